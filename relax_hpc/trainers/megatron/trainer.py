"""One process of a Megatron-core trainer: tensor, sequence, pipeline, context, expert and data parallel.

    rollouts ──forward of reference, teacher, critic, where needed──► columns ──updates──► for each, most often one:
    rollouts ──plan──► this data-parallel rank's micro-batches
    ──Megatron's schedule: forward, token_logprobs, algorithm.loss, backward──► gradients ──► norm ──finite?──► AdamW

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
from relax_hpc.algorithms.base import TEACHER, VALUES
from relax_hpc.recipe.algorithm import Ppo
from relax_hpc.recipe.schema import CRITIC_KEY, TEACHER_KEY, Recipe
from relax_hpc.records import Rollouts
from relax_hpc.run_dir import RunError
from relax_hpc.trainers import fit, state_files
from relax_hpc.trainers.build import check_beside, weights_folder
from relax_hpc.trainers.host_copies import HostCopies
from relax_hpc.trainers.megatron.cpu import supported
from relax_hpc.trainers.megatron.head import Critic, Policy, token_logprobs, token_values
from relax_hpc.trainers.megatron.learning import Learning
from relax_hpc.trainers.megatron.model import build, transformer_config
from relax_hpc.trainers.megatron.packing import Layout, MicroBatch, pack, plan
from relax_hpc.trainers.token_loss import Learner, TokenLoss, add, needs_reference
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


class MegatronTrainer(Updating):
    """See relax_hpc.trainers.base.Trainer."""

    @supported
    def __init__(self, recipe: Recipe, model_dir: Path, rank: int, world: int) -> None:
        self.recipe, self.rank, self.world = recipe, rank, world
        config, parallel = recipe.trainer, recipe.trainer.parallel
        check_beside(recipe, model_dir)
        fit.check(recipe, model_dir)
        self.device = _device(config.device, rank)
        self.dtype: torch.dtype = getattr(torch, config.dtype)
        self.hf: Any = AutoConfig.from_pretrained(model_dir, local_files_only=True).get_text_config()
        self.groups = groups.join(parallel, recipe.run.seed)
        torch.manual_seed(recipe.run.seed + rank)
        spread = parallel.tensor if parallel.sequence else 1
        tensor_rank = self.groups.tp.rank() if parallel.sequence else 0
        self.layout = Layout(self.groups.cp.size(), self.groups.cp.rank(), spread, tensor_rank)
        folder = weights_folder(recipe.model, model_dir)
        self.chunks = build(self.hf, transformer_config(self.hf, config), self.groups)
        weights.fill(self.chunks, folder, self.hf, self.groups)
        self.parts = weights.parts(self.chunks, self.groups)
        self.sending = weights.plan_export(self.parts, self.groups)
        self.learning: dict[Learner, Learning] = {"policy": Learning(self.chunks, self.chunks[0].config, recipe)}
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
        if isinstance(recipe.algorithm, Ppo):
            chunks = self._read(Critic, beside.get(CRITIC_KEY, folder))
            self.learning["critic"] = Learning(chunks, chunks[0].config, recipe)
        self.host = HostCopies()

    step = supported(Updating.step)
    supervised_step = supported(Updating.supervised_step)

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
        chunks_of = {KEPT[learner].model: learning.chunks for learner, learning in self.learning.items()}
        for what, chunks in (chunks_of | {"reference": self.reference}).items():
            for number, chunk in enumerate(chunks):
                chunk.load_state_dict(loaded[what][f"chunk{number}"], strict=False)  # what is absent was compared
        for learner, learning in self.learning.items():
            kept, optimizers = KEPT[learner], learning.optimizers()
            learning.begin(loaded[kept.steps])
            for part in moments.to_fill(optimizers, places[kept.model], LOADED_BYTES):
                read = state.load(folder, {kept.optimizer: part})[kept.optimizer]
                moments.put(optimizers, places[kept.model], read)
        state_files.fill_rng(self.rank, self.device, state_files.read(folder / state_files.RNG))

    def _held(self) -> tuple[list[torch.nn.Module], list[torch.optim.Optimizer]]:
        learning = self.learning.values()
        models = [*(chunk for each in learning for chunk in each.reduced), *self.reference, *self.teacher]
        return models, [o.optimizer for each in learning for o in each.optimizers()]

    def _sharded(self) -> dict[str, Any]:
        """What changes but the optimizers' state."""
        critic = self.learning["critic"].chunks if "critic" in self.learning else []
        return {
            "model": state.sharded(self.chunks, self.groups),
            "reference": state.sharded(self.reference, self.groups, "reference."),
            "critic": state.sharded(critic, self.groups, "critic."),
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
    def _column(
        self, name: str, rollouts: Rollouts, temperature: float, progress: Callable[[], None]
    ) -> NDArray[np.float32]:
        critic = self.learning["critic"].chunks if "critic" in self.learning else []
        held = {"recomputed": self.chunks, "reference": self.reference, TEACHER: self.teacher, VALUES: critic}
        models, what = held[name], "critic" if name == VALUES else name
        if not models:
            raise RunError(f"the algorithm of this step needs a {what}, the recipe's does not: none is held")
        if name in (TEACHER, VALUES):  # their experts are their own
            rollouts = replace(rollouts, routed_experts=None)
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

    def _refer(self) -> None:
        for frozen, chunk in zip(self.reference, self.chunks, strict=False):
            frozen.load_state_dict(chunk.state_dict())
            frozen.requires_grad_(False)


def _device(choice: str, rank: int) -> torch.device:
    if not torch.cuda.is_available():
        if choice == "cuda":
            raise RunError('trainer.device = "cuda" but torch sees no GPU: use "auto" or "cpu"')
        return torch.device("cpu")
    if choice == "cpu":
        raise RunError(
            'trainer.device = "cpu", but Megatron-core takes a GPU where there is one: use "auto", or hide it (CUDA_VISIBLE_DEVICES=)'
        )
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device
