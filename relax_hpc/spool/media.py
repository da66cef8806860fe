"""Media in a shard: each distinct one once, however many groups and samples show it.

    prompts' media ──distinct, by digest──► items ──tensors──► columns media/NAME: those of all items, one behind the other
                                              └──digest, types, shapes──► meta["media"], which also says each group's item

A sample whose environment showed more than its prompt names an item of its own, with all that it shows.

An item keeps its tensors, or its source, the bytes of the files that they were made of (media/source); or nothing but the
digest, where the reader has the prompts themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from relax_hpc.files.errors import RunError
from relax_hpc.records import Group, Media, MediaSource
from relax_hpc.spool import hdf5

KEY = "media"
"""The key in `meta`; a shard without media has none."""
FOLDER = "media/"
SOURCE = "media/source"
"""Column of the files that media were made of."""
Kept = Literal["tensors", "source", "digest"]
TYPES = {kind.str: kind for kind in map(np.dtype, ("?", "u1", "i1", "<i2", "<i4", "<i8", "<f2", "<f4", "<f8"))}
"""Types that a tensor may have, by numpy's name."""

Read = Callable[[str, int, int], NDArray[Any]]
"""read(column, begin, end) -> the rows."""
Remake = Callable[[MediaSource], Media]
"""Makes media again from their files, by the processor at hand."""


def columns(groups: Sequence[Group], kept: Kept) -> tuple[dict[str, hdf5.Column], dict[str, Any] | None]:
    """Return the columns of the groups' media, whose bytes are not copied, and what `meta` says of them; None where
    there are none. Raises Damaged if tensors are not those that the engine was given."""
    shown, later = [group.prompt.media for group in groups], [s.media for group in groups for s in group.samples]
    items = {media.digest: media for media in [*shown, *later] if media is not None}
    if not items:
        return {}, None
    number_of = {digest: number for number, digest in enumerate(items)}
    about: dict[str, Any] = {"groups": [media and number_of[media.digest] for media in shown], "items": []}
    if any(later):
        about["samples"] = [media and number_of[media.digest] for media in later]
    parts: dict[str, list[NDArray[Any]]] = {}
    for digest, media in items.items():
        tensors = {name: [array.dtype.str, array.shape] for name, array in media.tensors.items()}
        item: dict[str, Any] = {"digest": digest, "kept": kept, "tensors": tensors}
        if kept != "digest":
            media.check("the worker, when it publishes the shard")
        if kept == "source" and media.source is not None:
            item["files"] = [[modality, len(data)] for modality, data in media.source.files]
            about["processor"] = media.source.processor
            parts.setdefault(SOURCE, []).extend(np.frombuffer(data, np.uint8) for _, data in media.source.files)
        elif kept != "digest":
            item["kept"] = "tensors"
            for name, array in media.tensors.items():
                parts.setdefault(FOLDER + name, []).append(array.reshape(-1))
        about["items"].append(item)
    return {name: hdf5.Column(arrays, _one_type(name, arrays)) for name, arrays in parts.items()}, about


def _one_type(name: str, arrays: Sequence[NDArray[Any]]) -> np.dtype[Any]:
    types = {array.dtype.str for array in arrays}
    if len(types) > 1 or not types <= TYPES.keys():
        raise RunError(f"'{name}' has the types {sorted(types)} in one request: a shard keeps one of {[*TYPES]}")
    return TYPES[types.pop()]


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor's place in its column."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    begin: int
    """The row at which it begins."""

    @property
    def end(self) -> int:
        return self.begin + math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Item:
    """Media that one group or several show."""

    digest: str
    kept: Kept
    tensors: Mapping[str, Place]
    files: Sequence[tuple[str, Place]]
    """(modality, place in the column `media/source`) of each file, where these are kept."""

    @property
    def bytes(self) -> int:
        """Bytes of the tensors, whatever of them the shard keeps."""
        return sum(place.bytes for place in self.tensors.values())


