"""The rollout role: claims requests, generates their episodes, publishes each as a shard.

open requests ──claim by rename─► this worker    loop:  claim ► sync ► generate ► score ► claim …  (new weights are taken
newest weights ──fetch, verify──► engine                                 │          └► publish       with a request, or in
 (an evaluation's: the version                      partly generated ◄───┘                           mid-generation where
  that it names, no other)                   (async.partial) back to the open requests               async.on_stale = "mask")
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn, TypeVar

from relax_hpc.engines import Abort, EngineRestarted, TakesAdapters
from relax_hpc.files.errors import RunError
from relax_hpc.files.node_cache import NodeCache
from relax_hpc.files.watch import SHARED_PAUSE_S, backoff
from relax_hpc.recipe.tables.staleness import Partial
from relax_hpc.records import Failure, Group, PartialRollout, Prompt, failed_group
from relax_hpc.roles.common import gpus
from relax_hpc.roles.common.device_lock import DeviceLock
from relax_hpc.roles.common.process import Exit, RoleProcess, Stop
from relax_hpc.roles.rollout.ahead import NextRequest
from relax_hpc.roles.rollout.episodes import RolloutAborted
from relax_hpc.roles.rollout.poll_leader import PollLeader
from relax_hpc.roles.rollout.request_metrics import request_metrics, shard_meta
from relax_hpc.roles.rollout.runner import RolloutRunner
from relax_hpc.spool import partial_rollouts
from relax_hpc.spool.publisher import ShardPublisher
from relax_hpc.spool.queue import Claim, RequestQueue, end_claim
from relax_hpc.spool.request import Request, evaluated_version
from relax_hpc.spool.shard_writer import encode
from relax_hpc.weights import DamagedWeights, Version, WeightsError, make_receiver, named, reference

T = TypeVar("T")
GONE_S = 120.0
"""Seconds for which an evaluation's version is looked for: a file system may show a folder a minute late."""
MAX_ABORTS = 3
"""A request that was given back this often is generated to its end."""
ALOOF_S = 0.5
"""Seconds between heartbeats of a worker that waits while another one looks for requests."""


def body(process: RoleProcess) -> Exit:
    worker = RolloutWorker(process, process.arguments.claim_dir)
    try:
        worker.work()
    finally:
        worker.poll_leader.leave()
        worker.publisher.close()
        worker.receiver.close()
        worker.runner.close()


