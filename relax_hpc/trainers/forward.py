"""Logprobs of chosen tokens, without ever holding the logits of a whole micro-batch; a critic's values at them.

base model, with media ──hidden [R*L, H]──► the M positions that predict a loss token ──head, in chunks──► [M] logprobs, [M] entropies
                                                                                    └──a critic's head──► [M] values
"""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from relax_hpc.files.errors import RunError
from relax_hpc.huggingface import as_arguments, hidden_states
from relax_hpc.recipe.tables.trainer import LOGITS_PER_CHUNK
from relax_hpc.trainers.packing import MicroBatch
from relax_hpc.trainers.trees.attention import TreeAttention, attending, understood


def token_logprobs(
    model: PreTrainedModel,
    batch: MicroBatch,
    targets: Tensor,
    temperature: float,
    logits_per_chunk: int = LOGITS_PER_CHUNK,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """([M] logprobs of `targets` under logits / temperature, [M] entropies, with gradient where asked for), float32.

    targets: [M] int64, the token ids at batch.predictors. Where more than one chunk is needed, a chunk's logits are
    computed again in the backward pass.
    """
    body, head = cast(PreTrainedModel, model.base_model), Head.of(model)
    if batch.shared is not None:  # a token that several samples drew at one place is predicted once
        asked, of = (torch.from_numpy(index).to(targets.device) for index in (batch.shared.asked, batch.shared.of))
        chosen = predicting_states(body, batch, targets.device, batch.predictors[batch.shared.asked])
        logprobs, entropies = _in_chunks(head, chosen, targets[asked], temperature, logits_per_chunk, entropy_gradient)
        return logprobs[of], entropies[of]
    chosen = predicting_states(body, batch, targets.device)
    return _in_chunks(head, chosen, targets, temperature, logits_per_chunk, entropy_gradient)


class Head(NamedTuple):
    """A model's output layer, and the cap that some models put on their logits."""

    layer: Any
    cap: float | None

    @classmethod
    def of(cls, model: PreTrainedModel) -> Head:
        cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
        return cls(model.get_output_embeddings(), cap)

    @property
    def tokens(self) -> int:
        return int(self.layer.weight.shape[0])

    def logits(self, hidden: Tensor) -> Tensor:
        found: Tensor = self.layer(hidden)
        return found if self.cap is None else self.cap * torch.tanh(found / self.cap)


class Critic(torch.nn.Module):
    """A model's body with a head of one number, which begins at zero."""

    def __init__(self, body: PreTrainedModel) -> None:
        super().__init__()
        self.body = body
        self.head = torch.nn.Linear(body.config.get_text_config().hidden_size, 1)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)


def token_values(critic: Critic, batch: MicroBatch, device: torch.device) -> Tensor:
    """[M] float32: the value of the state before each token in the loss."""
    chosen = predicting_states(critic.body, batch, device)
    with torch.autocast(device.type, enabled=False):  # a loss of squares wants more digits than bfloat16 has
        values: Tensor = critic.head(chosen.float()).squeeze(-1)
    return values


def predicting_states(
    body: PreTrainedModel, batch: MicroBatch, device: torch.device, predictors: NDArray[np.int64] | None = None
) -> Tensor:
    """[M, H] hidden states at batch.predictors, or at others."""
    tree = TreeAttention(batch.shared.blocks) if batch.shared is not None and understood(body) else None
    # the samples' own keys need a mask only where a row has more than one; else attention takes its faster causal path
    plain = tree is not None or batch.one_sample_a_row
    mask = None if plain else torch.from_numpy(batch.attention_mask()).to(device)
    with attending(body, tree) if tree is not None else contextlib.nullcontext():
        hidden = hidden_states(
            body,
            input_ids=torch.from_numpy(batch.tokens).to(device),
            position_ids=torch.from_numpy(batch.positions).to(device),
            attention_mask=mask,
            **as_arguments(batch.media, body),
        )
    at = batch.predictors if predictors is None else predictors
    return hidden.flatten(0, 1)[torch.from_numpy(at).to(device)]


def _in_chunks(
    head: Head, chosen: Tensor, targets: Tensor, temperature: float, logits_per_chunk: int, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    tokens_per_chunk = max(1, logits_per_chunk // head.tokens)
    if len(chosen) <= tokens_per_chunk:
        return _head_logprobs(head, chosen, targets, temperature, entropy_gradient)
    parts = [
        checkpoint(_head_logprobs, head, rows, wanted, temperature, entropy_gradient, use_reentrant=False)
        for rows, wanted in zip(chosen.split(tokens_per_chunk), targets.split(tokens_per_chunk), strict=True)
    ]
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])


def _head_logprobs(
    head: Head, hidden: Tensor, targets: Tensor, temperature: float, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    distribution = torch.log_softmax(head.logits(hidden).float() / temperature, -1)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropies = -(distribution.exp() * distribution).sum(-1)
    return distribution.gather(-1, targets[:, None]).squeeze(-1), entropies


@torch.no_grad()
def check_head(model: PreTrainedModel) -> None:
    """Raise RunError for a model that does more after its base than apply its head and a cap (such as scales): its
    logprobs would be wrong."""
    probe = torch.arange(4, device=model.device)[None] % model.get_input_embeddings().weight.shape[0]  # type: ignore[index]
    whole = model(input_ids=probe, use_cache=False).logits
    parts = Head.of(model).logits(hidden_states(cast(PreTrainedModel, model.base_model), input_ids=probe))
    if not torch.allclose(whole, parts, rtol=1e-4, atol=1e-4):
        raise RunError(
            f"{type(model).__name__} changes its logits after the head by up to {(whole - parts).abs().max():.3g}: "
            "the torch trainer computes logits as head(base model) and would train on others"
        )
