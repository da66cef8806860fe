"""A trainer backend of one's own: one process, one sequence at a time, torch's AdamW. Slow, short, and with the sums of every other backend.

`PolicyUpdating` is what all backends do with a step: columns before the updates, the updates, what is skipped, metrics. A backend says how
logprobs and gradients come about, and how its state is written and read. Without critic, teacher or scorer.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import relax_hpc.trainers.state_files as state_files
from relax_hpc.files.errors import RunError
from relax_hpc.recipe.schema import Recipe
from relax_hpc.records import Rollouts
from relax_hpc.trainers.base import Saved
from relax_hpc.trainers.build import weights_folder
from relax_hpc.trainers.host_copies import HostCopies
from relax_hpc.trainers.optim import Learning
from relax_hpc.trainers.token_loss import Learner, TokenLoss, add, needs_reference
from relax_hpc.trainers.torch import load_model, tensors_of
from relax_hpc.trainers.update import PolicyUpdating


class PlainTrainer(PolicyUpdating):
    """See relax_hpc.trainers.base.Trainer."""

    def __init__(self, recipe: Recipe, model_dir: Path, rank: int, world: int) -> None:
        if world > 1 or recipe.trains_critic or recipe.models_held:
            raise RunError('trainer.backend = "plain" has one process, and no critic or teacher')
        self.recipe, self.world, self.device = recipe, world, torch.device("cpu")
        torch.manual_seed(recipe.run.seed)
        self.model = load_model(weights_folder(recipe.model, model_dir), self.device)
        self.reference = copy.deepcopy(self.model).requires_grad_(False) if needs_reference(recipe) else None
        self.learning, self.host = Learning(self.model, recipe.trainer), HostCopies()

    def begin_training(self) -> None:
        self.learning.begin()
        self._refer()

    def export(self) -> Iterator[tuple[str, Tensor]]:
        dtype: torch.dtype = getattr(torch, self.recipe.trainer.dtype)
        for name, tensor in tensors_of(self.model).items():
            yield name, tensor.detach().to(dtype if tensor.is_floating_point() else tensor.dtype, copy=True)

    def save(self, folder: Path) -> Mapping[str, str]:
        moments = state_files.optimizer_tensors(self.learning.optimizer, self.learning.parameters)
        files = self._models() | {state_files.RNG: state_files.rng_tensors(0, self.device)}
        return state_files.write(folder, files | state_files.in_parts(state_files.OPTIMIZER, moments))

    def begin_save(self, folder: Path) -> Saved:
        return Saved(self.save(folder))

    def load(self, folder: Path) -> None:
        own = self._models()
        state_files.fill(own[state_files.MODEL], state_files.read(folder / state_files.MODEL), folder)
        self.begin_training()  # so begins a reference that the checkpoint has not
        if self.reference is not None and (path := folder / state_files.REFERENCE).exists():
            state_files.fill(own[state_files.REFERENCE], state_files.read(path), path)
        state_files.fill_optimizer(self.learning.optimizer, self.learning.parameters, folder, state_files.OPTIMIZER)
        state_files.fill_rng(0, self.device, state_files.read(folder / state_files.RNG))

    def _models(self) -> dict[str, dict[str, Tensor]]:
        found = {state_files.MODEL: tensors_of(self.model)}
        return found if self.reference is None else found | {state_files.REFERENCE: tensors_of(self.reference)}

    def _held(self) -> tuple[Sequence[torch.nn.Module], Sequence[torch.optim.Optimizer]]:
        frozen = [] if self.reference is None else [self.reference]
        return [self.model, *frozen], [self.learning.optimizer]

    def _refer(self) -> None:
        if self.reference is not None:
            self.reference.load_state_dict(self.model.state_dict())

    @torch.no_grad()
    def _column(
        self, name: str, rollouts: Rollouts, temperature: float, progress: Callable[[], None]
    ) -> NDArray[np.float32]:
        model = {"recomputed": self.model, "reference": self.reference}.get(name)
        if model is None:
            raise RunError(f"the algorithm of this step needs a {name}, the recipe's does not: none is held")
        column = np.zeros(len(rollouts.tokens), np.float32)
        for targets, logprobs, _ in self._said(model, rollouts, temperature):
            column[targets] = logprobs.numpy()
            progress()
        return column

    def _gradients(
        self, rollouts: Rollouts, token_loss: TokenLoss, temperature: float, tokens: int, progress: Callable[[], None]
    ) -> dict[str, float]:
        """Sums over tokens, divided by the one count of the step: whatever the micro-batches, the gradients are the same."""
        self.learning.gradients.zero()
        sums: dict[str, float] = {}
        for targets, logprobs, entropies in self._said(self.model, rollouts, temperature):
            loss, said = token_loss(targets, logprobs, entropies if token_loss.entropy_gradient else entropies.detach())
            (loss / tokens).backward()
            sums = add([sums, said])
            progress()
        return sums

    def _gradient_norm(self, learner: Learner) -> float:
        return self.learning.gradients.norm()

    def _update(self, learner: Learner, norm: float, rate: float) -> None:
        self.learning.update(norm, rate)

    def _said(
        self, model: torch.nn.Module, rollouts: Rollouts, temperature: float
    ) -> Iterator[tuple[NDArray[np.int64], Tensor, Tensor]]:
        """Of each sample: its tokens in the loss, by their place in rollouts.tokens; their logprobs and entropies."""
        for i in range(len(rollouts)):
            prompt = rollouts.prompt_tokens[rollouts.prompt_offsets[i] : rollouts.prompt_offsets[i + 1]]
            begin, end = rollouts.offsets[i : i + 2]
            targets = begin + np.flatnonzero(rollouts.loss_mask[begin:end])
            if not len(targets):
                continue
            tokens = torch.from_numpy(np.concatenate([prompt, rollouts.tokens[begin:end]]).astype(np.int64))
            before = torch.from_numpy(targets - begin + len(prompt) - 1)  # what is at a place says the next token
            spread = (model(tokens[None], use_cache=False).logits[0, before].float() / temperature).log_softmax(-1)
            chosen = spread.gather(1, tokens[before + 1][:, None])[:, 0]
            yield targets, chosen, -(spread.exp() * spread).sum(-1)
