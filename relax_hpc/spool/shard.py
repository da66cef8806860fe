"""A shard: one HDF5 file with all groups of one request; complete or absent, never changed.

    worker: list[Group] ──shard_writer.encode──► bytes ──publish──► SHARDS/REQUEST.h5 ──► Shard (any reader)
                                                                     each row compared with its checksum as it is read

HDF5's file locks are off on purpose: a published shard has no writer, and Lustre mounted without flock refuses locks.
docs/shard-format.md describes the format for readers that know nothing of this package.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, cast

import numpy as np
import xxhash
from numpy.typing import NDArray

from relax_hpc.files.errors import Damaged, RunError
from relax_hpc.records import Finish, Group, Media, Prompt, Rollouts, Sample, joined, offsets_of
from relax_hpc.spool import hdf5
from relax_hpc.spool.checked import Checked, Rows
from relax_hpc.spool.index import Index
from relax_hpc.spool.layout import (
    ATTRIBUTES,
    COLUMNS,
    EXTRA,
    EXTRA_FOLDER,
    FORMAT,
    ROLLOUT,
    ROLLOUT_TYPE,
    ROUTED,
    ROUTED_TYPES,
    SCHEMA,
    TOKEN_COLUMNS,
    TURN_REWARDS,
    checked_meta,
)
from relax_hpc.spool.media import FOLDER, MediaIndex, Remake

INDEX = tuple(field.name for field in fields(Index))


class DamagedShard(Damaged):
    """A shard whose bytes are not those that were published."""

    def __init__(self, path: Path, what: object) -> None:
        super().__init__(f"'{path}': {what}: the file was damaged after it was written, or is not the one that was")
        self.path = path


class Shard:
    """A published shard, opened for reading. Use as a context manager, or `close()`.

    Everything read is compared with its checksum. Raises DamagedShard, a RunError, naming file and column where that
    differs or cannot be read; RunError if the file is missing or of another schema.
    """

    def __init__(self, path: str | os.PathLike[str], remake: Remake | None = None) -> None:
        """remake: makes media again from their files, where the shard keeps those."""
        self.path, self._remake = Path(path), remake
        self._cache: dict[str, Any] = {}
        try:
            self._file = hdf5.File(self.path)
        except FileNotFoundError:
            raise RunError(f"no shard '{self.path}': it was never published, or retention removed it") from None
        except OSError as error:
            raise DamagedShard(self.path, f"it is truncated or not HDF5 ({error})") from error
        self.bytes = self._file.bytes
        with self._damage():
            form, schema, self._meta_checksum = self._file.attributes(ATTRIBUTES)
        if (form, schema) != (FORMAT, SCHEMA):
            self._file.close()
            raise RunError(
                f"'{self.path}' has format and schema {[form, schema]}, expected {[FORMAT, SCHEMA]}: not a shard of this version"
            )

    def __enter__(self) -> Shard:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()
        self._cache.clear()

    @contextmanager
    def _damage(self, of: str = "") -> Iterator[None]:
        """Raise DamagedShard for an error inside the block, from HDF5 or from a check of the rows read. of: the
        column."""
        try:
            yield
        except RunError:
            raise
        except (RuntimeError, OSError, ValueError, TypeError, LookupError, MemoryError) as error:  # and RecursionError
            raise DamagedShard(self.path, f"column '{of}': {error}" if of else error) from error

    def __contains__(self, column: str) -> bool:
        return column in self.column_names()

    def read(self, column: str, begin: int = 0, end: int | None = None) -> NDArray[Any]:
        """Read a column, or its rows [begin, end). Raises RunError, which lists the columns there are."""
        rows = self._dataset(column).rows
        return self._pieces(column, [(begin, rows if end is None else min(end, rows))])

    def _pieces(self, column: str, pieces: Sequence[Rows]) -> NDArray[Any]:
        """Read these ranges of a column's rows, joined in one array."""
        dataset = self._dataset(column)
        with self._damage(column):
            return dataset.read([piece for piece in pieces if piece[1] > piece[0]])

    def _dataset(self, column: str) -> Checked:
        """Open a column for reading. Raises RunError if there is none, DamagedShard if its type or number of rows is
        wrong."""
        key = f"dataset {column}"
        if key not in self._cache:
            if not self._file.is_open:
                raise RuntimeError(f"'{self.path}' was closed by its reader")
            expected = self.meta["checksums"].get(column)
            if expected is None:
                raise RunError(f"'{self.path}' has no column '{column}'; it has {sorted(self.column_names())}")
            with self._damage(column):
                found = Checked(self._file.dataset(column, self._types(column)), expected)
            rows = found.rows if column in INDEX else self._rows.get(column, len(self.samples))
            if found.rows != rows:
                raise DamagedShard(self.path, f"column '{column}' has {found.rows} rows, offsets say {rows}")
            self._cache[key] = found
        return cast(Checked, self._cache[key])

    def _types(self, column: str) -> Sequence[np.dtype[Any]]:
        """Return the types that a column may have."""
        if column.startswith(FOLDER):
            return (self.media_index.columns()[column][0],)
        known = {ROUTED: ROUTED_TYPES, ROLLOUT: (ROLLOUT_TYPE,)}
        return (COLUMNS[column],) if column in COLUMNS else known.get(column, (EXTRA,))

    def _small(self, column: str) -> NDArray[Any]:
        """Read a column that is small beside the token columns; it is kept after the first read."""
        if column not in self._cache:
            self._cache[column] = self.read(column)
        return cast(NDArray[Any], self._cache[column])

    def column_names(self) -> list[str]:
        return [*self.meta["checksums"]]

    @property
    def meta(self) -> dict[str, Any]:
        if "meta" not in self._cache:
            with self._damage("meta"):
                dataset = self._file.dataset("meta", (COLUMNS["meta"],))
                data = np.empty(dataset.rows, np.uint8)
                dataset.read(0, data)
                if xxhash.xxh3_64_intdigest(data.data) != self._meta_checksum:
                    raise ValueError("it does not have its checksum")
                self._cache["meta"] = checked_meta(json.loads(data.tobytes()))
        return cast(dict[str, Any], self._cache["meta"])

    @property
    def request(self) -> str:
        return str(self.meta["request"])

    @property
    def checksum(self) -> int:
        """Checksum of `meta`, which holds the checksums of all else."""
        return int(self._meta_checksum)

    @functools.cached_property
    def index(self) -> Index:
        """The small columns that locate all others."""
        with self._damage():
            index = Index.read(self.read)
            if len(self.meta["prompts"]) != len(index.groups):
                raise ValueError(f"meta has {len(self.meta['prompts'])} prompts of {len(index.groups)} groups")
            return index

    @functools.cached_property
    def _rows(self) -> Mapping[str, int]:
        """Rows of each column whose number the index gives; every other column has one row a sample."""
        media = {name: rows for name, (_, rows) in self.media_index.columns().items()}
        return {**self.index.rows(self.meta.get(ROUTED)), **media}

    @functools.cached_property
    def media_index(self) -> MediaIndex:
        """Which group shows what, and where it is."""
        with self._damage("meta"):
            return MediaIndex.read(self.meta, len(self.groups), len(self.samples))

    @property
    def samples(self) -> NDArray[Any]:
        """Table of the samples: [N] of dtype SAMPLE."""
        return self.index.samples

    @property
    def groups(self) -> NDArray[Any]:
        """Table of the groups: [G] of dtype GROUP."""
        return self.index.groups

    @property
    def offsets(self) -> NDArray[np.int64]:
        """[N + 1] where each sample's tokens begin."""
        return self.index.offsets

    @property
    def prompt_offsets(self) -> NDArray[np.int64]:
        """[G + 1] where each group's prompt tokens begin."""
        return self.index.prompt_offsets

    @property
    def first_version(self) -> int:
        """The oldest version among the shard's tokens, from which its deadline counts."""
        spans = self.index.span_version
        return int(spans.min()) if len(spans) else int(self.meta["version"])

    def versions(self, begin: int, end: int) -> NDArray[np.int32]:
        """Return the version that made each token of the flat range: [end - begin]."""
        starts, versions = self.index.span_start, self.index.span_version
        edges = np.clip(np.append(starts, np.int64(self.offsets[-1])), begin, end)
        return cast("NDArray[np.int32]", np.repeat(versions, np.diff(edges)))

    def rollouts(
        self,
        which: NDArray[np.int64] | None = None,
        routed: bool = False,
        columns: Mapping[str, NDArray[np.float32]] = MappingProxyType({}),
        media: bool = True,
    ) -> Rollouts:
        """Read the samples `which` (ascending indices; all by default) and no others, so memory peaks at what is
        returned.

        `routed`: with the experts that each token was routed to. Raises RunError where those were not kept.
        `columns`: name -> [T] numbers for each token of the shard, returned for the samples' tokens. `media`: with what
        the samples' prompts show, compared with the digest of what the engine was given.
        """
        picked = np.arange(len(self.samples)) if which is None else np.asarray(which, np.int64)
        runs = [r for r in np.split(picked, np.flatnonzero(np.diff(picked) > 1) + 1) if len(r)]
        pieces = [(int(self.offsets[r[0]]), int(self.offsets[r[-1] + 1])) for r in runs]

        def gather(rows: Callable[[int, int], NDArray[Any]]) -> NDArray[Any]:
            """Join the ranges. Each is copied into its place at once, so that no column is held twice."""
            if len(pieces) <= 1:
                return rows(*pieces[0]) if pieces else rows(0, 0)
            array, done = np.empty(sum(end - begin for begin, end in pieces), rows(0, 0).dtype), 0
            for begin, end in pieces:
                array[done : done + end - begin] = rows(begin, end)
                done += end - begin
            return array

        flat: dict[str, Any] = {name: self._pieces(name, pieces) for name in TOKEN_COLUMNS}
        flat["versions"] = gather(self.versions)
        of_group, request = self.samples["group"][picked], self.request
        prompts, prompt_offsets = self._small("prompt_tokens"), self.prompt_offsets
        return Rollouts(
            ids=[f"{request}/{i}" for i in picked.tolist()],
            group=of_group.astype(np.int64),
            rewards=self.samples["reward"][picked],
            raw_rewards=self.samples["raw_reward"][picked],
            prompt_tokens=joined([prompts[prompt_offsets[g] : prompt_offsets[g + 1]] for g in of_group], np.int32),
            prompt_offsets=offsets_of([int(prompt_offsets[g + 1] - prompt_offsets[g]) for g in of_group]),
            offsets=offsets_of(np.diff(self.offsets)[picked].tolist()),
            finish=self.samples["finish"][picked],
            routed_experts=self._routed(picked) if routed else None,
            columns={name: gather(functools.partial(_piece, values)) for name, values in columns.items()},
            media=self.media_index.of_samples(picked.tolist(), of_group.tolist(), self.media) if media else (),
            shown_later=self._shown_later(picked),
            rollout=self._small(ROLLOUT)[picked] if ROLLOUT in self else None,
            turn_rewards=self._pieces(TURN_REWARDS, pieces) if TURN_REWARDS in self else None,
            extra={name: values[picked] for name, values in self._extra().items()},
            **flat,
        )

    def attempts(self) -> NDArray[np.bool_]:
        """[N] True on one sample of each attempt at a prompt: the first, since all of them have its reward."""
        if ROLLOUT not in self:
            return np.ones(len(self.samples), np.bool_)
        pairs = np.stack([self.samples["group"], self._small(ROLLOUT)])
        first = np.zeros(len(self.samples), np.bool_)
        first[np.unique(pairs, axis=1, return_index=True)[1]] = True
        return first

    def raw_rewards(self) -> list[NDArray[np.float32]]:
        """Return the raw rewards of each group that did not fail, [attempts that did not] each."""
        of_group, rewards = self.samples["group"], self.samples["raw_reward"]
        generated = (self.samples["finish"] != Finish.FAILED) & self.attempts()
        return [rewards[(of_group == g) & generated] for g in np.flatnonzero(self.groups["failed"] == 0)]

    def _extra(self) -> dict[str, NDArray[np.float32]]:
        """Return the numbers that rewards and environments added, by name: [N] each."""
        names = [name for name in self.column_names() if name.startswith(EXTRA_FOLDER)]
        return {name.removeprefix(EXTRA_FOLDER): self._small(name) for name in names}

    def _routed(self, picked: NDArray[np.int64]) -> NDArray[np.unsignedinteger[Any]] | None:
        """Return the routed experts of the samples, joined: [sum of P + T - 1, layers, k]."""
        parts = [part for i in picked.tolist() if (part := self.routed_experts(i)) is not None]
        if len(parts) < len(picked):
            raise RunError(
                f"'{self.path}' does not say which experts its tokens were routed to: it was generated without "
                "rollout.routed_experts = true; set that to false, or start a new run"
            )
        return np.concatenate(parts) if parts else None

    def _shown_later(self, picked: NDArray[np.int64]) -> NDArray[np.uint8] | None:
        """[picked] 1 where an environment showed more than the prompt; None where none did."""
        if not self.media_index.of_sample:
            return None
        return np.array([self.media_index.shows_later(i) for i in picked.tolist()], np.uint8)

    def media(self, group: int, sample: int | None = None) -> Media | None:
        """Read what a group's prompt shows beside its text, or all that one of its samples does; None if nothing. Raises
        DamagedShard unless it is what the engine was given."""
        try:
            return self.media_index.media(group, self.read, self._remake, sample)
        except DamagedShard:
            raise
        except Damaged as error:
            raise DamagedShard(self.path, f"group {group}: {error}") from error
        except RunError as error:
            raise RunError(f"'{self.path}', group {group}: {error}") from error

    def group(self, index: int, media: bool = True) -> Group:
        """Return one group as a record, as its worker made it, but with an empty prompt text (decode its tokens).

        `media`: with what its prompt shows; else Media with the digest alone.
        """
        which = np.flatnonzero(self.samples["group"] == index)
        tokens = self.rollouts(which, media=False)
        rows, about = self.groups[index], self.meta["prompts"][index]
        begin, end = self.prompt_offsets[index : index + 2]
        read = self.media if media else self.media_index.reference
        shown = read(index)
        prompt = Prompt(
            int(rows["source"]), int(rows["index"]), "", self._small("prompt_tokens")[begin:end], about["answer"], about["metadata"],
            shown,
        )  # fmt: skip
        samples = []
        for k, row in enumerate(self.samples[which]):
            later = read(index, int(which[k])) if self.media_index.shows_later(int(which[k])) else None
            x, y = tokens.offsets[k : k + 2]
            changes = np.flatnonzero(np.diff(tokens.versions[x:y], prepend=-1))
            spans = [(int(c), int(tokens.versions[x + c])) for c in changes]
            numbers = {n: float(a[k]) for n, a in tokens.extra.items() if not np.isnan(a[k])}
            samples.append(
                Sample(
                    tokens.tokens[x:y], tokens.loss_mask[x:y], tokens.logprobs[x:y], spans, Finish(int(row["finish"])),
                    float(row["reward"]), float(row["raw_reward"]), int(row["turns"]), numbers, self.routed_experts(int(which[k])),
                    media=later, rollout=None if tokens.rollout is None else int(tokens.rollout[k]),
                    turn_rewards=None if tokens.turn_rewards is None else tokens.turn_rewards[x:y],
                )
            )  # fmt: skip
        return Group(prompt, samples, *self.failure(index))

    def failure(self, group: int) -> tuple[str, str]:
        """Return (reason, detail) of a group that failed; both are empty if it did not."""
        return self.meta["reasons"].get(str(group), ""), self.meta["details"].get(str(group), "")

    def routed_experts(self, sample: int) -> NDArray[np.unsignedinteger[Any]] | None:
        """Return the experts that each token of a sample was routed to, [P + T - 1, layers, k]; None if that was not
        kept."""
        if ROUTED not in self.meta:
            return None
        layers, k = self.meta[ROUTED]
        if "routed_rows" not in self._cache:
            self._cache["routed_rows"] = self.index.routed_rows()
        begin, end = self._cache["routed_rows"][sample : sample + 2] * layers * k
        return self.read(ROUTED, int(begin), int(end)).reshape(-1, layers, k)

    def check_owner(self, request: str, run: str | None) -> None:
        """Raise DamagedShard if the shard is another request's, or another run's. run: the run's id, if known."""
        for what, expected, found in (("request", request, self.request), ("run", run, self.meta.get("run"))):
            if expected is not None and expected != found:
                raise DamagedShard(self.path, f"it is of {what} '{found}', its name says '{expected}'")

    def validate(self) -> None:
        """Compare every column with its checksum, in little memory, and offsets with lengths. Raises DamagedShard,
        which names the difference."""
        for name in self.meta["checksums"]:
            dataset = self._dataset(name)
            with self._damage(name):
                dataset.compare()


def _piece(values: NDArray[Any], begin: int, end: int) -> NDArray[Any]:
    return values[begin:end]
