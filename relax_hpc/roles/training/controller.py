"""Rank 0 of the trainer: decides what all ranks do next, and keeps requests, ledger, weights, evaluations and metrics.

decide ► step s (a ledger entry) | wait | publish once more | checkpoint | end      after the step: settle ► metrics
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from relax_hpc.algorithms.filters import make_filters
from relax_hpc.data import PromptCursor
from relax_hpc.data.curriculum import SourceWeights
from relax_hpc.files.publish import read_json
from relax_hpc.files.run_dir import RunDir
from relax_hpc.recipe.tables.source import left_out
from relax_hpc.roles.common.columns import Columns
from relax_hpc.roles.common.load_batch import Batch
from relax_hpc.roles.common.process import Exit
from relax_hpc.roles.common.role import Command
from relax_hpc.roles.training.arrivals import Arrivals
from relax_hpc.roles.training.batch_scheduler import BatchScheduler
from relax_hpc.roles.training.evaluation import Evaluations
from relax_hpc.roles.training.failures import Failures
from relax_hpc.roles.training.ledger_replay import LedgerReplay
from relax_hpc.roles.training.retention import Retention, newest_step
from relax_hpc.roles.training.sample_reuse import SampleReuse
from relax_hpc.roles.training.selection import GroupSelection
from relax_hpc.roles.training.sft import SftBatches
from relax_hpc.roles.training.skipped_steps import SkippedSteps
from relax_hpc.roles.training.state import TrainerState
from relax_hpc.roles.training.step_metrics import Clock, describe
from relax_hpc.spool.ledger import Entry, Ledger
from relax_hpc.spool.planner import RequestPlanner
from relax_hpc.spool.queue import RequestQueue
from relax_hpc.weights import Export, make_publisher

MARGIN_S = 10.0
"""Seconds kept free before the allocation's end, besides what a step and a checkpoint were seen to take."""

MEDIA_LOOKED_AT = 8
"""Prompts of each source whose media are made at the start, to see how many bytes a quota must reserve for them."""


