"""The critic role: a value model of its own that says what tokens are worth, and learns from the steps that the trainer
takes.

    SHARDS/REQUEST.h5 ──forward──► COLUMNS/REQUEST.values.h5 ──► the trainer takes the request
    ledger entry s, its shards and columns ──► returns ──► value loss ──AdamW──► critic version s + 1 ──► CRITIC/checkpoints/

It runs beside trainer and rollout: while the policy's step s is trained, the critic learns step s as well, and values
what was generated meanwhile. No request is valued by a critic that learned fewer steps than the policy which began the
request. So values are at most as old as tokens, and at max_staleness 0 those of step s are of critic version s. Rank 0
decides, the others follow.

A critic that dies learns again from its newest checkpoint on, by ledger, shards and columns; the values that it
published stay as they are.
"""

from __future__ import annotations

import math
import os
import shutil
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, NoReturn

import torch
from torch import Tensor

from relax_hpc import checkpoint
from relax_hpc.algorithms import ActorCritic, make_algorithm
from relax_hpc.algorithms.base import VALUES
from relax_hpc.files import tensor_files
from relax_hpc.files.errors import RunError
from relax_hpc.files.publish import Data, read_json
from relax_hpc.files.run_dir import RunDir
from relax_hpc.files.watch import FolderWatch, backoff
from relax_hpc.recipe.schema import CRITIC_KEY
from relax_hpc.roles.common import gpus
from relax_hpc.roles.common.process import Exit, RoleProcess, Stop
from relax_hpc.roles.common.ranks import (
    as_attempt,
    attempt_folder,
    begin_attempt,
    everywhere,
    first_said,
    meet,
    room_for_all,
    told,
)
from relax_hpc.roles.scoring.pending_columns import PendingColumns, described, opened, put, whole
from relax_hpc.roles.training.columns import Columns, columns_of
from relax_hpc.roles.training.load_batch import load, take
from relax_hpc.roles.training.quarantine import Quarantine
from relax_hpc.spool.column import encode
from relax_hpc.spool.ledger import Entry, Ledger
from relax_hpc.spool.reading import Shards
from relax_hpc.trainers import CriticTrainer, make_critic
from relax_hpc.trainers.build import SMALL_FILES, weights_folder
from relax_hpc.weights import DamagedWeights, WeightsError, reference

POLL_FOR_S = 1.0
"""Seconds that one wait lasts before the other processes hear that there is nothing yet."""
LOOK_AGAIN_S = 0.2
"""Seconds between looks for the weights of before step 0, and, on other ranks, for this attempt's folder."""
POLICY = "policy"
"""Folder within the attempt's with the policy's weights of before step 0, as which the critic begins."""
KEPT = 2
"""Checkpoints kept: one as new as the trainer's newest, and one before it."""


def body(process: RoleProcess) -> Exit:
    commit_dir = attempt_folder(process.run.critic, process.arguments.attempt)
    return as_attempt(process, commit_dir, lambda: Critic(process, commit_dir).work())


@dataclass(frozen=True, slots=True)
class Command:
    """Rank 0's decision, which all ranks act on."""

    do: Literal["value", "learn", "save", "wait", "stop"]
    request: str = ""
    behind: int = 0
    """How many requests lack values."""
    entry: Entry | None = None
    waited_s: float = 0.0


