"""Records of the data flow: a Group holds Samples of one Prompt. Every array field says its shape and unit."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Finish(IntEnum):
    """Why a sample ended."""

    STOP = 0
    """The end-of-sequence token or a stop string was generated, or the environment said done."""
    LENGTH = 1
    """max_new_tokens or the end of the model's context was reached."""
    FAILED = 2
    """The sample could not be generated; the reason stands in its group."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A task: the tokens that the model sees, and the data that a reward needs to score an answer."""

    source: int
    """Position of the prompt's [[source]] table in the recipe."""
    index: int
    """Position of the item within its source."""
    text: str
    """The prompt as text; chat messages are rendered with the chat template."""
    tokens: NDArray[np.int32]  # [P]
    answer: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    """Everything else that the source's row or item holds; JSON-like."""


@dataclass(slots=True)
class Sample:
    """One attempt at a prompt: everything after the prompt, turns and observations together."""

    tokens: NDArray[np.int32]  # [T]
    loss_mask: NDArray[np.uint8]  # [T] 1 on the model's own tokens, 0 on observations
    logprobs: NDArray[
        np.float32
    ]  # [T] of the tempered distribution it was drawn from (before top-p, top-k); 0 where the mask is 0
    spans: list[tuple[int, int]]
    """(start, version): from token `start` on, the weights were `version`; starts rise, the first is 0."""
    finish: Finish
    reward: float = 0.0
    """The reward that the algorithm trains on, after shaping."""
    raw_reward: float = 0.0
    """The reward as the verifier returned it."""
    turns: int = 1
    extra: dict[str, float] = field(default_factory=dict)
    """Numbers that an environment or a reward adds; each becomes a column of the shard."""
    routed_experts: NDArray[np.unsignedinteger[Any]] | None = None  # [P + T - 1, layers, k]
    """Experts that each token was routed to, for prompt and answer alike. The last token has none, since no router saw
    it."""
    seconds: float = 0.0
    """Seconds that the engine took for the sample's turns; not kept in the shard."""

    def text(self, tokenizer: Any) -> str:
        """Decode the model's own tokens; observations are left out."""
        return str(tokenizer.decode(self.tokens[self.loss_mask == 1].tolist(), skip_special_tokens=True))


@dataclass(frozen=True, slots=True)
class Failure:
    """The reason why a group could not be generated or scored."""

    reason: str
    """The reason in general: it mentions no single prompt, so that equal reasons are counted together."""
    detail: str
    """The reason in this case: source, prompt and sample, and the error's own text."""


@dataclass(slots=True)
class Group:
    """The samples of one prompt. A failed group has a reason and is kept, not trained on."""

    prompt: Prompt
    samples: list[Sample]
    reason: str = ""
    """The reason of a failed group; empty otherwise."""
    detail: str = ""
    """The details of a failed group's reason (see Failure.detail)."""


def failed_group(prompt: Prompt, samples_per_prompt: int, version: int, failure: Failure) -> Group:
    """Make the group of a prompt that could not be generated: its samples have no tokens. version: the weights that
    would have generated it."""
    tokens, mask, logprobs = np.empty(0, np.int32), np.empty(0, np.uint8), np.empty(0, np.float32)
    samples = [
        Sample(tokens, mask, logprobs, [(0, version)], Finish.FAILED, turns=0) for _ in range(samples_per_prompt)
    ]
    return Group(prompt, samples, failure.reason, failure.detail)


def with_experts(groups: list[Group]) -> list[Group]:
    """Give every sample routed experts if any of `groups` has them: zeros for samples that have none yet, or failed. A
    shard keeps experts for all of its samples or for none."""
    known = next((s.routed_experts for g in groups for s in g.samples if s.routed_experts is not None), None)
    if known is None:
        return groups
    filled = []
    for group in groups:
        shapes = [(len(group.prompt.tokens) + len(s.tokens) - 1, *known.shape[1:]) for s in group.samples]
        experts = [s.routed_experts for s in group.samples]
        zeros = [np.zeros(shape, known.dtype) if e is None else e for e, shape in zip(experts, shapes, strict=True)]
        samples = [replace(s, routed_experts=e) for s, e in zip(group.samples, zeros, strict=True)]
        filled.append(replace(group, samples=samples))
    return filled


