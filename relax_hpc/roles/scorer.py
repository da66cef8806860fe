"""The scorer role: it holds models that do not learn, and says what they make of each order's tokens.

SHARDS/ORDER.h5 ──► a forward of the reference, of the teacher ──► COLUMNS/ORDER.NAME.h5 ──► the trainer takes the order

It reads shards and writes columns, and knows no step. Orders are shared out by their names; earlier batches come first. One
that dies leaves nothing: who is started in its place makes the columns that are missing, with the same numbers.
"""

from __future__ import annotations

import os
import time
from functools import partial
from typing import NoReturn

import torch

from relax_hpc.recipe.schema import TEACHER_KEY
from relax_hpc.roles import gpus
from relax_hpc.roles.missing import Missing, described, opened, put, whole
from relax_hpc.roles.process import Exit, RoleProcess, Stop
from relax_hpc.run_dir import RunDir, RunError, read_json
from relax_hpc.spool.column import encode
from relax_hpc.spool.front import Front
from relax_hpc.spool.watch import backoff
from relax_hpc.trainers.scoring import Frozen
from relax_hpc.trainers.torch import device_of
from relax_hpc.weights import DamagedWeights, WeightsError, frozen
from relax_hpc.weights.contents import checksum
from relax_hpc.weights.parts import digest

LOOK_AGAIN_S = 1.0
"""How often the reference is looked for, before it is there."""


def body(process: RoleProcess) -> Exit:
    Scorer(process).work()


class Scorer:
    """One process: the models, and its share of the orders."""

    def __init__(self, process: RoleProcess) -> None:
        assert process.recipe.scorer is not None
        self.process, self.recipe, self.run, self.config = process, process.recipe, process.run, process.recipe.scorer
        process.telemetry.beat("starting", orders=0)
        source = read_json(process.run.identity)["shards_from"]
        self.shards = RunDir(source) if source else process.run
        self.front = Front(self.shards, self.recipe.spool.front)
        self.missing = Missing(
            self.run, self.shards, self.recipe.scored, self.recipe.async_.max_staleness, process.arguments.rank, self.config.processes
        )  # fmt: skip
        torch.set_num_threads(self.config.threads)
        if gpus.computes_on_gpu(self.config.device, "scorer"):
            trainers = self.recipe.trainer.processes // self.recipe.trainer.nodes
            torch.cuda.set_device((trainers + process.arguments.rank) % torch.cuda.device_count())
        self.device = device_of(self.config.device, "scorer")
        self.models: dict[str, tuple[str, Frozen]] = {}
        """Each with the checksum of its weights."""
        self._reference_seen: tuple[int, int] | None = None
        self.orders, self.usual_s = 0, 0.0

    def work(self) -> NoReturn:
        """Score orders until asked to stop."""
        if "teacher" in self.recipe.scored:
            model = Frozen.at(self.recipe, self.recipe.models_beside[TEACHER_KEY], self.device)
            self.models["teacher"] = checksum(digest(model.tensors().items(), progress=self.alive)), model
        while True:
            order, behind, waited_s = self.wait_for_order()
            if "reference" in self.recipe.scored:
                self.hold_reference()
            self.score(order, behind, waited_s)

    def hold_reference(self) -> None:
        """Load the reference; again where a trainer that began anew put another in its place."""
        for pause_s in backoff(last_s=LOOK_AGAIN_S):
            try:
                stat = os.stat(self.run.reference / "index.json")
            except FileNotFoundError:
                self.progress("waiting for the reference")
                time.sleep(pause_s)
                continue
            if (stat.st_ino, stat.st_mtime_ns) == self._reference_seen:
                return
            self.progress("loading")
            try:
                name, tensors = frozen.read(self.run, self.alive)
            except DamagedWeights as error:
                raise RunError(f"{error}; put the reference back from a copy of the run, or begin a new run") from error
            except WeightsError:  # it is just being replaced
                continue
            model = Frozen.of(self.recipe, self.run.model, tensors, self.run.reference, self.device)
            self.models["reference"] = name, model
            self._reference_seen = stat.st_ino, stat.st_mtime_ns
            return

    def wait_for_order(self) -> tuple[str, int, float]:
        """Wait for a shard that lacks a column; its order, how many such there are, and the seconds waited."""
        began = time.perf_counter()
        for pause_s in backoff(watchers=self.config.processes, usual_s=self.usual_s):
            self.progress("idle")
            orders = self.missing.orders()
            if orders:
                waited_s = time.perf_counter() - began
                self.usual_s = max(waited_s, self.usual_s / 2)
                return orders[0], len(orders), waited_s
            time.sleep(pause_s)
        raise AssertionError("backoff ends never")

    def score(self, order: str, behind: int, waited_s: float) -> None:
        """Make the columns of an order."""
        began = time.perf_counter()
        read = opened(self.shards, self.front, order, whole)
        if read is None:
            self.missing.done(order)
            return
        rollouts, about, of_shard = read
        found = {
            name: (weights, model.logprobs(rollouts, self.alive)) for name, (weights, model) in self.models.items()
        }
        score_s = time.perf_counter() - began
        for name, (weights, values) in found.items():
            path, image = self.run.column(order, name), encode(name, order, of_shard, weights, values)
            self.process.when_room(partial(put, path, image, self.shards.shard(order)), f"column {path.name}")
        publish_s = time.perf_counter() - began - score_s
        self.missing.done(order)
        self.orders += 1
        more = {"wait_s": waited_s, "publish_s": publish_s, "behind": behind}
        self.process.telemetry.metrics(**described(order, list(found), rollouts, about["created"], score_s, **more))

    def alive(self) -> None:
        self.progress("scoring" if self.models else "loading")

    def progress(self, state: str) -> None:
        """The heartbeat in everything that lasts; also where a stop is noticed."""
        if self.process.stopping:
            raise Stop
        self.process.telemetry.beat(state, orders=self.orders)