class RolloutWorker:
    """One rollout worker: an engine that generates requests, and the claim directory of the one at hand."""

    def __init__(self, process: RoleProcess, claim_dir: str) -> None:
        self.process, self.claim_dir, self.recipe = process, claim_dir, process.recipe
        process.telemetry.heartbeat("starting", requests=0, gpus=gpus.visible() or None)
        self.held: Version | None = None
        self.requests, self.blocked_s = 0, 0.0
        self.swapping = False
        """True if new weights are taken while a request is generated."""
        self.device_lock = DeviceLock(process.run, alone=False) if self.recipe.run.placement == "colocate" else None
        self.wait_for_devices()
        self.runner = RolloutRunner(self.recipe, process.run.model)
        self.engine = self.runner.engine
        self.release_devices()
        self.receiver = make_receiver(self.recipe, process.run, claim_dir)
        self.queue = RequestQueue(process.run, self.recipe.rollout.nodes)
        self.next_request = NextRequest(self.queue, self.runner.loader, self.recipe.rollout.workers)
        self.poll_leader = PollLeader(process.run)
        self.queue.open_claim_dir(claim_dir)
        self.run_id = process.run.read_id()
        outstanding = (self.recipe.async_.max_staleness + 1) * self.recipe.requests_per_step
        cache = NodeCache(process.run, self.recipe.spool.node_cache, outstanding)
        self.publisher = ShardPublisher(process.run, claim_dir, cache)
        self.usual_s = 0.0
        """Seconds that a search for requests usually takes: the last one, or half of the value before if that is
        more."""
        self.limits, self.why = Limits(), ""
        """Limits of the request at hand; why the last request was given back."""
        self.fetch_s = 0.0
        """Seconds spent on taking weights since this was last read."""

    def work(self) -> NoReturn:
        """Generate requests until asked to stop."""
        self.runner.warm_up(lambda: self.progress("starting"))
        while True:
            claim, waited_s = self.wait_for_claim()
            self.generate(claim, waited_s)

    def wait_for_devices(self) -> None:
        """Wait until the devices are ours, where they are shared with the trainer. Raises Stop when asked to stop."""
        if self.device_lock is not None:
            for pause_s in backoff():
                if self.device_lock.acquire():
                    return
                self.progress("waiting for devices")
                time.sleep(pause_s)

    def acquire_devices(self) -> bool:
        """Return True if the devices are ours and the engine is onloaded; the trainer may still have them."""
        if self.device_lock is not None and not self.device_lock.held:
            if not self.device_lock.acquire():
                return False
            self.poll_leader.leave()  # the node's workers wake side by side
            self.engine.onload(lambda: self.progress("syncing"))
        return True

    def release_devices(self) -> None:
        """Leave devices that are shared with the trainer; the engine loses its weights."""
        if self.device_lock is not None and self.device_lock.held:
            self.engine.offload()
            self.held = None
            self.device_lock.release()

    def wait_for_claim(self) -> tuple[Claim, float]:
        """Wait for a request and hold the weights for it. Return both, and the seconds waited. Raises Stop when asked
        to stop.

        New versions are taken with a request, not before: an idle worker would read them for nothing.
        """
        began = looking_since = time.perf_counter()
        pauses = self.pauses()
        while True:
            self.progress("idle" if self.held or self.device_lock else "syncing")
            self.report_published()
            if self.held is None and self.device_lock is None:
                self.again(self.sync)
            elif not self.poll_leader.looks():
                if not self.poll_leader.called.wait(SHARED_PAUSE_S):  # none is open: else the leader had left
                    self.release_devices()
                    self.poll_leader.called.wait(ALOOF_S)
                pauses, looking_since = self.pauses(), time.perf_counter()
                continue
            elif self.queue.has_open() and self.acquire_devices():
                newest = self.receiver.newest()
                prefers = self.next_request.id
                claim = self.queue.claim(self.claim_dir, newest.number, prefers) if newest else None
                if claim is not None:
                    self.poll_leader.leave()
                    self.usual_s = max(time.perf_counter() - looking_since, self.usual_s / 2)
                    self.catch_up(claim)
                    return claim, time.perf_counter() - began
            self.release_devices()
            time.sleep(next(pauses))

    def pauses(self) -> Iterator[float]:
        """Pause between two looks for requests, while this worker is its node's poll leader."""
        return backoff(last_s=SHARED_PAUSE_S, watchers=self.recipe.rollout.nodes, usual_s=self.usual_s)

    def catch_up(self, claim: Claim) -> None:
        """Take the weights that `claim` is to be generated with; if they cannot be had, leave the request to other
        workers."""
        try:
            self.wait_for_weights(claim.request)
        except BaseException:
            self.queue.put_back(claim)
            raise

    def wait_for_weights(self, request: Request) -> None:
        """Hold the weights for a request, if they can be had. Raises Stop when asked to stop, RunError if an
        evaluation's are gone."""
        tried_s = 0.0
        for pause_s in backoff():
            if self.acquire_devices():
                if self.again(lambda: self.sync(request)):
                    return
                tried_s += pause_s
            if request.evaluates and tried_s > GONE_S:
                raise RunError(
                    f"evaluation {request.id} is to be generated by version {request.batch}, whose weights are gone from "
                    f"'{self.process.run.weights}'; resume with `relax-hpc run {self.process.run.root}`, which gives it up"
                )
            self.release_devices()  # the trainer may have to publish them once more
            self.progress("syncing")
            time.sleep(pause_s)

    def again(self, work: Callable[[], T], request: Request | None = None) -> T:
        """Return `work()`; if the engine was lost and came back, do it once more, with the weights for `request`."""
        try:
            return work()
        except EngineRestarted as error:
            self.held = None
            self.process.log.warning("%s", error)
            about = {"request": request.id} if request else {}
            self.process.telemetry.metrics(kind="engine_restart", **about, reason=str(error))
            if request:
                self.wait_for_weights(request)
            return work()

    def version_for(self, request: Request | None) -> Version | None:
        """Return the version that a request is to be generated with; None if there is none yet."""
        if request is None or not request.evaluates:
            return self.receiver.newest()
        try:
            return named(self.process.run, *evaluated_version(request.id))
        except WeightsError as error:
            self.process.log.warning("%s", error)
            return None

    def sync(self, request: Request | None = None) -> bool:
        """Load the version for a request unless it is held: the one that an evaluation names, else the newest. It is
        verified whole before any of it is served. Return True if it is held now."""
        version = self.version_for(request)
        if version is None or version == self.held:
            return version is not None
        began = time.perf_counter()
        try:
            if self.held is None:
                self.load_base()
            with self.receiver.fetch(version, lambda: self.progress("syncing")) as tensors:
                heartbeat = functools.partial(self.process.telemetry.heartbeat, "syncing")
                self.engine.load(version.number, tensors, heartbeat, tensors.files)
            self.held = version
            return True
        except DamagedWeights as error:
            raise RunError(
                f"{error}; resume with `relax-hpc run {self.process.run.root}`: the trainer publishes it again"
            ) from error
        except WeightsError as error:
            # Retired while we looked: the version held stays valid for its requests, the next look sees a newer one.
            self.process.log.warning("%s", error)
            return False
        finally:
            self.fetch_s += time.perf_counter() - began

    def load_base(self) -> None:
        """Give an engine without weights the base, where versions hold the adapter alone. Raises WeightsError where it
        is not there yet."""
        lora = self.recipe.trainer.lora
        if lora is None or lora.sync == "merge":
            return
        assert isinstance(self.engine, TakesAdapters)
        try:
            _, tensors = reference.read(self.process.run, lambda: self.progress("syncing"))
        except DamagedWeights as error:
            raise RunError(
                f"{error}; put the adapter's base back from a copy of the run, or begin a new run"
            ) from error
        self.engine.load_base(tensors.items(), lambda: self.progress("syncing"))

    def generate(self, claim: Claim, waited_s: float) -> None:
        """Generate the claimed request and publish its shard, or give it back partly generated."""
        held, request = self.held, claim.request
        assert held is not None
        if self.process.run.shard(request.id).exists():  # a worker given up for lost published it after all
            end_claim(self.process.run, claim)
            return
        began, began_at, scored_s = time.perf_counter(), time.time(), self.runner.scored_s
        sync_s, self.fetch_s = self.fetch_s, 0.0
        prompts = self.runner.prompts(request, self.progress)
        read_s = time.perf_counter() - began
        self.next_request.begun()
        partial = partial_rollouts.read(self.process.run, request, claim.request_file, prompts)
        try:
            groups = self.poison(claim, prompts) or self.again(lambda: self.episodes(claim, prompts, partial), request)
        except RolloutAborted as generated:
            self.give_back(claim, generated.partial, time.perf_counter() - began)
            return
        refuse_other_weights(request, held, groups)
        score_s = self.runner.scored_s - scored_s
        generate_s = time.perf_counter() - began - score_s
        swap_s, self.fetch_s = self.fetch_s, 0.0
        about = {"run": self.run_id, "worker": self.claim_dir, "created": time.time(), "generate_s": generate_s}
        spool = self.recipe.spool
        kept = "digest" if request.evaluates else spool.media
        image = encode(request.id, groups, shard_meta(claim, held) | about, spool.compression, kept)
        line = request_metrics(claim, held, groups, partial, generate_s, self.recipe.rollout.devices_each) | {
            "began": round(began_at, 3), "wait_s": waited_s, "sync_s": sync_s, "blocked_s": self.blocked_s,
            "read_s": read_s, "generate_s": generate_s, "swap_s": swap_s, "score_s": score_s,
        }  # fmt: skip
        self.publisher.put(claim, image, line)
        began = time.perf_counter()
        self.report_published()
        self.blocked_s = time.perf_counter() - began

    def poison(self, claim: Claim, prompts: list[Prompt]) -> list[Group] | None:
        """Return failed groups for a request on which too many workers died; None for any other."""
        attempt, cap = claim.request_file.attempt, self.recipe.rollout.max_attempts
        if attempt < cap or self.held is None:
            return None
        died = Failure(f"{attempt} workers died on the request (rollout.max_attempts = {cap})", "")
        return [failed_group(p, claim.request.samples_per_prompt, self.held.number, died) for p in prompts]

    def give_back(self, claim: Claim, partial: PartialRollout, seconds: float) -> None:
        """Keep a request's partial rollout, and leave it to the next worker that claims it, with the newest weights
        then."""
        run, compression = self.process.run, self.recipe.spool.compression
        put_back = functools.partial(partial_rollouts.put_back, run, self.queue, claim, partial, compression)
        kept = self.process.when_room(put_back, f"a part of {claim.request.id}")
        self.process.telemetry.metrics(
            kind="abort", request=claim.request.id, version=claim.request_file.version, why=self.why, aborts=claim.request_file.aborts + 1,
            samples=len(partial.samples), cut_samples=len(partial.cut), tokens=partial.tokens, kept=kept, generate_s=seconds,
        )  # fmt: skip

    def report_published(self) -> None:
        """Report the shards published since the last call; one that found no room on the disk is tried again here."""
        for publication in self.publisher.ended():
            about, finish = publication.about, functools.partial(self.publisher.finish, publication)
            seconds = self.process.when_room(finish, f"shard {about['request']}")
            self.requests += 1
            self.process.telemetry.heartbeat(
                "published", requests=self.requests, request=about["request"], version=about["version"]
            )
            self.process.telemetry.metrics(kind="request", **about, publish_s=seconds)
            self.process.caches.keep()

    def episodes(self, claim: Claim, prompts: list[Prompt], partial: PartialRollout | None) -> list[Group]:
        """Generate the groups of a request. Raises RolloutAborted when it is to be given back."""
        masks = self.recipe.async_.on_stale == "mask" and not claim.request.evaluates
        self.limits = Limits.of(self.recipe.async_.partial, claim.request_file.aborts) if masks else Limits()
        self.swapping = masks and self.engine.swaps and not self.limits.at_publish
        try:
            return self.runner.groups(claim.request, prompts, self.progress, claim.request_file.aborts, partial)
        finally:
            self.limits, self.swapping = Limits(), False

    def progress(self, state: str) -> None:
        """Send a heartbeat during long work. A stop is noticed here, and that a request is to be given back."""
        self.process.telemetry.heartbeat(state, requests=self.requests)
        if state == "generating" and self.should_abort():
            raise Abort
        if self.process.stopping:
            raise Stop
        if state in ("generating", "environments", "scoring"):
            self.next_request.read_ahead()
        if self.swapping and state == "generating" and self.engine.version >= 0:  # else it is being started again
            self.sync()

    def should_abort(self) -> bool:
        """Return True if the request at hand is to be given back partly generated."""
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
    """How long a request is generated; by default to its end."""

    keeps: bool = False
    """True if it is given back partly generated when the worker is asked to stop."""
    at_publish: bool = False
    until: float = float("inf")
    """Time at which generating ends, on time.monotonic()."""

    @classmethod
    def of(cls, partial: Partial | None, aborts: int) -> Limits:
        """Return the limits of a request that was given back `aborts` times."""
        if partial is None or aborts >= MAX_ABORTS:
            return cls(keeps=partial is not None)
        limit_s = float("inf") if partial.abort_after_s is None else partial.abort_after_s
        return cls(True, partial.abort_at_publish, time.monotonic() + limit_s)


def refuse_other_weights(request: Request, held: Version, groups: Sequence[Group]) -> None:
    """Raise RunError if an evaluation was generated by another version than it names."""
    versions = {version for group in groups for sample in group.samples for _, version in sample.spans}
    made_by = {(held.number, held.lineage), *((version, held.lineage) for version in versions)}
    if request.evaluates and made_by != {evaluated_version(request.id)}:
        raise RunError(
            f"evaluation {request.id} was generated by versions {sorted(made_by)} (number, lineage), not by the one that it names: this is a "
            "defect of relax_hpc, or somebody else changed the engine's weights; nothing of it was kept"
        )
