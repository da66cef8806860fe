"""One process of a Megatron-core trainer: tensor, sequence, pipeline, context, expert and data parallel.

rollouts ──forward of reference, teacher, critic, where needed──► columns ──updates (learners.py)──► the policy's next version
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoConfig

import relax_hpc.trainers.megatron.export.weights as weights
from relax_hpc.algorithms.base import TEACHER, VALUES
from relax_hpc.files.errors import RunError
from relax_hpc.media.families import family_of
from relax_hpc.recipe.schema import CRITIC_KEY, TEACHER_KEY, Recipe
from relax_hpc.records import Progress, Rollouts
from relax_hpc.trainers import fit
from relax_hpc.trainers.build import check_beside, weights_folder
from relax_hpc.trainers.host_copies import HostCopies
from relax_hpc.trainers.megatron.cpu import supported
from relax_hpc.trainers.megatron.encoders import PREFIX
from relax_hpc.trainers.megatron.head import Critic, Policy
from relax_hpc.trainers.megatron.learners import Learners
from relax_hpc.trainers.megatron.learning import Learning
from relax_hpc.trainers.megatron.model import build, transformer_config
from relax_hpc.trainers.megatron.split import device_of
from relax_hpc.trainers.token_loss import needs_reference
from relax_hpc.trainers.update import PolicyUpdating


class MegatronTrainer(Learners, PolicyUpdating):
    """See relax_hpc.trainers.base.Trainer."""

    @supported
    def __init__(self, recipe: Recipe, model_dir: Path, rank: int, world: int) -> None:
        check_beside(recipe, model_dir)
        fit.check(recipe, model_dir)
        super().__init__(recipe, rank, world, device_of(recipe.trainer.device, "trainer"))
        self.hf: Any = AutoConfig.from_pretrained(model_dir, local_files_only=True)
        folder = weights_folder(recipe.model, model_dir)
        self.chunks = build(self.hf, transformer_config(self.hf, recipe.trainer), self.groups)
        weights.fill(self.chunks, folder, self.groups)
        self.parts = weights.parts(self.chunks, self.groups)
        self.sending = weights.plan_export(self.parts, self.groups)
        part_of = lambda name: family_of(self.hf).part(name.removeprefix(PREFIX)) if PREFIX in name else "language"
        self.learning["policy"] = Learning(self.chunks, self.chunks[0].config, recipe, part_of)
        self.reference: list[Policy] = []
        if needs_reference(recipe):
            self.reference = build(self.hf, self.chunks[0].config, self.groups)
            self._refer()
        beside = recipe.models_held
        self.teacher: list[Policy] = []
        if TEACHER_KEY in beside:
            self.teacher = self._read(Policy, beside[TEACHER_KEY])
            for chunk in self.teacher:
                chunk.requires_grad_(False)
        if recipe.trains_critic:
            chunks = self._read(Critic, beside.get(CRITIC_KEY, folder))
            self.learning["critic"] = Learning(chunks, chunks[0].config, recipe)
        self.host = HostCopies()

    step = supported(PolicyUpdating.step)
    supervised_step = supported(PolicyUpdating.supervised_step)

    @supported
    def begin_training(self) -> None:
        for learning in self.learning.values():
            learning.begin()
        self._refer()
        if "critic" in self.learning and CRITIC_KEY not in self.recipe.models_held:
            for part, parameter in weights.parts(self.learning["critic"].chunks, self.groups).items():
                parameter.data.copy_(self.parts[part])
            self.learning["critic"].optimizer.reload_model_params()

    def export(self) -> Iterator[tuple[str, Tensor]]:
        yield from weights.export(self.parts, self.sending, self.hf, self.dtype)

    def _held(self) -> tuple[list[torch.nn.Module], list[torch.optim.Optimizer]]:
        learning = self.learning.values()
        models = [*(chunk for each in learning for chunk in each.reduced), *self.reference, *self.teacher]
        return models, [o.optimizer for each in learning for o in each.optimizers()]

    def _changing(self) -> dict[str, list[Any]]:
        return super()._changing() | ({"reference": self.reference} if self.reference else {})

    def _column(self, name: str, rollouts: Rollouts, temperature: float, progress: Progress) -> NDArray[np.float32]:
        critic = self.learning["critic"].chunks if "critic" in self.learning else []
        held = {"recomputed": self.chunks, "reference": self.reference, TEACHER: self.teacher, VALUES: critic}
        models, what = held[name], "critic" if name == VALUES else name
        if not models:
            raise RunError(f"the algorithm of this step needs a {what}, the recipe's does not: none is held")
        if name in (TEACHER, VALUES):  # their experts are their own
            rollouts = replace(rollouts, routed_experts=None)
        return self._said(models, rollouts, temperature, progress)

    def _refer(self) -> None:
        for frozen, chunk in zip(self.reference, self.chunks, strict=False):
            frozen.load_state_dict(chunk.state_dict())
            frozen.requires_grad_(False)
