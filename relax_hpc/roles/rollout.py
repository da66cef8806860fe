"""The rollout role: claims orders, plays their episodes, publishes each as a shard.

open orders ────claim by rename─► this worker     loop:  claim ► sync ► play ► score ► claim …      (new weights are taken
newest weights ──fetch, verify──► engine                                │        └► publish         with an order, or in
 (an evaluation's: the version                       half-played ◄──────┘                           mid-generation where
  that it names, no other)                     (async.partial) back to the open orders              async.late = "mask")
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn

from relax_hpc.engines import EngineRestarted, Enough
from relax_hpc.recipe.staleness import Partial
from relax_hpc.records import Failure, Finish, Group, Part, Prompt, Sample, failed_group
from relax_hpc.roles import gpus
from relax_hpc.roles.episodes import HalfPlayed
from relax_hpc.roles.lookout import Lookout
from relax_hpc.roles.player import Player
from relax_hpc.roles.process import Exit, RoleProcess, Stop
from relax_hpc.roles.turn import Turn
from relax_hpc.run_dir import RunError
from relax_hpc.spool import parts
from relax_hpc.spool.front import Front
from relax_hpc.spool.orders import Order, evaluated_version
from relax_hpc.spool.publisher import ShardPublisher
from relax_hpc.spool.queue import Claim, Queue, end_claim
from relax_hpc.spool.shard import encode
from relax_hpc.spool.watch import SHARED_PAUSE_S, backoff
from relax_hpc.weights import DamagedWeights, Version, WeightsError, make_receiver, named

GONE_S = 120.0
"""How long an evaluation's version is looked for: a file system may show a folder a minute late."""
ALOOF_S = 0.5
"""How long a worker waits before it says that it lives, while another one looks for orders."""


def body(process: RoleProcess) -> Exit:
    worker = RolloutWorker(process, process.arguments.workplace)
    try:
        worker.work()
    finally:
        worker.lookout.leave()
        worker.publisher.close()
        worker.receiver.close()
        worker.player.close()


