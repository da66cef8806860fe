"""The trainer role: one page of loop. Rank 0 decides, the others follow; every rank makes every step.

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

import torch.distributed as dist
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer

from relax_hpc import checkpoint
from relax_hpc.algorithms import make_algorithm
from relax_hpc.algorithms.base import REFERENCE
from relax_hpc.data import PromptSources
from relax_hpc.data.examples import ExampleLoader
from relax_hpc.engines.model_folder import context_of
from relax_hpc.files.errors import RunError
from relax_hpc.records import Rollouts
from relax_hpc.roles.common.process import Exit, RoleProcess, is_full
from relax_hpc.roles.common.ranks import first_said, room_for_all
from relax_hpc.roles.training import sft
from relax_hpc.roles.training.controller import Command, Controller
from relax_hpc.roles.training.load_batch import load, take
from relax_hpc.roles.training.shared_devices import SharedDevices
from relax_hpc.roles.training.state import TrainerState
from relax_hpc.roles.training.step_metrics import Batch, Clock
from relax_hpc.spool.ledger import Entry
from relax_hpc.trainers import make_trainer
from relax_hpc.trainers.base import Saving
from relax_hpc.weights import reference


def body(process: RoleProcess) -> Exit:
    role = TrainerRole(process)
    try:
        return role.train()
    except FileNotFoundError as error:
        # A superseded incarnation cannot commit: its folder was renamed, so its paths lead nowhere.
        if role.commit_dir.exists():
            raise
        process.log.warning("fenced: a successor took over (%s)", error)
        return Exit.FENCED
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


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
        self.context = int(config.max_position_embeddings)
        # The context that the rows were checked with, so that the rows dropped are those counted.
        tokenizer = AutoTokenizer.from_pretrained(process.run.model)
        self.sources = PromptSources.of(recipe, tokenizer, context_of(config))
        if recipe.supervised:
            self.examples = ExampleLoader(self.sources, recipe.run.seed, recipe.trainer.data_workers)
        self.controller = Controller(self) if self.rank == 0 else None

    def train(self) -> Exit:
        """The loop: ends when all steps are trained, or when asked to stop."""
        self.begin()
        while True:
            self.devices.give()
            command = self.agree()
            if command.do == "wait":
                continue
            self.devices.take()
            if command.do == "end":
                break
            if command.do == "checkpoint":
                self.save(keep=1)
            if command.do == "publish":
                self.publish_alone()
            if command.do != "step":
                continue
            assert command.entry is not None
            clock = Clock()
            read = partial(self.take, command.entry)
            batch = load(read, command.entry, self.shard_reader, self.quarantine, self.rank, self.world)
            clock.lap("read_s")
            metrics = {} if self.debug == "rollout-only" else self.update(batch.rollouts)
            self.step += 1
            clock.lap("train_s")
            self.publish()
            clock.lap("publish_s")
            if self.controller:
                self.controller.after_step(command.entry, batch, metrics, clock)
            self.settle_saving(wait=False)
            if self.step % self.recipe.run.checkpoint_every == 0:
                self.save(keep=self.recipe.run.keep_checkpoints, wait=not self.recipe.run.async_checkpoints)
            if self.controller:
                self.controller.checkpoint_s = clock.lap("checkpoint_s")
        if command.error:
            raise RunError(command.error)
        self.settle_saving()
        if self.saved_step != self.step:
            self.save(keep=self.recipe.run.keep_checkpoints)
        if self.controller:
            self.controller.publisher.close()
        self.heartbeat("done" if command.exit is Exit.DONE else "stopped")
        return command.exit

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
            keep = lambda: reference.keep(self.run, self.commit_dir, self._export, alive)
            self.process.when_room(keep, "the reference")

    def _exported(self, use: Callable[[Controller], object]) -> None:
        """Let rank 0 use the weights that all ranks export, as often as it asks for them."""
        if self.controller:
            use(self.controller)
            self._tell("published")
        while not self.controller and self._tell("") == "export":
            for _ in self.trainer.export():
                pass

    def publish_alone(self) -> None:
        """Publish outside a step, and write the metrics of it."""
        clock = Clock()
        self.publish(asked=True)
        if self.controller and self.recipe.generates:
            self.process.telemetry.metrics(kind="publish", version=self.version, seconds=clock.lap("publish_s"))

    def _export(self) -> Iterator[tuple[str, Tensor]]:
        """Export the weights once more, on every rank (rank 0 asks); to the end even if the reader gives up, for the
        others do so too."""
        self._tell("export")
        tensors = self.trainer.export()
        try:
            yield from tensors
        finally:
            for _ in tensors:
                pass

    def _tell(self, command: str) -> str:
        """Broadcast rank 0's command and return it, on every rank."""
        words: list[Any] = [command]
        if self.world > 1:
            dist.broadcast_object_list(words, src=0)
        return str(words[0])

    def begin(self) -> None:
        """Take back the newest checkpoint, or begin: warm up, save, publish version 0."""
        agree = partial(first_said, world=self.world)
        state = checkpoint.restore(self.run, self.trainer.load, agree, self.move_to_quarantine)
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

    def move_to_quarantine(self, step: int, damage: str) -> None:
        """Quarantine a damaged checkpoint."""
        if self.controller:
            checkpoint.move_to_quarantine(self.run, self.commit_dir, self.run.quarantine, step, damage)
            self.process.telemetry.metrics(kind="damaged_checkpoint", step=step, reason=damage)

    def agree(self) -> Command:
        """Broadcast rank 0's command and return it, on every rank. A stop is agreed on here, before the optimizer
        steps, never inside a step."""
        words: list[Any] = [None]
        if self.controller:
            try:
                words = [self.controller.decide()]
            except RunError as error:
                words = [Command("end", exit=Exit.FATAL, error=str(error))]
        if self.world > 1:
            dist.broadcast_object_list(words, src=0)
        command: Command = words[0]
        if command.do == "wait" and not self.commit_dir.exists():
            raise FileNotFoundError(self.commit_dir)  # fenced: a node that was cut off may wait here for ever
        self.heartbeat("waiting for data" if command.do == "wait" else "training")
        return command

    def take(self, entry: Entry) -> Batch:
        """Load the samples that `entry` lets into the loss, in the order of their ids; the bound is checked on every
        token."""
        if self.recipe.supervised:
            return Batch(sft.read(entry, self.examples), 0, [])
        recipe = self.recipe
        routed = recipe.rollout.routed_experts and recipe.trainer.backend == "megatron"
        oldest = entry.step - self.bound if recipe.async_.on_stale == "mask" else None
        batch = take(entry, self.run, self.shard_reader, self.columns, routed, oldest)
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
