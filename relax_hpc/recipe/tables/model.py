"""[model]: the model that is trained, a folder of Hugging Face's format or a small one that is built in code."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Union

from pydantic import PositiveInt, Tag, model_validator

from relax_hpc.recipe.tables.table import Key, Table, conflict, named
from relax_hpc.recipe.tables.trainer import Sizes


class PathModel(Table):
    """A Hugging Face causal language model on disk."""

    name: Literal["path"] = Key("path", "A model directory that `from_pretrained` loads.")
    path: Path = Key(help="The directory with config.json, the tokenizer and safetensors weights.", looked_up=True)


class TinyVision(Table):
    """Eyes of a tiny model, which makes it a Qwen3-VL (with experts: a Qwen3-VL-MoE), or of the family that it names."""

    hidden_size: PositiveInt = Key(32, "Width of the vision encoder.")
    intermediate_size: PositiveInt = Key(64, "Width of its MLP.")
    layers: PositiveInt = Key(
        3, "Its layers; the first ones, up to 3, reach the first layers of the language model too."
    )
    heads: PositiveInt = Key(2, "Its attention heads; must divide hidden_size.")
    patch_size: PositiveInt = Key(8, "Pixels of a patch's side; a token is of 2 × 2 patches.")

    @model_validator(mode="after")
    def _divides(self) -> TinyVision:
        if self.hidden_size % self.heads or self.hidden_size // self.heads % 4:
            raise conflict(
                f"model.vision.heads = {self.heads} must divide hidden_size = {self.hidden_size} into multiples of 4"
            )
        return self


class TinyAudio(Table):
    """Ears of a tiny model, which makes it a Qwen3-Omni-MoE thinker; it has eyes too, and needs experts. A Gemma4Unified
    has ears without any of these sizes."""

    hidden_size: PositiveInt = Key(32, "Width of the audio encoder.")
    intermediate_size: PositiveInt = Key(64, "Width of its MLP.")
    layers: PositiveInt = Key(2, "Its layers.")
    heads: PositiveInt = Key(2, "Its attention heads; must divide hidden_size.")
    bands: PositiveInt = Key(32, "Bands of the spectrum that it hears, 100 times a second.")

    @model_validator(mode="after")
    def _divides(self) -> TinyAudio:
        if self.hidden_size % self.heads or self.hidden_size % 2:
            raise conflict(
                f"model.audio.heads = {self.heads} must divide hidden_size = {self.hidden_size}, an even number"
            )
        return self


class TinyModel(Table):
    """A small model built from its configuration, with a tokenizer of single characters: nothing is downloaded."""

    name: Literal["tiny"] = Key(
        "tiny", "Build a Qwen3-architecture model in code, randomly initialized from the run's seed."
    )
    family: Literal["qwen3", "qwen2_5_vl", "gemma4_unified"] = Key(
        "qwen3",
        "`qwen3`: Qwen3, Qwen3-VL or Qwen3-Omni, with experts or without, by what else is said here; `qwen2_5_vl` has eyes; "
        "`gemma4_unified` has eyes and ears without encoders, and 64 tokens or so for each picture.",
    )
    hidden_size: PositiveInt = Key(128, "Width of the residual stream.")
    intermediate_size: PositiveInt = Key(384, "Width of the gated MLP.")
    layers: PositiveInt = Key(3, "Transformer layers.")
    heads: PositiveInt = Key(4, "Attention heads; must divide hidden_size.")
    kv_heads: PositiveInt = Key(2, "Key/value heads; must divide heads.")
    experts: int = Key(0, "Experts of each layer, in place of its MLP (Qwen3-MoE); 0 is a dense model.", ge=0)
    experts_per_token: PositiveInt = Key(2, "Experts that a token goes through; at most `experts`.")
    moe_intermediate_size: PositiveInt = Key(64, "Width of an expert's gated MLP.")
    context: PositiveInt = Key(512, "Longest sequence in tokens, prompt and answer together.")
    alphabet: str = Key(
        "0123456789+-*/=() .,:?abcdefghijklmnopqrstuvwxyz\n", "The characters that are tokens; others become <unk>."
    )
    words: list[str] = Key([], "Longer strings that are one token each, such as the beginning of a tool call.")
    chat: bool = Key(
        False,
        "Give it a chat template with tools, whose calls and answers look as Qwen3's do; a turn ends with <|im_end|>. A model that sees "
        "has one without tools.",
    )
    vision: TinyVision | None = Key(None, "Make it see images and video.")
    audio: TinyAudio | None = Key(None, "Make it hear, and see.")

    @model_validator(mode="after")
    def _divides(self) -> TinyModel:
        if self.hidden_size % self.heads or self.heads % self.kv_heads:
            raise conflict(
                f"model.heads = {self.heads} must divide hidden_size = {self.hidden_size}, "
                f"and model.kv_heads = {self.kv_heads} must divide heads"
            )
        if self.experts and self.experts_per_token > self.experts:
            raise conflict(f"model.experts_per_token = {self.experts_per_token} exceeds model.experts = {self.experts}")
        if self.audio and not self.experts and self.family == "qwen3":
            raise conflict(
                "[model.audio] makes a Qwen3-Omni-MoE, which has experts: set model.experts, to 4 for instance"
            )
        if self.family != "qwen3" and (self.experts or not self.shows):
            raise conflict(
                f'model.family = "{self.family}" sees and has no experts: give [model.vision], and leave model.experts out'
            )
        if self.family == "qwen2_5_vl" and self.audio:
            raise conflict('model.family = "qwen2_5_vl" hears nothing: leave [model.audio] out, or take another family')
        if self.shows and self.hidden_size // self.heads % 16:
            raise conflict(
                f"model.hidden_size = {self.hidden_size} / heads = {self.heads}: a head of a model that sees has a multiple of 16 values"
            )
        if len(set(self.alphabet)) != len(self.alphabet):
            raise conflict("model.alphabet names a character twice")
        if short := [word for word in self.words if len(word) < 2]:
            raise conflict(
                f"model.words = {short}: a word has two characters or more; put single ones into model.alphabet"
            )
        if self.shows and (self.chat or self.words):
            raise conflict(
                "model.chat and model.words are for models of text: leave them out, or [model.vision] and [model.audio]"
            )
        return self

    @property
    def shows(self) -> bool:
        """True where it sees or hears."""
        return bool(self.vision or self.audio)

    @property
    def sizes(self) -> Sizes:
        """The sizes that a parallel plan must divide."""
        dense = 0 if self.experts else self.intermediate_size
        expert = self.moe_intermediate_size if self.experts else 0
        return Sizes(self.heads, self.kv_heads, self.layers, dense, self.experts, expert)


AnyModel = Annotated[
    Union[Annotated[PathModel, Tag("path")], Annotated[TinyModel, Tag("tiny")]],
    named(default=lambda v: "path" if "path" in v else "tiny"),
]
