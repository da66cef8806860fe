"""The size of a model, from its config.json or from [model], and how many of its parameters a process holds."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from relax_hpc.files.errors import RunError
from relax_hpc.planning.sizing.encoders import LANGUAGE, TEXT_ONLY, Encoders, read_encoders
from relax_hpc.recipe.tables.model import PathModel, TinyModel
from relax_hpc.recipe.tables.trainer import Parallel, Sizes

KNOWN = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
SPECIAL_TOKENS = 3
"""Tokens that the tokenizer of a tiny model has beside its alphabet."""
HEAD_DIM = {"qwen3": 128}
"""Model type -> head size, where config.json may leave it out and it is not hidden_size / heads."""


class Count(NamedTuple):
    """Numbers of parameters."""

    dense: int
    experts: int

    @property
    def all(self) -> int:
        return self.dense + self.experts

    def plus(self, other: Count) -> Count:
        return Count(self.dense + other.dense, self.experts + other.experts)


@dataclass(frozen=True, slots=True)
class Shape:
    """The numbers that say how large a model is."""

    type: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    context: int
    tied: bool
    """True where the output layer is the embedding."""
    intermediate: int
    experts: int
    chosen: int
    """Experts that a token is routed to."""
    expert_intermediate: int
    sparse: tuple[bool, ...]
    """[layers] True where the layer has experts."""
    encoders: Encoders = TEXT_ONLY

    @property
    def sizes(self) -> Sizes:
        """The sizes that a parallel plan must divide."""
        dense = 0 if all(self.sparse) else self.intermediate
        return Sizes(self.heads, self.kv_heads, self.layers, dense, self.experts, self.expert_intermediate)

    @property
    def qk_norm(self) -> bool:
        return self.type in ("qwen3", "qwen3_moe")

    def kv_bytes(self, element: int, tensor: int = 1) -> int:
        """Bytes of keys and values of one token, on one of `tensor` processes."""
        return 2 * self.layers * -(-self.kv_heads // tensor) * self.head_dim * element


@dataclass(frozen=True, slots=True)
class Cut:
    """The number of processes over which matrices are split."""

    tensor: int = 1
    expert: int = 1
    expert_tensor: int = 1


WHOLE = Cut()


def layer_parameters(shape: Shape, layer: int, cut: Cut = WHOLE) -> Count:
    """Parameters of one layer on one process."""
    heads = shape.heads // cut.tensor
    kv_heads = -(-shape.kv_heads // cut.tensor)  # an engine with more processes than heads repeats them
    columns = (heads + 2 * kv_heads) * shape.head_dim
    dense = columns * shape.hidden + heads * shape.head_dim * shape.hidden + 2 * shape.hidden
    dense += columns if shape.type == "qwen2" else 0
    dense += 2 * shape.head_dim if shape.qk_norm else 0
    if not shape.sparse[layer]:
        return Count(dense + 3 * shape.hidden * (shape.intermediate // cut.tensor), 0)
    one = 3 * shape.hidden * (shape.expert_intermediate // cut.expert_tensor)
    return Count(dense + shape.experts * shape.hidden, shape.experts // cut.expert * one)


def parameters(
    shape: Shape,
    cut: Cut = WHOLE,
    layers: Iterable[int] | None = None,
    first: bool = True,
    last: bool = True,
    critic: bool = False,
) -> Count:
    """Parameters on one process: these layers (all by default), the embedding and the encoders if `first`, norm and output
    layer if `last`.

    `critic`: the output layer is a head of one number, whole on every process.
    """
    total = Count(0, 0)
    for layer in range(shape.layers) if layers is None else layers:
        total = total.plus(layer_parameters(shape, layer, cut))
    matrix = -(-shape.vocabulary // cut.tensor) * shape.hidden
    ends = (matrix + shape.encoders.all) * first + shape.hidden * last
    if critic:
        return total.plus(Count(ends + (shape.hidden + 1) * last, 0))
    ends += (
        matrix if last and not (first and shape.tied) else 0
    )  # a last stage without the embedding has its own copy of a tied one
    return total.plus(Count(ends, 0))


def stage_layers(shape: Shape, plan: Parallel, stage: int) -> list[int]:
    """The layers of a pipeline stage; with virtual stages, those of all its chunks."""
    size = shape.layers // (plan.pipeline * plan.virtual_pipeline)
    starts = [(chunk * plan.pipeline + stage) * size for chunk in range(plan.virtual_pipeline)]
    return [layer for start in starts for layer in range(start, start + size)]


def stage_parameters(shape: Shape, plan: Parallel, stage: int, critic: bool = False) -> Count:
    """Parameters that the megatron backend holds on one process of a stage."""
    cut = Cut(plan.tensor, plan.expert, plan.expert_tensor)
    layers = stage_layers(shape, plan, stage)
    return parameters(shape, cut, layers, stage == 0, stage == plan.pipeline - 1, critic)


def shape_of(model: PathModel | TinyModel, recipe: Path, config: Path | None = None) -> tuple[Shape, str]:
    """(shape, where it is from): `config`, the model's folder, or models/NAME beside the recipe. Raises RunError."""
    if isinstance(model, TinyModel):
        return _tiny(model), "[model]"
    places = [model.path / "config.json", recipe.parent / "models" / model.path.name / "config.json"]
    if config is not None:
        places = [config / "config.json" if config.is_dir() else config]
    for path in places:
        if path.is_file():
            return from_config(_read(path), str(path)), str(path)
    looked = " and ".join(f"'{path}'" for path in places)
    raise RunError(
        f"model.path = '{model.path}' is not on this machine, and there are no numbers of it: no file {looked}; "
        "give the model's config.json with --config FILE"
    )


