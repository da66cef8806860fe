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
from pathlib import Path

from torch import Tensor

from relax_hpc.algorithms.base import RECOMPUTED, REFERENCE, TEACHER
from relax_hpc.files.errors import RunError
from relax_hpc.recipe.schema import TEACHER_KEY
from relax_hpc.roles.common.process import Exit, RoleProcess, Stop
from relax_hpc.roles.common.ranks import attempt_folder, until_fenced
from relax_hpc.roles.common.role import Command
from relax_hpc.roles.scoring.column_role import LOOK_AGAIN_S, ColumnRole, Lacking
from relax_hpc.trainers import make_scoring
from relax_hpc.trainers.build import tensors_in
from relax_hpc.weights import DamagedWeights, Receiver, Version, WeightsError, make_receiver, reference
from relax_hpc.weights.contents import checksum
from relax_hpc.weights.parts import digest


def body(process: RoleProcess) -> Exit:
    if process.recipe.scores_together:
        commit_dir = attempt_folder(process.run.scorer, process.arguments.attempt)
        return until_fenced(process, commit_dir, lambda: Scorer(process, commit_dir).work())
    return Scorer(process, None).work()


@dataclass(frozen=True, slots=True)
class ToScore(Lacking):
    """A request, and the weights to score it with."""

    reference: str
    """Checksum of the reference weights; empty where none are used."""
    policy: Version | None
    """The version of the policy; None where none is used."""


class Scorer(ColumnRole):
    """One scorer process: the models, or its part of them, and its share of the requests."""

    def __init__(self, process: RoleProcess, commit_dir: Path | None) -> None:
        """commit_dir: the attempt's folder, for a process that is one of a group; else None."""
        recipe, config = process.recipe, process.recipe.scorer
        assert config is not None
        self.names: dict[str, str] = {}
        """Model -> the weights that it has: a checksum, or a version of the policy. Equal on every rank."""
        super().__init__(process, commit_dir)
        self._reference_seen: tuple[tuple[int, int], str] = (0, 0), ""
        share = (0, 1) if commit_dir else (process.arguments.rank, config.processes)
        self.pending, self.watchers = self.pending_columns(recipe.scored, *share), share[1]
        self.actions = {"score": self.score}
        self.models = make_scoring(recipe, self.run.model, self.rank, self.world)
        self.receiver: Receiver | None = None
        if RECOMPUTED in recipe.scored:
            # no copy in the node's memory: nobody would clear it where no rollout worker is
            name = f"{process.name}-{process.arguments.attempt:04d}"
            self.receiver = make_receiver(recipe, process.run, name, copies=False)

    def work(self) -> Exit:
        """Score requests until asked to stop."""
        try:
            if TEACHER in self.recipe.scored:
                folder = self.recipe.models_beside[TEACHER_KEY]
                self.models.hold(TEACHER, folder)
                name = checksum(digest(tensors_in(folder), progress=self.alive)) if self.rank == 0 else ""
                self.names[TEACHER] = name
            return self.act().exit
        finally:
            if self.receiver is not None:
                self.receiver.close()

    def decide(self) -> Command:
        """Wait for a shard that lacks a column, and return the command to score it."""
        return self.poll(self.look, self.watchers)

    def look(self, waited_s: float) -> Command | None:
        reference, policy = self.reference(), self.receiver.newest() if self.receiver else None
        self.idle = "waiting for the reference" if reference is None else "idle"
        version = policy.number if policy else None if self.receiver is None else -1
        request, lacking = self.pending.first(self.shard_reader, version, lambda: self.heartbeat(self.idle))
        if request is None or reference is None:
            return None
        return Command("score", ToScore(request, lacking, waited_s, reference, policy))

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

    def hold(self, request: ToScore) -> bool:
        """Load the weights that a request is to be scored with. Return True if every rank has them."""
        held = self.names.get(REFERENCE, "") == request.reference or self.load_reference(request.reference)
        return held and (request.policy is None or self.load_policy(request.policy))

    def load_reference(self, name: str) -> bool:
        """Load the reference weights; a trainer that began anew may be replacing them meanwhile."""
        found, tensors = "", dict[str, Tensor]()
        try:
            found, tensors = reference.read(self.run, self.alive)
        except DamagedWeights as error:
            raise RunError(f"{error}; put the reference back from a copy of the run, or begin a new run") from error
        except WeightsError as error:
            self.process.log.warning("%s", error)
        return self.load(REFERENCE, name, tensors if found == name else None, self.run.reference)

    def load_policy(self, version: Version) -> bool:
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
            return self.load(RECOMPUTED, name, tensors, self.run.weights)

    def load(self, model: str, name: str, tensors: Mapping[str, Tensor] | None, where: Path) -> bool:
        """Give a model these weights once every rank has them: ranks that share a model load them together."""
        if not self.everywhere(tensors is not None):
            time.sleep(LOOK_AGAIN_S)
            return False
        assert tensors is not None
        self.models.load(model, tensors, where)
        self.names[model] = name
        return True

    def score(self, lacking: ToScore) -> None:
        """Compute and publish the columns of a request."""
        if not self.hold(lacking):
            return
        began = time.perf_counter()
        routed = self.recipe.rollout.routed_experts and self.recipe.trainer.backend == "megatron"
        shard = self.read(lacking.request, self.pending, routed)
        if shard is None:
            return
        columns = {
            name: (self.names[name], self.models.logprobs(name, shard.rollouts, self.alive))
            for name in self.recipe.scored
        }
        self.publish_columns(lacking, shard, columns, time.perf_counter() - began)
        self.pending.done(lacking.request)

    def alive(self) -> None:
        """Send a heartbeat during long work; a process that works alone notices a stop in the middle of it."""
        if self.process.stopping and self.world == 1:
            raise Stop
        self.heartbeat("scoring" if self.names else "loading")