class Controller:
    """Rank 0's part of the trainer: requests, ledger, weights, evaluations, retention, metrics."""

    def __init__(self, role: TrainerState) -> None:
        recipe, run, commit_dir = role.recipe, role.run, role.commit_dir
        self.role, self.process, self.recipe = role, role.process, role.recipe
        self.ledger = Ledger(run, commit_dir)
        self.queue = RequestQueue(run, when_room=self.process.when_room, commit_dir=commit_dir)
        self.incarnation = self.ledger.incarnation
        self.critic = RunDir(run.critic) if "values" in role.columns else None
        """The critic's directory, if it has processes of its own."""
        self.retention = Retention(run, recipe, commit_dir, self.ledger, role.context, self.critic)
        if recipe.spool.quota_gb is not None:  # before there is a shard that says it
            largest = role.sources.media_bytes(MEDIA_LOOKED_AT)
            self.retention.reserve_media(largest * recipe.rollout.groups_per_request)
        self.scheduler = self.new_scheduler()
        self.publisher = make_publisher(recipe, run, commit_dir, self.incarnation)
        evaluated = role.sources.evaluated(recipe.evaluation.prompts) if recipe.evaluation else []
        self.evaluations = Evaluations(run, recipe, self.queue, evaluated, role.quarantine)
        self.failures = Failures(role.shard_reader, self.process.log)
        self.skipped_steps = SkippedSteps(recipe.trainer.max_skipped_steps, self.process.log)
        deadline = self.process.arguments.deadline
        self.deadline = None if deadline is None else time.monotonic() + deadline - time.time()
        """The allocation's end, on time.monotonic()."""
        self.waited_s, self.last_step_at, self.longest_step_s = 0.0, time.perf_counter(), 0.0
        self.differs = False
        """True once it was reported that engine and trainer compute different logprobs."""
        self.checkpoint_s = 0.0
        """Seconds of the trainer's time that checkpoints took since the step before."""

    def begin(self, state: dict[str, Any] | None) -> None:
        """Go on from a checkpoint's state, or from nothing."""
        if state is not None:
            self.retention.removed_before = state["removed_before"]
            self.remove_before(min(self.role.run.checkpoint_steps()))
        if not isinstance(self.scheduler, LedgerReplay):
            self.scheduler.begin(state)
        self.evaluations.resume()
        for warning in (*self.recipe.warnings, *left_out(read_json(self.role.run.rows) or {})):
            self.process.log.warning("%s", warning)

    def new_scheduler(self) -> BatchScheduler | SftBatches | LedgerReplay:
        """Return what says which samples, prompts or entries of another run each step trains on."""
        role, recipe, ledger = self.role, self.recipe, self.ledger
        columns = Columns(role.run, role.columns, role.commit_dir, self.process.telemetry.metrics)
        if recipe.supervised:
            return SftBatches(role.examples, recipe.trainer.prompts_per_step, ledger)
        if role.shards != role.run:
            return LedgerReplay(role.shards, ledger, role.shard_reader, columns)
        planner = self.new_planner()
        selection = GroupSelection(
            make_filters(recipe.algorithm.filters),
            planner.wanted,
            recipe.curriculum.solved_at if recipe.curriculum else None,
            recipe.rollout.max_failed_fraction,
        )
        arrivals = Arrivals(role.shard_reader, columns, role.quarantine, self.retention)
        reuse = SampleReuse(ledger, role.shard_reader, recipe.algorithm.sample_reuse, planner.max_staleness)
        return BatchScheduler(planner, ledger, self.queue, arrivals, selection, self.retention, reuse)

    def new_planner(self) -> RequestPlanner:
        """Return a planner that has not asked for anything yet."""
        recipe = self.recipe
        return RequestPlanner(
            n=recipe.requests_per_step,
            groups_per_request=recipe.rollout.groups_per_request,
            samples_per_prompt=recipe.algorithm.group_size,
            max_staleness=self.role.bound,
            on_stale=recipe.async_.on_stale,
            seed=recipe.run.seed,
            cursor=PromptCursor(self.role.sources, recipe.run.seed),
            ahead=recipe.async_.max_staleness,
            batches=recipe.run.steps,
            wanted=recipe.trainer.prompts_per_step if recipe.algorithm.dynamic_sampling.on else 0,
            extra_requests=recipe.algorithm.dynamic_sampling.max_extra_batches * recipe.requests_per_step,
            oversample=recipe.algorithm.dynamic_sampling.oversample,
            weights=SourceWeights(self.role.sources.weights) if recipe.curriculum else None,
        )

    def publish(self, export: Export, asked: bool) -> None:
        """Publish the present weights as the newest version, if anybody takes it. `asked`: outside a step."""
        if not self.recipe.generates or (self.recipe.supervised and not self.is_taken(asked)):
            return
        number, alive, before = self.role.version, lambda: self.role.heartbeat("publishing"), self.publisher.lineage
        publish = partial(self.publisher.publish, number, export, alive, self.evaluations.needs(number))
        version = self.process.when_room(publish, f"version {number}")
        if version.lineage > before and version.incarnation == self.incarnation:
            self.process.log.warning(
                "version %d has other bits than the one that was published before: lineage %d begins, in which steps from here on do not "
                "continue what was trained and measured before (another machine, layout or code, or damage)",
                number, version.lineage,
            )  # fmt: skip
            self.process.telemetry.metrics(kind="lineage", version=number, lineage=version.lineage)

    def is_taken(self, asked: bool) -> bool:
        """Return True if an evaluation takes these weights, and none still needs those that are there. For supervised
        fine-tuning."""
        if asked:
            return self.publisher.wanted() or not self.evaluations.pending
        return self.evaluations.due(self.role.step)

    def decide(self) -> Command:
        """Decide what all ranks do next."""
        self.skipped_steps.check()
        if self.process.stopping or self.role.run.stop.exists() or self.out_of_time():
            return Command("end")
        if self.publisher.wanted():  # by a worker that could not take it when it was published
            return Command("publish")
        began = time.perf_counter()
        command = self.role.poll(self.look)
        self.waited_s += time.perf_counter() - began
        return (self.make_room() or command) if command.do == "wait" else command

    def look(self, waited_s: float) -> Command | None:
        """Return the next step, or the end when all is done; None while it must be waited for."""
        role, steps = self.role, self.recipe.run.steps
        self.report_scores()
        if role.step >= steps:
            self.request_score()
            if not self.evaluations.pending and (self.critic is None or newest_step(self.critic) >= steps):
                return Command("end", exit=Exit.DONE)
            return None
        entry = self.process.when_room(
            lambda: self.scheduler.next_entry(role.step, role.version, self.publisher.lineage),
            f"ledger entry {role.step}",
        )
        if self.scheduler.live:
            self.request_score()
        if entry is None or self.would_overtake():
            return None
        self.failures.note(entry)
        return Command("step", entry)

    def would_overtake(self) -> bool:
        """Return True if the next step would publish a version to be scored while another is being scored: each stays
        on disk until it is. Only supervised fine-tuning is that fast: elsewhere the workers make what is trained on."""
        behind = any(version <= self.role.step for version, _ in self.evaluations.pending)
        return self.recipe.supervised and behind and self.evaluations.due(self.role.step + 1)

    def out_of_time(self) -> bool:
        """Return True if the allocation may end before another step and its checkpoint do; then no step is begun."""
        needed_s = 1.5 * self.longest_step_s + 2 * self.role.save_s + MARGIN_S
        return self.deadline is not None and time.monotonic() + needed_s > self.deadline

    def make_room(self) -> Command | None:
        """Checkpoint early, so that old shards may go, when the quota holds requests back and nothing is left to train
        on; else None."""
        if self.scheduler.release(self.role.step) or self.scheduler.outstanding:
            return None
        if self.recipe.spool.keep == "needed" and self.role.saved_step != self.role.step:
            return Command("checkpoint")
        if self.retention.waits_for_critic():
            return None
        return Command(
            "end",
            exit=Exit.FATAL,
            error=f"spool.quota_gb = {self.recipe.spool.quota_gb} is reached at step {self.role.step}: {self.retention.used_bytes / 1e9:.6f} GB of "
            f"shards, and the next batch may need {self.retention.request_bytes * self.recipe.requests_per_step / 1e9:.6f} GB; resume with "
            '`relax-hpc run RUN_DIR --set spool.quota_gb=…`, or --set spool.keep="needed" to remove what is no longer replayed',
        )

    def after_step(self, entry: Entry, batch: Batch, metrics: dict[str, float], clock: Clock) -> None:
        """Settle ledger and planner after a step, and report it."""
        role, rollouts, replayed = self.role, batch.rollouts, not self.scheduler.live
        self.scheduler.settle(entry, role.step)
        self.skipped_steps.note(entry, rollouts, metrics)
        self.compare_engine(entry.step, metrics)
        now = time.perf_counter()
        step_s, tokens = now - self.last_step_at, int(rollouts.lengths().sum())
        values = describe(entry, batch, self.recipe) | metrics
        values |= {
            "step": entry.step, "version": role.version, "incarnation": self.incarnation, "replayed": replayed,
            "spool_depth": self.scheduler.depth, "wait_s": self.waited_s, "switch_s": role.switch_s,
            "checkpoint_s": self.checkpoint_s,
            "step_s": step_s, "tokens_per_s": tokens / step_s,
            "tokens_per_device_s": tokens / clock.laps["train_s"] / self.recipe.trainer.processes,
        }  # fmt: skip
        if self.role.columns:
            values["unscored"] = self.scheduler.unscored
        clock.lap("settle_s")
        values |= {**role.trainer.seconds, **clock.laps}
        if isinstance(self.scheduler, BatchScheduler) and self.scheduler.planner.weights is not None:
            weights = self.scheduler.planner.weights.at(role.step)
            values["source_shares"] = [weight / sum(weights) for weight in weights]
        self.process.telemetry.metrics(kind="step", **values)
        self.process.telemetry.trained(entry.step, self.incarnation, rollouts.ids)
        self.process.telemetry.heartbeat("training", step=role.step)
        for request, length in self.scheduler.stale_arrivals():
            self.process.telemetry.metrics(kind="dropped", request=request, length_mean=length)
        # where workers share the devices, they generate their requests to the end before a last checkpoint can be made
        busy_s = step_s - (self.waited_s if self.recipe.run.placement == "split" else 0.0)
        self.longest_step_s = max(busy_s, 0.9 * self.longest_step_s)
        self.waited_s, self.checkpoint_s, role.switch_s, self.last_step_at = 0.0, 0.0, 0.0, now
        self.process.caches.keep()

    def compare_engine(self, step: int, metrics: Mapping[str, float]) -> None:
        """Say once an attempt if engine and trainer do not compute the same logprobs. Shards of another run were made
        by other weights."""
        apart, limit = metrics.get("engine_diff", 0.0), self.recipe.rollout.logprob_diff_warning
        if self.differs or self.role.debug is not None or apart <= limit:
            return
        self.differs = True
        self.process.telemetry.metrics(kind="engine_differs", step=step, engine_diff=apart, limit=limit)
        self.process.log.warning(
            "step %d: engine and trainer differ by %.4f nats a token on average, with the same weights (rollout.logprob_diff_warning = %g): "
            "look for another dtype, kernels or routing of experts in the engine; algorithm.correction weighs the difference",
            step, apart, limit,
        )  # fmt: skip

    def request_score(self) -> None:
        """Ask for a held-out score of this version, if one is due."""
        if self.role.debug is None:
            self.evaluations.request(self.role.step, self.publisher.lineage)

    def report_scores(self) -> None:
        for score in self.evaluations.collect():
            for one in score.sources:
                self.process.log.info(
                    "version %d on %s: %.3f [%.3f, %.3f]", score.version, one.name, one.score, one.low, one.high
                )
            self.process.telemetry.metrics(kind="eval", **score.to_json())
            self.process.telemetry.heartbeat(score=score.all.score)

    def state_dict(self) -> dict[str, Any]:
        own = {"lineage": self.publisher.lineage, "removed_before": self.retention.removed_before}
        return self.scheduler.state_dict() | own

    def forget(self, oldest: int) -> None:
        """Remove what only steps before `oldest`, now the oldest checkpoint's step, would replay."""
        self.remove_before(oldest)
        self.publisher.forget(oldest, self.evaluations.needs(self.role.step))

    def remove_before(self, step: int) -> None:
        """Remove shards that only steps before `step` replay, if they are this run's."""
        if self.role.shards == self.role.run:
            self.retention.remove_before(step)
