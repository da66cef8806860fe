"""Scores of evaluations: rewards of a few answers a prompt become a mean with an interval, and pass@k, for each source.

shards ──answers()──► Answers, one a prompt ──score()──► SourceScore of each source, and one of all prompts together
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from relax_hpc.records import Finish

if TYPE_CHECKING:
    from relax_hpc.spool.shard import Shard

Z = 1.959963984540054
"""The 97.5% point of the normal distribution."""
RESAMPLES = 1000
SEED = 0
"""Seed of the resamples: equal answers have equal intervals, whoever computes them."""


@dataclass(frozen=True, slots=True)
class Answers:
    """The rewards and lengths of one prompt's answers."""

    source: int
    rewards: NDArray[np.float32]  # [n] what the verifier said; 0 for each that failed
    lengths: NDArray[np.int64]  # [n] in tokens, of those that were generated to their end
    truncated: NDArray[np.bool_]  # [n] the same
    failed: bool


@dataclass(frozen=True, slots=True)
class SourceScore:
    """The score of one source's prompts, or of all prompts together where `source` is None."""

    source: int | None
    name: str
    prompts: int
    samples: int
    failed: int
    """Prompts whose group could not be generated or scored; each counts as not solved."""
    score: float
    """Mean reward: over each prompt's answers, then over prompts."""
    low: float
    high: float
    interval: Literal["wilson", "bootstrap"]
    """The method behind the 95% interval [low, high]."""
    pass_at: dict[str, float]
    """k -> the chance that at least one of k answers is solved; a JSON object, so k is text."""
    length_mean: float
    truncated: float
    """Share of answers cut at the length limit."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def answers(shards: Iterable[Shard]) -> list[Answers]:
    """Read the answers in evaluation shards, one record a prompt."""
    found = []
    for shard in shards:
        of_group, lengths = shard.samples["group"], np.diff(shard.offsets)
        generated = (shard.samples["finish"] != Finish.FAILED) & shard.attempts()
        for group, about in enumerate(shard.groups):
            mine, failed = np.flatnonzero((of_group == group) & generated), bool(about["failed"])
            # A group, or a sample, that could not be judged counts as not solved: leaving it out would flatter the score.
            rewards = np.zeros(max(len(mine), shard.meta.get("samples_per_prompt", 1)), np.float32)
            if not failed:
                rewards[: len(mine)] = shard.samples["raw_reward"][mine]
            cut = shard.samples["finish"][mine] == Finish.LENGTH
            found.append(Answers(int(about["source"]), rewards, lengths[mine], cut, failed))
    return found


def score(found: Sequence[Answers], names: Sequence[str], solved_at: float) -> tuple[SourceScore, list[SourceScore]]:
    """Score all prompts together, and each source; `names` are the sources', by number."""
    every = sorted({a.source for a in found})
    sources = [_score([a for a in found if a.source == s], s, names[s], solved_at) for s in every]
    return _score(found, None, "all", solved_at), sources


def _score(found: Sequence[Answers], source: int | None, name: str, solved_at: float) -> SourceScore:
    means = np.array([a.rewards.mean(dtype=np.float64) for a in found])
    single = all(len(a.rewards) == 1 for a in found) and bool(np.isin(means, (0.0, 1.0)).all())
    low, high = wilson(int(means.sum()), len(means)) if single else bootstrap(means)
    fewest = min(len(a.rewards) for a in found)
    solved = [(len(a.rewards), int((a.rewards >= solved_at).sum())) for a in found]
    lengths, cut = (np.concatenate([getattr(a, field) for a in found]) for field in ("lengths", "truncated"))
    return SourceScore(
        source=source,
        name=name,
        prompts=len(found),
        samples=len(lengths),
        failed=sum(a.failed for a in found),
        score=float(means.mean()),
        low=low,
        high=high,
        interval="wilson" if single else "bootstrap",
        pass_at={str(k): float(np.mean([pass_at(n, c, k) for n, c in solved])) for k in powers_of_two(fewest)},
        length_mean=float(lengths.mean()) if len(lengths) else 0.0,
        truncated=float(cut.mean()) if len(cut) else 0.0,
    )


def pass_at(n: int, c: int, k: int) -> float:
    """Estimate, without bias, the chance that one of k answers is solved, from c solved ones of n (arXiv 2107.03374)."""
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def powers_of_two(upto: int) -> list[int]:
    """1, 2, 4, … not above `upto`."""
    return [2**i for i in range(upto.bit_length())]


def wilson(solved: int, prompts: int) -> tuple[float, float]:
    """Wilson's 95% interval of a share, for single answers, right or wrong; it has a width at 0 and 1 too."""
    share, weight = solved / prompts, Z**2 / prompts
    middle = (share + weight / 2) / (1 + weight)
    half = Z * math.sqrt(share * (1 - share) / prompts + Z**2 / (4 * prompts**2)) / (1 + weight)
    return max(0.0, middle - half), min(1.0, middle + half)


def bootstrap(means: NDArray[np.float64]) -> tuple[float, float]:
    """The 95% percentile interval of the mean, by resampling prompts: answers to one prompt are no independent draws."""
    generator = np.random.default_rng(SEED)
    size = len(means)
    resampled = [means[generator.integers(0, size, size)].mean() for _ in range(RESAMPLES)]
    low, high = np.percentile(resampled, [2.5, 97.5])
    return float(low), float(high)