def shape_in(folder: Path) -> Shape | None:
    """The shape of the model in `folder`; None where it is not on this machine."""
    path = folder / "config.json"
    return from_config(_read(path), str(path)) if path.is_file() else None


def from_config(about: dict[str, Any], where: str) -> Shape:
    """Read a Hugging Face configuration. Raises RunError for one of an unknown type or without a needed number."""
    kind = about.get("model_type")
    if kind in LANGUAGE:
        language, encoders = read_encoders(about)
        return replace(from_config(language, where), encoders=encoders)
    if kind not in KNOWN:
        known = ", ".join((*KNOWN, *LANGUAGE))
        raise RunError(f"{where}: model_type '{kind}': how large a model is can be told for {known}")

    def number(*names: str, default: int | None = None) -> int:
        found = next((about[name] for name in names if about.get(name) is not None), default)
        if not isinstance(found, int) or found <= 0:
            raise RunError(f"{where}: {names[0]} = {found!r}: expected a number above 0")
        return found

    layers, heads, hidden = number("num_hidden_layers"), number("num_attention_heads"), number("hidden_size")
    moe = kind == "qwen3_moe"
    dense, step = about.get("mlp_only_layers") or [], about.get("decoder_sparse_step", 1)
    return Shape(
        type=kind,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=number("num_key_value_heads", default=heads),
        head_dim=number("head_dim", default=HEAD_DIM.get(kind, hidden // heads)),
        vocabulary=number("vocab_size"),
        context=number("max_position_embeddings"),
        tied=bool(about.get("tie_word_embeddings", False)),
        intermediate=number("intermediate_size"),
        experts=number("num_experts", "num_local_experts") if moe else 0,
        chosen=number("num_experts_per_tok") if moe else 0,
        expert_intermediate=number("moe_intermediate_size") if moe else 0,
        sparse=tuple(moe and i not in dense and (i + 1) % step == 0 for i in range(layers)),
    )


def _tiny(model: TinyModel) -> Shape:
    if model.vision or model.audio:
        from relax_hpc.trainers.tiny_model import config_of

        return from_config(config_of(model).to_dict(), "[model]")
    return Shape(
        type="qwen3_moe" if model.experts else "qwen3",
        hidden=model.hidden_size,
        layers=model.layers,
        heads=model.heads,
        kv_heads=model.kv_heads,
        head_dim=model.hidden_size // model.heads,
        vocabulary=len(model.alphabet) + SPECIAL_TOKENS,
        context=model.context,
        tied=True,
        intermediate=model.intermediate_size,
        experts=model.experts,
        chosen=model.experts_per_token if model.experts else 0,
        expert_intermediate=model.moe_intermediate_size if model.experts else 0,
        sparse=(bool(model.experts),) * model.layers,
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        about = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise RunError(f"'{path}' cannot be read as JSON: {error}") from error
    if not isinstance(about, dict):
        raise RunError(f"'{path}' is not a JSON object: expected a Hugging Face config.json")
    return about
