"""A shard: one HDF5 file with all groups of one order; complete or absent, never changed.

    worker: list[Group] ──encode──► one HDF5 image in memory ──publish──► SHARDS/ORDER.h5 ──► Shard (any reader)

Flat columns plus offsets, so that a file of a thousand samples is a dozen datasets, one write and one read. The file is
laid out in memory and leaves in one write: a kill in mid-write leaves a temporary name, never a shard.
HDF5's file locks are off on purpose: a published shard has no writer, and Lustre mounted without flock refuses locks.
docs/shard-format.md describes the format for readers that know nothing of this package.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Literal, cast

import h5py
import numpy as np
import xxhash
from h5py import h5d, h5f, h5p, h5s
from numpy.typing import NDArray

from relax_hpc.records import Finish, Group, Prompt, Rollouts, Sample
from relax_hpc.run_dir import Data, RunError
from relax_hpc.spool import hdf5
from relax_hpc.spool.layout import COLUMNS, GROUP, ROUTED, SAMPLE, TOKEN_COLUMNS

FORMAT = "relax_hpc.shard"
SCHEMA = 1
ATTRIBUTES = ("format", "schema", "meta_checksum")
"""HDF5 keeps checksums of its own metadata, attributes included: what vouches for the rest stands there."""
Compression = Literal["none", "lz4", "zstd"]

READ_WHOLE_BYTES = 2 << 20
"""Up to this size a shard is read in one piece; larger ones are read by slices, so that a reader peaks at its slice."""


def columns(groups: Sequence[Group]) -> dict[str, hdf5.Column]:
    """The flat columns of `groups` (see docs/shard-format.md)."""
    samples = [s for g in groups for s in g.samples]
    of_group = np.repeat(np.arange(len(groups), dtype=np.int32), [len(g.samples) for g in groups])
    offsets = _offsets([len(s.tokens) for s in samples])
    starts, versions = [], []
    for sample, begin in zip(samples, offsets[:-1].tolist(), strict=True):
        for start, version in sample.spans:
            starts.append(begin + start)
            versions.append(version)
    table = np.zeros(len(samples), SAMPLE)
    table["group"] = of_group
    for name in ("reward", "raw_reward", "finish", "turns"):
        table[name] = [getattr(s, name) for s in samples]
    parts: dict[str, list[Any]] = {
        "prompt_tokens": [g.prompt.tokens for g in groups],
        "prompt_offsets": [_offsets([len(g.prompt.tokens) for g in groups])],
        "tokens": [s.tokens for s in samples],
        "offsets": [offsets],
        "loss_mask": [s.loss_mask for s in samples],
        "logprobs": [s.logprobs for s in samples],
        "span_start": [starts],
        "span_version": [versions],
        "samples": [table],
        "groups": [np.array([(g.prompt.source, g.prompt.index, bool(g.reason)) for g in groups], GROUP)],
    }
    flat = {name: hdf5.Column(of_column, COLUMNS[name]) for name, of_column in parts.items()}
    routed = [s.routed_experts for s in samples if s.routed_experts is not None]
    if routed and len(routed) == len(samples):
        flat[ROUTED] = hdf5.Column([part.reshape(-1) for part in routed], routed[0].dtype)
    for name in dict.fromkeys(key for s in samples for key in s.extra):
        flat[f"extra/{name}"] = hdf5.Column([np.array([s.extra.get(name, np.nan) for s in samples])], np.float32)
    return flat


def encode(order: str, groups: Sequence[Group], meta: dict[str, Any], compression: Compression = "none") -> Data:
    """The bytes of a shard, in pieces. `meta`: what else to say about the order, JSON-like (attempt, worker, versions, …)."""
    flat = columns(groups)
    reasons = {str(i): g.reason for i, g in enumerate(groups) if g.reason}
    prompts = [{"answer": g.prompt.answer, "metadata": g.prompt.metadata} for g in groups]
    checksums = {name: _checksum(column.pieces) for name, column in flat.items()}
    about = {**meta, "order": order, "reasons": reasons, "prompts": prompts, "checksums": checksums}
    if ROUTED in flat:
        about[ROUTED] = next(
            s.routed_experts.shape[1:] for g in groups for s in g.samples if s.routed_experts is not None
        )
    text = json.dumps(about, ensure_ascii=False, default=str).encode()
    flat["meta"] = hdf5.Column([np.frombuffer(text, np.uint8)], np.uint8)
    root: dict[str, str | int] = {
        "format": FORMAT,
        "schema": SCHEMA,
        "meta_checksum": xxhash.xxh3_64_intdigest(text),
    }
    return hdf5.image(flat, root, {} if compression == "none" else dict.fromkeys(TOKEN_COLUMNS, compression))


class Shard:
    """A published shard, opened for reading. Use as a context manager, or `close()`.

    Raises RunError when the file is missing, truncated, or no shard of a schema known here.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            self.bytes = self.path.stat().st_size
            access = hdf5.in_memory(1 << 16) if self.bytes <= READ_WHOLE_BYTES else h5p.create(h5p.FILE_ACCESS)
            access.set_file_locking(False, True)
            self._file = h5f.open(os.fsencode(self.path), h5f.ACC_RDONLY, access)
        except FileNotFoundError:
            raise RunError(f"no shard '{self.path}': it was never published, or retention removed it") from None
        except OSError as error:
            raise RunError(
                f"'{self.path}' ({self.bytes} bytes) is truncated or not HDF5: {error}; "
                "shards are published whole, so the file was damaged after it was written: move it away and resume"
            ) from error
        with self._damage():
            *found, self._meta_checksum = hdf5.attributes(self._file, ATTRIBUTES)
        if found != [FORMAT, SCHEMA]:
            self._file.close()
            raise RunError(
                f"'{self.path}' has format and schema {found}, expected {[FORMAT, SCHEMA]}: not a shard of this version"
            )
        self._cache: dict[str, Any] = {}

    def __enter__(self) -> Shard:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    @contextmanager
    def _damage(self) -> Iterator[None]:
        """What HDF5 says of broken metadata, as RunError."""
        try:
            yield
        except (RuntimeError, OSError, ValueError, TypeError) as error:
            raise RunError(
                f"'{self.path}' cannot be read, the file was damaged after it was written: {error}"
            ) from error

    def __contains__(self, column: str) -> bool:
        return column.partition("/")[0].encode() in self._file and column in self.column_names()

    def read(self, column: str, begin: int = 0, end: int | None = None) -> NDArray[Any]:
        """A column, or the rows [begin, end) of it. Raises RunError naming the columns there are."""
        try:
            dataset = h5d.open(self._file, column.encode())
        except KeyError:
            raise RunError(f"'{self.path}' has no column '{column}'; it has {sorted(self.column_names())}") from None
        except (RuntimeError, OSError, ValueError) as error:
            raise RunError(f"'{self.path}': column '{column}' cannot be read, the file was damaged: {error}") from error
        with self._damage():
            return self._rows(dataset, column, begin, end)

    def _rows(self, dataset: h5d.DatasetID, column: str, begin: int, end: int | None) -> NDArray[Any]:
        hdf5.load_filters(dataset)
        rows: int = dataset.shape[0]
        end = rows if end is None else min(end, rows)
        # dataset.dtype translates HDF5's type anew: slow for tables, so only where the column is not a known one.
        dtype = COLUMNS[column] if column in COLUMNS else dataset.dtype  # noqa: SIM401
        array = np.empty(max(end - begin, 0), dtype)
        if array.size:
            where = dataset.get_space()
            where.select_hyperslab((begin,), array.shape)
            dataset.read(h5s.create_simple(array.shape), where, array, hdf5.type_of(array.dtype))
        return array

    def _small(self, column: str) -> NDArray[Any]:
        """A column that is small beside the token columns, kept after the first read."""
        if column not in self._cache:
            self._cache[column] = self.read(column)
        return cast(NDArray[Any], self._cache[column])

    def column_names(self) -> list[str]:
        with self._damage():
            file = h5py.File(self._file)
            return [n for n in file if n != "extra"] + [f"extra/{n}" for n in file.get("extra", ())]

    @property
    def meta(self) -> dict[str, Any]:
        if "meta" not in self._cache:
            data = self.read("meta")
            if xxhash.xxh3_64_intdigest(data.data) != self._meta_checksum:
                raise RunError(
                    f"'{self.path}': `meta` does not have its checksum: the file was damaged after it was written"
                )
            self._cache["meta"] = json.loads(data.tobytes())
        return cast(dict[str, Any], self._cache["meta"])

    @property
    def order(self) -> str:
        return str(self.meta["order"])

    @property
    def checksum(self) -> int:
        """Of `meta`, which has the checksums of all else."""
        return int(self._meta_checksum)

    @property
    def samples(self) -> NDArray[Any]:
        """[N] of SAMPLE."""
        return self._small("samples")

    @property
    def groups(self) -> NDArray[Any]:
        """[G] of GROUP."""
        return self._small("groups")

    @property
    def offsets(self) -> NDArray[np.int64]:
        """[N + 1] where each sample's tokens begin."""
        return self._small("offsets")

    @property
    def prompt_offsets(self) -> NDArray[np.int64]:
        """[G + 1] where each group's prompt tokens begin."""
        return self._small("prompt_offsets")

    @property
    def first_version(self) -> int:
        """The oldest version among the shard's tokens: what its deadline counts from."""
        spans = self._small("span_version")
        return int(spans.min()) if len(spans) else int(self.meta["version"])

    def versions(self, begin: int, end: int) -> NDArray[np.int32]:
        """[end - begin] the version that made each token of the flat range."""
        starts, versions = self._small("span_start"), self._small("span_version")
        edges = np.clip(np.append(starts, np.int64(self.offsets[-1])), begin, end)
        return cast("NDArray[np.int32]", np.repeat(versions, np.diff(edges)))

    def rollouts(
        self,
        which: NDArray[np.int64] | None = None,
        routed: bool = False,
        columns: Mapping[str, NDArray[np.float32]] = MappingProxyType({}),
    ) -> Rollouts:
        """The samples `which` (ascending indices; all by default), reading no others: memory peaks at what is returned.

        `routed`: with the experts that each token was routed to. Raises RunError where those were not kept.
        `columns`: [T] numbers for each token of the shard, which go with the tokens.
        """
        picked = np.arange(len(self.samples)) if which is None else np.asarray(which, np.int64)
        runs = [r for r in np.split(picked, np.flatnonzero(np.diff(picked) > 1) + 1) if len(r)]
        pieces = [(int(self.offsets[r[0]]), int(self.offsets[r[-1] + 1])) for r in runs]

        def gather(read: Callable[[int, int], NDArray[Any]]) -> NDArray[Any]:
            """The pieces one after the other; each is copied into its place at once, so that no column is held twice."""
            if len(pieces) <= 1:
                return read(*pieces[0]) if pieces else read(0, 0)
            array, done = np.empty(sum(end - begin for begin, end in pieces), read(0, 0).dtype), 0
            for begin, end in pieces:
                array[done : done + end - begin] = read(begin, end)
                done += end - begin
            return array

        flat: dict[str, Any] = {name: gather(functools.partial(self.read, name)) for name in TOKEN_COLUMNS}
        flat["versions"] = gather(self.versions)
        of_group, order = self.samples["group"][picked], self.order
        prompts, prompt_offsets = self._small("prompt_tokens"), self.prompt_offsets
        return Rollouts(
            ids=[f"{order}/{i}" for i in picked.tolist()],
            group=of_group.astype(np.int64),
            rewards=self.samples["reward"][picked],
            raw_rewards=self.samples["raw_reward"][picked],
            prompt_tokens=_concatenate(
                [prompts[prompt_offsets[g] : prompt_offsets[g + 1]] for g in of_group], np.int32
            ),
            prompt_offsets=_offsets([int(prompt_offsets[g + 1] - prompt_offsets[g]) for g in of_group]),
            offsets=_offsets(np.diff(self.offsets)[picked].tolist()),
            finish=self.samples["finish"][picked],
            routed_experts=self._routed(picked) if routed else None,
            columns={name: gather(functools.partial(_piece, values)) for name, values in columns.items()},
            **flat,
        )

    def raw_rewards(self) -> list[NDArray[np.float32]]:
        """[samples] of each group that did not fail."""
        of_group, rewards = self.samples["group"], self.samples["raw_reward"]
        return [rewards[of_group == g] for g in np.flatnonzero(self.groups["failed"] == 0)]

    def _routed(self, picked: NDArray[np.int64]) -> NDArray[np.unsignedinteger[Any]] | None:
        """[sum of P + T - 1, layers, k] of the samples, one after the other."""
        parts = [part for i in picked.tolist() if (part := self.routed_experts(i)) is not None]
        if len(parts) < len(picked):
            raise RunError(
                f"'{self.path}' does not say which experts its tokens were routed to: it was generated without "
                "rollout.routed_experts = true; set that to false, or start a new run"
            )
        return np.concatenate(parts) if parts else None

    def group(self, index: int) -> Group:
        """One group as a record, as its worker made it (the prompt's text is to be decoded)."""
        which = np.flatnonzero(self.samples["group"] == index)
        tokens = self.rollouts(which)
        rows, about, known = self.groups[index], self.meta["prompts"][index], {*COLUMNS, ROUTED}
        extra = {n.removeprefix("extra/"): self._small(n)[which] for n in self.column_names() if n not in known}
        begin, end = self.prompt_offsets[index : index + 2]
        prompt = Prompt(
            int(rows["source"]),
            int(rows["index"]),
            "",
            self._small("prompt_tokens")[begin:end],
            about["answer"],
            about["metadata"],
        )
        samples = []
        for k, row in enumerate(self.samples[which]):
            x, y = tokens.offsets[k : k + 2]
            changes = np.flatnonzero(np.diff(tokens.versions[x:y], prepend=-1))
            spans = [(int(c), int(tokens.versions[x + c])) for c in changes]
            numbers = {n: float(a[k]) for n, a in extra.items() if not np.isnan(a[k])}
            samples.append(
                Sample(
                    tokens.tokens[x:y], tokens.loss_mask[x:y], tokens.logprobs[x:y], spans, Finish(int(row["finish"])),
                    float(row["reward"]), float(row["raw_reward"]), int(row["turns"]), numbers, self.routed_experts(int(which[k])),
                )
            )  # fmt: skip
        return Group(prompt, samples, self.meta["reasons"].get(str(index), ""))

    def routed_experts(self, sample: int) -> NDArray[np.unsignedinteger[Any]] | None:
        """[P + T - 1, layers, k] which experts each token of a sample was routed to; None where that was not kept."""
        if ROUTED not in self.meta:
            return None
        layers, k = self.meta[ROUTED]
        if "routed_rows" not in self._cache:
            prompts = np.diff(self.prompt_offsets)[self.samples["group"]]
            self._cache["routed_rows"] = _offsets((prompts + np.diff(self.offsets) - 1).tolist())
        begin, end = self._cache["routed_rows"][sample : sample + 2] * layers * k
        return self.read(ROUTED, int(begin), int(end)).reshape(-1, layers, k)

    def validate(self) -> None:
        """Compare every column with its checksum, and offsets with lengths. Raises RunError naming what differs."""
        for name, expected in self.meta["checksums"].items():
            found = _checksum([self.read(name).data])
            if found != expected:
                raise RunError(
                    f"'{self.path}': column '{name}' has checksum {found}, expected {expected}: the file was damaged"
                )
        total = int(self.offsets[-1])
        for name in TOKEN_COLUMNS:
            if len(self.read(name)) != total:
                raise RunError(f"'{self.path}': column '{name}' has {len(self.read(name))} tokens, offsets say {total}")