@dataclass(frozen=True, slots=True)
class PartialRollout:
    """The unfinished samples of a request that a worker gave back; another worker continues them, under newer weights."""

    groups: list[Group]
    """The groups with their samples so far. A sample's `turns` counts those that its environment has answered; all
    other fields hold for the tokens there are."""
    turns: list[list[int]]
    """The tokens at which the turns of each sample begin."""
    cut: list[int]
    """Indices of the samples whose last turn has not ended; their `finish` is to be ignored."""

    @property
    def samples(self) -> list[Sample]:
        return [sample for group in self.groups for sample in group.samples]

    @property
    def tokens(self) -> int:
        """Tokens of all samples after their prompts, observations included."""
        return sum(len(sample.tokens) for sample in self.samples)


@dataclass(frozen=True, slots=True)
class Rollouts:
    """Samples on their way into the loss, flat: token arrays are concatenated over samples, offsets say where each begins.

    N samples, T tokens in all; `prompt_*` arrays are per sample too, so that sample i is a sequence of its own:
    prompt_tokens[prompt_offsets[i]:prompt_offsets[i+1]] + tokens[offsets[i]:offsets[i+1]].
    """

    ids: list[str]  # [N] "REQUEST/sample", unique in the run
    group: NDArray[np.int64]  # [N] which group of the step a sample belongs to
    rewards: NDArray[np.float32]  # [N] what the algorithm trains on
    raw_rewards: NDArray[np.float32]  # [N] what the verifier said
    prompt_tokens: NDArray[np.int32]
    prompt_offsets: NDArray[np.int64]  # [N + 1]
    tokens: NDArray[np.int32]  # [T]
    offsets: NDArray[np.int64]  # [N + 1]
    loss_mask: NDArray[np.uint8]  # [T]
    logprobs: NDArray[np.float32]  # [T] the behavior policy's
    versions: NDArray[np.int32]  # [T] of the weights that made each token
    finish: NDArray[np.uint8]  # [N]
    routed_experts: NDArray[np.integer[Any]] | None = None
    """[S, layers, K] the experts that the behavior policy sent each token to, prompt tokens included. The last token of
    a sample has none, so S is the sum of lengths() - 1. The megatron trainer routes as they say."""
    columns: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    """Further numbers for the tokens in the loss, [T] each: logprobs of other policies by policy ("reference",
    "recomputed", "teacher"), and a critic's "values"."""
    too_old: NDArray[np.uint8] | None = None
    """[T] 1 on tokens that the model generated and that are kept out of the loss for their age alone."""

    def __len__(self) -> int:
        return len(self.ids)

    def lengths(self) -> NDArray[np.int64]:
        """[N] tokens of each whole sequence, prompt included."""
        lengths: NDArray[np.int64] = np.diff(self.offsets) + np.diff(self.prompt_offsets)
        return lengths

    def generated(self) -> NDArray[np.int64]:
        """[N] tokens that the model generated, those too old for the loss included; observations do not count."""
        own = self.loss_mask if self.too_old is None else self.loss_mask | self.too_old
        counted = np.concatenate([[0], np.cumsum(own, dtype=np.int64)])
        found: NDArray[np.int64] = counted[self.offsets[1:]] - counted[self.offsets[:-1]]
        return found


def mask_old(rollouts: Rollouts, oldest: int) -> tuple[Rollouts, int]:
    """Take tokens of versions before `oldest` out of the loss; returns the new rollouts and how many tokens that were."""
    out = (rollouts.versions < oldest) & (rollouts.loss_mask == 1)
    return replace(rollouts, loss_mask=rollouts.loss_mask * ~out, too_old=out.astype(np.uint8)), int(out.sum())
