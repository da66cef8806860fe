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
from functools import partial
from pathlib import Path

from torch import Tensor

from relax_hpc import checkpoint
from relax_hpc.algorithms import ActorCritic, make_algorithm
from relax_hpc.algorithms.base import VALUES
from relax_hpc.files import tensor_files
from relax_hpc.files.errors import RunError
from relax_hpc.files.run_dir import RunDir
from relax_hpc.files.watch import FolderWatch
from relax_hpc.recipe.schema import CRITIC_KEY
from relax_hpc.roles.common.columns import Columns, columns_of
from relax_hpc.roles.common.load_batch import load, load_batch
from relax_hpc.roles.common.process import Exit, RoleProcess
from relax_hpc.roles.common.quarantine import Quarantine
from relax_hpc.roles.common.ranks import attempt_folder, room_for_all, until_fenced
from relax_hpc.roles.common.role import Command
from relax_hpc.roles.scoring.column_role import ColumnRole, Lacking
from relax_hpc.spool.ledger import Entry, Ledger
from relax_hpc.trainers import CriticTrainer, make_critic
from relax_hpc.trainers.build import SMALL_FILES, weights_folder
from relax_hpc.weights import DamagedWeights, WeightsError, reference

POLICY = "policy"
"""Folder within the attempt's with the policy's weights of before step 0, as which the critic begins."""
KEPT = 2
"""Checkpoints kept: one as new as the trainer's newest, and one before it."""


def body(process: RoleProcess) -> Exit:
    commit_dir = attempt_folder(process.run.critic, process.arguments.attempt)
    return until_fenced(process, commit_dir, lambda: Critic(process, commit_dir).work())


