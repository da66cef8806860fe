"""Records of the data flow: a Group holds Samples of one Prompt. Every array field says its shape and unit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from relax_hpc.files.errors import Damaged

Progress = Callable[[], None]
"""Called now and then during everything that lasts: the heartbeat. An exception that it raises ends the work."""


class Finish(IntEnum):
    """Why a sample ended."""

    STOP = 0
    """The end-of-sequence token or a stop string was generated, or the environment said done."""
    LENGTH = 1
    """max_new_tokens or the end of the model's context was reached."""
    FAILED = 2
    """The sample could not be generated: it is kept, never trained on or compared with; the reason stands in its group."""


class StopReason(IntEnum):
    """The limit that ended a sample of several turns: its number `stop_reason`."""

    MAX_NEW_TOKENS = 1
    CONTEXT = 2
    MAX_TURNS = 3
    MAX_EPISODE_TOKENS = 4
    OBSERVATION = 5
    """An observation left no room for another answer."""


@dataclass(frozen=True, slots=True)
class MediaSource:
    """The files that media were made of, byte for byte, and the processor that made them."""

    files: tuple[tuple[str, bytes], ...]
    """("image", "video" or "audio"; the file's bytes), in the order in which the prompt shows them."""
    processor: Mapping[str, Any]
    """Its class, the digest of its settings, the recipe's limits and the versions of the libraries; JSON-like."""


@dataclass(frozen=True, slots=True)
class Media:
    """The images, videos and sounds of a prompt as the model's processor made them: the truth for engine and trainer."""

    tensors: Mapping[str, NDArray[Any]]
    """Arguments of the model's forward by name, such as pixel_values [patches, values], image_grid_thw [images, 3]."""
    digest: str
    """XXH3-128 (hexadecimal) of names, types, shapes and bytes, in the order of names."""
    source: MediaSource | None = None
    """The files, where shards are to keep these in place of the tensors (spool.media = "source")."""

    @classmethod
    def of(cls, tensors: Mapping[str, NDArray[Any]]) -> Media:
        """The media with their digest."""
        return cls(tensors, digest_of(tensors))

    @property
    def bytes(self) -> int:
        """Bytes of what a shard keeps of them: the files where there are these, else the tensors."""
        if self.source is not None:
            return sum(len(data) for _, data in self.source.files)
        return sum(array.nbytes for array in self.tensors.values())

    def check(self, station: str) -> None:
        """Raise Damaged where the tensors are not those that the digest was made of; `station`: who holds them now."""
        found = digest_of(self.tensors)
        if found != self.digest:
            raise Damaged(
                f"{station}: a prompt's media have the checksum {found}, but the processor made {self.digest}: "
                "they were changed in between"
            )


def digest_of(tensors: Mapping[str, NDArray[Any]]) -> str:
    """XXH3-128 of names, types, shapes and bytes of arrays, in the order of names."""
    digest = xxhash.xxh3_128()
    for name in sorted(tensors):
        array = np.ascontiguousarray(tensors[name])
        digest.update(f"{name} {array.dtype.str} {tensors[name].shape};".encode())
        digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


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
    """With media: as the model's processor expanded them, a placeholder for each patch or frame."""
    answer: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    """Everything else that the source's row or item holds; JSON-like."""
    media: Media | None = None


@dataclass(slots=True)
class Sample:
    """One attempt at a prompt: everything after the prompt, turns and observations together."""

    tokens: NDArray[np.int32]  # [T]
    loss_mask: NDArray[np.uint8]  # [T] 1 on the model's own tokens, 0 on observations
    logprobs: NDArray[np.float32]  # [T] of the tempered distribution, before top-p and top-k; 0 where the mask is 0
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
    """Experts that each token of prompt and answer was routed to. No router saw the last token."""
    seconds: float = 0.0
    """Seconds that the engine took for the sample's turns; not kept in the shard."""
    media: Media | None = None
    """All that the sample shows, its prompt's media first, where its environment showed more than the prompt; else None."""
    rollout: int | None = None
    """Number of the attempt at the prompt, for an agent's: one that rewrites or forks its history makes several samples,
    which share its reward. None: an attempt of its own."""
    turn_rewards: NDArray[np.float32] | None = None  # [T]
    """Rewards given before the end, each at the last token of its turn, 0 elsewhere; they are part of `reward`. None: there
    were none."""

    def text(self, tokenizer: Any) -> str:
        """Decode the model's own tokens; observations are left out."""
        return str(tokenizer.decode(self.tokens[self.loss_mask == 1].tolist(), skip_special_tokens=True))