class RolloutWorker:
    """One worker: what plays orders, and a folder for the one it plays."""

    def __init__(self, process: RoleProcess, workplace: str) -> None:
        self.process, self.workplace, self.recipe = process, workplace, process.recipe
        process.telemetry.beat("starting", orders=0, gpus=gpus.visible() or None)
        self.held: Version | None = None
        self.orders, self.blocked_s = 0, 0.0
        self.swapping = False
        """Whether new weights are taken while an order is played."""
        self.turn = Turn(process.run, alone=False) if self.recipe.run.placement == "colocate" else None
        self.wait_for_turn()
        self.player = Player(self.recipe, process.run.model)
        self.engine = self.player.engine
        self.give_turn()
        self.receiver = make_receiver(self.recipe, process.run, workplace)
        self.queue = Queue(process.run, self.recipe.rollout.nodes)
        self.lookout = Lookout(process.run)
        self.queue.open_workplace(workplace)
        self.run_id = process.run.read_id()
        self.publisher = ShardPublisher(process.run, workplace, Front(process.run, self.recipe.spool.front))
        self.usual_s = 0.0
        """How long it looked for the orders before."""
        self.limits, self.why = Limits(), ""
        """Of the order that is played; why the last one was given back."""
        self.fetch_s = 0.0
        """What taking weights took since this was last read."""

    def work(self) -> NoReturn:
        """Play orders until asked to stop."""
        while True:
            claim, waited_s = self.wait_for_claim()
            self.play(claim, waited_s)

    def wait_for_turn(self) -> None:
        """Wait until the devices are ours, where they are shared with the trainer. Raises Stop when asked to stop."""
        if self.turn is not None:
            for pause_s in backoff():
                if self.turn.take():
                    return
                self.progress("waiting for devices")
                time.sleep(pause_s)

    def take_turn(self) -> bool:
        """Whether the devices are ours, and the engine awake; the trainer may have them still."""
        if self.turn is not None and not self.turn.held:
            if not self.turn.take():
                return False
            self.lookout.leave()  # the node's workers wake side by side
            self.engine.wake(lambda: self.progress("syncing"))
        return True

    def give_turn(self) -> None:
        """Leave the devices to the trainer, where they are shared with it; the engine's weights are lost."""
        if self.turn is not None and self.turn.held:
            self.engine.rest()
            self.held = None
            self.turn.give()

    def wait_for_claim(self) -> tuple[Claim, float]:
        """Wait for an order, and hold the weights for it; both and the seconds waited. Raises Stop when asked to stop.

        New versions are taken with an order, not before: a worker that has nothing to do would read them for nothing.
        """
        began = looking_since = time.perf_counter()
        pauses = self.pauses()
        while True:
            self.progress("idle" if self.held or self.turn else "syncing")
            self.report_published()
            if self.held is None and self.turn is None:
                self.take_or_again()
            elif not self.lookout.looks():
                if not self.lookout.called.wait(SHARED_PAUSE_S):  # nor is there anything open: who looks had left
                    self.give_turn()
                    self.lookout.called.wait(ALOOF_S)
                pauses, looking_since = self.pauses(), time.perf_counter()
                continue
            elif self.queue.has_open() and self.take_turn():
                newest = self.receiver.newest()
                claim = self.queue.claim(self.workplace, newest.number) if newest else None
                if claim is not None:
                    self.lookout.leave()
                    self.usual_s = max(time.perf_counter() - looking_since, self.usual_s / 2)
                    self.catch_up(claim)
                    return claim, time.perf_counter() - began
            self.give_turn()
            time.sleep(next(pauses))

    def pauses(self) -> Iterator[float]:
        """Between two looks for orders, while this worker is the one of its node that looks."""
        return backoff(last_s=SHARED_PAUSE_S, watchers=self.recipe.rollout.nodes, usual_s=self.usual_s)

    def catch_up(self, claim: Claim) -> None:
        """Take the weights that `claim` is to be played with; where they cannot be had, others get it."""
        try:
            self.wait_for_weights(claim.order)
        except BaseException:
            self.queue.put_back(claim)
            raise

    def wait_for_weights(self, order: Order) -> None:
        """Hold the weights for an order, when they can be had. Raises Stop when asked to stop, RunError where an evaluation's are gone."""
        tried_s = 0.0
        for pause_s in backoff():
            if self.take_turn():
                if self.take_or_again(order):
                    return
                tried_s += pause_s
            if order.evaluates and tried_s > GONE_S:
                raise RunError(
                    f"evaluation {order.id} is to be played by version {order.batch}, whose weights are gone from "
                    f"'{self.process.run.weights}'; resume with `relax-hpc run {self.process.run.root}`, which gives it up"
                )
            self.give_turn()  # the trainer may have to publish them once more
            self.progress("syncing")
            time.sleep(pause_s)

    def take_or_again(self, order: Order | None = None) -> bool:
        """The same as `take`, once more when the engine was lost and came back."""
        try:
            return self.take(order)
        except EngineRestarted as error:
            self.report_restart(error)
            return self.take(order)

    def version_for(self, order: Order | None) -> Version | None:
        """The version that an order is to be played with; None when there is none yet."""
        if order is None or not order.evaluates:
            return self.receiver.newest()
        try:
            return named(self.process.run, *evaluated_version(order.id))
        except WeightsError as error:
            self.process.log.warning("%s", error)
            return None

    def take(self, order: Order | None = None) -> bool:
        """Load the version for an order unless it is held: the one that an evaluation names, else the newest. It is verified whole before
        any of it is served. Whether it is held now."""
        version = self.version_for(order)
        if version is None or version == self.held:
            return version is not None
        began = time.perf_counter()
        try:
            with self.receiver.fetch(version, lambda: self.progress("syncing")) as tensors:
                beat = functools.partial(self.process.telemetry.beat, "syncing")
                self.engine.load(version.number, tensors, beat, tensors.files)
            self.held = version
            return True
        except DamagedWeights as error:
            raise RunError(
                f"{error}; resume with `relax-hpc run {self.process.run.root}`: the trainer publishes it again"
            ) from error
        except WeightsError as error:
            # Retired while we looked: what is held stays valid for its orders, the next look sees a newer one.
            self.process.log.warning("%s", error)
            return False
        finally:
            self.fetch_s += time.perf_counter() - began

    def play(self, claim: Claim, waited_s: float) -> None:
        """Play the claimed order and publish its shard, or give it back half-played."""
        held = self.held
        assert held is not None
        if self.process.run.shard(claim.order.id).exists():  # a worker that counted as lost published it after all
            end_claim(self.process.run, claim)
            return
        order, began, began_at, scored_s = claim.order, time.perf_counter(), time.time(), self.player.scored_s
        sync_s, self.fetch_s = self.fetch_s, 0.0
        prompts = self.player.prompts(order)
        part = parts.read(self.process.run, order, claim.ticket)
        cap = self.recipe.rollout.max_attempts
        if claim.ticket.attempt >= cap:
            died = Failure(f"{claim.ticket.attempt} workers died on the order (rollout.max_attempts = {cap})", "")
            groups = [failed_group(p, order.copies, held.number, died) for p in prompts]
        else:
            try:
                groups = self.episodes_or_again(claim, prompts, part)
            except HalfPlayed as played:
                self.give_back(claim, played.part, time.perf_counter() - began)
                return
        refuse_other_weights(order, held, groups)
        score_s = self.player.scored_s - scored_s
        generate_s = time.perf_counter() - began - score_s
        swap_s, self.fetch_s = self.fetch_s, 0.0
        meta = {
            "run": self.run_id, "version": held.number, "lineage": held.lineage, "weights": held.checksum,
            "attempt": claim.ticket.attempt, "worker": self.workplace,
            "seed": order.seed, "copies": order.copies, "created": time.time(), "generate_s": generate_s,
            "aborts": claim.ticket.parts,
        }  # fmt: skip
        image = encode(order.id, groups, meta, self.recipe.spool.compression)
        samples = [s for g in groups for s in g.samples]
        lengths, kept = [len(s.tokens) for s in samples], part.samples if part else []
        tokens = said_by_model(samples) - said_by_model(kept)
        about = {
            "order": order.id, "version": held.number, "samples": len(samples), "tokens": sum(lengths),
            "length_max": max(lengths, default=0), "turns_mean": mean([s.turns for s in samples]),
            "truncated": mean([s.finish is Finish.LENGTH for s in samples]),
            "longest_s": max((s.seconds for s in samples), default=0.0),
            "tokens_per_s": tokens / generate_s, "tokens_per_device_s": tokens / generate_s / self.recipe.rollout.devices_each,
            "reward": mean([s.raw_reward for s in samples]), "failed": sum(bool(g.reason) for g in groups),
            "aborts": claim.ticket.parts, "continued_samples": len(part.cut) if part else 0,
            "kept_tokens": sum(len(s.tokens) for s in kept),
            "began": round(began_at, 3), "wait_s": waited_s, "sync_s": sync_s, "blocked_s": self.blocked_s,
            "generate_s": generate_s, "swap_s": swap_s, "score_s": score_s,
        }  # fmt: skip
        self.publisher.put(claim, image, about)
        began = time.perf_counter()
        self.report_published()
        self.blocked_s = time.perf_counter() - began

    def give_back(self, claim: Claim, part: Part, seconds: float) -> None:
        """Keep what there is of an order, and leave it to whoever claims it next, with the newest weights then."""
        run, compression = self.process.run, self.recipe.spool.compression
        put_back = functools.partial(parts.put_back, run, self.queue, claim, part, compression)
        kept = self.process.when_room(put_back, f"a part of {claim.order.id}")
        self.process.telemetry.metrics(
            kind="abort", order=claim.order.id, version=claim.ticket.version, why=self.why, aborts=claim.ticket.parts + 1,
            samples=len(part.samples), cut_samples=len(part.cut), tokens=part.tokens, kept=kept, generate_s=seconds,
        )  # fmt: skip

    def report_published(self) -> None:
        """Say what was published since the last call; what found no room is tried again here."""
        for publication in self.publisher.ended():
            about, finish = publication.about, functools.partial(self.publisher.finish, publication)
            seconds = self.process.when_room(finish, f"shard {about['order']}")
            self.orders += 1
            self.process.telemetry.beat("published", orders=self.orders, order=about["order"], version=about["version"])
            self.process.telemetry.metrics(kind="order", **about, publish_s=seconds)
            self.process.caches.keep()

    def episodes(self, claim: Claim, prompts: list[Prompt], part: Part | None) -> list[Group]:
        """The groups of an order. Raises HalfPlayed when it is to be given back."""
        masks = self.recipe.async_.late == "mask" and not claim.order.evaluates
        self.limits = Limits.of(self.recipe.async_.partial, claim.ticket.parts) if masks else Limits()
        self.swapping = masks and self.engine.swaps and not self.limits.at_publish
        try:
            return self.player.groups(claim.order, prompts, self.progress, claim.ticket.parts, part)
        finally:
            self.limits, self.swapping = Limits(), False

    def episodes_or_again(self, claim: Claim, prompts: list[Prompt], part: Part | None) -> list[Group]:
        """The groups of an order, once more from where it was claimed when the engine was lost and came back."""
        try:
            return self.episodes(claim, prompts, part)
        except EngineRestarted as error:
            self.report_restart(error, order=claim.order.id)
            self.wait_for_weights(claim.order)
            return self.episodes(claim, prompts, part)

    def report_restart(self, error: EngineRestarted, **about: str) -> None:
        """Say that the engine was lost, with whose order; its weights are gone."""
        self.held = None
        self.process.log.warning("%s", error)
        self.process.telemetry.metrics(kind="engine_restart", **about, reason=str(error))

    def progress(self, state: str) -> None:
        """The heartbeat in everything that lasts; also where a stop is noticed, and that an order is to be given back."""
        self.process.telemetry.beat(state, orders=self.orders)
        if state == "generating" and self.has_enough():
            raise Enough
        if self.process.stopping:
            raise Stop
        if self.swapping and state == "generating" and self.engine.version >= 0:  # else it is being started again
            self.take()

    def has_enough(self) -> bool:
        """Whether the order that is played is to be given back half-played."""
        if self.limits.keeps and self.process.stopping:
            self.why = "stop"
        elif time.monotonic() >= self.limits.until:
            self.why = "time"
        elif self.limits.at_publish and self.receiver.newest() not in (None, self.held):
            self.why = "publish"
        else:
            return False
        return True


