"""A shard as a table of its samples: named columns, each computed only when it is asked for.

Shard + Statuses ──sample_columns──► {name: N values} ──arrow_table──► pyarrow.Table (one shard at a time)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, get_args

import numpy as np

from relax_hpc.files.errors import RunError
from relax_hpc.files.run_dir import RunDir
from relax_hpc.monitor.analysis.statuses import RequestStatus, Verdict
from relax_hpc.recipe.tables.scoring import Score
from relax_hpc.records import Finish

if TYPE_CHECKING:
    import pyarrow as pa

    from relax_hpc.spool.shard import Shard

TYPES: dict[str, str] = {
    "shard": "string", "request": "string", "group": "int32", "sample": "int32", "source": "int32", "prompt_index": "int64",
    "step": "int64", "status": "string", "reason": "string", "detail": "string", "reward": "float32", "raw_reward": "float32", "finish": "string",
    "turns": "int32", "prompt_length": "int64", "length": "int64", "first_version": "int64", "last_version": "int64",
    "age": "int64", "media": "string",
}  # fmt: skip
"""Columns of every table of trajectories, and their Arrow types; RunView.trajectories says what each holds."""
TEXT_TYPES = {"prompt": "string", "completion": "string", "answer": "string", "metadata": "string"}
TOKEN_TYPES = {
    "prompt_tokens": "list<int32>", "tokens": "list<int32>", "loss_mask": "list<uint8>", "logprobs": "list<float32>",
    "versions": "list<int32>", "columns/reference": "list<float32>", "columns/teacher": "list<float32>",
    "columns/recomputed": "list<float32>", "columns/values": "list<float32>",
}  # fmt: skip
"""Arrow types of the columns that a table has only when they are asked for by name."""
SCORES: tuple[str, ...] = (*get_args(Score), "values")
"""Columns that scorers and critics make, each in a file of its own."""
FINISH_NAMES = np.array([f.name.lower() for f in Finish])


class Decoder(Protocol):
    """The part of tokenizers.Tokenizer that is used here."""

    def decode_batch(self, sequences: list[list[int]], skip_special_tokens: bool = True) -> list[str]: ...


def choose_columns(columns: Sequence[str] | None, extras: Iterable[str], text: bool) -> list[str]:
    """The columns of a table: those asked for, or all but token columns. Raises RunError for unknown ones."""
    everything = [*TYPES, *TEXT_TYPES, *extras]
    if columns is None:
        return [c for c in everything if text or c not in TEXT_TYPES]
    known = {*everything, *TOKEN_TYPES}
    unknown = [c for c in columns if c not in known]
    if unknown:
        raise RunError(f"no column {unknown[0]!r} of trajectories: use any of {[*everything, *TOKEN_TYPES]}")
    return list(dict.fromkeys(columns))


def verdicts(shard: Shard, status: RequestStatus) -> list[Verdict]:
    """[G] the verdict on each group of a shard."""
    return [status.group(g, *shard.failure(g)) for g in range(len(shard.groups))]


def sample_columns(
    shard: Shard, status: RequestStatus, columns: Iterable[str], decoder: Decoder | None = None
) -> dict[str, Any]:
    """{name: N values} for the samples of a shard. Integers that may be unknown are masked arrays; `decoder` makes text."""
    samples, groups, group = shard.samples, shard.groups, shard.samples["group"]
    count, offsets = len(samples), shard.offsets
    judged = verdicts(shard, status)

    def per_group(values: Sequence[Any]) -> list[Any]:
        return [values[g] for g in group]

    def failed_too(statuses: list[str]) -> list[str]:
        ends = samples["finish"].tolist()
        return ["failed" if end == Finish.FAILED else status for end, status in zip(ends, statuses, strict=True)]

    makers: dict[str, Callable[[], Any]] = {
        "shard": lambda: [f"{shard.path.parent.name}/{shard.path.name}"] * count,
        "request": lambda: [shard.request] * count,
        "group": lambda: group,
        "sample": lambda: np.arange(count, dtype=np.int32),
        "source": lambda: groups["source"][group].astype(np.int32),
        "prompt_index": lambda: groups["index"][group],
        "step": lambda: _masked(np.full(count, status.step or 0), status.step is None),
        "status": lambda: failed_too(per_group([v.status for v in judged])),
        "reason": lambda: per_group([v.reason for v in judged]),
        "detail": lambda: per_group([v.detail or shard.failure(g)[1] for g, v in enumerate(judged)]),
        "reward": lambda: samples["reward"],
        "raw_reward": lambda: samples["raw_reward"],
        "finish": lambda: FINISH_NAMES[samples["finish"]],
        "turns": lambda: samples["turns"].astype(np.int32),
        "prompt_length": lambda: np.diff(shard.prompt_offsets)[group],
        "length": lambda: np.diff(offsets),
        "first_version": lambda: _versions(shard)[0],
        "last_version": lambda: _versions(shard)[1],
        "age": lambda: _masked((status.step or 0) - _versions(shard)[0], status.step is None),
        "media": lambda: per_group([_media(shard, g) for g in range(len(groups))]),
        "prompt": lambda: per_group(
            _decode(decoder, _cut(shard.read("prompt_tokens"), shard.prompt_offsets), special=True)
        ),
        "completion": lambda: _decode(decoder, _cut(shard.read("tokens"), offsets), special=False),
        "answer": lambda: per_group([p["answer"] for p in shard.meta["prompts"]]),
        "metadata": lambda: per_group(
            [json.dumps(p["metadata"], ensure_ascii=False, sort_keys=True) for p in shard.meta["prompts"]]
        ),
        "prompt_tokens": lambda: per_group(_cut(shard.read("prompt_tokens"), shard.prompt_offsets)),
        "tokens": lambda: _cut(shard.read("tokens"), offsets),
        "loss_mask": lambda: _cut(shard.read("loss_mask"), offsets),
        "logprobs": lambda: _cut(shard.read("logprobs"), offsets),
        "versions": lambda: _cut(shard.versions(0, int(offsets[-1])), offsets),
    }
    makers |= {f"columns/{name}": partial(_scored, shard, name) for name in SCORES}
    return {c: makers[c]() if c in makers else _extra(shard, c, count) for c in columns}


def arrow_table(values: dict[str, Any]) -> pa.Table:
    """`sample_columns` as an Arrow table; the types do not depend on the values, so tables of all shards go together."""
    import pyarrow as pa

    return pa.table({name: pa.array(column, arrow_type(name)) for name, column in values.items()})


def arrow_type(column: str) -> pa.DataType:
    import pyarrow as pa

    named = {**TYPES, **TEXT_TYPES, **TOKEN_TYPES}.get(column, "float32")
    if named.startswith("list<"):
        return pa.list_(pa.type_for_alias(named[5:-1]))
    return pa.type_for_alias(named)


def _scored(shard: Shard, name: str) -> list[Any]:
    """[N] another role's numbers for each sample's tokens, None without such a column. Raises RunError for damage."""
    from relax_hpc.spool.column import DamagedColumn, read_column

    if shard.path.parent.parent.name != "shards":
        return [None] * len(shard.samples)
    try:
        column = read_column(RunDir(shard.path.parents[2]).column(shard.request, name), name)
    except DamagedColumn as error:
        raise RunError(f"{error}; where it is removed, the run makes it again when it goes on") from error
    return _cut(column.values, shard.offsets) if column else [None] * len(shard.samples)


def _masked(values: Any, mask: Any) -> Any:
    return np.ma.MaskedArray(values, np.ma.getmaskarray(values) | mask)


def _media(shard: Shard, group: int) -> str | None:
    """Say what a group's prompt shows beside its text, as JSON: its digest, and the shape of each tensor."""
    item = shard.media_index.item(group)
    if item is None:
        return None
    return json.dumps({"digest": item.digest, **{name: place.shape for name, place in item.tensors.items()}})


