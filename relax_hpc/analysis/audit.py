"""The auditor: was every order trained exactly once, and every evaluation played by the version that it names? Counted from the
samples that entered the loss, not from the ledger.

metrics/trainer-0.trained.jsonl   which samples each incarnation put into the loss of which step
shards                            which samples there are, and which version made each token
the newest checkpoint             which orders are still outstanding
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from relax_hpc.recipe import load_recipe
from relax_hpc.run_dir import RunDir, RunError, open_existing, read_json
from relax_hpc.spool.column import DamagedColumn, read_column
from relax_hpc.spool.ledger import Entry, Ledger, Taken
from relax_hpc.spool.orders import evaluated_version, is_evaluation, order_name
from relax_hpc.spool.shard import Shard
from relax_hpc.telemetry import read_metrics


@dataclass(frozen=True, slots=True)
class Audit:
    """What became of a run's orders and samples. All lists are empty in a sound run."""

    steps: int
    trained: int
    """Samples that entered the loss, replays not counted."""
    lost: list[str]
    """Orders that were released and are neither trained, given up with a replacement, nor outstanding; samples likewise."""
    twice: list[str]
    """Samples in the loss of two steps (more often than the ledger says, with algorithm.replay), or of one step in one incarnation and not in its replay by another."""
    torn: list[str]
    """Published shards and entries of the ledger that cannot be read or do not match their checksums; columns that are not those of the ledger."""
    over_bound: list[str]
    """Orders with a token that was older than the bound when it was trained; steps, where older tokens are masked; groups that
    a step took once more and may not have."""
    mixed: list[str]
    """Evaluations with a token of another version than the one that they name, or whose orders were played by different weights."""
    mean_lengths: list[float]
    """Mean length in tokens of each trained group, in the order of training: kills must not bias it."""


def audit(path: str | Path) -> Audit:
    """Audit the run at `path`, from its files: a fork from where it begins, with the ledger of the run that it comes from. The run must have been
    checkpointed at its last step. Of supervised fine-tuning, whose steps name prompts in the ledger, a prompt that was drawn is what an order
    is elsewhere. Raises RunError where there is nothing to audit."""
    run = open_existing(path)
    checkpoints = run.checkpoint_steps()
    if not checkpoints:
        raise RunError(f"'{path}' has no checkpoint: nothing was trained yet")
    state = read_json(run.checkpoint(checkpoints[-1]) / "state.json")
    by_step = _losses(run, state["step"])
    counts = Counter(
        f"{order}/{i}" for times in by_step.values() for order, indices in times[0].items() for i in indices
    )
    found = Audit(state["step"], len(counts), lost=[], twice=[], torn=[], over_bound=[], mixed=[], mean_lengths=[])
    found.twice.extend(
        f"step {step}: replayed with other samples"
        for step, times in by_step.items()
        if any(t != times[0] for t in times)
    )
    entries = _read_entries(run, state["step"], found.torn)
    again = _replays(run, entries, state, found.over_bound)
    found.twice.extend(name for name, count in counts.items() if count > 1 + again[name])
    masked = load_recipe(run.recipe).async_.late == "mask"  # orders may be older than their tokens in the loss
    if masked:
        found.over_bound.extend(_over_bound(run, state))
    drawn, refilled = Counter[tuple[int, int, int]](), set[str]()
    first = read_json(run.identity).get("fork_step") or 0
    settled = _settled_before(run)
    for step in range(first, state["step"]):
        if step not in entries:
            continue  # it is damaged; what it took counts as lost, unless another step speaks of it
        entry = entries[step]
        if entry is None or (step not in by_step and not entry.filtered):
            found.lost.append(f"step {step}")
            continue
        drawn.update(entry.learned)
        found.lost.extend(name for name in entry.lessons if name not in counts)
        settled |= {d.order for d in entry.dropped} | {t.order for t in entry.take}
        refilled |= {order_name(step, state["orders_per_step"] + k) for k in range(entry.refills)}
        for taken in entry.take:
            _look_at(run, taken, entry, counts, again, None if masked else state["max_staleness"], found)
    found.twice.extend(f"source {s}, prompt {i}, epoch {e}" for (s, i, e), count in drawn.items() if count > 1)
    found.lost.extend(_unsettled(state, settled, refilled))
    _look_at_evaluations(run, found)
    return found


def _look_at_evaluations(run: RunDir, found: Audit) -> None:
    """Compare every evaluation's shards with the version that their names and the manifests say."""
    weights: dict[tuple[int, int], set[str]] = {}
    for path in sorted(p for p in run.evals.glob("*.h5") if is_evaluation(p.stem)):
        number, lineage = asked = evaluated_version(path.stem)
        try:
            with Shard(path) as shard:
                shard.validate()
                versions = {int(shard.meta["version"]), *shard.read("span_version").tolist()}
                played = {(version, int(shard.meta["lineage"])) for version in versions}
                checksum = shard.meta.get("weights")  # shards of older versions have none
        except RunError as error:
            found.torn.append(str(error))
            continue
        if played != {asked}:
            found.mixed.append(f"{path.stem} was played by versions {sorted(played)} (number, lineage)")
        if checksum is not None:
            # There is none of versions before the oldest checkpoint.
            manifest = read_json(run.weights / f"v{number:08d}.l{lineage}.json")
            weights.setdefault(asked, {manifest["checksum"]} if manifest else set()).add(checksum)
    found.mixed.extend(
        f"version {number} (lineage {lineage}) was evaluated with weights {sorted(checksums)}"
        for (number, lineage), checksums in weights.items()
        if len(checksums) > 1
    )


