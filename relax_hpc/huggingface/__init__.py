"""Models of transformers as engines and trainers hold them: with weights that were not drawn, and named as in files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from relax_hpc.media.families import Family, family_of

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray
    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedModel

APART = {"qwen2_moe", "qwen3_moe", "qwen3_omni_moe_text"}
"""Types of language models whose files hold each expert by itself, where transformers has one tensor for all of a layer."""
TURNED = {"qwen3_vl_moe_text"}
"""Types of language models whose files hold the experts' matrices with rows and columns exchanged."""
GATE_UP, DOWN = ".experts.gate_up_proj", ".experts.down_proj"


def unfilled(config: PreTrainedConfig, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Make a frozen model whose weights, tied where they should be, are whatever was in memory: fill all of them."""
    from torch.nn import Module
    from transformers.initialization import no_init_weights

    with no_init_weights():  # seconds for a billion parameters, minutes for more
        model = from_config(config, dtype=dtype)
    model.tie_weights()
    frozen: PreTrainedModel = Module.to(model, device).eval().requires_grad_(False)
    return frozen


def language_config(config: PreTrainedConfig) -> Any:
    """The part of a folder's config that describes the language model to train."""
    return family_of(config).config(config).get_text_config()


def from_config(config: PreTrainedConfig, **how: Any) -> PreTrainedModel:
    """Build the model that is trained, with weights drawn at random."""
    family = family_of(config)
    kind, own = family.model_class(), family.config(config)
    made: PreTrainedModel = (
        kind.from_config(own, **how) if hasattr(kind, "from_config") else kind._from_config(own, **how)
    )
    return made


def hidden_states(body: PreTrainedModel, **arguments: Any) -> Tensor:
    """[R, L, H] the last hidden states of a model's body; of a model that merges media itself, without its head."""
    arguments = {"use_cache": False, **arguments}
    if (head := getattr(body, "lm_head", None)) is None:
        found: Tensor = body(**arguments).last_hidden_state
        return found
    from torch.nn import Identity

    body.lm_head = Identity()
    try:
        found = body(**arguments).logits
    finally:
        body.lm_head = head
    return found


def as_tensors(media: Mapping[str, NDArray[Any]], dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Tensors of what prompts show, numbers with a fraction in `dtype`."""
    import torch

    tensors = {name: torch.from_numpy(array).to(device) for name, array in media.items()}
    return {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}


def as_arguments(media: Mapping[str, NDArray[Any]], model: PreTrainedModel) -> dict[str, Any]:
    """Arguments of the forward of a model, or of its body, for what prompts show."""
    return family_of(model.config).arguments(model.base_model, as_tensors(media, model.dtype, model.device))


def named_as_in_files(tensors: Mapping[str, Tensor], config: PreTrainedConfig) -> dict[str, Tensor]:
    """Rename a model's weights to the names that its files use; what is split or turned there is a view."""
    kind, family = config.get_text_config().model_type, family_of(config)
    if kind in APART:
        tensors = _one_by_one(tensors)
    elif kind in TURNED:
        turned = {n: t.transpose(-1, -2) for n, t in tensors.items() if n.endswith((GATE_UP, DOWN))}
        tensors = {**tensors, **turned}
    return {name_in_files(name, family): tensor for name, tensor in tensors.items()}


def name_in_files(name: str, family: Family) -> str:
    """The name that the model's files have for a parameter."""
    found = next(((ours, theirs) for ours, theirs in family.renamed if name.startswith(ours)), ("", ""))
    return family.prefix + found[1] + name.removeprefix(found[0])


def _one_by_one(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    named: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith(GATE_UP):
            where = name.removesuffix("gate_up_proj")
            for expert, both in enumerate(tensor):
                named[f"{where}{expert}.gate_proj.weight"], named[f"{where}{expert}.up_proj.weight"] = both.chunk(2)
        elif name.endswith(DOWN):
            where = name.removesuffix("down_proj")
            named |= {f"{where}{expert}.down_proj.weight": one for expert, one in enumerate(tensor)}
        else:
            named[name] = tensor
    return named
