"""Keys that several algorithms share, and checks of how they fit together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import PositiveFloat, PositiveInt, model_validator

from relax_hpc.recipe.tables.correction import AnyCorrection, Rejection
from relax_hpc.recipe.tables.table import Key, Table, conflict

FILTERS = (
    "Filters that keep groups out of training: 'zero_std', where all rewards are the same ('zero_std:COLUMN': all values of raw_reward, or of a "
    "number that rewards or the environment added), or MODULE:FUNCTION or FILE.py:FUNCTION (group) -> reason or None."
)
Aggregate = Literal["token", "sequence", "prompt", "constant"]
AGGREGATE = (
    "Normalization of the loss. `token`: the mean over all tokens of the step; `sequence`: the mean over samples of each one's mean; "
    "`prompt`: the mean over prompts of the mean over all tokens of each one's samples (arXiv 2510.13786); `constant`: the mean over samples of each one's sum, divided by rollout.max_new_tokens · max_turns."
)
KL_IN = (
    "`loss`: added to each token's loss. `reward`: taken from the reward, as the behavior policy's KL (a sample's sum over its tokens; "
    "token by token where returns are)."
)
KL_ESTIMATOR = (
    "How the KL is estimated at a token. Absent: k1 in the reward, where k1 alone has the KL's gradient; in the loss k3, or k2 for `ppo` "
    "and REINFORCE++."
)
NORMALIZE = (
    "What a sample's distance from its group's mean is divided by. `group`: the standard deviation of the group's rewards; `batch`: that of "
    "these distances over the whole step (arXiv 2506.10910, 2510.13786); `none`: nothing (arXiv 2503.20783)."
)
EXTRA = "Batches of further prompts that a step may ask for; after them it trains on the groups that it has."
DUAL_CLIP = 3.0
"""The default bound of `dual_clip` where tokens may be stale; veRL has the same (clip_ratio_c)."""
CLIP = "The importance ratio is clipped to [1 - clip[0], 1 + clip[1]]."


def _default_estimator(in_loss: str) -> Callable[[dict[str, Any]], str]:
    """Make the default of `kl_estimator`, which depends on where the KL is put."""
    return lambda keys: "k1" if keys.get("kl_in") == "reward" else in_loss


class DynamicSampling(Table):
    """Dynamic sampling (arXiv 2503.14476): further prompts in place of groups that failed or that filters keep out."""

    max_extra_batches: int = Key(0, EXTRA, ge=0)
    oversample: float = Key(
        1.0,
        "Prompts requested at once, as a multiple of those that the batches take; groups that pass and are not needed wait for the next "
        "step, within async.max_staleness.",
        ge=1,
    )

    @property
    def on(self) -> bool:
        """True where a step takes requests until as many groups pass as it wants."""
        return self.max_extra_batches > 0 or self.oversample > 1


class Algorithm(Table):
    """Keys of all algorithms: the size of a group, filters, dynamic sampling."""

    group_size: PositiveInt = Key(8, "Samples drawn for each prompt.")
    filters: list[str] = Key(
        [],
        FILTERS,
        looked_up=True,
    )
    dynamic_sampling: DynamicSampling = DynamicSampling()
    sample_reuse: int = Key(
        0,
        "Groups of earlier steps that a step trains on once more, besides its own: those whose rewards vary most, each once, "
        "while all of their tokens are within async.max_staleness, which must be above 0.",
        ge=0,
    )

    @property
    def needs(self) -> frozenset[str]:
        """Inputs of its advantages and loss beside rewards and logprobs; a user's own tells them once it is made."""
        return frozenset()

    @model_validator(mode="after")
    def _filters(self) -> Algorithm:
        alike = [name for name in self.filters if name.partition(":")[0] == "zero_std"]
        if self.group_size == 1 and alike:
            raise conflict(
                f"algorithm.filters: '{alike[0]}' keeps every group of one sample out of training, but "
                "algorithm.group_size = 1: raise it or leave the filter out"
            )
        return self


