"""The torch trainer: a Hugging Face causal model, data parallel, one optimizer step or more from a step's rollouts.

    rollouts ──forward of the reference, where one is needed──► columns ──updates──► for each, most often one:
    rollouts ──plan──► this rank's micro-batches ──forward, algorithm.loss, backward──► gradients (sums over tokens)
    gradients ──all-reduce──► norm ──finite?──► AdamW        metrics ──summed over ranks──► means over tokens

Every rank sees all rollouts and takes its share; each loss is divided by one global token count before its backward, so
ranks may have different numbers of micro-batches, and the sums are the same under every split.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import transformers
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import relax_hpc.trainers.state_files as state_files
from relax_hpc.algorithms import make_algorithm
from relax_hpc.data.packing import MicroBatch, pack, plan
from relax_hpc.experts import one_by_one
from relax_hpc.recipe.schema import Recipe
from relax_hpc.records import Rollouts
from relax_hpc.run_dir import RunError
from relax_hpc.trainers.base import Saved
from relax_hpc.trainers.build import weights_folder
from relax_hpc.trainers.forward import check_head, token_logprobs
from relax_hpc.trainers.optim import FlatGradients
from relax_hpc.trainers.token_loss import TokenLoss, add
from relax_hpc.trainers.update import Updating


class TorchTrainer(Updating):
    """One data-parallel process; see relax_hpc.trainers.base.Trainer."""

    def __init__(self, recipe: Recipe, model_dir: Path, rank: int, world: int) -> None:
        self.recipe, self.rank, self.world = recipe, rank, world
        self.device = _device(recipe.trainer.device)
        self.dtype: torch.dtype = getattr(torch, recipe.trainer.dtype)
        torch.manual_seed(recipe.run.seed + rank)
        self.model = _load_model(weights_folder(recipe.model, model_dir)).to(self.device).eval()  # eval: no dropout
        check_head(self.model)
        self.parameters = dict(self.model.named_parameters())  # tied weights once
        self.gradients = FlatGradients(list(self.parameters.values()))
        self.optimizer = self._new_optimizer()
        self.reference: PreTrainedModel | None = None
        if "reference" in make_algorithm(recipe.algorithm).needs:
            self.reference = self._frozen_copy()

    def begin_training(self) -> None:
        self.optimizer = self._new_optimizer()
        if self.reference is not None:
            self.reference = self._frozen_copy()

    def export(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._weights(self.model).items():
            # a copy even where type and device are right: the next step changes the weights in place
            yield name, tensor.detach().to("cpu", self.dtype if tensor.is_floating_point() else tensor.dtype, copy=True)

    def save(self, folder: Path) -> None:
        states = state_files.rng_tensors(self.rank, self.device)
        for other in self._gather(states)[1:]:
            states |= other
        if self.rank == 0:
            state_files.write(folder / state_files.MODEL, self._weights(self.model))
            state_files.write(
                folder / state_files.OPTIMIZER, state_files.optimizer_tensors(self.optimizer, self.parameters)
            )
            state_files.write(folder / state_files.RNG, states)
            if self.reference is not None:
                state_files.write(folder / state_files.REFERENCE, self._weights(self.reference))
        if self.world > 1:
            dist.barrier()

    def begin_save(self, folder: Path) -> Saved:
        self.save(folder)
        return Saved()

    def load(self, folder: Path) -> None:
        model, optimizer = folder / state_files.MODEL, folder / state_files.OPTIMIZER
        state_files.fill(self._weights(self.model), state_files.read(model), model)
        self.optimizer = self._new_optimizer()
        state_files.fill_optimizer(self.optimizer, self.parameters, state_files.read(optimizer), optimizer)
        if self.reference is not None:
            reference = folder / state_files.REFERENCE
            state_files.fill(self._weights(self.reference), state_files.read(reference), reference)
        state_files.fill_rng(self.rank, self.device, state_files.read(folder / state_files.RNG))

    def _gradients(
        self, rollouts: Rollouts, token_loss: TokenLoss, temperature: float, tokens: int, progress: Callable[[], None]
    ) -> dict[str, float]:
        self.gradients.zero()
        sums: dict[str, float] = {}
        for rows in plan(rollouts, self.world, self.recipe.trainer.tokens_per_micro_batch)[self.rank]:
            batch = pack(rollouts, rows)
            found = self._logprobs(self.model, rollouts, batch, temperature, token_loss.entropy_gradient)
            loss, said = token_loss(batch.targets, *found)
            (loss / tokens).backward()
            sums = add([sums, said])
            progress()
        if self.world > 1:
            self.gradients.all_reduce()
        return sums

    def _gradient_norm(self) -> float:
        return self.gradients.norm()

    def _update(self, norm: float, rate: float) -> None:
        self.gradients.clip(norm, self.recipe.trainer.clip_grad_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()

    def _logprobs(
        self,
        model: PreTrainedModel,
        rollouts: Rollouts,
        batch: MicroBatch,
        temperature: float,
        entropy_gradient: bool = False,
    ) -> tuple[Tensor, Tensor]:
        targets = torch.from_numpy(rollouts.tokens[batch.targets].astype(np.int64)).to(self.device)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            return token_logprobs(model, batch, targets, temperature, entropy_gradient=entropy_gradient)

    @torch.no_grad()
    def _column(
        self, name: str, rollouts: Rollouts, temperature: float, progress: Callable[[], None]
    ) -> NDArray[np.float32]:
        model = self.model if name == "recomputed" else self.reference
        if model is None:
            raise RunError("the algorithm of this step needs a reference, the recipe's does not: none is held")
        column = torch.zeros(len(rollouts.tokens), device=self.device)
        for rows in plan(rollouts, self.world, self.recipe.trainer.tokens_per_micro_batch)[self.rank]:
            batch = pack(rollouts, rows)
            where = torch.from_numpy(batch.targets).to(self.device)
            column[where] = self._logprobs(model, rollouts, batch, temperature)[0]
            progress()
        if self.world > 1:
            dist.all_reduce(column)  # each rank has its share, zeros elsewhere
        return column.cpu().numpy()

    def _new_optimizer(self) -> torch.optim.AdamW:
        config = self.recipe.trainer
        matrices = [p for p in self.parameters.values() if p.ndim > 1]
        vectors = [p for p in self.parameters.values() if p.ndim <= 1]  # norms and biases do not decay
        groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, eps=config.eps, fused=True)

    def _frozen_copy(self) -> PreTrainedModel:
        reference = copy.deepcopy(self.model).requires_grad_(False)
        for parameter in reference.parameters():
            parameter.grad = None
        return reference

    @staticmethod
    def _weights(model: PreTrainedModel) -> dict[str, Tensor]:
        """Parameters (tied ones once) and the buffers that belong to the state, by the names of Hugging Face's files."""
        every = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        buffers = {name: value for name, value in model.state_dict().items() if name not in every}
        return one_by_one(dict(model.named_parameters()) | buffers, model.config.get_text_config().model_type)


def _device(choice: str) -> torch.device:
    if choice == "cpu" or (choice == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise RunError('trainer.device = "cuda" but torch sees no GPU: use "auto" or "cpu"')
    return torch.device("cuda", torch.cuda.current_device())  # the role has chosen it


def _load_model(folder: Path) -> PreTrainedModel:
    """The model in float32. Raises RunError when the folder lacks weights (transformers would draw them at random)."""
    transformers.utils.logging.disable_progress_bar()
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, output_loading_info=True
        )
    except (OSError, ValueError) as error:
        raise RunError(f"no model can be loaded from '{folder}': {error}") from error
    absent = sorted(info["missing_keys"]) + sorted(str(key) for key in info["mismatched_keys"])
    if absent:
        raise RunError(
            f"the weights in '{folder}' do not fill its config.json: {absent[:3]} ({len(absent)} in all) are missing or differ"
        )
    policy: PreTrainedModel = model
    return policy
