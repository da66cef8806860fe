"""The trainer role: a step is one page. Rank 0 decides (controller.py); every rank makes every step.

shards ──take: bound checked, ledger entry linked──► advantages ► packed micro-batches ► step ► version s + 1 ► workers
  └─► columns, where scorers or a critic make them
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import AutoConfig, AutoTokenizer

from relax_hpc import checkpoint
from relax_hpc.algorithms import make_algorithm
from relax_hpc.algorithms.base import REFERENCE
from relax_hpc.data import PromptSources
from relax_hpc.data.examples import ExampleLoader
from relax_hpc.engines.model_folder import context_of
from relax_hpc.environments.tools.schemas import with_tools
from relax_hpc.files.errors import RunError
from relax_hpc.records import Rollouts
from relax_hpc.roles.common.load_batch import Batch, load, load_batch
from relax_hpc.roles.common.process import Exit, RoleProcess, is_full
from relax_hpc.roles.common.ranks import room_for_all, told, until_fenced
from relax_hpc.roles.common.role import Command
from relax_hpc.roles.training import sft
from relax_hpc.roles.training.controller import Controller
from relax_hpc.roles.training.shared_devices import SharedDevices
from relax_hpc.roles.training.state import TrainerState
from relax_hpc.roles.training.step_metrics import Clock
from relax_hpc.spool.ledger import Entry
from relax_hpc.trainers import make_trainer
from relax_hpc.trainers.base import Saving
from relax_hpc.weights import WeightsError, reference


def body(process: RoleProcess) -> Exit:
    return until_fenced(process, Path(process.arguments.incarnation), lambda: TrainerRole(process).train())


@dataclass(frozen=True, slots=True)
class Begun:
    """A checkpoint that is being written, with everything needed to commit it."""

    saving: Saving
    folder: Path
    step: int
    state: dict[str, Any]
    keep: int


class TrainerRole(TrainerState):
    """The training loop, on every rank. Rank 0's own part is in `controller`."""

    def __init__(self, process: RoleProcess) -> None:
        super().__init__(process)
        recipe = self.recipe
        self.devices = SharedDevices(self)
        self.devices.wait()
        self.algorithm = make_algorithm(recipe.algorithm)
        self.trainer = make_trainer(recipe, process.run.model, self.rank, self.world)
        self.saving: tuple[Begun, float] | None = None
        config = AutoConfig.from_pretrained(process.run.model)
        self.context = int(config.get_text_config().max_position_embeddings)
        # The context that the rows were checked with, so that the rows dropped are those counted.
        tokenizer = AutoTokenizer.from_pretrained(process.run.model)
        self.sources = PromptSources.of(with_tools(recipe), tokenizer, context_of(config), process.run.model)
        if recipe.supervised:
            self.examples = ExampleLoader(self.sources, recipe.run.seed, recipe.trainer.data_workers)
        self.controller = Controller(self) if self.rank == 0 else None
        self.actions = {
            "step": self.train_step,
            "publish": lambda _: self.publish_alone(),
            "checkpoint": lambda _: self.save(keep=1),
        }

    def train(self) -> Exit:
        """Train until all steps are done, or until asked to stop."""
        self.begin()
        last = self.act()
        self.settle_saving()
        if self.saved_step != self.step:
            self.save(keep=self.recipe.run.keep_checkpoints)
        if self.controller:
            self.controller.publisher.close()
        self.heartbeat("done" if last.exit is Exit.DONE else "stopped")
        return last.exit

    def decide(self) -> Command:
        assert self.controller is not None
        return self.controller.decide()

    def agree(self) -> Command:
        """See GroupRole. While it waits, the workers may have the devices."""
        self.devices.release()
        command = super().agree()
        if command.do != "wait":
            self.devices.acquire()
            self.heartbeat("training")
        return command

    def train_step(self, entry: Entry) -> None:
        """Make a step: read its batch, update, publish the new version, checkpoint where one is due."""
        clock = Clock()
        read = partial(self.read_batch, entry)
        batch = load(read, entry, self.shard_reader, self.quarantine, self.rank, self.world)
        clock.lap("read_s")
        metrics = {} if self.debug == "rollout-only" else self.update(batch.rollouts)
        self.step += 1
        clock.lap("train_s")
        self.publish()
        clock.lap("publish_s")
        if self.controller:
            self.controller.after_step(entry, batch, metrics, clock)
        self.settle_saving(wait=False)
        if self.step % self.recipe.run.checkpoint_every == 0:
            self.save(keep=self.recipe.run.keep_checkpoints, wait=not self.recipe.run.async_checkpoints)
        if self.controller:
            self.controller.checkpoint_s = clock.lap("checkpoint_s")

    def update(self, rollouts: Rollouts) -> dict[str, float]:
        """Make one optimizer step and return its metrics."""
        return self.trainer.step(rollouts, self.algorithm, self.step, lambda: self.heartbeat("training"))

    def publish(self, asked: bool = False) -> None:
        """Publish the present weights as the newest version; collective: every rank takes part in each export that rank
        0 asks for."""
        self._exported(lambda controller: controller.publish(self._export, asked))

    def keep_reference(self, fresh: bool) -> None:
        """Keep the present weights as the reference (rank 0), if the run begins, or was forked from one without."""
        held = reference.held_checksum(self.run)
        if not fresh and held is None and self.step != self.forked_at:
            if REFERENCE not in self.columns:  # a critic that has a checkpoint does not begin any more
                return
            raise RunError(
                f"'{self.run.reference}' is gone, against which samples are scored: put it back, or begin a new run"
            )
        if fresh or held is None:
            alive = lambda: self.heartbeat("publishing")
            export = partial(self._export, base=self.recipe.trainer.lora is not None)
            keep = lambda: reference.keep(self.run, self.commit_dir, export, alive)
            self.process.when_room(keep, "the reference")

    def _exported(self, use: Callable[[Controller], object]) -> None:
        """Let rank 0 use the weights that all ranks export, as often as it asks for them."""
        if self.controller:
            use(self.controller)
            told("published", self.world)
        while not self.controller and (asked := told("", self.world)) != "published":
            for _ in self._tensors(asked == "export base"):
                pass

    def publish_alone(self) -> None:
        """Publish outside a step, and write the metrics of it."""
        clock = Clock()
        self.publish(asked=True)
        if self.controller and self.recipe.generates:
            self.process.telemetry.metrics(kind="publish", version=self.version, seconds=clock.lap("publish_s"))

    def _tensors(self, base: bool) -> Iterator[tuple[str, Tensor]]:
        return self.trainer.export_base() if base else self.trainer.export()

    def _export(self, base: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Export the weights, or the base of an adapter, once more, on every rank (rank 0 asks); to the end even if the
        reader gives up, for the others do so too."""
        told("export base" if base else "export", self.world)
        tensors = self._tensors(base)
        try:
            yield from tensors
        finally:
            for _ in tensors:
                pass

    def begin(self) -> None:
        """Take back the newest checkpoint, or begin: warm up, save, publish version 0."""
        state = self.restore(self.run, self.take_back)
        if state is not None:
            self.step = self.saved_step = state["step"]
            if self.recipe.supervised:
                self.examples.load_state_dict(state["examples"])
        else:
            if self.recipe.sft_warm_start is not None:
                sft.warm_up(self.recipe, self.trainer, self.sources, self.process)
            self.trainer.begin_training()
        if self.keeps_reference:
            self._exported(lambda _: self.keep_reference(fresh=state is None))
        if self.controller:
            self.controller.begin(state)
        self.publish_alone()
        if state is None:
            self.save(keep=self.recipe.run.keep_checkpoints)

    def take_back(self, folder: Path) -> None:
        """Load a checkpoint, after the base where it holds an adapter."""
        if self.recipe.trainer.lora is not None:
            try:
                _, tensors = reference.read(self.run, lambda: self.heartbeat("loading"))
            except WeightsError as error:
                raise RunError(
                    f"{error}; it is the base of the adapter that is trained: put it back from a copy of the run"
                ) from error
            self.trainer.load_base(tensors, self.run.reference)
        self.trainer.load(folder)

    def read_batch(self, entry: Entry) -> Batch:
        """Load the samples that `entry` lets into the loss, in the order of their ids; the bound is checked on every
        token."""
        if self.recipe.supervised:
            return Batch(sft.read(entry, self.examples), 0, [])
        recipe = self.recipe
        routed = recipe.rollout.routed_experts and recipe.trainer.backend == "megatron"
        oldest = entry.step - self.bound if recipe.async_.on_stale == "mask" else None
        batch = load_batch(entry, self.run, self.shard_reader, self.columns, routed, oldest)
        rollouts = batch.rollouts
        ages = entry.step - rollouts.versions[rollouts.loss_mask == 1]
        if ages.size and not 0 <= ages.min() <= ages.max() <= self.bound:
            raise RunError(
                f"step {entry.step}: tokens are {ages.min()} to {ages.max()} versions old, the bound is {self.bound}; "
                "this is a defect of relax_hpc: please report it with the ledger entry"
            )
        return batch

    def save(self, keep: int, wait: bool = True) -> None:
        """Checkpoint this step; collective. Without `wait`, training goes on while it is written."""
        self.settle_saving()
        began = time.perf_counter()
        self.heartbeat("checkpointing")
        if wait:
            self.process.when_room(lambda: self.commit(self.begin_save(keep)), f"the checkpoint of step {self.step}")
            self.saved(self.step, began)
        else:
            self.saving = self.begin_save(keep), began

    def settle_saving(self, wait: bool = True) -> None:
        """Commit the checkpoint that is being written, once every process has written its part."""
        if self.saving is None:
            return
        begun, began = self.saving
        if not wait and not self.everywhere(begun.saving.done()):
            return
        self.saving = None
        try:
            self.commit(begun)
        except OSError as error:
            if not is_full(error):
                raise
            self.save(begun.keep)  # of the step that it is now: that one's state is gone
            return
        self.saved(begun.step, began)

    def saved(self, step: int, began: float) -> None:
        self.saved_step, self.save_s = step, time.perf_counter() - began
        if self.controller:
            self.process.telemetry.metrics(kind="checkpoint", step=step, seconds=self.save_s)

    def begin_save(self, keep: int) -> Begun:
        folder = checkpoint.unfinished(self.commit_dir, self.step)
        if self.controller:
            checkpoint.begin(self.commit_dir, self.step)
        with room_for_all(self.world):
            saving = self.trainer.begin_save(folder)
        return Begun(saving, folder, self.step, self.controller.state_dict() if self.controller else {}, keep)

    def commit(self, begun: Begun) -> None:
        with room_for_all(self.world):
            begun.saving.finish()
            if self.controller:
                checkpoint.commit(self.run, begun.folder, begun.step, begun.state, begun.saving.checksums)
                self.controller.forget(checkpoint.rotate(self.run, self.commit_dir, begun.keep))
