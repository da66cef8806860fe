"""A model that learns nothing and only says logprobs of tokens: a scorer's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import relax_hpc.trainers.state_files as state_files
from relax_hpc.data.packing import pack, plan
from relax_hpc.recipe.schema import Recipe
from relax_hpc.records import Rollouts
from relax_hpc.trainers.forward import token_logprobs
from relax_hpc.trainers.torch import load_model, tensors_of


class Frozen:
    """Its arithmetic is the torch trainer's."""

    def __init__(self, recipe: Recipe, model: PreTrainedModel) -> None:
        self._recipe, self.model = recipe, model.requires_grad_(False)
        self._dtype: torch.dtype = getattr(torch, recipe.trainer.dtype)

    @classmethod
    def at(cls, recipe: Recipe, folder: Path, device: torch.device) -> Frozen:
        """Of a model directory."""
        return cls(recipe, load_model(folder, device))

    @classmethod
    def of(
        cls, recipe: Recipe, model_dir: Path, tensors: Mapping[str, Tensor], where: Path, device: torch.device
    ) -> Frozen:
        """Of the run's model with other weights, those in `where`."""
        config = AutoConfig.from_pretrained(model_dir, local_files_only=True)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        state_files.fill(tensors_of(model), tensors, where)
        return cls(recipe, torch.nn.Module.to(model, device).eval())

    def tensors(self) -> dict[str, Tensor]:
        """Its weights, by the names of Hugging Face's files."""
        return tensors_of(self.model)

    @torch.inference_mode()
    def logprobs(self, rollouts: Rollouts, progress: Callable[[], None] = lambda: None) -> NDArray[np.float32]:
        """[T] of the tokens in the loss, 0 elsewhere."""
        assert self._recipe.scorer is not None
        device = self.model.device
        column = torch.zeros(len(rollouts.tokens), device=device)
        for rows in plan(rollouts, 1, self._recipe.scorer.tokens_per_micro_batch)[0]:
            batch = pack(rollouts, rows)
            targets = torch.from_numpy(rollouts.tokens[batch.targets].astype(np.int64)).to(device)
            with torch.autocast(device.type, torch.bfloat16, enabled=self._dtype == torch.bfloat16):
                said, _ = token_logprobs(self.model, batch, targets, self._recipe.rollout.temperature)
            column[torch.from_numpy(batch.targets).to(device)] = said
            progress()
        found: NDArray[np.float32] = column.cpu().numpy()
        return found