@dataclass(frozen=True, slots=True)
class Failure:
    """The reason why a group could not be generated or scored."""

    reason: str
    """The reason in general, without any prompt, so that equal reasons are counted together."""
    detail: str
    """The reason in this case: source, prompt and sample, and the error's own text."""

    @classmethod
    def of(cls, prompt: Prompt, reason: str, detail: str) -> Failure:
        """The failure of a user's code at a prompt; `detail`: the error's own text, if it has one."""
        about = f"source {prompt.source}, prompt {prompt.index}"
        return cls(reason, f"{about}: {detail}" if detail else about)


@dataclass(slots=True)
class Group:
    """The samples of one prompt. A failed group has a reason and is kept, not trained on."""

    prompt: Prompt
    samples: list[Sample]
    reason: str = ""
    """The reason of a failed group; empty otherwise."""
    detail: str = ""
    """The details of a failed group's reason (see Failure.detail); in another group, why some of its samples failed."""

    @property
    def generated(self) -> list[Sample]:
        """The samples that did not fail."""
        return [sample for sample in self.samples if sample.finish is not Finish.FAILED]


def failed_group(prompt: Prompt, samples_per_prompt: int, version: int, failure: Failure) -> Group:
    """Make the group of a prompt that could not be generated by weights of `version`: its samples have no tokens."""
    tokens, mask, logprobs = np.empty(0, np.int32), np.empty(0, np.uint8), np.empty(0, np.float32)
    samples = [
        Sample(tokens, mask, logprobs, [(0, version)], Finish.FAILED, turns=0) for _ in range(samples_per_prompt)
    ]
    return Group(prompt, samples, failure.reason, failure.detail)


def with_experts(groups: list[Group]) -> list[Group]:
    """Give every sample routed experts, zeros if need be, if any has them: a shard has them for all samples or none."""
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
    """The unfinished samples of a request that a worker gave back, for another one to continue under newer weights."""

    groups: list[Group]
    """The groups with their samples so far. A sample's `turns` counts those that its environment has answered."""
    turns: list[list[int]]
    """The tokens at which the turns of each sample begin."""
    cut: list[int]
    """Indices of the samples whose last turn has not ended; their `finish` is to be ignored."""
    failures: Mapping[int, Failure] = field(default_factory=dict)
    """Failures of samples, by their indices."""
    environments: Mapping[int, str] = field(default_factory=dict)
    """Records of the environments that can be brought back by their states, by the indices of their samples."""

    @property
    def samples(self) -> list[Sample]:
        return [sample for group in self.groups for sample in group.samples]

    @property
    def tokens(self) -> int:
        """Tokens of all samples after their prompts, observations included."""
        return sum(len(sample.tokens) for sample in self.samples)


@dataclass(frozen=True, slots=True)
class Rollouts:
    """N samples on their way into the loss, flat: T tokens concatenated, offsets say where each sample begins.

    Sample i is prompt_tokens[prompt_offsets[i]:prompt_offsets[i+1]] + tokens[offsets[i]:offsets[i+1]].
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
    """[S, layers, K] the experts that the behavior policy sent each token to. The last token of a sample has none, so S
    is the sum of lengths() - 1. The megatron trainer routes as they say."""
    columns: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    """Further numbers for the tokens in the loss, [T] each: logprobs of "reference", "recomputed", "teacher"; "values"."""
    media: tuple[Media | None, ...] = ()
    """[N] of each sample: its prompt's, which the samples of a group share, with what its environment showed later; empty
    where nothing of the step shows any."""
    shown_later: NDArray[np.uint8] | None = None
    """[N] 1 where an environment showed media after the prompt: placeholders stand in the sample's own tokens too."""
    too_old: NDArray[np.uint8] | None = None
    """[T] 1 on tokens that the model generated and that are kept out of the loss for their age alone."""
    rollout: NDArray[np.int32] | None = None
    """[N] which attempt of its group a sample is of, where an attempt may have several; else None: each has one."""
    turn_rewards: NDArray[np.float32] | None = None
    """[T] rewards given before the end (see Sample.turn_rewards); None where there were none."""
    extra: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    """[N] each: the numbers that rewards and environments added, by name, such as the parts of a reward that is a sum;
    NaN where a sample has none."""

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
    """Take tokens of versions before `oldest` out of the loss; returns the new rollouts and the number of these tokens."""
    out = (rollouts.versions < oldest) & (rollouts.loss_mask == 1)
    return replace(rollouts, loss_mask=rollouts.loss_mask * ~out, too_old=out.astype(np.uint8)), int(out.sum())


