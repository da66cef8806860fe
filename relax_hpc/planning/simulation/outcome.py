"""Turns the trace of a simulation into the numbers of one row."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from relax_hpc.planning.simulation.file_calls import calls_per_second
from relax_hpc.planning.simulation.setup import Setup, Trace
from relax_hpc.spool.request import OnStale


@dataclass(frozen=True, slots=True)
class Outcome:
    """The results of one setup, without the steps in which the pipeline fills. Shares are between 0 and 1."""

    workers: int
    nodes: int
    """Rollout nodes."""
    max_staleness: int
    on_stale: OnStale
    mtbf_h: float | None
    """Mean hours between faults of a node; None without faults."""
    step_p50_s: float
    step_p95_s: float
    samples_s: float
    trainer_waits: float
    """Share of the wall clock in which the trainer waits for data: what is not overlapped."""
    workers_idle: float
    """Share of all workers' time in which they wait for a request."""
    age_p50: float
    age_max: int
    """Largest age in versions of a token in the loss."""
    dropped: float
    """Share of the requests that were dropped."""
    masked: float
    """Share of the tokens of trained requests that are too old for the loss."""
    effective: float
    """Share of the wall clock left after restarts, repeated and cut-off steps, and checkpoints."""
    trainer_faults: int
    node_faults: int
    file_calls_s: float
    """File-system calls a second of the whole run."""
    wall_s: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def summarize(setup: Setup, mtbf_h: float | None, trace: Trace) -> Outcome:
    """Compute the row of a trace."""
    ends = np.array([0.0, *trace.ended_s])
    steady = ends[min(setup.max_staleness + 1, setup.steps - 1) :]
    each = np.diff(steady)
    wall = float(ends[-1])
    idle = trace.idle_s / (setup.workers * wall)
    dropped = sum(len(drop) for _, drop in trace.ledger)
    taken = setup.steps * setup.requests_per_step
    samples = setup.requests_per_step * setup.groups_per_request * setup.samples_per_prompt
    return Outcome(
        workers=setup.workers,
        nodes=setup.nodes,
        max_staleness=setup.max_staleness,
        on_stale=setup.on_stale,
        mtbf_h=mtbf_h,
        step_p50_s=float(np.median(each)),
        step_p95_s=float(np.quantile(each, 0.95)),
        samples_s=samples * len(each) / float(steady[-1] - steady[0]),
        trainer_waits=trace.trainer_s["wait"] / wall,
        workers_idle=idle,
        age_p50=float(np.median(trace.ages)) if trace.ages else 0.0,
        age_max=max(trace.ages, default=0),
        dropped=dropped / (taken + dropped),
        masked=trace.masked_tokens / trace.tokens,
        effective=1 - (trace.trainer_s["lost"] + trace.trainer_s["checkpoint"]) / wall,
        trainer_faults=trace.trainer_faults,
        node_faults=trace.node_faults,
        file_calls_s=calls_per_second(
            setup.workers, setup.nodes, idle * setup.workers, trace.requests_generated / wall
        ),
        wall_s=wall,
    )
