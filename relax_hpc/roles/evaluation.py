"""The held-out score: evaluation orders, played greedily by the rollout workers between orders, never trained on."""

from __future__ import annotations

from dataclasses import dataclass, field

from relax_hpc.recipe.schema import Recipe
from relax_hpc.run_dir import RunDir
from relax_hpc.spool.orders import Order, order_seed
from relax_hpc.spool.queue import Queue
from relax_hpc.spool.shard import Shard
from relax_hpc.spool.watch import FolderWatch
from relax_hpc.telemetry import read_metrics


@dataclass(frozen=True, slots=True)
class Score:
    """A version's held-out score."""

    asked: int
    """The version that was asked for."""
    version: int
    """The weights that really played it; a worker may have had newer ones than were asked for."""
    score: float
    prompts: int
    failed: int


@dataclass(slots=True)
class Evaluations:
    """Rank 0's account of evaluations that were asked for."""

    run: RunDir
    recipe: Recipe
    queue: Queue
    held_out: list[tuple[int, int]]
    """(source, index) of the held-out prompts."""
    pending: dict[int, list[str]] = field(default_factory=dict)
    watch: FolderWatch = field(init=False)
    _asked: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.watch = FolderWatch(self.run.evals)

    def request(self, version: int) -> None:
        """Ask for a score of `version` if one is due and was not asked for."""
        if self.recipe.evaluation is None:
            return
        due = version % self.recipe.evaluation.every == 0 or version == self.recipe.run.steps
        if due and version not in self._asked:
            self._ask(version)

    def resume(self) -> None:
        """Wait again for the scores that a trainer before us asked for, and did not report."""
        records, _ = read_metrics(self.run.metrics / "trainer-0.jsonl")
        reported = {r["asked"] for r in records if r["kind"] == "eval"}
        orders = [i for i in (*self.queue.in_play(), *self.watch.names()) if i.startswith("e")]
        for version in sorted({int(i[1:7]) for i in orders} - reported):
            self._ask(version)

    def _ask(self, version: int) -> None:
        self._asked.add(version)
        rows = self.recipe.rollout.groups_per_order * self.recipe.algorithm.group_size
        orders = []
        for k, begin in enumerate(range(0, len(self.held_out), rows)):
            name = f"e{version:06d}-{k:03d}"
            prompts = tuple(self.held_out[begin : begin + rows])
            orders.append(Order(name, prompts, 1, order_seed(self.recipe.run.seed, name), version))
        self.pending[version] = [o.id for o in orders]
        in_play = self.queue.in_play()
        self.queue.put([o for o in orders if o.id not in in_play and not self.run.shard(o.id).exists()])

    def collect(self) -> list[Score]:
        """Scores that became complete since the last call."""
        if not self.pending:
            return []
        names = self.watch.names()
        ready = [v for v, orders in self.pending.items() if all(f"{o}.h5" in names for o in orders)]
        return [self._score(version, self.pending.pop(version)) for version in ready]

    def _score(self, asked: int, orders: list[str]) -> Score:
        rewards: list[float] = []
        versions, failed, prompts = [], 0, 0
        for order in orders:
            with Shard(self.run.shard(order)) as shard:
                fine = shard.groups["failed"][shard.samples["group"]] == 0
                rewards += shard.samples["raw_reward"][fine].tolist()
                versions.append(int(shard.meta["version"]))
                failed += int(shard.groups["failed"].sum())
                prompts += len(shard.groups)
        # A group that could not be judged counts as not solved: leaving it out would flatter the score.
        return Score(asked, min(versions), sum(rewards) / max(prompts, 1), prompts, failed)
