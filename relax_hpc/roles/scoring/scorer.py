"""The scorer role: holds models that other roles train, or nobody, and publishes their logprobs of each request's
tokens.

    SHARDS/REQUEST.h5 ──► a forward of reference, teacher, newest policy ──► COLUMNS/REQUEST.NAME.h5 ──► the trainer takes the request

It reads shards and writes columns, and knows no step. On the torch backend each process works on its own: requests are
shared out by their names. On Megatron all processes are one group, over which the recipe's plan splits the models: rank
0 decides, the others follow. Earlier batches come first. A process that dies leaves nothing behind: its successor makes
the columns that are missing, reference and teacher with the same numbers.

The policy's logprobs are those of the newest version there is, and never of one before the version that began the
request. So they are at most as old as a token, and at max_staleness 0 those of the step itself.
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
from relax_hpc.files.errors import RunError
from relax_hpc.files.publish import Data, read_json
from relax_hpc.files.run_dir import RunDir
from relax_hpc.files.watch import backoff
from relax_hpc.recipe.schema import TEACHER_KEY
from relax_hpc.roles.common import gpus
from relax_hpc.roles.common.process import Exit, RoleProcess, Stop
from relax_hpc.roles.common.ranks import (
    as_attempt,
    attempt_folder,
    begin_attempt,
    everywhere,
    meet,
    room_for_all,
    told,
)
from relax_hpc.roles.scoring.pending_columns import PendingColumns, described, opened, put, whole
from relax_hpc.spool.column import encode
from relax_hpc.spool.reading import Shards
from relax_hpc.trainers import make_scoring
from relax_hpc.trainers.build import tensors_in
from relax_hpc.weights import DamagedWeights, Receiver, Version, WeightsError, make_receiver, reference
from relax_hpc.weights.contents import checksum
from relax_hpc.weights.parts import digest

LOOK_AGAIN_S = 0.1
"""Seconds to wait for weights that cannot be had yet, or for another rank."""
POLL_FOR_S = 1.0
"""Seconds that one wait lasts before the other processes hear that there is nothing yet."""


def body(process: RoleProcess) -> Exit:
    if process.recipe.scores_together:
        commit_dir = attempt_folder(process.run.scorer, process.arguments.attempt)
        return as_attempt(process, commit_dir, lambda: Scorer(process, commit_dir).work())
    return Scorer(process, None).work()


@dataclass(frozen=True, slots=True)
class Command:
    """Rank 0's decision, which all ranks act on."""

    request: str = ""
    """The request to be scored; empty: none yet."""
    behind: int = 0
    """How many requests lack columns."""
    waited_s: float = 0.0
    reference: str = ""
    """Checksum of the reference weights to score with; empty where none are used."""
    policy: Version | None = None
    """The version of the policy to score with; None where none is used."""
    stop: bool = False


