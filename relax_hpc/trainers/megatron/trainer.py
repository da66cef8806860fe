"""One process of a Megatron-core trainer: tensor, sequence, pipeline, context, expert and data parallel.

    rollouts ──forward of the reference, where one is needed──► columns ──updates──► for each, most often one:
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
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.pipeline_parallel import get_forward_backward_func
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoConfig

import relax_hpc.trainers.megatron.groups as groups
import relax_hpc.trainers.megatron.moments as moments
import relax_hpc.trainers.megatron.state as state
import relax_hpc.trainers.megatron.weights as weights
from relax_hpc.algorithms import make_algorithm
from relax_hpc.algorithms.base import TEACHER
from relax_hpc.recipe.schema import Recipe
from relax_hpc.records import Rollouts
from relax_hpc.run_dir import RunError
from relax_hpc.trainers import fit, state_files
from relax_hpc.trainers.build import check_beside, weights_folder
from relax_hpc.trainers.megatron.cpu import supported
from relax_hpc.trainers.megatron.head import Policy, token_logprobs
from relax_hpc.trainers.megatron.model import build, transformer_config
from relax_hpc.trainers.megatron.packing import Layout, MicroBatch, pack, plan
from relax_hpc.trainers.token_loss import Learner, TokenLoss, add
from relax_hpc.trainers.update import Updating

LOADED_BYTES = 2**30
"""Of the optimizer's state, read at once."""


