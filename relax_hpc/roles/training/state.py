"""The trainer's state on every rank: all that the controller and the shared devices need to know of the role."""

from __future__ import annotations

from pathlib import Path

import torch

from relax_hpc.algorithms.base import REFERENCE
from relax_hpc.data import PromptSources
from relax_hpc.data.examples import ExampleLoader
from relax_hpc.recipe.schema import CRITIC_KEY
from relax_hpc.roles.common import gpus
from relax_hpc.roles.common.process import RoleProcess
from relax_hpc.roles.common.quarantine import Quarantine
from relax_hpc.roles.common.ranks import meet
from relax_hpc.roles.common.role import GroupRole
from relax_hpc.trainers.base import Trainer


class TrainerState(GroupRole):
    """One process of the trainer, and its progress."""

    idle = "waiting for data"
    commit_dir: Path
    trainer: Trainer
    sources: PromptSources
    examples: ExampleLoader
    """The examples of supervised fine-tuning; no other algorithm has one."""
    context: int
    """The model's longest sequence, in tokens."""

    def __init__(self, process: RoleProcess) -> None:
        """Meet the other ranks, on devices that are this process's own."""
        super().__init__(process, Path(process.arguments.incarnation))
        recipe = self.recipe
        self.step, self.saved_step, self.save_s = 0, -1, 0.0
        self.switch_s = 0.0
        """Seconds that leaving and taking shared devices took since the step before, without generation."""
        self.quarantine = Quarantine(self.run, self.commit_dir, process.telemetry.metrics)
        process.telemetry.heartbeat("starting", step=0, steps=recipe.run.steps)
        self.debug: str | None = self.identity["debug"]
        self.forked_at: int | None = self.identity.get("fork_step")
        self.columns = () if self.debug == "rollout-only" else recipe.columns
        """Names of the columns that other roles make."""
        begins_elsewhere = "values" in self.columns and CRITIC_KEY not in recipe.models_beside
        self.keeps_reference = REFERENCE in self.columns or begins_elsewhere or recipe.trainer.lora is not None
        """True if the weights of before step 0 are kept: scorers hold them, a critic begins as them, or an adapter has
        them as its base."""
        # With weights that never change, or shards of another run, ages say nothing: they are bounded by the run's length.
        self.bound = recipe.run.steps if self.debug else recipe.async_.max_staleness
        torch.set_num_threads(recipe.trainer.threads)
        gpus.assign(process, self.commit_dir)
        meet(self.commit_dir, self.rank, self.world, recipe.trainer.device)

    @property
    def version(self) -> int:
        """The version of the policy's weights: how many steps were trained."""
        return 0 if self.debug == "rollout-only" else self.step

    def heartbeat(self, state: str) -> None:
        self.process.telemetry.heartbeat(state, step=self.step)
