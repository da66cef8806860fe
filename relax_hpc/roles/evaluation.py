"""Evaluations: orders on prompts that are never trained on, played by the rollout workers between orders, and their scores.

trainer: version 50 published, its files pinned ──► orders e000050-… ──► workers take version 50, whatever is the newest ──► shards
         all shards there ──► score, files free again                     (a version of a later lineage: e000050l1-…)
         one is damaged   ──► aside/, its order again
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from relax_hpc.analysis.scores import SourceScore, answers, score
from relax_hpc.recipe.schema import Recipe
from relax_hpc.recipe.source import labels
from relax_hpc.roles.damage import Quarantine
from relax_hpc.run_dir import RunDir, RunError
from relax_hpc.spool.orders import Order, evaluated_version, evaluation_name, is_evaluation, order_seed
from relax_hpc.spool.queue import Queue
from relax_hpc.spool.shard import DamagedShard, Shard
from relax_hpc.spool.watch import FolderWatch
from relax_hpc.telemetry import read_metrics
from relax_hpc.weights import can_be_had

GONE = "its weights are not on disk any more, or are damaged"


@dataclass(frozen=True, slots=True)
class Score:
    """What a version reaches."""

    version: int
    lineage: int
    all: SourceScore
    sources: list[SourceScore]
    failures: dict[str, int]
    """Why prompts failed -> how many."""

    def to_json(self) -> dict[str, Any]:
        """For metrics: the score over all prompts, and that of each source."""
        whole = {key: value for key, value in self.all.to_json().items() if key not in ("source", "name")}
        return {
            "version": self.version, "lineage": self.lineage, **whole, "sources": [s.to_json() for s in self.sources],
            "failures": self.failures,
        }  # fmt: skip


def evaluation_orders(
    recipe: Recipe, prompts: Sequence[tuple[int, int]], version: int, lineage: int = 0
) -> list[Order]:
    """The orders that evaluate a version on `prompts`, (source, index) each; as many answers in one as training's orders have."""
    copies = recipe.evaluation.samples if recipe.evaluation else 1
    rows = max(1, recipe.rollout.groups_per_order * recipe.algorithm.group_size // copies)
    # The answers of every lineage are drawn alike.
    seed = lambda k: order_seed(recipe.run.seed, evaluation_name(version, 0, k))
    return [
        Order(evaluation_name(version, lineage, k), tuple(prompts[k * rows : (k + 1) * rows]), copies, seed(k), version)
        for k in range(-(-len(prompts) // rows))
    ]


def read_score(run: RunDir, recipe: Recipe, orders: Sequence[str]) -> Score:
    """The score of the version that `orders` name, from their shards. Raises DamagedShard."""
    solved_at = recipe.evaluation.solved_at if recipe.evaluation else 1.0
    with ExitStack() as opened:
        shards = [opened.enter_context(Shard(run.shard(order))) for order in orders]
        for order, shard in zip(orders, shards, strict=True):
            shard.check_owner(order, run.read_id())
            shard.validate()
        why = Counter(shard.failure(g)[0] for shard in shards for g, of in enumerate(shard.groups) if of["failed"])
        found = score(answers(shards), labels(recipe.sources), solved_at)
        return Score(*evaluated_version(orders[0]), *found, dict(why.most_common()))


@dataclass(slots=True)
class Evaluations:
    """Rank 0's account of evaluations that were asked for."""

    run: RunDir
    recipe: Recipe
    queue: Queue
    prompts: list[tuple[int, int]]
    """(source, index) of all that is evaluated."""
    quarantine: Quarantine
    pending: dict[tuple[int, int], list[str]] = field(default_factory=dict)
    """(version, lineage) -> the orders of its evaluation, which is not complete."""
    watch: FolderWatch = field(init=False)
    _asked: set[tuple[int, int]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.watch = FolderWatch(self.run.evals)

    def request(self, version: int, lineage: int) -> None:
        """Ask for a score of a version if one is due and was not asked for. The version must be pinned: see `needs`."""
        if self.due(version) and (version, lineage) not in self._asked:
            self._ask(version, lineage)

    def needs(self, version: int) -> frozenset[int]:
        """Versions whose weights are to be pinned when `version` is published: of what is pending, and this one if a score is due."""
        return frozenset([number for number, _ in self.pending] + [version] * self.due(version))

    def due(self, version: int) -> bool:
        """Whether this version is to be scored."""
        asked = self.recipe.evaluation
        return asked is not None and (version % asked.every == 0 or version == self.recipe.run.steps)

    def resume(self) -> None:
        """Wait again for the scores that a trainer before us asked for, and did not report."""
        records, _ = read_metrics(self.run.metrics / "trainer-0.jsonl")
        # Records of older versions say what was asked for and what played it, which was not always the same.
        reported = {(r.get("asked", r["version"]), r.get("lineage", 0)) for r in records if r["kind"] == "eval"}
        self.queue.remove_torn()
        orders = {name.partition(".")[0] for name in (*self.queue.in_play(), *self.watch.names())}
        for version, lineage in sorted({evaluated_version(i) for i in orders if is_evaluation(i)} - reported):
            self._ask_again(version, lineage)

    def _ask_again(self, version: int, lineage: int) -> None:
        """Of what was asked for before: played by that very version or not at all."""
        orders = evaluation_orders(self.recipe, self.prompts, version, lineage)
        if all(self.run.shard(o.id).exists() for o in orders) or can_be_had(self.run, version, lineage):
            self._ask(version, lineage)
            return
        self._give_up(version, lineage, GONE)

    def _ask(self, version: int, lineage: int) -> None:
        self._asked.add((version, lineage))
        orders = evaluation_orders(self.recipe, self.prompts, version, lineage)
        self.pending[version, lineage] = [o.id for o in orders]
        in_play = self.queue.in_play()
        self.queue.put([o for o in orders if o.id not in in_play and not self.run.shard(o.id).exists()])

    def collect(self) -> Iterator[Score]:
        """Scores that became complete since the last call."""
        if not self.pending:
            return
        names = self.watch.names()
        for key, orders in [*self.pending.items()]:
            # A listing may know a while longer what was put aside.
            if all(f"{o}.h5" in names for o in orders) and all(self.run.shard(o).exists() for o in orders):
                try:
                    found = read_score(self.run, self.recipe, orders)
                except DamagedShard as damage:
                    self._play_again(*key, damage)
                    continue
                del self.pending[key]
                yield found

    def _play_again(self, version: int, lineage: int, damage: DamagedShard) -> None:
        """An order whose shard is damaged, by the version that it names; where that cannot be, there is no score."""
        try:
            self.quarantine.put(damage.path.stem, damage)
        except RunError as error:
            self._give_up(version, lineage, str(error))
            return
        if can_be_had(self.run, version, lineage):
            self._ask(version, lineage)
        else:
            self._give_up(version, lineage, f"{damage}, and {GONE}")

    def _give_up(self, version: int, lineage: int, reason: str) -> None:
        """The run goes on without this score."""
        self.pending.pop((version, lineage), None)
        self.queue.withdraw(o.id for o in evaluation_orders(self.recipe, self.prompts, version, lineage))
        logging.getLogger("trainer").warning(
            "the evaluation of version %d (lineage %d) is given up: %s", version, lineage, reason
        )
        self.quarantine.say(kind="eval_failed", version=version, lineage=lineage, reason=reason)
