"""[algorithm]: the algorithms of a recipe, each with its keys and its paper's defaults."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Union

from pydantic import PositiveFloat, PositiveInt, Tag, model_validator

from relax_hpc.recipe.tables.correction import AnyCorrection
from relax_hpc.recipe.tables.table import Key, Table, conflict, named

FILTERS = (
    "Filters that keep groups out of training: 'zero_std', where all rewards are the same ('zero_std:COLUMN': all values of raw_reward, or of a "
    "number that rewards or the environment added), or MODULE:FUNCTION or FILE.py:FUNCTION (group) -> reason or None."
)
AGGREGATE = (
    "Normalization of the loss. `token`: the mean over all tokens of the step; `sequence`: the mean over samples of each one's mean; "
    "`constant`: the mean over samples of each one's sum, divided by rollout.max_new_tokens · max_turns."
)
MAX_EXTRA_BATCHES = (
    "Batches of further prompts that a step may ask for, in place of groups that failed or that filters keep out (dynamic "
    "sampling, arXiv 2503.14476); after them it trains on the groups that it has. 0 asks for none."
)
IN_LOSS_K2 = "How the KL is estimated at a token. Absent: k1 in the reward, where k1 alone has the KL's gradient; k2 in the loss."
DUAL_CLIP = 3.0
"""The default bound of `dual_clip` where tokens may be stale; veRL has the same (clip_ratio_c)."""
CLIP = "The importance ratio is clipped to [1 - clip[0], 1 + clip[1]]."


def _estimator(in_loss: str) -> Callable[[dict[str, Any]], str]:
    """Make the default of `kl_estimator`, which depends on where the KL is put."""
    return lambda keys: "k1" if keys.get("kl_in") == "reward" else in_loss


class Algorithm(Table):
    """Keys of all algorithms: the size of a group, filters, dynamic sampling."""

    group_size: PositiveInt = Key(8, "Samples drawn for each prompt.")
    filters: list[str] = Key(
        [],
        FILTERS,
        looked_up=True,
    )
    max_extra_batches: int = Key(0, MAX_EXTRA_BATCHES, ge=0)
    oversample: float = Key(
        1.0,
        "Prompts requested at once, as a multiple of those that the batches take; groups that pass and are not needed wait for the next "
        "step, within async.max_staleness.",
        ge=1,
    )

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

    @property
    def samples_dynamically(self) -> bool:
        """True where a step takes requests until as many groups pass as it wants."""
        return self.max_extra_batches > 0 or self.oversample > 1

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

    aggregate: Literal["token", "sequence", "constant"] = Key("token", AGGREGATE)
    overlong: tuple[int, PositiveInt] | None = Key(
        None,
        "[from, to] tokens that the model generates for an answer (observations do not count) over which a penalty on its reward rises from 0 to 1 (soft overlong punishment, "
        "arXiv 2503.14476); DAPO's is [max_new_tokens - 4096, max_new_tokens].",
    )
    kl_coef: float = Key(0.0, "Weight of the KL to the reference (version 0); 0 holds no reference.", ge=0)
    reference_refresh_steps: PositiveInt | None = Key(
        None,
        "Training steps after which the policy becomes the reference, again and again; absent: the reference stays version 0.",
    )
    kl_in: Literal["loss", "reward"] = Key(
        "loss",
        "`loss`: added to each token's loss. `reward`: taken from the reward, as the behavior policy's KL (a sample's sum "
        "over its tokens; token by token where returns are).",
    )
    kl_estimator: Literal["k1", "k2", "k3"] = Key(
        decided=_estimator("k3"),
        help="How the KL is estimated at a token. Absent: k1 in the reward, where k1 alone has the KL's gradient; k3 in the loss.",
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
    opsm: PositiveFloat | None = Key(
        None,
        "Off-policy sequence masking (arXiv 2512.02556): samples with a negative advantage whose mean of log behavior - "
        "log current is above this stay out of the policy's loss; such as 1e-4.",
    )

    @property
    def needs(self) -> frozenset[str]:
        asked = {
            "reference": self.kl_coef > 0,
            "recomputed": self.correction is not None,
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

    @model_validator(mode="after")
    def _group(self) -> Grouped:
        name = getattr(self, "name", "")
        if self.group_size < 2:
            raise conflict(
                f"algorithm.group_size = {self.group_size}: {name} compares samples of one prompt, use 2 or more"
            )
        return self


class Ratio(PolicyGradient):
    """Keys of algorithms that weigh tokens by an importance ratio: how much likelier they have become."""

    old_logprobs: Literal["engine", "recomputed"] = Key(
        "engine",
        "The logprobs that the importance ratio is taken against: those the engine reported when it sampled, or those of "
        "the trainer before the step's first update, or a scorer's (the proximal policy of a decoupled objective, with a correction).",
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


class Grpo(Clipped, Grouped):
    """GRPO (arXiv 2402.03300), with clip-higher and the mean over tokens (arXiv 2503.14476) unless told otherwise."""

    name: Literal["grpo"] = Key("grpo", "Group-relative policy optimization.")
    clip: tuple[float, float] = Key((0.2, 0.28), CLIP)
    normalize_std: bool = Key(True, "Divide the advantage by the group's standard deviation of rewards.")


class DrGrpo(Clipped, Grouped):
    """Dr. GRPO (arXiv 2503.20783): GRPO without the divisions by a group's deviation and a sample's length."""

    name: Literal["dr_grpo"] = Key("dr_grpo", "GRPO done right.")
    aggregate: Literal["token", "sequence", "constant"] = Key("constant", AGGREGATE)


class Dapo(Clipped, Grouped):
    """DAPO (arXiv 2503.14476): clip-higher, mean over tokens, dynamic sampling (`filters` and `max_extra_batches`), `overlong`."""

    name: Literal["dapo"] = Key("dapo", "Decoupled clip and dynamic sampling policy optimization.")
    filters: list[str] = Key(
        ["zero_std"],
        FILTERS,
        looked_up=True,
    )
    max_extra_batches: int = Key(3, MAX_EXTRA_BATCHES, ge=0)
    clip: tuple[float, float] = Key((0.2, 0.28), CLIP)


class Gspo(Clipped, Grouped):
    """GSPO (arXiv 2507.18071): one importance ratio a sample, the geometric mean of its tokens'."""

    name: Literal["gspo"] = Key("gspo", "Group sequence policy optimization.")
    aggregate: Literal["token", "sequence", "constant"] = Key("sequence", AGGREGATE)
    clip: tuple[float, float] = Key((3e-4, 4e-4), "A sample's ratio is clipped to [1 - clip[0], 1 + clip[1]].")
    level: Literal["sequence", "token"] = Key(
        "sequence", "`token` is GSPO-token: the sample's ratio in value, each token's own gradient."
    )