class PolicyGradient(Algorithm):
    """Keys that the built-in algorithms share."""

    aggregate: Aggregate = Key("token", AGGREGATE)
    overlong: tuple[int, PositiveInt] | None = Key(
        None,
        "[from, to] tokens that the model generates for an answer (observations do not count) over which a penalty on its reward rises from 0 to 1 (soft overlong punishment, "
        "arXiv 2503.14476); DAPO's is [max_new_tokens - 4096, max_new_tokens].",
    )
    mask_truncated: bool = Key(
        False,
        "Keep samples that were cut off (finish `length`) out of the loss; their rewards still count in their group's comparison "
        "(overlong filtering, arXiv 2503.14476).",
    )
    kl_coef: float = Key(0.0, "Weight of the KL to the reference (version 0); 0 holds no reference.", ge=0)
    reference_refresh_steps: PositiveInt | None = Key(
        None,
        "Training steps after which the policy becomes the reference, again and again; absent: the reference stays version 0.",
    )
    kl_in: Literal["loss", "reward"] = Key("loss", KL_IN)
    kl_estimator: Literal["k1", "k2", "k3"] = Key(
        decided=_default_estimator("k3"),
        help=KL_ESTIMATOR,
    )
    kl_unbiased: bool = Key(
        False,
        "Multiply the KL in the loss by the importance ratio against the policy that sampled, so that the gradient is the KL's own however old a "
        "token is (arXiv 2512.02556).",
    )
    entropy_coef: float = Key(0.0, "Weight of the entropy bonus.", ge=0)
    teacher: Path | None = Key(
        None,
        "A model directory of the same vocabulary that the policy is distilled from on its own samples: a token's advantage is "
        "reduced by the behavior policy's reverse KL to it.",
        looked_up=True,
    )
    teacher_coef: PositiveFloat = Key(1.0, "Weight of the KL to the teacher.")
    correction: AnyCorrection | None = Key(
        None, "Importance weights of the trainer's own logprobs against the engine's, on the policy's loss."
    )
    rejection: Rejection | None = Key(
        None,
        "Bounds on how far the trainer's own logprobs may be from the engine's for a sample to be trained on; with or without a correction.",
    )
    opsm: PositiveFloat | None = Key(
        None,
        "Off-policy sequence masking (arXiv 2512.02556): samples with a negative advantage whose mean of log behavior - "
        "log current is above this stay out of the policy's loss; such as 1e-4.",
    )

    @property
    def needs(self) -> frozenset[str]:
        asked = {
            "reference": self.kl_coef > 0,
            "recomputed": self.correction is not None or self.rejection is not None,
            "entropy": self.entropy_coef > 0,
            "teacher": self.teacher is not None,
        }
        return frozenset(name for name, wanted in asked.items() if wanted)

    @model_validator(mode="after")
    def _gradient_of_the_kl(self) -> PolicyGradient:
        said = f"algorithm.kl_estimator = '{self.kl_estimator}' with kl_in = '{self.kl_in}'"
        if self.kl_coef > 0 and self.kl_in == "reward" and self.kl_estimator != "k1":
            raise conflict(
                f"{said}: what is taken from the reward is weighed with ∇ log π, which is the KL's gradient for k1 alone "
                "(arXiv 2510.01555): set kl_estimator = 'k1', or kl_in = 'loss'"
            )
        if self.kl_coef > 0 and self.kl_in == "loss" and self.kl_estimator == "k1" and not self.kl_unbiased:
            raise conflict(
                f"{said}: its gradient is ∇ log π, which is 0 on average (arXiv 2510.01555): set kl_estimator to 'k2' or 'k3', or "
                "kl_unbiased = true, or kl_in = 'reward'"
            )
        return self

    @model_validator(mode="after")
    def _shared(self) -> PolicyGradient:
        if self.overlong is not None and not 0 <= self.overlong[0] < self.overlong[1]:
            raise conflict(f"algorithm.overlong = {list(self.overlong)}: expected [from, to] with 0 <= from < to")
        if self.reference_refresh_steps and not self.kl_coef > 0:
            raise conflict(
                f"algorithm.reference_refresh_steps = {self.reference_refresh_steps}, but algorithm.kl_coef = 0 holds no "
                "reference: set kl_coef above 0, or leave reference_refresh_steps out"
            )
        if self.kl_unbiased and not (self.kl_coef > 0 and self.kl_in == "loss"):
            raise conflict(
                f"algorithm.kl_unbiased = true weighs the KL in the loss, but algorithm.kl_coef = {self.kl_coef} and "
                f"kl_in = '{self.kl_in}': set kl_coef above 0 and kl_in = 'loss', or leave kl_unbiased out"
            )
        return self


class Grouped(PolicyGradient):
    """Keys of algorithms that compare the samples of one prompt."""

    credit: Literal["trajectory", "turn"] = Key(
        "trajectory",
        "What is compared within a group. `trajectory`: all that a sample earned, the same for each of its tokens. `turn`: what it earned "
        "from each turn on, with the same turn of the samples that came so far.",
    )
    turn_discount: float = Key(
        1.0,
        "Weight of a reward one turn later, and its square two turns later: discounts rewards, per turn.",
        gt=0,
        le=1,
    )

    @model_validator(mode="after")
    def _group(self) -> Grouped:
        name = getattr(self, "name", "")
        if self.group_size < 2:
            raise conflict(
                f"algorithm.group_size = {self.group_size}: {name} compares samples of one prompt, use 2 or more"
            )
        return self


