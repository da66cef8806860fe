"""The Megatron-core trainer. Nothing here imports Megatron before its CPU support is in place.

recipe's plan ──► process groups ──► chunks of the model on this process, filled from Hugging Face's files
rollouts ──► packed micro-batches ──► Megatron's schedule of forwards and backwards ──► its optimizer
"""

from __future__ import annotations

import logging
import warnings

from relax_hpc.trainers.megatron.cpu import support

# Said once a process and no concern of a user's: kernels that are not installed, names that torch has new ones for.
warnings.filterwarnings("ignore", module=r"megatron\.")
warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.")
warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not a leaf")
logging.getLogger("megatron").setLevel(logging.WARNING)  # it writes its whole configuration, on every process
with support(megatron=False):
    from relax_hpc.trainers.megatron.critic import MegatronCritic
    from relax_hpc.trainers.megatron.scoring import MegatronScoring
    from relax_hpc.trainers.megatron.trainer import MegatronTrainer

__all__ = ["MegatronCritic", "MegatronScoring", "MegatronTrainer"]
