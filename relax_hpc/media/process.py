"""A prompt's text and media through the model's own processor, once: the expanded tokens and the tensors beside them.

text with marks, cells ──decode──► pictures, frames, sounds ──transformers' processor──► (tokens, Media)
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from relax_hpc.files.errors import RunError
from relax_hpc.media.families import Family, family_of
from relax_hpc.media.values import MediaError, stored
from relax_hpc.recipe.tables.source import Media as Limits
from relax_hpc.records import Media, MediaSource

LIBRARIES = ("PIL", "av", "soundfile", "torchvision")
"""Modules of the extra `media`."""
DISTRIBUTIONS = ("transformers", "torchvision", "pillow", "av", "soundfile")
"""Libraries on whose versions the tensors depend."""
NO_ARGUMENTS = {"input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids", "video_metadata"}
"""Things that processors make which follow from the tokens, or are no arguments of a model."""


class Cell(NamedTuple):
    """A picture, video or sound as the data set has it."""

    modality: str
    value: Any


class Processor:
    """The processor of the model in a folder, with the recipe's limits. It is loaded when it is first needed."""

    def __init__(self, folder: Path, limits: Limits, *, keeps_files: bool = False) -> None:
        """keeps_files: media bring the files that they were made of, for shards that keep these."""
        self._folder, self._limits, self._keeps_files = folder, limits, keeps_files

    @cached_property
    def _config(self) -> Any:
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(self._folder, local_files_only=True)

    @cached_property
    def family(self) -> Family:
        """The model's family."""
        return family_of(self._config)

    def serve(self, wanted: Mapping[str, str]) -> None:
        """Raise RunError if the model cannot see what these keys of the recipe name, by key; or its processor is unusable."""
        for key, modality in wanted.items():
            if modality not in self.family.marks:
                knows = f"only {list(self.family.marks)} beside text" if self.family.marks else "only text"
                raise RunError(
                    f"{key}: the model, a '{self._config.model_type}', knows {knows}; give another, or leave it out"
                )
        if wanted:
            missing = [name for name in LIBRARIES if find_spec(name) is None]
            if missing:
                raise RunError(
                    f"{next(iter(wanted))} needs {missing}, which cannot be imported: pip install 'relax-hpc[media]'"
                )
            self.check()

    def check(self) -> None:
        """Raise RunError for a processor that does not load, or is not this model's."""
        tokenizer = self._loaded.tokenizer
        for modality, number in self.family.placeholders(self._config).items():
            if tokenizer(self.family.marks[modality], add_special_tokens=False)["input_ids"].count(number) != 1:
                raise RunError(
                    f"'{self._folder}': the tokenizer does not make the model's {modality} placeholder, token {number}, of "
                    f"{self.family.marks[modality]!r}: config.json and the tokenizer are of different models"
                )

    @property
    def chat_template(self) -> str | None:
        """The processor's own chat template, if it has one."""
        return getattr(self._loaded, "chat_template", None)

    def look(self, cell: Cell, folder: Path) -> None:
        """Look at a cell's header alone; `folder`: where relative paths begin. Raises MediaError for an unusable one."""
        from relax_hpc.media.decode import check_header

        check_header(cell.modality, cell.value, folder, self._limits)

    def tokens(
        self, text: str, cells: Sequence[Cell], folder: Path, *, special: bool
    ) -> tuple[NDArray[np.int32], Media]:
        """Process a prompt whose text has the family's mark for each cell, in their order.

        special: the tokenizer adds its special tokens, which a chat template has written itself. Raises MediaError.
        """
        self.check_marks(text, cells)
        source = self._source(cells, folder) if self._keeps_files else None
        if source is not None:  # what is kept is what is decoded, though the file changes meanwhile
            cells = [Cell(*file) for file in source.files]
        shown: dict[str, list[Any]] = {"image": [], "video": [], "audio": []}
        for number, cell in enumerate(cells):
            try:
                shown[cell.modality].append(self._decode(cell, folder))
            except MediaError as error:
                raise MediaError(f"{cell.modality} {number + 1} of {len(cells)}: {error}") from None
        made = self._process(text, shown["image"], shown["video"], shown["audio"], special)
        tokens = np.asarray(made["input_ids"][0], np.int32)
        arrays = {name: np.ascontiguousarray(value) for name, value in made.items() if name not in NO_ARGUMENTS}
        media = Media.of(self.family.tensors(self._loaded, arrays, [one.fps for one in shown["video"]]))
        return tokens, replace(media, source=source)

    def remake(self, source: MediaSource) -> Media:
        """Make media again from their files. Raises RunError."""
        cells = [Cell(modality, data) for modality, data in source.files]
        text = "".join(self.family.marks[cell.modality] for cell in cells)
        try:
            return self.tokens(text, cells, self._folder, special=False)[1]
        except MediaError as error:
            raise RunError(f"media cannot be made again from the files that a shard keeps: {error}") from error

    def _source(self, cells: Sequence[Cell], folder: Path) -> MediaSource | None:
        """The cells' files byte for byte; None where frames or arrays were given."""
        files = []
        for cell in cells:
            try:
                with stored(cell.value, folder).open() as file:
                    files.append((cell.modality, file.read()))
            except MediaError:
                return None
        return MediaSource(tuple(files), self._about)

    @cached_property
    def _about(self) -> dict[str, Any]:
        """The processor, in words that change when it makes other tensors."""
        settings = json.dumps(self._loaded.to_dict(), sort_keys=True, default=str)
        return {
            "class": type(self._loaded).__name__, "settings": xxhash.xxh3_128_hexdigest(settings.encode()),
            "limits": self._limits.model_dump(mode="json"), "versions": {name: version(name) for name in DISTRIBUTIONS},
        }  # fmt: skip

    def check_marks(self, text: str, cells: Sequence[Cell]) -> None:
        """Raise MediaError where the text has more or fewer of the model's own placeholders than there are cells."""
        counted = Counter(cell.modality for cell in cells)
        for modality, token in self._placeholder_texts.items():
            if (found := text.count(token)) != counted[modality]:
                raise MediaError(
                    f"the rendered prompt has {found} of the model's own {token} for {counted[modality]} of {modality}: "
                    "its text must not write them itself, and the chat template must write one for each"
                )

    @cached_property
    def _placeholder_texts(self) -> dict[str, str]:
        ids = self.family.placeholders(self._config)
        return {modality: self._loaded.tokenizer.convert_ids_to_tokens(number) for modality, number in ids.items()}

    @cached_property
    def _loaded(self) -> Any:
        from transformers import AutoProcessor

        try:
            processor = AutoProcessor.from_pretrained(self._folder, local_files_only=True)
        except Exception as error:  # transformers raises whatever its checks do
            raise RunError(
                f"'{self._folder}' has no processor that loads, which prompts with media need: {type(error).__name__}: {error}"
            ) from error
        if not hasattr(processor, "tokenizer"):
            raise RunError(
                f"'{self._folder}' has a tokenizer, but no processor: copy preprocessor_config.json (and "
                "video_preprocessor_config.json, processor_config.json where the model has them) beside its config.json"
            )
        return processor

    def _decode(self, cell: Cell, folder: Path) -> Any:
        from relax_hpc.media.decode import decoded

        ears = getattr(self._loaded, "feature_extractor", None)
        fitting = self.family.frame_size(self._loaded, self._limits)

        def size(height: int, width: int) -> tuple[int, int]:
            try:
                return fitting(height, width)
            except ValueError as error:
                raise MediaError(f"frames of {width} × {height} pixels cannot be shown: {error}") from None

        return decoded(cell.modality, cell.value, folder, self._limits, size, ears.sampling_rate if ears else 0)

    def _process(self, text: str, images: list[Any], videos: list[Any], sounds: list[Any], special: bool) -> Any:
        from transformers.video_utils import VideoMetadata

        options = self.family.options(self._loaded, self._limits)
        given: dict[str, Any] = {
            "images": images,
            "videos": [v.frames.transpose(0, 3, 1, 2) for v in videos],
            "audio": sounds,
        }
        if videos:
            about = [VideoMetadata(len(v.frames), v.fps, frames_indices=[*range(len(v.frames))]) for v in videos]
            options = {**options, "videos_kwargs": {**options.get("videos_kwargs", {}), "video_metadata": about}}
        try:
            return self._loaded(
                text=[text], return_tensors="np", text_kwargs={"add_special_tokens": special},
                **{name: values for name, values in given.items() if values}, **options,
            )  # fmt: skip
        except (ValueError, RuntimeError, TypeError, IndexError, StopIteration) as error:
            raise MediaError(f"the model's processor refuses it: {error}") from error