class Normalized(Grouped):
    """Keys of algorithms whose advantages are distances from the group's mean."""

    normalize: Literal["group", "batch", "none"] = Key("group", NORMALIZE)


class Unshaped(PolicyGradient):
    """Algorithms whose rewards nothing may be taken from."""

    because: ClassVar[str]
    """The reason, and what to do instead."""

    @model_validator(mode="after")
    def _no_penalties(self) -> Unshaped:
        if self.overlong is not None or (self.kl_coef > 0 and self.kl_in == "reward"):
            key = "overlong" if self.overlong is not None else "kl_in = 'reward'"
            raise conflict(f"algorithm.{key} changes a reward, {self.because}")
        return self


class ClipCov(Table):
    """Clip-Cov (arXiv 2505.22617): tokens that would lower the entropy most lose their gradient, at random."""

    share: float = Key(2e-4, "Share of the step's tokens, at least one.", gt=0, le=1)
    low: float = Key(1.0, "The least covariance of advantage and logprob of the tokens to draw from.")
    high: float = Key(5.0, "The greatest one.")

    @model_validator(mode="after")
    def _order(self) -> ClipCov:
        if self.low >= self.high:
            raise conflict(f"algorithm.clip_cov.low = {self.low} must be below algorithm.clip_cov.high = {self.high}")
        return self


class KlCov(Table):
    """KL-Cov (arXiv 2505.22617): tokens that would lower the entropy most pay for moving."""

    share: float = Key(
        2e-4,
        "Share of the step's tokens, at least one: those with the greatest covariance of advantage and logprob.",
        gt=0,
        le=1,
    )
    coef: PositiveFloat = Key(1.0, "Weight of |log ρ|, which is added to their loss.")


class Ratio(PolicyGradient):
    """Keys of algorithms that weigh tokens by an importance ratio: how much likelier they have become."""

    old_logprobs: Literal["engine", "recomputed"] = Key(
        "engine",
        "The logprobs that the importance ratio is taken against: those the engine reported when it sampled, or those of "
        "the trainer before the step's first update, or a scorer's (the proximal policy of a decoupled objective, with a correction).",
    )
    clip_cov: ClipCov | None = Key(
        None,
        "Take the gradient from a few of the tokens whose advantage and logprob vary together: a table, {} has the paper's numbers.",
    )
    kl_cov: KlCov | None = Key(
        None,
        "Hold a few of the tokens whose advantage and logprob vary together where they are: a table, {} has the paper's numbers.",
    )

    @property
    def needs(self) -> frozenset[str]:
        return super().needs | ({"recomputed"} if self.old_logprobs == "recomputed" else set())

    @model_validator(mode="after")
    def _decoupled(self) -> Ratio:
        if self.correction is not None and self.old_logprobs == "engine":
            raise conflict(
                f"algorithm.correction = '{self.correction.name}' weighs the recomputed logprobs against the engine's, but "
                "algorithm.old_logprobs = 'engine' has the ratio do so already: set old_logprobs = 'recomputed', or leave correction out"
            )
        return self


class Clipped(Ratio):
    """Keys of algorithms that clip the importance ratio, as PPO does."""

    clip: tuple[float, float] = Key((0.2, 0.2), CLIP)
    dual_clip: float | None = Key(
        None,
        "A loss is at most this times -advantage where the advantage is negative (arXiv 1912.09729); above 1, or 0 for no such bound. "
        f"Absent: {DUAL_CLIP} where async.max_staleness is above 0, else 0.",
    )

    @model_validator(mode="after")
    def _bounds(self) -> Clipped:
        if not (0 <= self.clip[0] < 1 and self.clip[1] >= 0):
            raise conflict(
                f"algorithm.clip = {list(self.clip)}: the low bound lies in [0, 1), the high bound is at least 0"
            )
        if self.dual_clip and self.dual_clip <= 1:
            raise conflict(
                f"algorithm.dual_clip = {self.dual_clip} would bound ratios that have not moved: use more than 1, such as {DUAL_CLIP}, "
                "or 0 for no bound"
            )
        return self


class K2(PolicyGradient):
    """The KL's estimator of algorithms that put k2 in the loss."""

    kl_estimator: Literal["k1", "k2", "k3"] = Key(
        decided=_default_estimator("k2"),
        help=KL_ESTIMATOR,
    )


class TokenRewards(K2, Clipped):
    """Keys of algorithms that give each token a reward of its own."""

    kl_in: Literal["loss", "reward"] = Key("reward", KL_IN)
    discount: float = Key(1.0, "γ: discount of rewards, per token.", gt=0, le=1)
