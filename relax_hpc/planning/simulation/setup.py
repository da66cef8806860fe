"""The input of a simulation, and the trace that it writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from relax_hpc.spool.request import OnStale


@dataclass(frozen=True, slots=True)
class Setup:
    """The run to simulate: its size, its bound, its faults."""

    workers: int
    workers_per_node: int
    max_staleness: int
    on_stale: OnStale
    requests_per_step: int
    groups_per_request: int
    samples_per_prompt: int
    """Samples in a group."""
    steps: int
    checkpoint_every: int
    trainer_mtbf_s: float = float("inf")
    """Mean seconds between faults of the trainer's nodes, taken together."""
    node_mtbf_s: float = float("inf")
    """Mean seconds between faults of each rollout node."""
    seed: int = 0

    @property
    def nodes(self) -> int:
        """Rollout nodes."""
        return -(-self.workers // self.workers_per_node)


@dataclass(slots=True)  # not frozen: there are millions, and making frozen ones takes twice as long
class Prompt:
    """The prompt that a request asks for."""

    source: int
    index: int


class Prompts:
    """A cursor that never ends: prompt i is (0, i)."""

    def __init__(self) -> None:
        self.position = 0

    def draw(self, count: int, weights: Sequence[float] | None = None) -> list[Prompt]:
        self.position += count
        return [Prompt(0, i) for i in range(self.position - count, self.position)]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class Spans(NamedTuple):
    """A generated request: the versions that made it, oldest first, and the share of its tokens that each made."""

    versions: tuple[int, ...]
    shares: tuple[float, ...]


@dataclass(slots=True)
class Trace:
    """Records of a simulated run."""

    ledger: list[tuple[tuple[str, ...], tuple[str, ...]]] = field(default_factory=list)
    """For each step: (requests it took, requests it dropped)."""
    ended_s: list[float] = field(default_factory=list)
    """Time at which each step was first made."""
    ages: list[int] = field(default_factory=list)
    """For each request that was taken: the step minus the oldest version in the loss."""
    tokens: float = 0.0
    """Tokens generated, of requests that were taken."""
    masked_tokens: float = 0.0
    trainer_s: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("wait", "work", "checkpoint", "lost"), 0.0)
    )
    """Seconds of the trainer by use; `lost`: restarts, steps that a fault cut off, and repeated steps."""
    idle_s: float = 0.0
    """Seconds that all workers together were idle."""
    trainer_faults: int = 0
    node_faults: int = 0
    requests_generated: int = 0
