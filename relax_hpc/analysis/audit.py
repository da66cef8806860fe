"""The auditor: was every order trained exactly once? Counted from the samples that entered the loss, not from the ledger.

metrics/trainer-0.trained.jsonl   which samples each incarnation put into the loss of which step
shards                            which samples there are
the newest checkpoint             which orders are still outstanding
"""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from relax_hpc.recipe import load_recipe
from relax_hpc.run_dir import RunDir, RunError, open_existing, read_json
from relax_hpc.spool.column import DamagedColumn, read_column
from relax_hpc.spool.ledger import Ledger
from relax_hpc.spool.orders import order_name
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
    """Published shards that do not open or do not match their checksums; columns that are not those of the ledger."""
    over_bound: list[str]
    """Orders with a token that was older than the bound when it was trained; steps, where older tokens are masked; groups that
    a step took once more and may not have."""
    mean_lengths: list[float]
    """Mean length in tokens of each trained group, in the order of training: kills must not bias it."""


def audit(path: str | Path) -> Audit:
    """Audit the run at `path`, from its files. The run must have been checkpointed at its last step. Of supervised fine-tuning,
    whose steps name prompts in the ledger, a prompt that was drawn is what an order is elsewhere."""
    run = open_existing(path)
    checkpoints = run.checkpoint_steps()
    if not checkpoints:
        raise RunError(f"'{path}' has no checkpoint: nothing was trained yet")
    state = read_json(run.checkpoint(checkpoints[-1]) / "state.json")
    records, _ = read_metrics(run.metrics / "trainer-0.trained.jsonl")
    by_step: dict[int, list[dict[str, list[int]]]] = {}
    for record in records:
        by_step.setdefault(record["step"], []).append(record["samples"])
    by_step = {step: times for step, times in by_step.items() if step < state["step"]}
    twice = [
        f"step {step}: replayed with other samples"
        for step, times in by_step.items()
        if any(t != times[0] for t in times)
    ]
    counts = Counter(
        f"{order}/{i}" for times in by_step.values() for order, indices in times[0].items() for i in indices
    )

    masked = load_recipe(run.recipe).async_.late == "mask"  # orders may be older than their tokens in the loss
    oldest_trained = {
        r["step"]: r.get("age_max", 0) for r in read_metrics(run.metrics / "trainer-0.jsonl")[0] if r["kind"] == "step"
    }
    drawn = Counter[tuple[int, int, int]]()
    ledger, settled, excused, torn, lost, lengths = Ledger(run), set[str](), set[str](), [], [], []
    over: list[str] = []
    refilled: list[str] = []
    again = _replays(run, ledger, state, over)
    twice += [name for name, count in counts.items() if count > 1 + again[name]]
    for step in range(state["step"]):
        entry = ledger.find(step)
        if entry is None or (step not in by_step and len(entry.filtered) == 0):
            lost.append(f"step {step}")
            continue
        drawn.update(entry.learned)
        lost += [name for name in entry.lessons if name not in counts]
        if masked and oldest_trained.get(step, 0) > state["max_staleness"]:
            over.append(f"step {step}")
        settled |= {d.order for d in entry.dropped}
        excused |= set(entry.filtered)
        refilled += [order_name(step, state["orders_per_step"] + k) for k in range(entry.refills)]
        for order, columns in ((t.order, t.columns) for t in entry.take):
            settled.add(order)
            torn += [wrong for name, version in columns.items() if (wrong := _other_column(run, order, name, version))]
            try:
                with Shard(run.shard(order)) as shard:
                    shard.validate()
                    groups, sizes, oldest = (
                        shard.samples["group"].tolist(),
                        shard.offsets[1:] - shard.offsets[:-1],
                        shard.first_version,
                    )
            except RunError as error:
                torn.append(str(error))
                continue
            if step - oldest > state["max_staleness"] and not masked:
                over.append(order)
            lost += [
                f"{order}/{i}"
                for i, g in enumerate(groups)
                if counts[f"{order}/{i}"] < 1 + again[f"{order}/{i}"] and f"{order}/{g}" not in excused
            ]
            by_group: dict[int, list[int]] = {}
            for group, size in zip(groups, sizes.tolist(), strict=True):
                by_group.setdefault(group, []).append(size)
            lengths += [sum(s) / len(s) for s in by_group.values()]
    twice += [f"source {s}, prompt {i}, epoch {e}" for (s, i, e), count in drawn.items() if count > 1]
    if "book" in state:
        outstanding = {o["id"] for o in state["book"]["outstanding"]}
        released = {
            order_name(batch, k)
            for batch in range(state["book"]["next_batch"])
            for k in range(state["orders_per_step"])
        }
        lost += sorted((released | set(refilled)) - settled - outstanding)
    return Audit(state["step"], len(counts), lost, twice, torn, over, lengths)


def _other_column(run: RunDir, order: str, name: str, version: str) -> str:
    """What is wrong with a column that was trained with; empty when it is the ledger's."""
    path = run.column(order, name)
    try:
        column = read_column(path, name)
    except DamagedColumn as error:
        return str(error)
    found = column.version if column else "missing"
    return "" if found == version else f"'{path}' is {found}, the ledger says {version}"


def _replays(run: RunDir, ledger: Ledger, state: dict[str, Any], over: list[str]) -> Counter[str]:
    """How often the ledger says that each sample was trained on once more; what it may not say is added to `over`."""
    again: Counter[str] = Counter()
    for step in range(state["step"]):
        entry = ledger.find(step)
        for name, first in entry.again.items() if entry else ():
            order, _, group = name.rpartition("/")
            old = ledger.find(first) if first < step else None
            taken = [t for t in old.take if t.order == order] if old and name not in old.filtered else []
            if not taken or step - taken[0].first_version > state["max_staleness"]:
                over.append(f"step {step}: {name} once more")
            with contextlib.suppress(RunError), Shard(run.shard(order)) as shard:
                again.update(f"{order}/{i}" for i in np.flatnonzero(shard.samples["group"] == int(group)).tolist())
    return again
