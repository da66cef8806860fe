"""What a Megatron-core trainer of the policy and one of a critic have in common: process groups, micro-batches, schedule, gradients, checkpoints.

    rollouts ──plan──► this data-parallel rank's micro-batches
    ──Megatron's schedule: forward, what the model says of its targets, loss, backward──► gradients ──► norm ──finite?──► AdamW

Each loss is divided by one global token count before its backward, and gradients are summed over all processes that hold
other tokens: the sums are the same under every plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoConfig

import relax_hpc.trainers.megatron.groups as groups
import relax_hpc.trainers.megatron.moments as moments
import relax_hpc.trainers.megatron.state as state
import relax_hpc.trainers.megatron.weights as weights
from relax_hpc.recipe.schema import Recipe
from relax_hpc.records import Rollouts
from relax_hpc.run_dir import RunError
from relax_hpc.trainers import state_files
from relax_hpc.trainers.megatron.cpu import supported
from relax_hpc.trainers.megatron.head import Critic, Policy, token_logprobs, token_values
from relax_hpc.trainers.megatron.learning import Learning
from relax_hpc.trainers.megatron.model import build, transformer_config
from relax_hpc.trainers.megatron.packing import Layout, MicroBatch, pack, plan
from relax_hpc.trainers.token_loss import Learner, TokenLoss, add
from relax_hpc.trainers.update import Updating

LOADED_BYTES = 2**30
"""Of the optimizer's state, read at once."""


class Kept(NamedTuple):
    """What a checkpoint calls the parts of a model that learns."""

    model: str
    optimizer: str
    steps: str


KEPT: dict[Learner, Kept] = {
    "policy": Kept("model", "optimizer", "steps"),
    "critic": Kept("critic", "critic_optimizer", "critic_steps"),
}


