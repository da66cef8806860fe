"""The critic role: a model of its own that says what tokens are worth, and learns it from what the trainer trains on.

SHARDS/ORDER.h5 ──forward──► COLUMNS/ORDER.values.h5 ──► the trainer takes the order
ledger entry s, its shards and columns ──► returns ──► value loss ──AdamW──► critic version s + 1 ──► CRITIC/checkpoints/

It runs beside trainer and rollout: while the policy's step s is trained, it learns step s as well, and values what was generated
meanwhile. No order is valued by a critic that learned fewer steps than the policy which began the order: so values are as old as
tokens at most, and at max_staleness 0 those of step s are of critic version s. Rank 0 decides, the others follow.

One that dies learns again from its newest checkpoint on, by ledger, shards and columns: the values that it said stay as they are.
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

from relax_hpc import checkpoint, tensor_files
from relax_hpc.algorithms import ActorCritic, make_algorithm
from relax_hpc.algorithms.base import VALUES
from relax_hpc.recipe.schema import CRITIC_KEY
from relax_hpc.roles import gpus
from relax_hpc.roles.columns import Columns, columns_of
from relax_hpc.roles.missing import Missing, described, opened, put, whole
from relax_hpc.roles.process import Exit, RoleProcess, Stop
from relax_hpc.roles.ranks import (
    as_attempt,
    attempt_folder,
    begin_attempt,
    everywhere,
    first_said,
    meet,
    room_for_all,
    together,
    told,
)
from relax_hpc.roles.taking import take
from relax_hpc.run_dir import Data, RunDir, RunError, read_json
from relax_hpc.spool.column import encode
from relax_hpc.spool.ledger import Entry, Ledger
from relax_hpc.spool.reading import Shards
from relax_hpc.spool.watch import FolderWatch, backoff
from relax_hpc.trainers import CriticTrainer, make_critic
from relax_hpc.trainers.build import SMALL_FILES, weights_folder
from relax_hpc.weights import DamagedWeights, WeightsError, frozen

POLL_FOR_S = 1.0
"""How long one wait lasts before the other processes hear that there is nothing yet."""
LOOK_AGAIN_S = 0.2
"""How often the weights of before step 0 are looked for, and by other ranks the folder of this attempt."""
POLICY = "policy"
"""In the attempt's folder: what the critic begins as."""
KEPT = 2
"""Checkpoints: one that the trainer's newest has a twin of, and one before it."""


def body(process: RoleProcess) -> Exit:
    via = attempt_folder(process.run.critic, process.arguments.attempt)
    return as_attempt(process, via, lambda: Critic(process, via).work())


@dataclass(frozen=True, slots=True)
class Word:
    """What rank 0 decided; all ranks act on it."""

    do: Literal["value", "learn", "save", "wait", "stop"]
    order: str = ""
    behind: int = 0
    """Orders that lack values."""
    entry: Entry | None = None
    waited_s: float = 0.0


