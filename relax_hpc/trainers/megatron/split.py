"""Models that are split over the processes of a group by the recipe's plan: micro-batches, schedule, outputs.

rollouts ──plan──► this data-parallel rank's micro-batches ──Megatron's schedule──► a model's output at its targets, on the last stage
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoConfig

import relax_hpc.trainers.megatron.export.weights as weights
import relax_hpc.trainers.megatron.groups as groups
from relax_hpc.files.errors import RunError
from relax_hpc.media.families import family_of
from relax_hpc.recipe.schema import Recipe
from relax_hpc.records import Progress, Rollouts
from relax_hpc.trainers.megatron.head import Critic, Policy, token_logprobs, token_values
from relax_hpc.trainers.megatron.model import build, transformer_config
from relax_hpc.trainers.megatron.packing import Layout, LocalBatch, pack, plan
from relax_hpc.trainers.megatron.shown import Among


class Split:
    """One process of models that are split by the recipe's plan."""

    def __init__(self, recipe: Recipe, rank: int, world: int, device: torch.device) -> None:
        """The default process group must exist already, and Megatron's support for this machine."""
        self.recipe, self.rank, self.world, self.device = recipe, rank, world, device
        parallel = recipe.trainer.parallel
        self.dtype: torch.dtype = getattr(torch, recipe.trainer.dtype)
        self.groups = groups.join(parallel, recipe.run.seed)
        torch.manual_seed(recipe.run.seed + rank)
        spread = parallel.tensor if parallel.sequence else 1
        tensor_rank = self.groups.tp.rank() if parallel.sequence else 0
        self.layout = Layout(self.groups.cp.size(), self.groups.cp.rank(), spread, tensor_rank)
        self._budget = recipe.trainer.tokens_per_micro_batch * parallel.context

    def _run(
        self,
        models: list[Any],
        rollouts: Rollouts,
        batches: list[LocalBatch],
        temperature: float,
        loss_of: Callable[..., Tensor],
        forward_only: bool = False,
    ) -> None:
        """Run all micro-batches through Megatron's schedule. `loss_of` is called with each one's number and the model's
        output at its targets, on the last stage."""

        def forward(numbers: Iterator[int], model: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
            number = next(numbers)
            batch = batches[number]
            hidden = model(batch.tokens, batch.positions, packed_seq_params=batch.packed)
            policy = getattr(model, "module", model)
            return hidden, partial(finish, policy, number)

        def finish(policy: Policy, number: int, hidden: Tensor) -> tuple[Tensor, Tensor, None]:
            batch = batches[number]
            said: tuple[Tensor, ...]
            if isinstance(policy, Critic):
                said = (token_values(policy, hidden, batch),)
            else:
                targets = torch.from_numpy(rollouts.tokens[batch.targets].astype(np.int64)).to(self.device)
                said = token_logprobs(policy, hidden, batch, targets, temperature)
            # the token count is ours already, so Megatron's is not asked for
            return loss_of(number, *said), torch.zeros((), dtype=torch.int, device=self.device), None

        iterators = [iter(range(len(batches))) for _ in models]
        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iterators if len(models) > 1 else iterators[0],
            model=models,
            num_microbatches=len(batches),
            seq_length=1,  # lengths vary: told with each tensor
            micro_batch_size=1,
            forward_only=forward_only,
        )

    @torch.no_grad()
    def _said(
        self, models: list[Policy], rollouts: Rollouts, temperature: float, progress: Progress
    ) -> NDArray[np.float32]:
        """[T] a model's output at the tokens in the loss; on every process."""
        column = torch.zeros(len(rollouts.tokens), device=self.device)
        batches = self._batches(rollouts, models)

        def keep(number: int, found: Tensor, *ignored: Tensor) -> Tensor:
            progress()
            if self._speaks():
                column[torch.from_numpy(batches[number].targets).to(self.device)] = found
            return found.sum()

        self._run(models, rollouts, batches, temperature, keep, forward_only=True)
        if self.world > 1:
            dist.all_reduce(column)  # each token's number is on one process, zeros elsewhere
        return column.cpu().numpy()

    def _speaks(self) -> bool:
        """Return True on the process whose numbers count: those that share sequences or matrices compute the same ones."""
        return bool(self.groups.tp.rank() == self.groups.cp.rank() == 0)

    def _batches(self, rollouts: Rollouts, models: list[Any], whole_groups: bool = False) -> list[LocalBatch]:
        parallel = self.recipe.trainer.parallel
        # interleaved stages take micro-batches in rounds of as many as there are stages
        multiple = parallel.pipeline if parallel.virtual_pipeline > 1 else 1
        shares = plan(rollouts, self.groups.dp.size(), self._budget, multiple, whole_groups)
        config = models[0].hf
        among = None
        if models[0].encoders is not None:
            among = Among(self.groups.tp.size(), self.groups.tp.rank()) if parallel.spread_encoders else Among(1, 0)
        make = partial(pack, family=family_of(config), config=config, among=among)
        return [make(rollouts, samples, self.layout, self.device) for samples in shares[self.groups.dp.rank()]]

    def _read(self, kind: type[Policy], folder: Path) -> list[Policy]:
        """Load the model in `folder`, split as the policy is."""
        hf = AutoConfig.from_pretrained(folder, local_files_only=True)
        chunks = build(hf, transformer_config(hf, self.recipe.trainer), self.groups, kind)
        weights.fill(chunks, folder, self.groups)
        return chunks


def device_of(choice: str, role: str) -> torch.device:
    """The device that a role computes on: the GPU that it has chosen, the CPU where there is none. Raises RunError
    where the recipe asks for another kind."""
    if not torch.cuda.is_available():
        if choice == "cuda":
            raise RunError(f'{role}.device = "cuda" but torch sees no GPU: use "auto" or "cpu"')
        return torch.device("cpu")
    if choice == "cpu":
        raise RunError(
            f'{role}.device = "cpu", but Megatron-core takes a GPU where there is one: use "auto", or hide it (CUDA_VISIBLE_DEVICES=)'
        )
    return torch.device("cuda", torch.cuda.current_device())