class Scorer:
    """One scorer process: the models, or its part of them, and its share of the requests."""

    def __init__(self, process: RoleProcess, commit_dir: Path | None) -> None:
        """commit_dir: the attempt's folder, for a process that is one of a group; else None."""
        recipe, arguments = process.recipe, process.arguments
        assert recipe.scorer is not None
        self.process, self.recipe, self.run, self.config = process, recipe, process.run, recipe.scorer
        self.commit_dir = commit_dir
        process.telemetry.heartbeat("starting", requests=0)
        self.names: dict[str, str] = {}
        """Model -> the weights that it has: a checksum, or a version of the policy. Equal on every rank."""
        self._reference_seen: tuple[tuple[int, int], str] = (0, 0), ""
        self.requests, self.usual_s = 0, 0.0
        self.rank: int = arguments.rank if commit_dir else 0
        self.world: int = arguments.world if commit_dir else 1
        about = read_json(process.run.identity)
        self.shards = RunDir(about["shards_from"]) if about["shards_from"] else process.run
        self.shard_reader = Shards(self.shards, recipe.spool.node_cache)
        share = (0, 1) if commit_dir else (arguments.rank, self.config.processes)
        self.pending = PendingColumns(self.run, self.shards, recipe.scored, recipe.async_.max_staleness, *share)
        torch.set_num_threads(recipe.trainer.threads)
        if commit_dir is not None:
            begin_attempt(process, commit_dir, self.wait)
        if gpus.computes_on_gpu(recipe.trainer.device, "scorer"):
            trainers = recipe.trainer.processes // recipe.trainer.nodes
            gpus.take_beside(recipe, "scorer", trainers, arguments.rank, self.world)
        if commit_dir is not None:
            meet(commit_dir, self.rank, self.world, recipe.trainer.device)
        self.models = make_scoring(recipe, self.run.model, self.rank, self.world)
        self.receiver: Receiver | None = None
        if RECOMPUTED in recipe.scored:
            # no copy in the node's memory: nobody would clear it where no rollout worker is
            self.receiver = make_receiver(recipe, process.run, f"{process.name}-{arguments.attempt:04d}", copies=False)

    def work(self) -> NoReturn:
        """Score requests until asked to stop."""
        try:
            self.score_requests()
        finally:
            if self.receiver is not None:
                self.receiver.close()

    def score_requests(self) -> NoReturn:
        if TEACHER in self.recipe.scored:
            folder = self.recipe.models_beside[TEACHER_KEY]
            self.models.hold(TEACHER, folder)
            self.names[TEACHER] = checksum(digest(tensors_in(folder), progress=self.alive)) if self.rank == 0 else ""
        while True:
            command = self.agree()
            if command.stop:
                raise Stop
            if command.request and self.hold(command):
                self.score(command)

    def agree(self) -> Command:
        """Broadcast rank 0's command and return it, on every rank."""
        command = told(self.decide() if self.rank == 0 else None, self.world)
        if self.commit_dir is not None and not self.commit_dir.exists():
            raise FileNotFoundError(self.commit_dir)  # fenced
        if not command.request:
            self.heartbeat("idle")
        return command

    def decide(self) -> Command:
        """Wait for a shard that lacks a column, and return the command to score it."""
        began = time.perf_counter()
        for pause_s in backoff(watchers=1 if self.commit_dir else self.config.processes, usual_s=self.usual_s):
            if self.process.stopping:
                return Command(stop=True)
            waited_s = time.perf_counter() - began
            reference, policy = self.reference(), self.receiver.newest() if self.receiver else None
            version = policy.number if policy else None if self.receiver is None else -1
            request, lacking = self.pending.first(self.shard_reader, version, lambda: self.heartbeat("idle"))
            if request is not None and reference is not None:
                self.usual_s = max(waited_s, self.usual_s / 2)
                return Command(request, lacking, waited_s, reference, policy)
            if waited_s > POLL_FOR_S and self.commit_dir is not None:
                return Command()
            self.heartbeat("idle" if reference is not None else "waiting for the reference")
            time.sleep(pause_s)
        raise AssertionError("backoff ends never")

    def reference(self) -> str | None:
        """Return the reference's checksum, as the run has it now; None before there is one, empty where none is scored
        with."""
        if REFERENCE not in self.recipe.scored:
            return ""
        try:
            stat = os.stat(self.run.reference / "index.json")
        except FileNotFoundError:
            return None
        seen, held = self._reference_seen
        if (stat.st_ino, stat.st_mtime_ns) != seen:
            held = reference.held_checksum(self.run) or ""
            self._reference_seen = (stat.st_ino, stat.st_mtime_ns), held
        return held or None

    def hold(self, command: Command) -> bool:
        """Load the weights that a request is to be scored with. Return True if every rank has them."""
        held = self.names.get(REFERENCE, "") == command.reference or self.take_reference(command.reference)
        return held and (command.policy is None or self.take_policy(command.policy))

    def take_reference(self, name: str) -> bool:
        """Load the reference weights; a trainer that began anew may be replacing them meanwhile."""
        found, tensors = "", dict[str, Tensor]()
        try:
            found, tensors = reference.read(self.run, self.alive)
        except DamagedWeights as error:
            raise RunError(f"{error}; put the reference back from a copy of the run, or begin a new run") from error
        except WeightsError as error:
            self.process.log.warning("%s", error)
        return self.take(REFERENCE, name, tensors if found == name else None, self.run.reference)

    def take_policy(self, version: Version) -> bool:
        """Load this version of the policy, unless it is held."""
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
        """Give a model these weights once every rank has them: ranks that share a model load them together."""
        if not everywhere(tensors is not None, self.world):
            time.sleep(LOOK_AGAIN_S)
            return False
        assert tensors is not None
        self.models.take(model, tensors, where)
        self.names[model] = name
        return True

    def score(self, command: Command) -> None:
        """Compute and publish the columns of a request."""
        request, began = command.request, time.perf_counter()
        routed = self.recipe.rollout.routed_experts and self.recipe.trainer.backend == "megatron"
        read = opened(self.shards, self.shard_reader, request, partial(whole, routed=routed))
        if not everywhere(read is not None, self.world):
            self.pending.done(request)
            return
        assert read is not None
        rollouts, about, of_shard = read
        values = {name: self.models.logprobs(name, rollouts, self.alive) for name in self.recipe.scored}
        score_s = time.perf_counter() - began
        for name, column in values.items():
            path, image = self.run.column(request, name), encode(name, request, of_shard, self.names[name], column)
            publish = partial(self.publish, path, image, self.shards.shard(request))
            self.process.when_room(publish, f"column {path.name}")
        self.pending.done(request)
        self.requests += 1
        if self.rank == 0:
            publish_s = time.perf_counter() - began - score_s
            more = {"wait_s": command.waited_s, "publish_s": publish_s, "behind": command.behind}
            self.process.telemetry.metrics(
                **described(request, list(values), rollouts, about["created"], score_s, **more)
            )

    def publish(self, path: Path, image: Data, shard: Path) -> None:
        with room_for_all(self.world):
            if self.rank == 0:
                put(path, image, shard, self.commit_dir)

    def wait(self) -> None:
        """Wait before the first command: each process may leave on its own."""
        if self.process.stopping:
            raise Stop
        self.heartbeat("starting")
        time.sleep(LOOK_AGAIN_S)

    def alive(self) -> None:
        """Send a heartbeat during long work; a process that works alone notices a stop in the middle of it."""
        if self.process.stopping and self.world == 1:
            raise Stop
        self.heartbeat("scoring" if self.names else "loading")

    def heartbeat(self, state: str) -> None:
        self.process.telemetry.heartbeat(state, requests=self.requests)