class Sapo(Ratio, Grouped):
    """SAPO (arXiv 2511.20347): a soft gate in the place of the clip."""

    name: Literal["sapo"] = Key("sapo", "Soft adaptive policy optimization.")
    aggregate: Literal["token", "sequence", "constant"] = Key("sequence", AGGREGATE)
    tau_positive: PositiveFloat = Key(
        1.0, "The gate's temperature where the advantage is positive; higher is narrower."
    )
    tau_negative: PositiveFloat = Key(1.05, "The gate's temperature elsewhere.")


class Cispo(Ratio, Grouped):
    """CISPO (arXiv 2506.13585): the clipped ratio is a weight without gradient, so that no token loses its own."""

    name: Literal["cispo"] = Key("cispo", "Clipped importance-sampling policy optimization.")
    clip: tuple[float, float] = Key(
        (1.0, 4.0),
        "The weight is clipped to [1 - clip[0], 1 + clip[1]]: no lower bound, as in the paper; the upper one of arXiv 2510.13786.",
    )

    @model_validator(mode="after")
    def _bounds(self) -> Cispo:
        if not (0 <= self.clip[0] <= 1 and self.clip[1] >= 0):
            raise conflict(
                f"algorithm.clip = {list(self.clip)}: the low bound lies in [0, 1], the high bound is at least 0"
            )
        return self


class Rloo(Grouped):
    """RLOO (arXiv 2402.14740): REINFORCE against the mean reward of the prompt's other samples; on-policy only."""

    name: Literal["rloo"] = Key("rloo", "REINFORCE leave-one-out.")
    aggregate: Literal["token", "sequence", "constant"] = Key("constant", AGGREGATE)


class ReinforcePlusPlus(Clipped):
    """REINFORCE++ (arXiv 2501.03262): returns of single tokens, whitened over all tokens of the step."""

    name: Literal["reinforce_plus_plus"] = Key("reinforce_plus_plus", "REINFORCE++, without groups.")
    kl_estimator: Literal["k1", "k2", "k3"] = Key(decided=_estimator("k2"), help=IN_LOSS_K2)
    kl_in: Literal["loss", "reward"] = Key(
        "reward",
        "`loss`: added to each token's loss. `reward`: taken from each token's reward, as the behavior policy's KL.",
    )
    discount: float = Key(1.0, "Discount of the returns, per token.", gt=0, le=1)


class ReinforcePlusPlusBaseline(Clipped, Grouped):
    """REINFORCE++ with baseline (arXiv 2501.03262): reward less the group's mean, whitened over the step; KL k2 in the loss."""

    name: Literal["reinforce_plus_plus_baseline"] = Key("reinforce_plus_plus_baseline", "REINFORCE++ on groups.")
    kl_estimator: Literal["k1", "k2", "k3"] = Key(decided=_estimator("k2"), help=IN_LOSS_K2)