class Critic:
    """One process of the critic role."""

    def __init__(self, process: RoleProcess, commit_dir: Path) -> None:
        """commit_dir: the attempt's folder."""
        arguments, recipe = process.arguments, process.recipe
        assert recipe.critic is not None
        self.process, self.recipe, self.run = process, recipe, process.run
        self.rank, self.world = arguments.rank, arguments.world
        process.telemetry.heartbeat("starting", requests=0)
        about = read_json(process.run.identity)
        self.shards = RunDir(about["shards_from"]) if about["shards_from"] else process.run
        """The run whose shards are trained on."""
        self.shard_reader, self.ledger = Shards(self.shards, recipe.spool.node_cache), Ledger(process.run)
        self.own, self.commit_dir = RunDir(process.run.critic), commit_dir
        self.bound = recipe.run.steps if about["debug"] else recipe.async_.max_staleness
        algorithm = make_algorithm(recipe.algorithm)
        assert isinstance(algorithm, ActorCritic)
        self.algorithm, needed = algorithm, tuple(sorted(algorithm.returns_need))
        self.pending = PendingColumns(process.run, self.shards, (VALUES,), recipe.async_.max_staleness)
        self.columns = Columns(process.run, needed, self.commit_dir, process.telemetry.metrics)
        self.checkpoints = FolderWatch(process.run.checkpoints)
        torch.set_num_threads(recipe.trainer.threads)
        self.version = int(about.get("fork_step") or 0)
        """How many steps were learned."""
        self.saved, self.requests, self.learned, self.usual_s = -1, 0, 0, 0.0
        self.begin_attempt()
        self.trainer = self.made()

    def work(self) -> NoReturn:
        """Value requests and learn steps until asked to stop."""
        if self.saved < 0:
            self.save()
            shutil.rmtree(self.commit_dir / POLICY, ignore_errors=True)  # all ranks have it: they met when they saved
        while True:
            command = self.agree()
            if command.do == "value":
                self.value(command)
            elif command.do == "learn":
                self.learn(command)
            elif command.do == "save":
                self.save()
            elif command.do == "stop":
                if self.saved != self.version:
                    self.save()
                raise Stop

    def begin_attempt(self) -> None:
        """Take over from earlier attempts; meet the other ranks."""
        begin_attempt(self.process, self.commit_dir, lambda: self.wait(LOOK_AGAIN_S))
        recipe, device = self.recipe, self.recipe.trainer.device
        if gpus.computes_on_gpu(device, "critic"):
            nodes, scorers = recipe.trainer.nodes, recipe.scorer.processes if recipe.scorer else 0
            if recipe.scores_together:  # on the first node; the critic is on the last one
                scorers *= nodes == 1
            first = recipe.trainer.processes // nodes + math.ceil(scorers / nodes)
            gpus.take_beside(recipe, "critic", first, self.rank, self.world)
        meet(self.commit_dir, self.rank, self.world, device)

    def made(self) -> CriticTrainer:
        """Return the trainer as the newest checkpoint has it, or as it begins: with the body of a model of its own, or
        of the policy before step 0."""
        found = self.own.checkpoint_steps()
        folder = self.recipe.models_beside.get(CRITIC_KEY)
        if folder is None:  # that of a checkpoint has the same shape, and its weights come next
            folder = self.policy_before() if not found else weights_folder(self.recipe.model, self.run.model)
        trainer = make_critic(self.recipe, folder, self.rank, self.world)
        agree = partial(first_said, world=self.world)
        state = checkpoint.restore(self.own, trainer.load, agree, self.move_to_quarantine)
        if state is not None:
            self.version = self.saved = state["step"]
        return trainer

    def move_to_quarantine(self, step: int, damage: str) -> None:
        """Quarantine a damaged checkpoint."""
        if self.rank == 0:
            checkpoint.move_to_quarantine(self.own, self.commit_dir, self.run.quarantine, step, damage)
            self.process.telemetry.metrics(kind="damaged_checkpoint", step=step, reason=damage)

    def policy_before(self) -> Path:
        """Return a model directory with the policy's weights of before step 0, once the trainer has kept them. It is
        removed with the attempt."""
        folder = self.commit_dir / POLICY
        if self.rank == 0:
            tensors = self.kept_weights()
            self.process.when_room(partial(self.write_model, folder, tensors), "what the critic begins as")
        while not folder.exists():
            self.wait(LOOK_AGAIN_S)
        return folder

    def kept_weights(self) -> dict[str, Tensor]:
        while True:
            try:
                return reference.read(self.run, self.wait)[1]
            except DamagedWeights as error:
                raise RunError(f"{error}; put the reference back from a copy of the run, or begin a new run") from error
            except WeightsError:  # it is not there yet, or just being replaced
                self.wait(LOOK_AGAIN_S)

    def write_model(self, folder: Path, tensors: dict[str, Tensor]) -> None:
        staged = folder.with_suffix(".staged")
        shutil.rmtree(staged, ignore_errors=True)
        staged.mkdir()
        for path in (path for pattern in SMALL_FILES for path in self.run.model.glob(pattern)):
            shutil.copyfile(path, staged / path.name)
        tensor_files.write(staged / "model.safetensors", tensors.items(), durable=False)
        os.rename(staged, folder)

    def wait(self, pause_s: float = 0.0) -> None:
        """Wait before the first command: each process may leave on its own. A role that is starting is given more
        time."""
        if self.process.stopping:
            raise Stop
        self.heartbeat("starting")
        time.sleep(pause_s)

    def agree(self) -> Command:
        """Broadcast rank 0's command and return it, on every rank."""
        command = told(self.decide() if self.rank == 0 else None, self.world)
        if command.do == "wait":
            if not self.commit_dir.exists():
                raise FileNotFoundError(self.commit_dir)  # fenced: on a node that was cut off it may wait here for ever
            self.heartbeat("idle")
        return command

    def decide(self) -> Command:
        """Decide what to do next. Requests come before steps, for the trainer waits for them."""
        began = time.perf_counter()
        for pause_s in backoff(usual_s=self.usual_s):
            if self.process.stopping:
                return Command("stop")
            if self.twin_wanted():
                return Command("save")
            waited_s = time.perf_counter() - began
            ready, lacking = self.pending.first(self.shard_reader, self.version, lambda: self.heartbeat("idle"))
            if ready is not None:
                self.usual_s = max(waited_s, self.usual_s / 2)
                return Command("value", request=ready, behind=lacking, waited_s=waited_s)
            entry = self.ledger.find(self.version) if self.version < self.recipe.run.steps else None
            if entry is not None and columns_of(entry, self.shard_reader, self.columns) is not None:
                return Command("learn", entry=entry, waited_s=waited_s)
            if waited_s > POLL_FOR_S:
                return Command("wait")
            self.heartbeat("idle")
            time.sleep(pause_s)
        raise AssertionError("backoff ends never")

    def twin_wanted(self) -> bool:
        """Return True if the trainer made a checkpoint out of turn (it was stopped, or needs room) and ours is
        older."""
        steps = [int(name[5:]) for name in self.checkpoints.names() if name.startswith("step-")]
        return any(self.saved < step <= self.version for step in steps)

    def value(self, command: Command) -> None:
        """Compute and publish the values of a request."""
        began = time.perf_counter()
        read = opened(self.shards, self.shard_reader, command.request, whole)
        if not everywhere(read is not None, self.world):
            self.pending.done(command.request)
            return
        assert read is not None
        rollouts, about, of_shard = read
        values = self.trainer.values(rollouts, lambda: self.heartbeat("valuing"))
        valued_s = time.perf_counter() - began
        self.pending.done(command.request)
        self.requests += 1
        path = self.run.column(command.request, VALUES)
        image = encode(VALUES, command.request, of_shard, f"critic {self.version}", values)
        self.process.when_room(
            partial(self.publish, path, image, self.shards.shard(command.request)), f"column {path.name}"
        )
        if self.rank != 0:
            return
        publish_s = time.perf_counter() - began - valued_s
        more = {"wait_s": command.waited_s, "publish_s": publish_s, "behind": command.behind}
        self.process.telemetry.metrics(
            **described(command.request, [VALUES], rollouts, about["created"], valued_s, **more)
        )

    def publish(self, path: Path, image: Data, shard: Path) -> None:
        with room_for_all(self.world):
            if self.rank == 0:
                put(path, image, shard, self.commit_dir)

    def learn(self, command: Command) -> None:
        """Learn a step."""
        entry, began = command.entry, time.perf_counter()
        assert entry is not None
        oldest = entry.step - self.bound if self.recipe.async_.on_stale == "mask" else None
        read = partial(take, entry, self.run, self.shard_reader, self.columns.names, oldest=oldest)
        quarantine = Quarantine(self.run, self.commit_dir, self.process.telemetry.metrics)
        rollouts = load(read, entry, self.shard_reader, quarantine, self.rank, self.world).rollouts
        metrics = self.trainer.learn(rollouts, self.algorithm, entry.step, lambda: self.heartbeat("learning"))
        self.version += 1
        self.learned += 1
        if self.rank == 0:
            learn_s = time.perf_counter() - began
            self.process.telemetry.metrics(
                kind="critic",
                step=entry.step,
                version=self.version,
                wait_s=command.waited_s,
                learn_s=learn_s,
                **metrics,
            )
        if self.version == self.recipe.run.steps or self.version % self.recipe.run.checkpoint_every == 0:
            self.save()

    def save(self) -> None:
        """Checkpoint this version; collective."""
        self.heartbeat("checkpointing")
        self.process.when_room(self.write_checkpoint, f"the critic's checkpoint of step {self.version}")
        self.saved = self.version

    def write_checkpoint(self) -> None:
        folder = checkpoint.unfinished(self.commit_dir, self.version)
        if self.rank == 0:
            self.own.checkpoints.mkdir(exist_ok=True)
            checkpoint.begin(self.commit_dir, self.version)
        with room_for_all(self.world):
            checksums = self.trainer.save(folder)
        with room_for_all(self.world):
            if self.rank == 0:
                checkpoint.commit(self.own, folder, self.version, {}, checksums)
                checkpoint.rotate(self.own, self.commit_dir, KEPT)

    def heartbeat(self, state: str) -> None:
        self.process.telemetry.heartbeat(state, requests=self.requests, step=self.version, learned=self.learned)
