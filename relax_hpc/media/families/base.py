"""Kinds of models. A family says how transformers builds its models, and how media enter them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from relax_hpc.recipe.tables.source import Media as Limits
from relax_hpc.records import Media

TOKEN_TYPES = {"image": 1, "video": 2, "audio": 3}
"""Numbers of the modalities in mm_token_type_ids, as transformers' processors give them; text is 0."""
PLAIN = -1
"""A token that means nothing to any model."""


class Family:
    """A kind of model, one file each. This class itself is the family of text models."""

    name: ClassVar[str] = "text"
    model_types: ClassVar[frozenset[str]] = frozenset()
    """Values of config.model_type, of a folder's config and of the part that is built."""
    placeholder_keys: ClassVar[Mapping[str, str]] = {}
    """Modality -> key of the config with the id of its placeholder token."""
    marks: ClassVar[Mapping[str, str]] = {}
    """Modality -> the text that stands for one in a prompt, as the model's chat template writes it."""
    parts: ClassVar[Sequence[tuple[str, str]]] = ()
    """(beginning of a parameter's name, its part: "vision", "projector" or "audio"); the first that fits holds."""
    axes: ClassVar[int] = 1
    """Numbers that a position has."""
    language: ClassVar[str] = "model."
    """Names of the language model's parameters begin with this, except the head's."""
    prefix: ClassVar[str] = ""
    """Names in the files of the whole model begin with this, where only a part of it is built."""
    renamed: ClassVar[Sequence[tuple[str, str]]] = ()
    """(beginning of a parameter's name, what the files have in its place), where they differ."""
    frames_a_position: ClassVar[int] = 1
    """Frames of sound that its encoder takes together, before its layers."""
    filling: ClassVar[Mapping[str, int]] = {}
    """Tensor -> number that fills it up where prompts with media of several sizes are joined, if it is not zero."""

    @property
    def modalities(self) -> tuple[str, ...]:
        """The modalities that a prompt may show, of "image", "video", "audio"."""
        return tuple(self.placeholder_keys)

    def model_class(self) -> Any:
        """The class with `from_config`/`from_pretrained` (or the model's own class) that builds the model to train."""
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM

    def config(self, config: Any) -> Any:
        """The part of a folder's config that the model to train is built from."""
        return config

    def deep_layers(self, config: Any) -> int:
        """How many of the language model's first layers have features of the vision encoder added behind them (deepstack)."""
        vision = getattr(self.config(config), "vision_config", None)
        return len(getattr(vision, "deepstack_visual_indexes", ()))

    def check(self, config: Any) -> None:
        """Raise RunError for a model of this kind that engines and trainers would compute differently."""

    def placeholders(self, config: Any) -> dict[str, int]:
        """Modality -> id of its placeholder token. A model may never draw one."""
        own = self.config(config)
        return {modality: int(getattr(own, key)) for modality, key in self.placeholder_keys.items()}

    def options(self, processor: Any, limits: Limits) -> dict[str, dict[str, Any]]:
        """Arguments of the processor by which it keeps to the limits: images_kwargs, videos_kwargs, audio_kwargs."""
        return {}

    def frame_size(self, processor: Any, limits: Limits) -> Callable[[int, int], tuple[int, int]]:
        """How large a video's frame of (height, width) is decoded."""
        return lambda height, width: (height, width)

    def tensors(self, processor: Any, made: dict[str, NDArray[Any]], fps: Sequence[float]) -> dict[str, NDArray[Any]]:
        """The model's arguments among what the processor made; `fps`: frames a second of each video."""
        return made

    def token_types(self, config: Any, tokens: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
        """[T] the modality of each token as a number (mm_token_type_ids); 0 is text."""
        types = np.zeros(len(tokens), np.int64)
        for modality, token in self.placeholders(config).items():
            types[tokens == token] = TOKEN_TYPES[modality]
        return types

    def positions(self, config: Any, tokens: NDArray[np.integer[Any]], media: Media | None) -> NDArray[Any]:
        """Positions of a prompt for rotary embeddings: [T], or [3, T] for a family that has three axes."""
        return np.arange(len(tokens))

    def positions_onward(self, config: Any, context: NDArray[np.integer[Any]], media: Media | None) -> NDArray[Any]:
        """[T + 1] or [3, T + 1]: positions of a prompt with whatever was said after it, and of the token that follows.

        A model may say the tokens that begin an image, and no image follows: only those next to placeholders are not plain.
        """
        shown = np.isin(context, list(self.placeholders(config).values()))
        beside = shown.copy()
        beside[1:] |= shown[:-1]
        beside[:-1] |= shown[1:]
        plain = np.append(np.where(beside, context, PLAIN), PLAIN)
        return self.positions(config, plain, media)

    def part(self, parameter: str) -> str:
        """The part of the model that a parameter belongs to: "language", "vision", "projector" or "audio"."""
        return next((part for beginning, part in self.parts if parameter.startswith(beginning)), "language")

    def encoded(self, media: Media) -> dict[str, float]:
        """How many positions each encoder goes through: "vision", "audio"."""
        patches = [a.shape[:-1] for name, a in media.tensors.items() if name.startswith("pixel_values")]
        heard = [a.sum() for name, a in media.tensors.items() if name.endswith("_mask")]
        return {"vision": float(sum(map(np.prod, patches))), "audio": float(sum(heard)) / self.frames_a_position}

    def joined(self, media: Sequence[Media]) -> dict[str, NDArray[Any]]:
        """Put the tensors of several prompts one after the other, in this order: arguments of one forward."""
        names = sorted({name for one in media for name in one.tensors})
        given = {name: [one.tensors[name] for one in media if name in one.tensors] for name in names}
        return {name: _stacked(arrays, self.filling.get(name, 0)) for name, arrays in given.items()}

    def arguments(self, model: Any, shown: dict[str, Any]) -> dict[str, Any]:
        """Arguments of the forward of a model, or of its body, for these tensors."""
        return shown


def methods_of(model_class: type[Any], config: Any, **attributes: Any) -> Any:
    """A model without parameters, for methods that need its config alone (get_rope_index)."""
    model = object.__new__(model_class)
    for name, value in {"config": config, **attributes}.items():
        object.__setattr__(model, name, value)
    return model


def _stacked(arrays: Sequence[NDArray[Any]], filling: int) -> NDArray[Any]:
    """Join on the first axis; where the other sizes differ (the lengths of sounds), fill up to the longest."""
    sizes = np.max([array.shape[1:] for array in arrays], axis=0).tolist() if arrays[0].ndim > 1 else []
    wanted = [[(0, 0), *((0, int(n) - m) for n, m in zip(sizes, a.shape[1:], strict=True))] for a in arrays]
    return np.concatenate([np.pad(a, w, constant_values=filling) for a, w in zip(arrays, wanted, strict=True)])