class MegatronTrainer(Updating):
    """See relax_hpc.trainers.base.Trainer."""

    @supported
    def __init__(self, recipe: Recipe, model_dir: Path, rank: int, world: int) -> None:
        self.recipe, self.rank, self.world = recipe, rank, world
        config, parallel = recipe.trainer, recipe.trainer.parallel
        fit.check(recipe, model_dir)
        self.device = _device(config.device, rank)
        self.dtype: torch.dtype = getattr(torch, config.dtype)
        self.hf: Any = AutoConfig.from_pretrained(model_dir, local_files_only=True).get_text_config()
        self.groups = groups.join(parallel, recipe.run.seed)
        torch.manual_seed(recipe.run.seed + rank)
        spread = parallel.tensor if parallel.sequence else 1
        tensor_rank = self.groups.tp.rank() if parallel.sequence else 0
        self.layout = Layout(self.groups.cp.size(), self.groups.cp.rank(), spread, tensor_rank)
        self.config = transformer_config(self.hf, config)
        folder = weights_folder(recipe.model, model_dir)
        self.chunks = build(self.hf, self.config, self.groups)
        weights.fill(self.chunks, folder, self.hf, self.groups)
        self.parts = weights.parts(self.chunks, self.groups)
        self.sending = weights.plan_export(self.parts, self.groups)
        self.reduced = self._reduced()
        self.optimizer = get_megatron_optimizer(_optimizer_config(recipe), self.reduced, use_gloo_process_groups=False)
        self._begin_optimizer()
        self.teacher = self._beside("algorithm.teacher", model_dir)
        self.reference: list[Policy] = []
        if "reference" in make_algorithm(recipe.algorithm).needs:
            self.reference = build(self.hf, self.config, self.groups)
            self._refer()

    step = supported(Updating.step)
    supervised_step = supported(Updating.supervised_step)

    @supported
    def begin_training(self) -> None:
        self._begin_optimizer()  # master weights stay as they are
        self._refer()

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
        moved = moments.gathered(self._optimizers(), model["model"])
        saving = state.Saving(folder, {**model, "optimizer": moved}, self.steps)
        if self.rank == 0:
            state_files.write(folder / state_files.RNG, states)
        return saving

    @supported
    def load(self, folder: Path) -> None:
        optimizers, places = self._optimizers(), self._sharded()["model"]
        everything = self._sharded()
        state.compare(folder, {**everything, "optimizer": moments.expected(optimizers, places)})
        loaded = state.load(folder, everything)
        for what, chunks in (("model", self.chunks), ("reference", self.reference)):
            for number, chunk in enumerate(chunks):
                chunk.load_state_dict(loaded[what][f"chunk{number}"], strict=False)  # what is absent was compared
        self._begin_optimizer(loaded["steps"])
        for part in moments.to_fill(optimizers, places, LOADED_BYTES):
            moments.put(optimizers, places, state.load(folder, {"optimizer": part})["optimizer"])
        state_files.fill_rng(self.rank, self.device, state_files.read(folder / state_files.RNG))

    def _sharded(self) -> dict[str, Any]:
        return {
            "model": state.sharded(self.chunks, self.groups),
            "reference": state.sharded(self.reference, self.groups, "reference."),
        }

    def _begin_optimizer(self, steps: int = 0) -> None:
        self.steps = steps
        for optimizer in self._optimizers():
            moments.fresh(optimizer, steps)

    def _gradients(
        self, rollouts: Rollouts, token_loss: TokenLoss, temperature: float, tokens: int, progress: Callable[[], None]
    ) -> dict[str, float]:
        for chunk in self.reduced:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        batches = self._batches(rollouts)
        sums: dict[str, float] = {}

        def loss_of(number: int, logprobs: Tensor, entropies: Tensor) -> Tensor:
            nonlocal sums
            progress()
            loss, said = token_loss(batches[number].targets, logprobs, entropies)
            sums = add([sums, said])
            return loss / tokens

        self._run(self.reduced, rollouts, batches, temperature, loss_of)
        return sums if self._speaks() else {}

    def _gradient_norm(self, learner: Learner) -> float:
        self.optimizer.prepare_grads()
        return float(self.optimizer.get_grad_norm())

    def _update(self, learner: Learner, norm: float, rate: float) -> None:
        config = self.recipe.trainer
        for optimizer in self._optimizers():
            clip_grad_by_total_norm_fp32(optimizer.get_parameters(), config.clip_grad_norm, norm)
            for group in optimizer.param_groups:
                group["lr"], group["weight_decay"] = rate, config.weight_decay * group["wd_mult"]
        self.optimizer.step_with_ready_grads()
        self.steps += 1

    def _run(
        self,
        models: list[Any],
        rollouts: Rollouts,
        batches: list[MicroBatch],
        temperature: float,
        loss_of: Callable[[int, Tensor, Tensor], Tensor],
        forward_only: bool = False,
    ) -> None:
        """All micro-batches through Megatron's schedule; `loss_of` is called on the last stage, with each one's number."""

        def forward(numbers: Iterator[int], model: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
            number = next(numbers)
            batch = batches[number]
            hidden = model(batch.tokens, batch.positions, None, packed_seq_params=batch.packed)
            policy = getattr(model, "module", model)
            return hidden, partial(finish, policy, number)

        def finish(policy: Policy, number: int, hidden: Tensor) -> tuple[Tensor, Tensor, None]:
            batch = batches[number]
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
        models = {"recomputed": self.chunks, "reference": self.reference, TEACHER: self.teacher}[name]
        if not models:
            raise RunError(f"the algorithm of this step needs a {name}, the recipe's does not: none is held")
        if name == TEACHER:  # its experts are its own
            rollouts = replace(rollouts, routed_experts=None)
        column = torch.zeros(len(rollouts.tokens), device=self.device)
        batches = self._batches(rollouts)

        def keep(number: int, logprobs: Tensor, entropies: Tensor) -> Tensor:
            progress()
            if self._speaks():
                column[torch.from_numpy(batches[number].targets).to(self.device)] = logprobs
            return logprobs.sum()

        self._run(models, rollouts, batches, temperature, keep, forward_only=True)
        if self.world > 1:
            dist.all_reduce(column)  # each token's logprob is on one process, zeros elsewhere
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

    def _reduced(self) -> list[Any]:
        """The chunks, with gradients that are summed over the processes that hold the same parameters."""
        parallel = self.recipe.trainer.parallel
        config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=True,
            overlap_grad_reduce=parallel.overlap,
        )
        reduced = [
            DistributedDataParallel(self.config, config, chunk, disable_bucketing=number > 0)
            for number, chunk in enumerate(self.chunks)
        ]
        self.config.finalize_model_grads_func = _finalize
        if parallel.overlap:
            self.config.no_sync_func = [c.no_sync for c in reduced] if len(reduced) > 1 else reduced[0].no_sync
        return reduced

    def _optimizers(self) -> list[Any]:
        return [o for o in getattr(self.optimizer, "chained_optimizers", [self.optimizer]) if not o.is_stub_optimizer]

    @torch.no_grad()
    def _beside(self, key: str, model_dir: Path) -> list[Policy]:
        """Another model, that the recipe names under `key`, split as the policy is; nothing where it names none."""
        path = self.recipe.models_beside.get(key)
        if path is None:
            return []
        check_beside(key, path, model_dir)
        hf = AutoConfig.from_pretrained(path, local_files_only=True).get_text_config()
        chunks = build(hf, transformer_config(hf, self.recipe.trainer), self.groups)
        weights.fill(chunks, path, hf, self.groups)
        return [chunk.requires_grad_(False) for chunk in chunks]

    def _refer(self) -> None:
        for frozen, chunk in zip(self.reference, self.chunks, strict=False):
            frozen.load_state_dict(chunk.state_dict())
            frozen.requires_grad_(False)


def _finalize(chunks: list[Any], tokens: Tensor | None, **options: Any) -> None:
    """Sum gradients; they are divided by the number of tokens already."""
    finalize_model_grads(chunks, None, **options)


def _optimizer_config(recipe: Recipe) -> OptimizerConfig:
    config = recipe.trainer
    dtype = getattr(torch, config.dtype)
    return OptimizerConfig(
        optimizer="adam",
        lr=config.learning_rate,
        weight_decay=config.weight_decay,
        adam_beta1=config.betas[0],
        adam_beta2=config.betas[1],
        adam_eps=config.eps,
        clip_grad=config.clip_grad_norm,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=True,
    )


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