class Critic(ColumnRole):
    """One process of the critic role."""

    commit_dir: Path
    version = 0
    """How many steps were learned."""
    saved, learned = -1, 0

    def __init__(self, process: RoleProcess, commit_dir: Path) -> None:
        """commit_dir: the attempt's folder."""
        algorithm = make_algorithm(process.recipe.algorithm)
        assert process.recipe.critic is not None and isinstance(algorithm, ActorCritic)
        super().__init__(process, commit_dir)
        self.algorithm, self.ledger, self.own = algorithm, Ledger(process.run), RunDir(process.run.critic)
        self.bound = self.recipe.run.steps if self.identity["debug"] else self.recipe.async_.max_staleness
        self.pending = self.pending_columns((VALUES,))
        needed = tuple(sorted(algorithm.returns_need))
        self.columns = Columns(process.run, needed, self.commit_dir, process.telemetry.metrics)
        self.checkpoints = FolderWatch(process.run.checkpoints)
        self.actions = {"value": self.value, "learn": self.learn, "save": lambda _: self.save()}
        self.version = int(self.identity.get("fork_step") or 0)
        self.trainer = self.made()

    def work(self) -> Exit:
        """Value requests and learn steps until asked to stop."""
        if self.saved < 0:
            self.save()
            shutil.rmtree(self.commit_dir / POLICY, ignore_errors=True)  # all ranks have it: they met when they saved
        last = self.act()
        if self.saved != self.version:
            self.save()
        return last.exit

    def first_gpu(self) -> int:
        """See ColumnRole. The critic is on the last node, scorers of one group are on the first one."""
        recipe = self.recipe
        nodes, scorers = recipe.trainer.nodes, recipe.scorer.processes if recipe.scorer else 0
        if recipe.scores_together:
            scorers *= nodes == 1
        return super().first_gpu() + math.ceil(scorers / nodes)

    def made(self) -> CriticTrainer:
        """Return the trainer as the newest checkpoint has it, or as it begins: with the body of a model of its own, or
        of the policy before step 0."""
        found = self.own.checkpoint_steps()
        folder = self.recipe.models_beside.get(CRITIC_KEY)
        if folder is None:  # that of a checkpoint has the same shape, and its weights come next
            folder = self.policy_before() if not found else weights_folder(self.recipe.model, self.run.model)
        trainer = make_critic(self.recipe, folder, self.rank, self.world)
        state = self.restore(self.own, trainer.load)
        if state is not None:
            self.version = self.saved = state["step"]
        return trainer

    def policy_before(self) -> Path:
        """Return a model directory with the policy's weights of before step 0, once the trainer has kept them. It is
        removed with the attempt."""
        folder = self.commit_dir / POLICY
        if self.rank == 0:
            tensors = self.kept_weights()
            self.process.when_room(partial(self.write_model, folder, tensors), "what the critic begins as")
        while not folder.exists():
            self.wait()
        return folder

    def kept_weights(self) -> dict[str, Tensor]:
        while True:
            try:
                return reference.read(self.run, lambda: self.wait(0.0))[1]
            except DamagedWeights as error:
                raise RunError(f"{error}; put the reference back from a copy of the run, or begin a new run") from error
            except WeightsError:  # it is not there yet, or just being replaced
                self.wait()

    def write_model(self, folder: Path, tensors: dict[str, Tensor]) -> None:
        staged = folder.with_suffix(".staged")
        shutil.rmtree(staged, ignore_errors=True)
        staged.mkdir()
        for path in (path for pattern in SMALL_FILES for path in self.run.model.glob(pattern)):
            shutil.copyfile(path, staged / path.name)
        tensor_files.write(staged / "model.safetensors", tensors.items(), durable=False)
        os.rename(staged, folder)

    def decide(self) -> Command:
        """Decide what to do next. Requests come before steps, for the trainer waits for them."""
        return self.poll(self.look)

    def look(self, waited_s: float) -> Command | None:
        if self.twin_wanted():
            return Command("save")
        ready, lacking = self.pending.first(self.shard_reader, self.version, lambda: self.heartbeat(self.idle))
        if ready is not None:
            return Command("value", Lacking(ready, lacking, waited_s))
        entry = self.ledger.find(self.version) if self.version < self.recipe.run.steps else None
        if entry is not None and columns_of(entry, self.shard_reader, self.columns) is not None:
            return Command("learn", (entry, waited_s))
        return None

    def twin_wanted(self) -> bool:
        """Return True if the trainer made a checkpoint out of turn (it was stopped, or needs room) and ours is
        older."""
        steps = [int(name[5:]) for name in self.checkpoints.names() if name.startswith("step-")]
        return any(self.saved < step <= self.version for step in steps)

    def value(self, lacking: Lacking) -> None:
        """Compute and publish the values of a request."""
        began = time.perf_counter()
        shard = self.read(lacking.request, self.pending)
        if shard is None:
            return
        values = self.trainer.values(shard.rollouts, lambda: self.heartbeat("valuing"))
        self.pending.done(lacking.request)
        valued_s = time.perf_counter() - began
        self.publish_columns(lacking, shard, {VALUES: (f"critic {self.version}", values)}, valued_s)

    def learn(self, work: tuple[Entry, float]) -> None:
        """Learn a step: its entry, and the seconds waited for it."""
        (entry, waited_s), began = work, time.perf_counter()
        oldest = entry.step - self.bound if self.recipe.async_.on_stale == "mask" else None
        read = partial(load_batch, entry, self.run, self.shard_reader, self.columns.names, oldest=oldest)
        quarantine = Quarantine(self.run, self.commit_dir, self.process.telemetry.metrics)
        rollouts = load(read, entry, self.shard_reader, quarantine, self.rank, self.world).rollouts
        metrics = self.trainer.learn(rollouts, self.algorithm, entry.step, lambda: self.heartbeat("learning"))
        self.version += 1
        self.learned += 1
        if self.rank == 0:
            seconds = {"wait_s": waited_s, "learn_s": time.perf_counter() - began}
            self.process.telemetry.metrics(kind="critic", step=entry.step, version=self.version, **seconds, **metrics)
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
