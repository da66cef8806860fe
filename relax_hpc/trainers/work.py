"""How much a sample costs to train on: its tokens, and what its media cost in tokens.

Each parameter of a layer is one multiplication for each position that goes through it, and two more for the gradient. A
patch of a picture therefore costs as many tokens as the vision encoder has parameters for each one of the language model.
"""

from __future__ import annotations

from torch.nn import Embedding
from transformers import PreTrainedModel

from relax_hpc.media.families import family_of

WITH_GRADIENT = 3
"""Multiplications of a parameter that learns, for one without."""


def position_costs(model: PreTrainedModel) -> dict[str, float]:
    """What a position of each encoder costs, in tokens: "vision", "audio". Empty for a text model."""
    family = family_of(model.config)
    if not family.modalities:
        return {}
    text = model.config.get_text_config()
    chosen = getattr(text, "num_experts_per_tok", 1) / (getattr(text, "num_experts", 0) or 1)
    prefix = "" if hasattr(model, "lm_head") else f"{model.base_model_prefix}."
    work: dict[str, float] = dict.fromkeys(("language", "vision", "audio", "projector"), 0.0)
    learns = any(parameter.requires_grad for parameter in model.parameters())
    for name, module in model.named_modules():
        if isinstance(module, Embedding) or module is model.get_output_embeddings():
            continue
        for own, parameter in module.named_parameters(prefix=name, recurse=False):
            part = family.part(prefix + own)
            share = chosen if ".experts." in own else 1.0
            with_gradient = learns and (parameter.requires_grad or part == "language")
            work[part] += share * parameter.numel() * (WITH_GRADIENT if with_gradient else 1)
    return {part: work[part] / work["language"] for part in ("vision", "audio")}