class Learners(Updating):
    """One process of models that learn, split by the recipe's plan."""

    def __init__(self, recipe: Recipe, rank: int, world: int, device: torch.device) -> None:
        """The process group is there, and Megatron's support for this machine."""
        self.recipe, self.rank, self.world, self.device = recipe, rank, world, device
        parallel = recipe.trainer.parallel
        self.dtype: torch.dtype = getattr(torch, recipe.trainer.dtype)
        self.groups = groups.join(parallel, recipe.run.seed)
        torch.manual_seed(recipe.run.seed + rank)
        spread = parallel.tensor if parallel.sequence else 1
        tensor_rank = self.groups.tp.rank() if parallel.sequence else 0
        self.layout = Layout(self.groups.cp.size(), self.groups.cp.rank(), spread, tensor_rank)
        self.learning: dict[Learner, Learning] = {}

    @supported
    def save(self, folder: Path) -> None:
        self.begin_save(folder).finish()

    @supported
    def begin_save(self, folder: Path) -> state.Saving:
        states = state_files.rng_tensors(self.rank, self.device)
        for other in self._gather(states):
            states |= other
        model = self._sharded()
        everything: dict[str, Any] = dict(model)
        for learner, learning in self.learning.items():
            kept = KEPT[learner]
            everything[kept.optimizer] = moments.gathered(learning.optimizers(), model[kept.model])
            everything[kept.steps] = learning.steps
        saving = state.Saving(folder, everything)
        if self.rank == 0:
            state_files.write(folder / state_files.RNG, states)
        return saving

    @supported
    def load(self, folder: Path) -> None:
        places, everything = self._sharded(), self._sharded()
        states = {
            KEPT[learner].optimizer: moments.expected(learning.optimizers(), places[KEPT[learner].model])
            for learner, learning in self.learning.items()
        }
        state.compare(folder, {**everything, **states})
        loaded = state.load(folder, everything)
        for what, chunks in self._changing().items():
            for number, chunk in enumerate(chunks):
                chunk.load_state_dict(loaded[what][f"chunk{number}"], strict=False)  # what is absent was compared
        for learner, learning in self.learning.items():
            kept, optimizers = KEPT[learner], learning.optimizers()
            learning.begin(loaded[kept.steps])
            for part in moments.to_fill(optimizers, places[kept.model], LOADED_BYTES):
                read = state.load(folder, {kept.optimizer: part})[kept.optimizer]
                moments.put(optimizers, places[kept.model], read)
        state_files.fill_rng(self.rank, self.device, state_files.read(folder / state_files.RNG))

    def _changing(self) -> dict[str, list[Any]]:
        """The models whose weights change, by what a checkpoint calls them."""
        return {KEPT[learner].model: learning.chunks for learner, learning in self.learning.items()}

    def _sharded(self) -> dict[str, Any]:
        """What changes but the optimizers' state."""
        prefix = {"model": ""}
        return {
            what: state.sharded(chunks, self.groups, prefix.get(what, f"{what}."))
            for what, chunks in self._changing().items()
        }

    def _gradients(
        self, rollouts: Rollouts, token_loss: TokenLoss, temperature: float, tokens: int, progress: Callable[[], None]
    ) -> dict[str, float]:
        learning = self.learning[token_loss.learner]
        learning.zero()
        if token_loss.learner == "critic":
            rollouts = replace(rollouts, routed_experts=None)  # its experts are its own
        batches = self._batches(rollouts)
        sums: dict[str, float] = {}

        def loss_of(number: int, *found: Tensor) -> Tensor:
            nonlocal sums
            progress()
            loss, said = token_loss(batches[number].targets, *found)
            sums = add([sums, said])
            return loss / tokens

        self._run(learning.reduced, rollouts, batches, temperature, loss_of)
        return sums if self._speaks() else {}

    def _gradient_norm(self, learner: Learner) -> float:
        return self.learning[learner].norm()

    def _update(self, learner: Learner, norm: float, rate: float) -> None:
        self.learning[learner].update(norm, rate)

    def _run(
        self,
        models: list[Any],
        rollouts: Rollouts,
        batches: list[MicroBatch],
        temperature: float,
        loss_of: Callable[..., Tensor],
        forward_only: bool = False,
    ) -> None:
        """All micro-batches through Megatron's schedule; `loss_of` is called on the last stage, with each one's number
        and what the model says of its targets."""

        def forward(numbers: Iterator[int], model: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
            number = next(numbers)
            batch = batches[number]
            hidden = model(batch.tokens, batch.positions, None, packed_seq_params=batch.packed)
            policy = getattr(model, "module", model)
            return hidden, partial(finish, policy, number)

        def finish(policy: Policy, number: int, hidden: Tensor) -> tuple[Tensor, Tensor, None]:
            batch = batches[number]
            said: tuple[Tensor, ...]
            if isinstance(policy, Critic):
                said = (token_values(policy, hidden, batch),)
            else:
                targets = torch.from_numpy(rollouts.tokens[batch.targets].astype(np.int64)).to(self.device)
                said = token_logprobs(policy, hidden, batch, targets, temperature)
            # the token count is ours already, so Megatron's is not asked for
            return loss_of(number, *said), torch.zeros((), dtype=torch.int, device=self.device), None

        iterators = [iter(range(len(batches))) for _ in models]
        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iterators if len(models) > 1 else iterators[0],
            model=models,
            num_microbatches=len(batches),
            seq_length=1,  # lengths vary: told with each tensor
            micro_batch_size=1,
            forward_only=forward_only,
        )

    @torch.no_grad()
    def _said(
        self,
        models: list[Policy],
        rollouts: Rollouts,
        temperature: float,
        progress: Callable[[], None],
    ) -> NDArray[np.float32]:
        """[T] what a model says of the tokens in the loss; on every process."""
        column = torch.zeros(len(rollouts.tokens), device=self.device)
        batches = self._batches(rollouts)

        def keep(number: int, found: Tensor, *ignored: Tensor) -> Tensor:
            progress()
            if self._speaks():
                column[torch.from_numpy(batches[number].targets).to(self.device)] = found
            return found.sum()

        self._run(models, rollouts, batches, temperature, keep, forward_only=True)
        if self.world > 1:
            dist.all_reduce(column)  # each token's number is on one process, zeros elsewhere
        return column.cpu().numpy()

    def _speaks(self) -> bool:
        """Processes that share sequences or matrices compute the same numbers: one of them says so."""
        return bool(self.groups.tp.rank() == self.groups.cp.rank() == 0)

    def _batches(self, rollouts: Rollouts) -> list[MicroBatch]:
        parallel = self.recipe.trainer.parallel
        # interleaved stages take micro-batches in rounds of as many as there are stages
        multiple = parallel.pipeline if parallel.virtual_pipeline > 1 else 1
        shares = plan(
            rollouts, self.groups.dp.size(), self.recipe.trainer.tokens_per_micro_batch * parallel.context, multiple
        )
        return [pack(rollouts, samples, self.layout, self.device) for samples in shares[self.groups.dp.rank()]]

    def _read(self, kind: type[Policy], folder: Path) -> list[Policy]:
        """The model in `folder`, split as the policy is."""
        hf = AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config()
        chunks = build(hf, transformer_config(hf, self.recipe.trainer), self.groups, kind)
        weights.fill(chunks, folder, hf, self.groups)
        return chunks


def device_of(choice: str, role: str, index: int | None = None) -> torch.device:
    """The device that a role computes on: the `index`-th, or the one that it has chosen. Raises RunError where it cannot be as the recipe says."""
    if not torch.cuda.is_available():
        if choice == "cuda":
            raise RunError(f'{role}.device = "cuda" but torch sees no GPU: use "auto" or "cpu"')
        return torch.device("cpu")
    if choice == "cpu":
        raise RunError(
            f'{role}.device = "cpu", but Megatron-core takes a GPU where there is one: use "auto", or hide it (CUDA_VISIBLE_DEVICES=)'
        )
    device = torch.device("cuda", torch.cuda.current_device() if index is None else index % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device