def concatenate(parts: Iterable[Rollouts]) -> Rollouts:
    """Join the rollouts of several shards. Groups are numbered anew, in order. All must have the same columns."""
    rollouts = list(parts)
    columns = rollouts[0].columns if rollouts else {}
    first_group, groups = 0, []
    for part in rollouts:
        _, renumbered = np.unique(part.group, return_inverse=True)
        groups.append(renumbered + first_group)
        first_group += int(renumbered.max(initial=-1)) + 1
    types = {
        "rewards": np.float32, "raw_rewards": np.float32, "prompt_tokens": np.int32, "tokens": np.int32, "loss_mask": np.uint8,
        "logprobs": np.float32, "versions": np.int32, "finish": np.uint8,
    }  # fmt: skip
    flat: dict[str, Any] = {name: joined([getattr(r, name) for r in rollouts], of) for name, of in types.items()}
    routed = [r.routed_experts for r in rollouts if r.routed_experts is not None]
    return Rollouts(
        ids=[i for r in rollouts for i in r.ids],
        group=joined(groups, np.int64),
        prompt_offsets=offsets_of([int(n) for r in rollouts for n in np.diff(r.prompt_offsets)]),
        offsets=offsets_of([int(n) for r in rollouts for n in np.diff(r.offsets)]),
        routed_experts=np.concatenate(routed) if routed else None,
        columns={n: joined([r.columns[n] for r in rollouts], np.float32) for n in columns},
        shown_later=_shown_later(rollouts),
        rollout=_attempts(rollouts),
        turn_rewards=_turn_rewards(rollouts),
        extra={
            n: joined([_extra(r, n) for r in rollouts], np.float32)
            for n in dict.fromkeys(n for r in rollouts for n in r.extra)
        },
        media=tuple(m for r in rollouts for m in r.media or [None] * len(r)) if any(r.media for r in rollouts) else (),
        **flat,
    )


def _shown_later(rollouts: Sequence[Rollouts]) -> NDArray[np.uint8] | None:
    if all(r.shown_later is None for r in rollouts):
        return None
    return joined([np.zeros(len(r), np.uint8) if r.shown_later is None else r.shown_later for r in rollouts], np.uint8)


def _attempts(rollouts: Sequence[Rollouts]) -> NDArray[np.int32] | None:
    if all(r.rollout is None for r in rollouts):
        return None
    return joined([np.arange(len(r)) if r.rollout is None else r.rollout for r in rollouts], np.int32)


def _turn_rewards(rollouts: Sequence[Rollouts]) -> NDArray[np.float32] | None:
    if all(r.turn_rewards is None for r in rollouts):
        return None
    parts = [np.zeros(len(r.tokens)) if r.turn_rewards is None else r.turn_rewards for r in rollouts]
    return joined(parts, np.float32)


def _extra(rollouts: Rollouts, name: str) -> NDArray[np.float32]:
    return rollouts.extra.get(name, np.full(len(rollouts), np.nan, np.float32))


def offsets_of(lengths: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
    """Return where each of some parts begins, and the end of the last: [N + 1]."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])


def joined(parts: Sequence[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    """Join arrays; no arrays are an empty one."""
    return np.concatenate(parts).astype(dtype, copy=False) if len(parts) else np.empty(0, dtype)