class Critic:
    """One process of the role."""

    def __init__(self, process: RoleProcess, via: Path) -> None:
        """via: the attempt's folder."""
        arguments, recipe = process.arguments, process.recipe
        assert recipe.critic is not None
        self.process, self.recipe, self.run, self.config = process, recipe, process.run, recipe.critic
        self.rank, self.world = arguments.rank, arguments.world
        process.telemetry.beat("starting", orders=0)
        about = read_json(process.run.identity)
        self.shards = RunDir(about["shards_from"]) if about["shards_from"] else process.run
        """The run whose shards are trained on."""
        self.front, self.ledger = Shards(self.shards, recipe.spool.front), Ledger(process.run)
        self.own, self.via = RunDir(process.run.critic), via
        self.bound = recipe.run.steps if about["debug"] else recipe.async_.max_staleness
        algorithm = make_algorithm(recipe.algorithm)
        assert isinstance(algorithm, ActorCritic)
        self.algorithm, needed = algorithm, tuple(sorted(algorithm.returns_need))
        self.missing = Missing(process.run, self.shards, (VALUES,), recipe.async_.max_staleness)
        self.columns = Columns(process.run, needed, self.via, process.telemetry.metrics)
        self.checkpoints = FolderWatch(process.run.checkpoints)
        torch.set_num_threads(self.config.threads)
        self.version = int(about.get("fork_step") or 0)
        """Steps that were learned."""
        self.saved, self.orders, self.learned, self.usual_s = -1, 0, 0, 0.0
        self.begin_attempt()
        self.trainer = self.made()

    def work(self) -> NoReturn:
        """Value orders and learn steps until asked to stop."""
        if self.saved < 0:
            self.save()
            shutil.rmtree(self.via / POLICY, ignore_errors=True)  # all ranks have it: they met when they saved
        while True:
            word = self.agree()
            if word.do == "value":
                self.value(word)
            elif word.do == "learn":
                self.learn(word)
            elif word.do == "save":
                self.save()
            elif word.do == "stop":
                if self.saved != self.version:
                    self.save()
                raise Stop

    def begin_attempt(self) -> None:
        """Take over from attempts before this one; meet the other ranks."""
        begin_attempt(self.process, self.via, lambda: self.wait(LOOK_AGAIN_S))
        recipe, device = self.recipe, self.config.device
        if gpus.computes_on_gpu(device, "critic"):
            nodes, scorers = recipe.trainer.nodes, recipe.scorer.processes if recipe.scorer else 0
            if recipe.scores_together:  # on the first node; the critic is on the last one
                scorers *= nodes == 1
            first = recipe.trainer.processes // nodes + math.ceil(scorers / nodes)
            gpus.take_beside(recipe, "critic", first, self.rank, self.world)
        meet(self.via, self.rank, self.world, device)

    def made(self) -> CriticTrainer:
        """As the newest checkpoint has it, or as it begins: with the body of a model of its own, or of the policy before step 0."""
        found = self.own.checkpoint_steps()
        folder = self.recipe.models_beside.get(CRITIC_KEY)
        if folder is None:  # that of a checkpoint has the same shape, and its weights come next
            folder = self.policy_before() if not found else weights_folder(self.recipe.model, self.run.model)
        trainer = make_critic(self.recipe, folder, self.rank, self.world)
        agree = partial(first_said, world=self.world)
        state = checkpoint.restore(self.own, trainer.load, agree, self.put_aside)
        if state is not None:
            self.version = self.saved = state["step"]
        return trainer

    def put_aside(self, step: int, damage: str) -> None:
        """A checkpoint that is damaged."""
        if self.rank == 0:
            checkpoint.put_aside(self.own, self.via, self.run.aside, step, damage)
            self.process.telemetry.metrics(kind="damaged_checkpoint", step=step, reason=damage)

    def policy_before(self) -> Path:
        """A model directory with the policy's weights of before step 0, once the trainer has kept them; it goes with the attempt."""
        folder = self.via / POLICY
        if self.rank == 0:
            tensors = self.kept_weights()
            self.process.when_room(partial(self.write_model, folder, tensors), "what the critic begins as")
        while not folder.exists():
            self.wait(LOOK_AGAIN_S)
        return folder

    def kept_weights(self) -> dict[str, Tensor]:
        while True:
            try:
                return frozen.read(self.run, self.wait)[1]
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
        """Before the first word: each may leave on its own. A role that is starting is given more time."""
        if self.process.stopping:
            raise Stop
        self.beat("starting")
        time.sleep(pause_s)

    def agree(self) -> Word:
        """Rank 0's word, on every rank."""
        word = told(self.decide() if self.rank == 0 else None, self.world)
        if word.do == "wait":
            if not self.via.exists():
                raise FileNotFoundError(self.via)  # fenced: on a node that was cut off it may wait here for ever
            self.beat("idle")
        return word

    def decide(self) -> Word:
        """What there is to do: orders come before steps, for the trainer waits for them."""
        began = time.perf_counter()
        for pause_s in backoff(usual_s=self.usual_s):
            if self.process.stopping:
                return Word("stop")
            if self.twin_wanted():
                return Word("save")
            waited_s = time.perf_counter() - began
            ready, lacking = self.missing.first(self.front, self.version, lambda: self.beat("idle"))
            if ready is not None:
                self.usual_s = max(waited_s, self.usual_s / 2)
                return Word("value", order=ready, behind=lacking, waited_s=waited_s)
            entry = self.ledger.find(self.version) if self.version < self.recipe.run.steps else None
            if entry is not None and columns_of(entry, self.front, self.columns) is not None:
                return Word("learn", entry=entry, waited_s=waited_s)
            if waited_s > POLL_FOR_S:
                return Word("wait")
            self.beat("idle")
            time.sleep(pause_s)
        raise AssertionError("backoff ends never")

    def twin_wanted(self) -> bool:
        """Whether the trainer made a checkpoint out of turn (it was stopped, or needs room), and ours is older than that."""
        steps = [int(name[5:]) for name in self.checkpoints.names() if name.startswith("step-")]
        return any(self.saved < step <= self.version for step in steps)

    def value(self, word: Word) -> None:
        """Make the values of an order."""
        began = time.perf_counter()
        read = opened(self.shards, self.front, word.order, whole)
        if not everywhere(read is not None, self.world):
            self.missing.done(word.order)
            return
        assert read is not None
        rollouts, about, of_shard = read
        values = self.trainer.values(rollouts, lambda: self.beat("valuing"))
        valued_s = time.perf_counter() - began
        self.missing.done(word.order)
        self.orders += 1
        path = self.run.column(word.order, VALUES)
        image = encode(VALUES, word.order, of_shard, f"critic {self.version}", values)
        self.process.when_room(partial(self.publish, path, image, self.shards.shard(word.order)), f"column {path.name}")
        if self.rank != 0:
            return
        publish_s = time.perf_counter() - began - valued_s
        more = {"wait_s": word.waited_s, "publish_s": publish_s, "behind": word.behind}
        self.process.telemetry.metrics(**described(word.order, [VALUES], rollouts, about["created"], valued_s, **more))

    def publish(self, path: Path, image: Data, shard: Path) -> None:
        with room_for_all(self.world):
            if self.rank == 0:
                put(path, image, shard, self.via)

    def learn(self, word: Word) -> None:
        """Learn a step."""
        entry, began = word.entry, time.perf_counter()
        assert entry is not None
        oldest = entry.step - self.bound if self.recipe.async_.late == "mask" else None
        read = partial(take, entry, self.run, self.front, self.columns.names, oldest=oldest)
        rollouts = together(read, self.world).rollouts
        metrics = self.trainer.learn(rollouts, self.algorithm, entry.step, lambda: self.beat("learning"))
        self.version += 1
        self.learned += 1
        if self.rank == 0:
            learn_s = time.perf_counter() - began
            self.process.telemetry.metrics(
                kind="critic", step=entry.step, version=self.version, wait_s=word.waited_s, learn_s=learn_s, **metrics
            )
        if self.version == self.recipe.run.steps or self.version % self.recipe.run.checkpoint_every == 0:
            self.save()

    def save(self) -> None:
        """Checkpoint this version; collective."""
        self.beat("checkpointing")
        self.process.when_room(self.write_checkpoint, f"the critic's checkpoint of step {self.version}")
        self.saved = self.version

    def write_checkpoint(self) -> None:
        folder = checkpoint.unfinished(self.via, self.version)
        if self.rank == 0:
            self.own.checkpoints.mkdir(exist_ok=True)
            checkpoint.begin(self.via, self.version)
        with room_for_all(self.world):
            checksums = self.trainer.save(folder)
        with room_for_all(self.world):
            if self.rank == 0:
                checkpoint.commit(self.own, folder, self.version, {}, checksums)
                checkpoint.rotate(self.own, self.via, KEPT)

    def beat(self, state: str) -> None:
        self.process.telemetry.beat(state, orders=self.orders, step=self.version, learned=self.learned)
