"""The scorer role: it holds models that others train, or nobody, and says what they make of each order's tokens.

SHARDS/ORDER.h5 ──► a forward of the reference, the teacher, the newest policy ──► COLUMNS/ORDER.NAME.h5 ──► the trainer takes the order

It reads shards and writes columns, and knows no step. On the torch backend each process works on its own: orders are shared out by their
names. On Megatron all of them are one group, which the recipe's plan splits the models over: rank 0 decides, the others follow. Earlier batches
come first. Who dies leaves nothing: what is started in its place makes the columns that are missing, reference and teacher with the same numbers.

The policy's are those of the newest version that there is, and of none before the one that began the order: so they are as old as a token
at most, and at max_staleness 0 those of the step itself.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from relax_hpc.algorithms.base import RECOMPUTED, REFERENCE, TEACHER
from relax_hpc.recipe.schema import TEACHER_KEY
from relax_hpc.roles import gpus
from relax_hpc.roles.missing import Missing, described, opened, put, whole
from relax_hpc.roles.process import Exit, RoleProcess, Stop
from relax_hpc.roles.ranks import (
    as_attempt,
    attempt_folder,
    begin_attempt,
    everywhere,
    meet,
    room_for_all,
    told,
)
from relax_hpc.run_dir import Data, RunDir, RunError, read_json
from relax_hpc.spool.column import encode
from relax_hpc.spool.reading import Shards
from relax_hpc.spool.watch import backoff
from relax_hpc.trainers import make_scoring
from relax_hpc.trainers.build import tensors_in
from relax_hpc.weights import DamagedWeights, Receiver, Version, WeightsError, frozen, make_receiver
from relax_hpc.weights.contents import checksum
from relax_hpc.weights.parts import digest

LOOK_AGAIN_S = 0.1
"""How long to wait for weights that cannot be had yet, or for another rank."""
POLL_FOR_S = 1.0
"""How long one wait lasts before the other processes hear that there is nothing yet."""


def body(process: RoleProcess) -> Exit:
    if process.recipe.scores_together:
        via = attempt_folder(process.run.scorer, process.arguments.attempt)
        return as_attempt(process, via, lambda: Scorer(process, via).work())
    return Scorer(process, None).work()


@dataclass(frozen=True, slots=True)
class Word:
    """What rank 0 decided; all ranks act on it."""

    order: str = ""
    """To be scored; none yet."""
    behind: int = 0
    """Orders that lack columns."""
    waited_s: float = 0.0
    reference: str = ""
    """Checksum of the reference, where it is to be scored with one."""
    policy: Version | None = None
    """Which version of the policy it is to be scored with."""
    stop: bool = False


class Scorer:
    """One process: the models, or its part of them, and its share of the orders."""

    def __init__(self, process: RoleProcess, via: Path | None) -> None:
        """via: the folder of the attempt, of a process that is one of a group."""
        recipe, arguments = process.recipe, process.arguments
        assert recipe.scorer is not None
        self.process, self.recipe, self.run, self.config = process, recipe, process.run, recipe.scorer
        self.via = via
        process.telemetry.beat("starting", orders=0)
        self.names: dict[str, str] = {}
        """Which weights each model has: a checksum, or a version of the policy. The same on every rank."""
        self._reference_seen: tuple[tuple[int, int], str] = (0, 0), ""
        self.orders, self.usual_s = 0, 0.0
        self.rank, self.world = (arguments.rank, arguments.world) if via else (0, 1)
        about = read_json(process.run.identity)
        self.shards = RunDir(about["shards_from"]) if about["shards_from"] else process.run
        self.front = Shards(self.shards, recipe.spool.front)
        share = (0, 1) if via else (arguments.rank, self.config.processes)
        self.missing = Missing(self.run, self.shards, recipe.scored, recipe.async_.max_staleness, *share)
        torch.set_num_threads(self.config.threads)
        if via is not None:
            begin_attempt(process, via, self.wait)
        if gpus.computes_on_gpu(self.config.device, "scorer"):
            trainers = recipe.trainer.processes // recipe.trainer.nodes
            gpus.take_beside(recipe, "scorer", trainers, arguments.rank, self.world)
        if via is not None:
            meet(via, self.rank, self.world, self.config.device)
        self.models = make_scoring(recipe, self.run.model, self.rank, self.world)
        self.receiver: Receiver | None = None
        if RECOMPUTED in recipe.scored:
            # no copy in the node's memory: nobody would clear it where no rollout worker is
            self.receiver = make_receiver(recipe, process.run, f"{process.name}-{arguments.attempt:04d}", copies=False)

    def work(self) -> NoReturn:
        """Score orders until asked to stop."""
        try:
            self.score_orders()
        finally:
            if self.receiver is not None:
                self.receiver.close()

    def score_orders(self) -> NoReturn:
        if TEACHER in self.recipe.scored:
            folder = self.recipe.models_beside[TEACHER_KEY]
            self.models.hold(TEACHER, folder)
            self.names[TEACHER] = checksum(digest(tensors_in(folder), progress=self.alive)) if self.rank == 0 else ""
        while True:
            word = self.agree()
            if word.stop:
                raise Stop
            if word.order and self.hold(word):
                self.score(word)

    def agree(self) -> Word:
        """Rank 0's word, on every rank."""
        word = told(self.decide() if self.rank == 0 else None, self.world)
        if self.via is not None and not self.via.exists():
            raise FileNotFoundError(self.via)  # fenced
        if not word.order:
            self.beat("idle")
        return word

    def decide(self) -> Word:
        """Wait for a shard that lacks a column."""
        began = time.perf_counter()
        for pause_s in backoff(watchers=1 if self.via else self.config.processes, usual_s=self.usual_s):
            if self.process.stopping:
                return Word(stop=True)
            waited_s = time.perf_counter() - began
            reference, policy = self.reference(), self.receiver.newest() if self.receiver else None
            version = policy.number if policy else None if self.receiver is None else -1
            order, lacking = self.missing.first(self.front, version, lambda: self.beat("idle"))
            if order is not None and reference is not None:
                self.usual_s = max(waited_s, self.usual_s / 2)
                return Word(order, lacking, waited_s, reference, policy)
            if waited_s > POLL_FOR_S and self.via is not None:
                return Word()
            self.beat("idle" if reference is not None else "waiting for the reference")
            time.sleep(pause_s)
        raise AssertionError("backoff ends never")

    def reference(self) -> str | None:
        """The reference's checksum, as the run has it now; None before there is one, and nothing where none is scored with."""
        if REFERENCE not in self.recipe.scored:
            return ""
        try:
            stat = os.stat(self.run.reference / "index.json")
        except FileNotFoundError:
            return None
        seen, held = self._reference_seen
        if (stat.st_ino, stat.st_mtime_ns) != seen:
            held = frozen.held_checksum(self.run) or ""
            self._reference_seen = (stat.st_ino, stat.st_mtime_ns), held
        return held or None

    def hold(self, word: Word) -> bool:
        """Have the weights that an order is to be scored with; whether every rank could have them."""
        held = self.names.get(REFERENCE, "") == word.reference or self.take_reference(word.reference)
        return held and (word.policy is None or self.take_policy(word.policy))

    def take_reference(self, name: str) -> bool:
        """Load the reference; a trainer that began anew may be putting another in its place."""
        found, tensors = "", dict[str, Tensor]()
        try:
            found, tensors = frozen.read(self.run, self.alive)
        except DamagedWeights as error:
            raise RunError(f"{error}; put the reference back from a copy of the run, or begin a new run") from error
        except WeightsError as error:
            self.process.log.warning("%s", error)
        return self.take(REFERENCE, name, tensors if found == name else None, self.run.reference)

    def take_policy(self, version: Version) -> bool:
        """Load this version, unless it is held."""
        assert self.receiver is not None
        name = f"policy {version.number}.{version.lineage}"
        if self.names.get(RECOMPUTED) == name:
            return True
        with contextlib.ExitStack() as stack:
            tensors: Mapping[str, Tensor] | None = None
            try:
                tensors = dict(stack.enter_context(self.receiver.fetch(version, self.alive)))
            except DamagedWeights as error:
                raise RunError(
                    f"{error}; resume with `relax-hpc run {self.run.root}`: the trainer publishes it again"
                ) from error
            except WeightsError as error:  # it was retired while we looked: the next look sees a newer one
                self.process.log.warning("%s", error)
            return self.take(RECOMPUTED, name, tensors, self.run.weights)

    def take(self, model: str, name: str, tensors: Mapping[str, Tensor] | None, where: Path) -> bool:
        """Give a model these weights, where every rank has them: ranks that share a model take them together."""
        if not everywhere(tensors is not None, self.world):
            time.sleep(LOOK_AGAIN_S)
            return False
        assert tensors is not None
        self.models.take(model, tensors, where)
        self.names[model] = name
        return True

    def score(self, word: Word) -> None:
        """Make the columns of an order."""
        order, began = word.order, time.perf_counter()
        routed = self.recipe.rollout.routed_experts and self.recipe.trainer.backend == "megatron"
        read = opened(self.shards, self.front, order, partial(whole, routed=routed))
        if not everywhere(read is not None, self.world):
            self.missing.done(order)
            return
        assert read is not None
        rollouts, about, of_shard = read
        values = {name: self.models.logprobs(name, rollouts, self.alive) for name in self.recipe.scored}
        score_s = time.perf_counter() - began
        for name, column in values.items():
            path, image = self.run.column(order, name), encode(name, order, of_shard, self.names[name], column)
            publish = partial(self.publish, path, image, self.shards.shard(order))
            self.process.when_room(publish, f"column {path.name}")
        self.missing.done(order)
        self.orders += 1
        if self.rank == 0:
            publish_s = time.perf_counter() - began - score_s
            more = {"wait_s": word.waited_s, "publish_s": publish_s, "behind": word.behind}
            self.process.telemetry.metrics(
                **described(order, list(values), rollouts, about["created"], score_s, **more)
            )

    def publish(self, path: Path, image: Data, shard: Path) -> None:
        with room_for_all(self.world):
            if self.rank == 0:
                put(path, image, shard, self.via)

    def wait(self) -> None:
        """Before the first word: each process may leave on its own."""
        if self.process.stopping:
            raise Stop
        self.beat("starting")
        time.sleep(LOOK_AGAIN_S)

    def alive(self) -> None:
        """The heartbeat in everything that lasts; who works alone notices a stop in the middle of it."""
        if self.process.stopping and self.world == 1:
            raise Stop
        self.beat("scoring" if self.names else "loading")

    def beat(self, state: str) -> None:
        self.process.telemetry.beat(state, orders=self.orders)