def concatenate(parts: Iterable[Rollouts]) -> Rollouts:
    """Rollouts of several shards as one; groups are numbered anew, in order. All have the same columns."""
    rollouts = list(parts)
    columns = rollouts[0].columns if rollouts else {}
    first_group, groups = 0, []
    for part in rollouts:
        _, renumbered = np.unique(part.group, return_inverse=True)
        groups.append(renumbered + first_group)
        first_group += int(renumbered.max(initial=-1)) + 1
    join: Callable[[str, Any], NDArray[Any]] = lambda name, dtype: _concatenate(
        [getattr(r, name) for r in rollouts], dtype
    )
    routed = [r.routed_experts for r in rollouts if r.routed_experts is not None]
    return Rollouts(
        ids=[i for r in rollouts for i in r.ids],
        group=_concatenate(groups, np.int64),
        rewards=join("rewards", np.float32),
        raw_rewards=join("raw_rewards", np.float32),
        prompt_tokens=join("prompt_tokens", np.int32),
        prompt_offsets=_offsets([int(n) for r in rollouts for n in np.diff(r.prompt_offsets)]),
        tokens=join("tokens", np.int32),
        offsets=_offsets([int(n) for r in rollouts for n in np.diff(r.offsets)]),
        loss_mask=join("loss_mask", np.uint8),
        logprobs=join("logprobs", np.float32),
        versions=join("versions", np.int32),
        finish=join("finish", np.uint8),
        routed_experts=np.concatenate(routed) if routed else None,
        columns={n: _concatenate([r.columns[n] for r in rollouts], np.float32) for n in columns},
    )


def _checksum(pieces: Iterable[memoryview]) -> str:
    digest = xxhash.xxh3_64()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


def _offsets(lengths: Sequence[int]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])


def _piece(values: NDArray[Any], begin: int, end: int) -> NDArray[Any]:
    return values[begin:end]


def _concatenate(parts: Sequence[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    return np.concatenate(parts).astype(dtype, copy=False) if len(parts) else np.empty(0, dtype)