def _versions(shard: Shard) -> tuple[Any, Any]:
    """([N] version of the first token, [N] of the last), masked for samples without tokens."""
    starts, versions, offsets = shard.read("span_start"), shard.read("span_version"), shard.offsets
    empty = np.diff(offsets) == 0
    if not len(starts):
        none = np.ma.MaskedArray(np.zeros(len(empty), np.int64), mask=np.ones(len(empty), bool))
        return none, none
    # Where several spans begin together, only the last one has tokens.
    first, last = (
        versions[np.maximum(np.searchsorted(starts, token, side="right") - 1, 0)].astype(np.int64)
        for token in (offsets[:-1], offsets[1:] - 1)
    )
    return np.ma.MaskedArray(first, empty), np.ma.MaskedArray(last, empty)


def _cut(flat: Any, offsets: Any) -> list[Any]:
    return np.split(flat, offsets[1:-1]) if len(offsets) > 1 else []


def _decode(decoder: Decoder | None, sequences: list[Any], *, special: bool) -> list[str | None]:
    if decoder is None:
        return [None] * len(sequences)
    return list(decoder.decode_batch([s.tolist() for s in sequences], skip_special_tokens=not special))


def _extra(shard: Shard, column: str, count: int) -> Any:
    return shard.read(column) if column in shard else np.full(count, np.nan, np.float32)