class Critic(Table):
    """The critic of `ppo`: a model with one number for each token, held and trained by the trainer's processes, or by those of [critic]."""

    model: Path | None = Key(
        None,
        "A model directory of the same vocabulary that its body starts from; absent: the policy's weights, after the SFT warm start. "
        "Its head begins at zero.",
        looked_up=True,
    )
    learning_rate: PositiveFloat = Key(
        1e-5,
        "Peak learning rate of its AdamW, which is otherwise the policy's: schedule, moments, decay, clip_grad_norm.",
        resume=True,
    )
    warmup_steps: int = Key(0, "Training steps at the beginning in which the critic alone learns.", ge=0)
    clip: PositiveFloat = Key(
        0.2,
        "Clip of its values: its loss is the worse of two, one for its value and one for its value held within this distance of the one before the step.",
    )


class Ppo(Clipped):
    """PPO (arXiv 1707.06347): a critic's values, and generalized advantage estimation (arXiv 1506.02438) from them."""

    name: Literal["ppo"] = Key("ppo", "Proximal policy optimization with a critic.")
    kl_estimator: Literal["k1", "k2", "k3"] = Key(decided=_estimator("k2"), help=IN_LOSS_K2)
    kl_in: Literal["loss", "reward"] = Key(
        "reward",
        "`loss`: added to each token's loss. `reward`: taken from each token's reward, as the behavior policy's KL.",
    )
    discount: float = Key(1.0, "γ: discount of rewards, per token.", gt=0, le=1)
    gae_lambda: float = Key(
        0.95, "λ of the advantages: 1 is return less value, 0 the error of one step's prediction.", ge=0, le=1
    )
    value_lambda: float = Key(
        1.0, "λ of the returns that the critic learns; apart from the policy's as in arXiv 2503.01491.", ge=0, le=1
    )
    whiten: bool = Key(
        True, "Whiten advantages: subtract their mean over the step's tokens, and divide by their deviation."
    )
    critic: Critic = Critic()

    @property
    def needs(self) -> frozenset[str]:
        return super().needs | {"values"}


class Opd(Clipped):
    """On-policy distillation (arXiv 2306.13649, 2306.08543): the reverse KL to a teacher is the whole objective;
    rewards are only reported."""

    name: Literal["opd"] = Key("opd", "On-policy distillation.")
    teacher: Path = Key(
        help="A model directory of the same vocabulary: a token's advantage is minus the behavior policy's reverse KL to it.",
        looked_up=True,
    )

    @model_validator(mode="after")
    def _no_rewards(self) -> Opd:
        if self.overlong is not None or (self.kl_coef > 0 and self.kl_in == "reward"):
            key = "overlong" if self.overlong is not None else "kl_in = 'reward'"
            raise conflict(
                f"algorithm.{key} changes a reward, of which 'opd' makes nothing: leave it out, or give another algorithm "
                "the teacher beside its rewards, such as 'grpo'"
            )
        return self


class Sft(Table):
    """Supervised fine-tuning: the cross-entropy of the sources' own answers, each with the token that ends it. Only
    evaluations are generated: without [evaluation] there are no rollout workers."""

    name: Literal["sft"] = Key("sft", "Supervised fine-tuning.")
    aggregate: Literal["token", "sequence"] = Key(
        "token",
        "Normalization of the loss. `token`: the mean over all tokens of the step's answers; `sequence`: the mean over answers of each one's mean.",
    )
    group_size: ClassVar[int] = 1
    filters: ClassVar[list[str]] = []
    max_extra_batches: ClassVar[int] = 0
    oversample: ClassVar[float] = 1.0
    sample_reuse: ClassVar[int] = 0
    needs: ClassVar[frozenset[str]] = frozenset()
    samples_dynamically: ClassVar[bool] = False


class OwnAlgorithm(Algorithm):
    """An algorithm of your own."""

    name: Literal["own"] = Key("own", "An algorithm of your own.")
    factory: str = Key(
        help="MODULE:FUNCTION or FILE.py:FUNCTION, called with `options`; returns a relax_hpc.algorithms.Algorithm.",
        looked_up=True,
    )
    options: dict[str, Any] = Key({}, "Keyword arguments for the factory.")


AnyAlgorithm = Annotated[
    Union[
        Annotated[Grpo, Tag("grpo")],
        Annotated[DrGrpo, Tag("dr_grpo")],
        Annotated[Dapo, Tag("dapo")],
        Annotated[Gspo, Tag("gspo")],
        Annotated[Sapo, Tag("sapo")],
        Annotated[Cispo, Tag("cispo")],
        Annotated[Rloo, Tag("rloo")],
        Annotated[ReinforcePlusPlus, Tag("reinforce_plus_plus")],
        Annotated[ReinforcePlusPlusBaseline, Tag("reinforce_plus_plus_baseline")],
        Annotated[Ppo, Tag("ppo")],
        Annotated[Opd, Tag("opd")],
        Annotated[Sft, Tag("sft")],
        Annotated[OwnAlgorithm, Tag("own")],
    ],
    named(default=lambda v: "own" if "factory" in v else "grpo"),
]