@dataclass(frozen=True, slots=True)
class Limits:
    """Until when an order is played; by default to its end."""

    keeps: bool = False
    """Whether it is given back half-played when the worker is asked to stop."""
    at_publish: bool = False
    until: float = float("inf")
    """Of time.monotonic()."""

    @classmethod
    def of(cls, partial: Partial | None, aborts: int) -> Limits:
        """Of an order that was given back `aborts` times."""
        if partial is None or aborts >= partial.max_aborts:
            return cls(keeps=partial is not None)
        limit_s = float("inf") if partial.abort_after_s is None else partial.abort_after_s
        return cls(True, partial.abort_at_publish, time.monotonic() + limit_s)


def refuse_other_weights(order: Order, held: Version, groups: Sequence[Group]) -> None:
    """Raises RunError where an evaluation was played by another version than it names."""
    versions = {version for group in groups for sample in group.samples for _, version in sample.spans}
    made_by = {(held.number, held.lineage), *((version, held.lineage) for version in versions)}
    if order.evaluates and made_by != {evaluated_version(order.id)}:
        raise RunError(
            f"evaluation {order.id} was played by versions {sorted(made_by)} (number, lineage), not by the one that it names: this is a "
            "defect of relax_hpc, or somebody else changed the engine's weights; nothing of it was kept"
        )


def said_by_model(samples: Sequence[Sample]) -> int:
    """Tokens of the model's own."""
    return sum(int(sample.loss_mask.sum()) for sample in samples)


def mean(values: Sequence[float]) -> float:
    return sum(values) / max(len(values), 1)
