"""Evaluations: orders on prompts that are never trained on, played by the rollout workers between orders, and their scores."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from relax_hpc.analysis.scores import SourceScore, answers, score
from relax_hpc.recipe.schema import Recipe
from relax_hpc.recipe.source import labels
from relax_hpc.run_dir import RunDir
from relax_hpc.spool.orders import Order, order_seed
from relax_hpc.spool.queue import Queue
from relax_hpc.spool.shard import Shard
from relax_hpc.spool.watch import FolderWatch
from relax_hpc.telemetry import read_metrics


@dataclass(frozen=True, slots=True)
class Score:
    """What a version reaches."""

    asked: int
    """The version that was asked for."""
    version: int
    """The weights that really played it; a worker may have had newer ones than were asked for."""
    all: SourceScore
    sources: list[SourceScore]

    def to_json(self) -> dict[str, Any]:
        """For metrics: the score over all prompts, and that of each source."""
        whole = {key: value for key, value in self.all.to_json().items() if key not in ("source", "name")}
        return {"asked": self.asked, "version": self.version, **whole, "sources": [s.to_json() for s in self.sources]}


def evaluation_orders(recipe: Recipe, prompts: Sequence[tuple[int, int]], version: int) -> list[Order]:
    """The orders that evaluate `version` on `prompts`, (source, index) each; as many answers in one as training's orders have."""
    copies = recipe.evaluation.samples if recipe.evaluation else 1
    rows = max(1, recipe.rollout.groups_per_order * recipe.algorithm.group_size // copies)
    names = [f"e{version:06d}-{k:03d}" for k in range(-(-len(prompts) // rows))]
    return [
        Order(name, tuple(prompts[k * rows : (k + 1) * rows]), copies, order_seed(recipe.run.seed, name), version)
        for k, name in enumerate(names)
    ]


def read_score(run: RunDir, recipe: Recipe, version: int, orders: Sequence[str]) -> Score:
    """The score of `version` from the shards of its orders."""
    solved_at = recipe.evaluation.solved_at if recipe.evaluation else 1.0
    with ExitStack() as opened:
        shards = [opened.enter_context(Shard(run.shard(order))) for order in orders]
        played = min(int(shard.meta["version"]) for shard in shards)
        return Score(version, played, *score(answers(shards), labels(recipe.sources), solved_at))


@dataclass(slots=True)
class Evaluations:
    """Rank 0's account of evaluations that were asked for."""

    run: RunDir
    recipe: Recipe
    queue: Queue
    prompts: list[tuple[int, int]]
    """(source, index) of all that is evaluated."""
    pending: dict[int, list[str]] = field(default_factory=dict)
    watch: FolderWatch = field(init=False)
    _asked: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.watch = FolderWatch(self.run.evals)

    def request(self, version: int) -> None:
        """Ask for a score of `version` if one is due and was not asked for."""
        if self.due(version) and version not in self._asked:
            self._ask(version)

    def due(self, version: int) -> bool:
        """Whether this version is to be scored."""
        asked = self.recipe.evaluation
        return asked is not None and (version % asked.every == 0 or version == self.recipe.run.steps)

    def resume(self) -> None:
        """Wait again for the scores that a trainer before us asked for, and did not report."""
        records, _ = read_metrics(self.run.metrics / "trainer-0.jsonl")
        reported = {r["asked"] for r in records if r["kind"] == "eval"}
        orders = [i for i in (*self.queue.in_play(), *self.watch.names()) if i.startswith("e")]
        for version in sorted({int(i[1:7]) for i in orders} - reported):
            self._ask(version)

    def _ask(self, version: int) -> None:
        self._asked.add(version)
        orders = evaluation_orders(self.recipe, self.prompts, version)
        self.pending[version] = [o.id for o in orders]
        in_play = self.queue.in_play()
        self.queue.put([o for o in orders if o.id not in in_play and not self.run.shard(o.id).exists()])

    def collect(self) -> Iterator[Score]:
        """Scores that became complete since the last call."""
        if not self.pending:
            return
        names = self.watch.names()
        for version in [v for v, orders in self.pending.items() if all(f"{o}.h5" in names for o in orders)]:
            yield read_score(self.run, self.recipe, version, self.pending.pop(version))
