"""The words of the data flow as records: Prompt -> Sample -> Group; every array says its shape and unit."""

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
    """max_new_tokens or the context was reached."""
    FAILED = 2
    """The sample could not be generated; its group says why."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A task: what the model sees, and what a reward needs to judge an answer."""

    source: int
    """Which [[source]] of the recipe, by position."""
    index: int
    """Which item of the source."""
    text: str
    """What was asked, as text (chat messages after the chat template)."""
    tokens: NDArray[np.int32]  # [P]
    answer: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    """Whatever else the source's row or item says; JSON-like."""


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
    """What the algorithm trains on, after shaping."""
    raw_reward: float = 0.0
    """What the verifier said."""
    turns: int = 1
    extra: dict[str, float] = field(default_factory=dict)
    """Numbers that an environment or a reward adds; a column of the shard each."""
    routed_experts: NDArray[np.unsignedinteger[Any]] | None = None  # [P + T - 1, layers, k]
    """Which experts each token of prompt and answer was routed to, but the last, which no router saw."""
    seconds: float = 0.0
    """That the engine took for its turns; not kept in the shard."""

    def text(self, tokenizer: Any) -> str:
        """The model's own words."""
        return str(tokenizer.decode(self.tokens[self.loss_mask == 1].tolist(), skip_special_tokens=True))


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a group could not be generated or scored."""

    reason: str
    """Nothing in it is of one prompt alone, so that equal ones are counted together."""
    detail: str
    """Which source, prompt and sample, and what was said."""


@dataclass(slots=True)
class Group:
    """The samples of one prompt. A failed group has a reason and is kept, not trained on."""

    prompt: Prompt
    samples: list[Sample]
    reason: str = ""
    """Why the group failed; empty when it did not."""
    detail: str = ""
    """The rest of a Failure."""


def failed_group(prompt: Prompt, samples_per_prompt: int, version: int, failure: Failure) -> Group:
    """A group of which nothing could be generated: its samples have no tokens. version: that would have generated it."""
    tokens, mask, logprobs = np.empty(0, np.int32), np.empty(0, np.uint8), np.empty(0, np.float32)
    samples = [
        Sample(tokens, mask, logprobs, [(0, version)], Finish.FAILED, turns=0) for _ in range(samples_per_prompt)
    ]
    return Group(prompt, samples, failure.reason, failure.detail)


def with_experts(groups: list[Group]) -> list[Group]:
    """The groups. Experts, which a shard keeps for all of its samples or none, are zeros for those that have none yet, or failed."""
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
    """A partial rollouts: its samples so far, to be gone on with under newer weights."""

    groups: list[Group]
    """A sample's `turns` are those that its environment has answered; all else of it holds for the tokens there are."""
    turns: list[list[int]]
    """Of each sample: the tokens at which its turns begin."""
    cut: list[int]
    """The samples whose last turn has not ended; what their `finish` says is to be ignored."""

    @property
    def samples(self) -> list[Sample]:
        return [sample for group in self.groups for sample in group.samples]

    @property
    def tokens(self) -> int:
        """After the prompts, observations too."""
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
    """[S, layers, K] the experts that the behavior policy sent each token to, for all of a sample's tokens, the prompt's
    too, but its last: S is the sum of lengths() - 1. The megatron trainer routes as they say."""
    columns: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    """[T] each, of the tokens in the loss: other policies' logprobs by policy ("reference", "recomputed", "teacher"), a critic's
    "values"."""
    too_old: NDArray[np.uint8] | None = None
    """[T] 1 on tokens that the model generated and that are out of the loss for their age alone."""

    def __len__(self) -> int:
        return len(self.ids)

    def lengths(self) -> NDArray[np.int64]:
        """[N] tokens of each whole sequence, prompt included."""
        lengths: NDArray[np.int64] = np.diff(self.offsets) + np.diff(self.prompt_offsets)
        return lengths

    def generated(self) -> NDArray[np.int64]:
        """[N] tokens that the model generated, also those that are too old for the loss; observations are none."""
        own = self.loss_mask if self.too_old is None else self.loss_mask | self.too_old
        counted = np.concatenate([[0], np.cumsum(own, dtype=np.int64)])
        found: NDArray[np.int64] = counted[self.offsets[1:]] - counted[self.offsets[:-1]]
        return found


def mask_old(rollouts: Rollouts, oldest: int) -> tuple[Rollouts, int]:
    """`rollouts` without the tokens of versions before `oldest` in the loss, and how many those are."""
    out = (rollouts.versions < oldest) & (rollouts.loss_mask == 1)
    return replace(rollouts, loss_mask=rollouts.loss_mask * ~out, too_old=out.astype(np.uint8)), int(out.sum())
