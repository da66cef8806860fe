"""Logprobs of chosen tokens from the last stage's hidden states, without the logits of a whole micro-batch.

hidden [t / tensor, 1, H] ──gather──► [m] positions that predict ──head, vocabulary split, in chunks──► [m] ──► [M] everywhere
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from relax_hpc.recipe.tables.trainer import LOGITS_PER_CHUNK
from relax_hpc.trainers.megatron.encoders import Encoders
from relax_hpc.trainers.megatron.packing import LocalBatch, Packed


class Policy(GPTModel):  # type: ignore[misc]
    """A GPTModel whose last stage returns hidden states; `token_logprobs` applies its head to some of them."""

    output_layer: Any
    real_vocabulary: int
    """Size of the vocabulary; rows beyond it only fill up the embedding."""
    hf: Any
    """Hugging Face's configuration of the model."""
    encoders: Encoders | None
    """The encoders of media, on the first stage of a model that has them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.encoders = None
        if self.post_process:  # token_logprobs gathers the hidden states, and their gradients, itself
            self.output_layer.sequence_parallel = self.output_layer.allreduce_dgrad = False
            self.output_layer.disable_grad_reduce = True

    def forward(self, tokens: Tensor, positions: Tensor, *, packed_seq_params: Packed) -> Tensor:
        """[t / tensor, 1, H] hidden states of a micro-batch, behind this process's layers."""
        embeddings = deep = None
        if self.encoders is not None and packed_seq_params.shown is not None:
            embeddings, deep = self.encoders(self.embedding(tokens, positions), packed_seq_params.shown)
        # deep features travel as the layers' context: a recomputed layer then gives their gradients like its input's
        hidden: Tensor = super().forward(
            tokens,
            positions,
            None,
            embeddings,
            packed_seq_params=packed_seq_params,
            extra_block_kwargs={"context": deep},
        )
        return hidden

    def _postprocess(self, hidden_states: Tensor, **ignored: Any) -> Tensor:
        return hidden_states

    def logits(self, hidden: Tensor) -> Tensor:
        """[m, H] -> [m, V / tensor]"""
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        logits: Tensor = self.output_layer(hidden[:, None], weight=weight)[0]
        return logits[:, 0]


class Critic(Policy):
    """A model whose head has one output, the same on every tensor-parallel process; it begins at zero."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "share_embeddings_and_output_weights": False})
        if self.post_process:
            instead = self.output_layer.weight
            self.output_layer = torch.nn.Linear(self.config.hidden_size, 1, dtype=instead.dtype, device=instead.device)
            torch.nn.init.zeros_(self.output_layer.weight)
            torch.nn.init.zeros_(self.output_layer.bias)


def token_values(model: Critic, hidden: Tensor, batch: LocalBatch) -> Tensor:
    """[M] float32, on every process: the value before each token in the loss. hidden: output of the last stage."""
    groups = model.pg_collection
    if model.config.sequence_parallel:  # every process has the whole gradient of what it gathers
        hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False, group=groups.tp)
    chosen, head = hidden.flatten(0, 1)[batch.predictors], model.output_layer
    return _everywhere(F.linear(chosen.float(), head.weight.float(), head.bias.float()).squeeze(-1), batch, groups.cp)


def token_logprobs(
    model: Policy, hidden: Tensor, batch: LocalBatch, targets: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """([M] logprobs of `targets` [M] under logits / temperature, [M] entropies), float32, on every process. hidden:
    output of the last stage."""
    groups = model.pg_collection
    if model.config.sequence_parallel:
        hidden = gather_from_sequence_parallel_region(hidden, group=groups.tp)  # its gradients are summed
    else:
        hidden = copy_to_tensor_model_parallel_region(hidden, group=groups.tp)
    held = model.output_layer.output_size_per_partition
    first = groups.tp.rank() * held
    real = min(held, max(0, model.real_vocabulary - first))
    chosen, wanted = hidden.flatten(0, 1)[batch.predictors], targets[batch.mine]
    size = max(1, LOGITS_PER_CHUNK // held)
    parts = [
        checkpoint(_head, model, rows, tokens - first, real, temperature, use_reentrant=False)
        if len(chosen) > size
        else _head(model, rows, tokens - first, real, temperature)
        for rows, tokens in zip(chosen.split(size), wanted.split(size), strict=True)
    ]
    logprobs, entropies = (_everywhere(torch.cat(values), batch, groups.cp) for values in zip(*parts, strict=True))
    return logprobs, entropies


def _head(model: Policy, hidden: Tensor, targets: Tensor, real: int, temperature: float) -> tuple[Tensor, Tensor]:
    logits = model.logits(hidden)[:, :real].float() / temperature
    logprobs, entropies = _SplitLogprobs.apply(logits, targets, model.pg_collection.tp)  # type: ignore[no-untyped-call]
    return logprobs, entropies


class _SplitLogprobs(torch.autograd.Function):
    """log_softmax over a vocabulary that is split over `group`, at one token each; also the entropies."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, group: Any) -> tuple[Tensor, Tensor]:
        # logits: [m, v]; targets: [m], below 0 or above v where another process has the token
        top = logits.amax(-1) if logits.shape[1] else logits.new_full((len(logits),), -torch.inf)
        _reduce(top, group, dist.ReduceOp.MAX)
        here = (targets >= 0) & (targets < logits.shape[1])
        index = targets.where(here, 0)
        exponentials = (logits - top[:, None]).exp()
        chosen = (
            logits.gather(-1, index[:, None]).squeeze(-1).where(here, 0) if logits.shape[1] else torch.zeros_like(top)
        )
        sums = torch.stack([exponentials.sum(-1), (exponentials * (logits - top[:, None])).sum(-1), chosen])
        _reduce(sums, group, dist.ReduceOp.SUM)
        total, weighted, chosen = sums
        entropies = total.log() - weighted / total
        ctx.save_for_backward(exponentials / total[:, None], index, here, entropies)
        ctx.set_materialize_grads(False)
        return chosen - top - total.log(), entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, None, None]:
        probabilities, index, here, entropies = ctx.saved_tensors
        gradient = torch.zeros_like(probabilities)
        if grads[0] is not None:
            gradient = -probabilities * grads[0][:, None]
            if gradient.shape[1]:
                gradient.scatter_add_(-1, index[:, None], (grads[0] * here)[:, None])
        if grads[1] is not None:  # of the entropies: -p·(log p + H)
            own = torch.xlogy(probabilities, probabilities) + probabilities * entropies[:, None]
            gradient -= own * grads[1][:, None]
        return gradient, None, None


def _everywhere(values: Tensor, batch: LocalBatch, group: Any) -> Tensor:
    """Collect the [m] values of each context-parallel process as [M] on all of them."""
    if group.size() == 1:
        return values
    everywhere: Tensor = _Everywhere.apply(batch.mine, len(batch.targets), group, values)  # type: ignore[no-untyped-call]
    return everywhere


class _Everywhere(torch.autograd.Function):
    """See _everywhere. Each process computes the same loss from the values."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, count: int, group: Any, values: Tensor) -> Tensor:
        ctx.save_for_backward(mine)
        everywhere = values.new_zeros(count)
        everywhere[mine] = values
        dist.all_reduce(everywhere, group=group)
        return everywhere

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None, Tensor]:
        return None, None, None, grads[0][ctx.saved_tensors[0]]


def _reduce(tensor: Tensor, group: Any, how: Any) -> None:
    if group.size() > 1:
        dist.all_reduce(tensor, op=how, group=group)
