"""The best and the worst samples of some shards, with their text."""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from relax_hpc.monitor.analysis.pictures import shown
from relax_hpc.monitor.analysis.tables import sample_columns
from relax_hpc.spool.request import RequestState

if TYPE_CHECKING:
    from relax_hpc.monitor.analysis import RunView
    from relax_hpc.spool.shard import Shard

SHOWN = (
    "request", "group", "sample", "step", "reward", "length", "finish", "age", "prompt", "completion", "answer", "tokens",
    "prompt_tokens", "media",
)  # fmt: skip

PLACEHOLDERS = re.compile(r"(<\|[^|<>]+\|>)\1+")
"""A token such as <|image_pad|>, as often as a picture has patches."""


class Found(NamedTuple):
    """A sample worth showing, ordered so that a larger one is better; among equals the newer one."""

    reward: float
    request: str
    group: int
    sample: int
    path: Path


def best_and_worst(view: RunView, paths: Sequence[Path], count: int) -> dict[str, list[dict[str, Any]]]:
    """{"best": rows, "worst": rows} of the trained samples at `paths`, at most one of a group in each.

    A row has the columns SHOWN as plain values, `media` as pictures for a page; `prompt` and `completion` are token ids when the run has no tokenizer.
    """
    statuses = view.statuses()
    best: list[Found] = []
    worst: list[Found] = []
    for shard in view.iter_shards([p for p in paths if statuses.of(p).state is RequestState.TRAINED], broken=[]):
        groups = list(_groups(shard))
        best = heapq.nlargest(count, best + [max(group) for group in groups])
        least = worst + [min(group) for group in groups]
        worst = heapq.nlargest(count, least, key=lambda f: (-f.reward, f.request, f.group))
    return {what: [row for f in found for row in _rows(view, f)] for what, found in (("best", best), ("worst", worst))}


def _groups(shard: Shard) -> Iterator[list[Found]]:
    samples = shard.samples
    for group in np.unique(samples["group"]):
        mine = np.flatnonzero(samples["group"] == group)
        yield [Found(float(samples["reward"][i]), shard.request, int(group), int(i), shard.path) for i in mine]


def _rows(view: RunView, found: Found) -> Iterator[dict[str, Any]]:
    """Yield the row of a sample; nothing when its shard is gone meanwhile."""
    decoder = view.decoder if view.has_text else None
    for shard in view.iter_shards([found.path], broken=[]):
        columns = sample_columns(shard, view.statuses().of(found.path), SHOWN, decoder)
        row = {name: values[found.sample] for name, values in columns.items()}
        if decoder is None:
            row |= {"prompt": row["prompt_tokens"].tolist(), "completion": row["tokens"].tolist()}
        else:
            row["prompt"] = shortened(row["prompt"])
        row["media"] = shown(view, found.request, found.group) if row["media"] else []
        row["age"] = None if row["age"] is np.ma.masked else row["age"]
        yield {k: visible(v) if isinstance(v, str) else v for k, v in row.items()}


def shortened(prompt: str) -> str:
    """Say how often a placeholder for media stands in a row, in place of the row."""
    return PLACEHOLDERS.sub(lambda found: f"{found[1]}×{len(found[0]) // len(found[1])}", prompt)


def visible(text: str) -> str:
    """Show control characters, which a model may well have generated, as a replacement sign."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
