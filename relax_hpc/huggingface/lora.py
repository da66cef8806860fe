"""Low-rank adapters of a model's linear layers (LoRA, arXiv 2106.09685), in the model and in files of PEFT's format.

    layer:  x ──W──► + ◄──scale · B──(A x)──        W [out, in] is the frozen base; A [rank, in] and B [out, rank] learn
    merged: W + scale · B A                         scale = alpha / rank; B begins at zero, so the model begins as its base

A layer keeps its name and its weight's name. Its adapter has the names that PEFT's files have.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedConfig, PreTrainedModel

from relax_hpc.files.errors import RunError
from relax_hpc.huggingface import name_in_files
from relax_hpc.media.families import family_of
from relax_hpc.recipe.tables.trainer import Lora

FACTORS = ("lora_A", "lora_B")
CONFIG_FILE = "adapter_config.json"
"""PEFT's description of an adapter."""
PEFT_PREFIX = "base_model.model."


class LoraLinear(nn.Linear):
    """A linear layer with an adapter. It is made of a layer that is in a model already, by `adapt`."""

    lora_A: nn.Parameter
    lora_B: nn.Parameter
    scale: float
    dropout: float
    shown: bool
    """False while the base is asked for alone."""

    def forward(self, input: Tensor) -> Tensor:
        found = super().forward(input)
        if not self.shown:
            return found
        # The model is in evaluation mode; its adapters drop inputs only where they learn.
        learns = torch.is_grad_enabled() and self.lora_A.requires_grad
        dropped = functional.dropout(input, self.dropout, learns) if self.dropout else input
        return found + functional.linear(functional.linear(dropped, self.lora_A), self.lora_B) * self.scale

    def merged(self) -> Tensor:
        """[out, in] the weight of a layer that does the same without an adapter."""
        return self.weight + self.scale * (self.lora_B @ self.lora_A)


def adapt(model: PreTrainedModel, lora: Lora, seed: int = 0) -> None:
    """Give the linear layers that `lora` names an adapter each, drawn from `seed`, and freeze everything else. Raises
    RunError, which lists the layers there are, for a name that no layer has."""
    generator = torch.Generator().manual_seed(seed)
    model.requires_grad_(False)
    for name in targets(model, lora.targets):
        layer: Any = model.get_submodule(name)
        drawn = torch.empty(lora.rank, layer.in_features)
        nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=generator)
        layer.__class__ = LoraLinear
        layer.lora_A = nn.Parameter(drawn.to(layer.weight))
        layer.lora_B = nn.Parameter(layer.weight.new_zeros(layer.out_features, lora.rank))
        layer.scale, layer.dropout, layer.shown = lora.alpha / lora.rank, lora.dropout, True


def targets(model: PreTrainedModel, ends: Sequence[str]) -> list[str]:
    """Names of the linear layers whose names end in one of `ends`; where none is given, of all in the language model but
    its output layer. Raises RunError for an end that no layer has."""
    family, head = family_of(model.config), model.get_output_embeddings()
    linear = [name for name, layer in model.named_modules() if type(layer) is nn.Linear and layer is not head]
    if not ends:
        return [name for name in linear if family.part(name) == "language"]
    if unknown := [end for end in ends if not any(f".{name}".endswith(f".{end}") for name in linear)]:
        there = ", ".join(sorted(Counter(name.rpartition(".")[2] for name in linear)))
        raise RunError(f"trainer.lora.targets names {unknown}, and the model's linear layers are called {there}")
    return [name for name in linear if any(f".{name}".endswith(f".{end}") for end in ends)]


def layers(model: nn.Module) -> dict[str, LoraLinear]:
    """The layers of a model, or of its body, that have an adapter, by their names."""
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, LoraLinear)}


@contextlib.contextmanager
def base_alone(model: nn.Module) -> Iterator[None]:
    """Have the model compute as its base does, for the length of the block."""
    found = layers(model).values()
    for layer in found:
        layer.shown = False
    try:
        yield
    finally:
        for layer in found:
            layer.shown = True


def strip(model: nn.Module) -> None:
    """Take the adapters away; the base stays."""
    every: dict[str, Any] = {**layers(model)}
    for layer in every.values():
        layer.__class__ = nn.Linear
        for factor in FACTORS:
            delattr(layer, factor)


def of_base(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out the adapters of a model's tensors."""
    return {name: tensor for name, tensor in tensors.items() if not name.endswith(FACTORS)}


def adapter_of(model: PreTrainedModel) -> dict[str, Tensor]:
    """The adapter's tensors by the names of PEFT's files; to change one changes the model."""
    prefix = PEFT_PREFIX + family_of(model.config).prefix
    return {
        f"{prefix}{name}.{factor}.weight": getattr(layer, factor).data
        for name, layer in layers(model).items()
        for factor in FACTORS
    }


def peft_config(model: PreTrainedModel, lora: Lora, base: Path) -> dict[str, Any]:
    """PEFT's description of a model's adapter. base: the model directory that it is for."""
    prefix = family_of(model.config).prefix
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(base), "r": lora.rank,
        "lora_alpha": lora.alpha, "lora_dropout": lora.dropout, "bias": "none", "inference_mode": True,
        "target_modules": sorted(prefix + name for name in layers(model)),
    }  # fmt: skip


def merged(
    base: Mapping[str, Tensor], adapter: Mapping[str, Tensor], scale: float, config: PreTrainedConfig
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a model that does without an adapter what `base` does with it, one at a time; both by their
    names in files. Raises RunError for an adapter of another base."""
    family = family_of(config)
    prefix, first = PEFT_PREFIX + family.prefix, f".{FACTORS[0]}.weight"
    found: dict[str, str] = {}
    for key in adapter:
        if key.endswith(first):
            layer = key.removesuffix(first)
            found[name_in_files(f"{layer.removeprefix(prefix)}.weight", family)] = layer
    for name, layer in found.items():
        a, b = (adapter[f"{layer}.{factor}.weight"] for factor in FACTORS)
        there = base.get(name)
        if there is None or there.shape != (len(b), a.shape[1]):
            has = "no such layer" if there is None else f"one of {list(there.shape)}"
            raise RunError(
                f"the adapter is for a layer '{name}' of {[len(b), a.shape[1]]}, and the base has {has}: it is of another model"
            )
    for name, tensor in base.items():
        if layer := found.get(name, ""):
            a, b = (adapter[f"{layer}.{factor}.weight"].float() for factor in FACTORS)
            yield name, (tensor.float() + scale * (b @ a)).to(tensor.dtype)
        else:
            yield name, tensor