def _read_entries(run: RunDir, steps: int, torn: list[str]) -> dict[int, Entry | None]:
    """Each step's entry, None where there is none; those that are damaged are left out, and named in `torn`."""
    entries: dict[int, Entry | None] = {}
    for step in range(steps):
        try:
            entries[step] = Ledger(run).find(step)
        except RunError as error:
            torn.append(str(error))
    return entries


def _settled_before(run: RunDir) -> set[str]:
    """Orders that were taken or given up by the runs that a fork comes from. Raises RunError where such a run is gone."""
    about, settled = read_json(run.identity), set[str]()
    if about.get("fork_of"):
        parent = open_existing(about["fork_of"])
        settled = _settled_before(parent)
        for entry in (Ledger(parent).find(step) for step in range(about["fork_step"])):
            settled |= {o.order for o in (*entry.take, *entry.dropped)} if entry else set()
    return settled


def _losses(run: RunDir, steps: int) -> dict[int, list[dict[str, list[int]]]]:
    """Step -> the samples in its loss, by order, each time that it was made."""
    by_step: dict[int, list[dict[str, list[int]]]] = {}
    for record in read_metrics(run.metrics / "trainer-0.trained.jsonl")[0]:
        if record["step"] < steps:
            by_step.setdefault(record["step"], []).append(record["samples"])
    return by_step


def _over_bound(run: RunDir, state: dict[str, Any]) -> list[str]:
    """The steps with a token in the loss that was too old, by their own metrics."""
    oldest = {
        r["step"]: r.get("age_max", 0) for r in read_metrics(run.metrics / "trainer-0.jsonl")[0] if r["kind"] == "step"
    }
    return [f"step {step}" for step in range(state["step"]) if oldest.get(step, 0) > state["max_staleness"]]


def _look_at(
    run: RunDir,
    taken: Taken,
    entry: Entry,
    counts: Counter[str],
    again: Counter[str],
    max_staleness: int | None,
    found: Audit,
) -> None:
    """Compare an order that a step took with its shard, its columns and what was trained on. max_staleness: None where tokens are masked."""
    order = taken.order
    for name, version in taken.columns.items():
        if wrong := _other_column(run, order, name, version):
            found.torn.append(wrong)
    try:
        with Shard(run.shard(order)) as shard:
            shard.validate()
            groups, sizes, oldest = shard.samples["group"].tolist(), np.diff(shard.offsets), shard.first_version
    except RunError as error:
        found.torn.append(str(error))
        return
    if max_staleness is not None and entry.step - oldest > max_staleness:
        found.over_bound.append(order)
    found.lost.extend(
        f"{order}/{i}"
        for i, g in enumerate(groups)
        if counts[f"{order}/{i}"] < 1 + again[f"{order}/{i}"] and f"{order}/{g}" not in entry.filtered
    )
    by_group: dict[int, list[int]] = {}
    for group, size in zip(groups, sizes.tolist(), strict=True):
        by_group.setdefault(group, []).append(size)
    found.mean_lengths.extend(sum(s) / len(s) for s in by_group.values())


def _unsettled(state: dict[str, Any], settled: set[str], refilled: set[str]) -> list[str]:
    """Orders that were released and are neither settled nor outstanding."""
    if "book" not in state:
        return []
    outstanding = {o["id"] for o in state["book"]["outstanding"]}
    released = {
        order_name(batch, k) for batch in range(state["book"]["next_batch"]) for k in range(state["orders_per_step"])
    }
    return sorted((released | refilled) - settled - outstanding)


def _other_column(run: RunDir, order: str, name: str, version: str) -> str:
    """What is wrong with a column that was trained with; empty when it is the ledger's."""
    path = run.column(order, name)
    try:
        column = read_column(path, name)
    except DamagedColumn as error:
        return str(error)
    found = column.version if column else "missing"
    return "" if found == version else f"'{path}' is {found}, the ledger says {version}"


def _replays(run: RunDir, entries: Mapping[int, Entry | None], state: dict[str, Any], over: list[str]) -> Counter[str]:
    """How often the ledger says that each sample was trained on once more; what it may not say is added to `over`."""
    again: Counter[str] = Counter()
    for step, entry in entries.items():
        for name, first in entry.again.items() if entry else ():
            order, _, group = name.rpartition("/")
            old = entries.get(first) if first < step else None
            taken = [t for t in old.take if t.order == order] if old and name not in old.filtered else []
            if not taken or step - taken[0].first_version > state["max_staleness"]:
                over.append(f"step {step}: {name} once more")
            with contextlib.suppress(RunError), Shard(run.shard(order)) as shard:
                again.update(f"{order}/{i}" for i in np.flatnonzero(shard.samples["group"] == int(group)).tolist())
    return again