@dataclass(frozen=True, slots=True)
class MediaIndex:
    """Which group shows what, and where its tensors are."""

    items: Sequence[Item]
    of_group: Sequence[int | None]
    of_sample: Sequence[int | None]
    """Of each sample, where its environment showed more than its prompt; empty where none did."""
    processor: Mapping[str, Any]
    """The processor that made tensors of the files that are kept."""

    @classmethod
    def read(cls, meta: Mapping[str, Any], groups: int, samples: int) -> MediaIndex:
        """Read it from `meta`. Raises ValueError, KeyError, TypeError or AttributeError where it cannot be right."""
        about = meta.get(KEY)
        if about is None:
            return cls([], [None] * groups, [], {})
        ends: dict[str, int] = {}
        items = [_item(item, ends) for item in about["items"]]
        known, later = {None, *range(len(items))}, about.get("samples", [])
        if len(about["groups"]) != groups or not known.issuperset(about["groups"]):
            raise ValueError(f"its {groups} groups show the media {about['groups']} of {len(items)}")
        if len(later) not in (0, samples) or not known.issuperset(later):
            raise ValueError(f"its {samples} samples show the media {later} of {len(items)}")
        return cls(items, about["groups"], later, about.get("processor", {}))

    def shows_later(self, sample: int) -> bool:
        """Return True if a sample's environment showed more than its prompt."""
        return bool(self.of_sample) and self.of_sample[sample] is not None

    def number(self, group: int, sample: int | None = None) -> int | None:
        """Return the item that a group's prompt shows, or all that one of its samples does; None for text alone."""
        own = self.of_sample[sample] if self.of_sample and sample is not None else None
        return self.of_group[group] if own is None else own

    def item(self, group: int, sample: int | None = None) -> Item | None:
        """Return what a group's prompt shows, or all that one of its samples does; None if it is text alone."""
        number = self.number(group, sample)
        return None if number is None else self.items[number]

    def reference(self, group: int, sample: int | None = None) -> Media | None:
        """Return the digest of a group's media, or a sample's, without the tensors."""
        item = self.item(group, sample)
        return None if item is None else Media({}, item.digest)

    def media(self, group: int, read: Read, remake: Remake | None, sample: int | None = None) -> Media | None:
        """Read a group's media, or all that one of its samples shows. Raises Damaged unless they are what the engine was given, RunError where they cannot be
        made again from their files.

        read: returns rows of a column; remake: makes media from the files."""
        item = self.item(group, sample)
        if item is None:
            return None
        if item.kept == "digest":
            raise RunError("the shard keeps only the digest of its media: make the prompt once more from its source")
        if item.kept == "source":
            return self._made_again(item, read, remake)
        found = {name: read(FOLDER + name, p.begin, p.end).reshape(p.shape) for name, p in item.tensors.items()}
        media = Media(found, item.digest)
        media.check("the reader of the shard")
        return media

    def _made_again(self, item: Item, read: Read, remake: Remake | None) -> Media:
        if remake is None:
            raise RunError("the shard keeps the files that its media were made of, and here is no processor for them")
        files = tuple((modality, read(SOURCE, p.begin, p.end).tobytes()) for modality, p in item.files)
        media = remake(MediaSource(files, self.processor))
        if media.digest != item.digest:
            shapes = ({n: p.shape for n, p in item.tensors.items()}, {n: a.shape for n, a in media.tensors.items()})
            mine = media.source.processor if media.source else "another processor"
            raise RunError(
                f"its media, made again from their files, are not those that the engine was given: the processor {mine} made {shapes[1]} "
                f"with the digest {media.digest}; {self.processor} had made {shapes[0]} with {item.digest}: use the same processor and "
                'libraries, or keep the tensors (spool.media = "tensors")'
            )
        return media

    def of_samples(
        self, samples: Sequence[int], groups: Sequence[int], read: Callable[[int, int], Media | None]
    ) -> tuple[Media | None, ...]:
        """Return the media of samples, of these groups, each item read once; nothing where the shard has none."""
        if not self.items:
            return ()
        numbers = [self.number(group, sample) for sample, group in zip(samples, groups, strict=True)]
        first = dict(zip(reversed(numbers), zip(reversed(groups), reversed(samples), strict=True), strict=True))
        found = {number: None if number is None else read(*of) for number, of in first.items()}
        return tuple(found[number] for number in numbers)

    @property
    def bytes(self) -> int:
        """Bytes that the shard keeps: of tensors, or of the files that they are made of."""
        tensors = sum(item.bytes for item in self.items if item.kept == "tensors")
        return tensors + sum(place.bytes for item in self.items for _, place in item.files)

    def columns(self) -> dict[str, tuple[np.dtype[Any], int]]:
        """Return each column of media with its type and its rows."""
        stored = [(FOLDER + n, p) for item in self.items if item.kept == "tensors" for n, p in item.tensors.items()]
        stored += [(SOURCE, place) for item in self.items for _, place in item.files]
        return {column: (place.dtype, place.end) for column, place in stored}


def _item(about: Mapping[str, Any], ends: dict[str, int]) -> Item:
    """Return an item, whose arrays lie behind those of the items before it; the `ends` of columns are moved on."""

    def place(column: str, dtype: np.dtype[Any], shape: Sequence[int], stored: bool = True) -> Place:
        if not all(isinstance(size, int) and size >= 0 for size in shape):
            raise ValueError(f"'{column}' has the shape {shape}")
        found = Place(dtype, tuple(shape), ends.get(column, 0))
        ends[column] = found.end if stored else found.begin
        return found

    is_kept = about["kept"] == "tensors"
    tensors = {n: place(FOLDER + n, TYPES[kind], shape, is_kept) for n, (kind, shape) in dict(about["tensors"]).items()}
    files = [(str(modality), place(SOURCE, TYPES["|u1"], [size])) for modality, size in about.get("files", ())]
    return Item(str(about["digest"]), about["kept"], tensors, files)
