"""[algorithm]: the algorithms of a recipe, each with its keys and its paper's defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Union

from pydantic import PositiveFloat, Tag, model_validator

from relax_hpc.recipe.tables.algorithm_keys import (
    AGGREGATE,
    CLIP,
    EXTRA,
    FILTERS,
    K2,
    NORMALIZE,
    Aggregate,
    Algorithm,
    Clipped,
    DynamicSampling,
    Grouped,
    Normalized,
    Ratio,
    TokenRewards,
    Unshaped,
)
from relax_hpc.recipe.tables.table import Key, Table, conflict, named


class Grpo(Clipped, Normalized):
    """GRPO (arXiv 2402.03300), with clip-higher and the mean over tokens (arXiv 2503.14476) unless told otherwise."""

    name: Literal["grpo"] = Key("grpo", "Group-relative policy optimization.")
    clip: tuple[float, float] = Key((0.2, 0.28), CLIP)


class DrGrpo(Clipped, Normalized):
    """Dr. GRPO (arXiv 2503.20783): GRPO without the divisions by a group's deviation and a sample's length."""

    name: Literal["dr_grpo"] = Key("dr_grpo", "GRPO done right.")
    normalize: Literal["group", "batch", "none"] = Key("none", NORMALIZE)
    aggregate: Aggregate = Key("constant", AGGREGATE)


class DapoSampling(DynamicSampling):
    """Dynamic sampling as in DAPO."""

    max_extra_batches: int = Key(3, EXTRA, ge=0)


class Dapo(Clipped, Normalized):
    """DAPO (arXiv 2503.14476): clip-higher, mean over tokens, dynamic sampling (`filters`, and 3 for `dynamic_sampling.max_extra_batches`), `overlong`."""

    name: Literal["dapo"] = Key("dapo", "Decoupled clip and dynamic sampling policy optimization.")
    filters: list[str] = Key(
        ["zero_std"],
        FILTERS,
        looked_up=True,
    )
    dynamic_sampling: DapoSampling = DapoSampling()
    clip: tuple[float, float] = Key((0.2, 0.28), CLIP)


class Gspo(Clipped, Normalized):
    """GSPO (arXiv 2507.18071): one importance ratio a sample, the geometric mean of its tokens'."""

    name: Literal["gspo"] = Key("gspo", "Group sequence policy optimization.")
    aggregate: Aggregate = Key("sequence", AGGREGATE)
    clip: tuple[float, float] = Key((3e-4, 4e-4), CLIP)
    level: Literal["sequence", "token"] = Key(
        "sequence", "`token` is GSPO-token: the sample's ratio in value, each token's own gradient."
    )


class Sapo(Ratio, Normalized):
    """SAPO (arXiv 2511.20347): a soft gate in the place of the clip."""

    name: Literal["sapo"] = Key("sapo", "Soft adaptive policy optimization.")
    aggregate: Aggregate = Key("sequence", AGGREGATE)
    tau: tuple[PositiveFloat, PositiveFloat] = Key(
        (1.0, 1.05), "The gate's temperatures where the advantage is positive and elsewhere; higher is narrower."
    )


class Cispo(Ratio, Normalized):
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


class Gmpo(Clipped, Normalized):
    """GMPO (arXiv 2507.20673): one importance ratio a sample, the geometric mean of its tokens' clipped ones."""

    name: Literal["gmpo"] = Key("gmpo", "Geometric-mean policy optimization.")
    aggregate: Aggregate = Key("sequence", AGGREGATE)
    clip: tuple[float, float] = Key((0.4, 0.4), "A token's log importance ratio is clipped to [-clip[0], clip[1]].")


class Dppo(Ratio, Normalized):
    """DPPO (arXiv 2602.04879): tokens are masked by the divergence of the policy from the one that sampled, not by their ratio."""

    name: Literal["dppo"] = Key("dppo", "Divergence proximal policy optimization.")
    divergence: Literal["tv", "kl"] = Key(
        "tv", "Of two choices, the token or another: `tv`, the total variation, |p - q|; `kl`, KL(sampled ‖ current)."
    )
    clip: tuple[PositiveFloat, PositiveFloat] = Key(
        decided=lambda keys: (0.05, 0.05) if keys.get("divergence") == "kl" else (0.15, 0.15),
        help="A token is masked where the divergence is above clip[0] and its advantage makes it less likely still, or above clip[1] and more "
        "likely. Absent: 0.15 for `tv`, 0.05 for `kl`.",
    )
    truncate: float = Key(10.0, "The importance ratio, a weight without gradient, is at most this.", ge=1)


class MaxRl(Unshaped, Clipped, Grouped):
    """MaxRL (arXiv 2602.02710): reward less the group's mean, over that mean, so that hard prompts weigh more; rewards are 0 or more."""

    because = "which 'maxrl' divides by the group's mean: leave it out, or use another algorithm, such as 'grpo'"
    name: Literal["maxrl"] = Key("maxrl", "Maximum likelihood reinforcement learning.")


class Gdpo(Unshaped, Clipped, Grouped):
    """GDPO (arXiv 2601.05242): each part of the reward is compared and normalized within its group, their sum over the step."""

    because = "of which 'gdpo' has only the parts that algorithm.parts names: leave it out, or make it a part, such as the reward 'length'"
    name: Literal["gdpo"] = Key("gdpo", "Group reward-decoupled normalization policy optimization.")
    parts: dict[str, float] = Key(
        help="Parts of the reward and their weights: names in a source's `rewards`, or of numbers that rewards or environments add.",
        min_length=1,
    )

    @model_validator(mode="after")
    def _whole(self) -> Gdpo:
        if self.credit != "trajectory" or self.turn_discount != 1:
            key = "credit = 'turn'" if self.credit != "trajectory" else f"turn_discount = {self.turn_discount}"
            raise conflict(
                f"algorithm.{key}: 'gdpo' compares parts of whole samples: leave it out, or use another algorithm, such as 'grpo'"
            )
        return self


class Rloo(Normalized):
    """RLOO (arXiv 2402.14740): REINFORCE against the mean reward of the prompt's other samples; on-policy only."""

    name: Literal["rloo"] = Key("rloo", "REINFORCE leave-one-out.")
    normalize: Literal["group", "batch", "none"] = Key("none", NORMALIZE)
    aggregate: Aggregate = Key("constant", AGGREGATE)


class ReinforcePlusPlus(TokenRewards):
    """REINFORCE++ (arXiv 2501.03262): returns of single tokens, whitened over all tokens of the step."""

    name: Literal["reinforce_plus_plus"] = Key("reinforce_plus_plus", "REINFORCE++, without groups.")


class ReinforcePlusPlusBaseline(K2, Clipped, Grouped):
    """REINFORCE++ with baseline (arXiv 2501.03262): reward less the group's mean, whitened over the step; KL k2 in the loss."""

    name: Literal["reinforce_plus_plus_baseline"] = Key("reinforce_plus_plus_baseline", "REINFORCE++ on groups.")


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


class Ppo(TokenRewards):
    """PPO (arXiv 1707.06347): a critic's values, and generalized advantage estimation (arXiv 1506.02438) from them."""

    name: Literal["ppo"] = Key("ppo", "Proximal policy optimization with a critic.")
    gae_lambda: float = Key(
        0.95, "λ of the advantages: 1 is return less value, 0 the error of one step's prediction.", ge=0, le=1
    )
    gae_alpha: PositiveFloat | None = Key(
        None,
        "In place of gae_lambda, λ = 1 - 1 / (gae_alpha·l) for an answer of l tokens (length-adaptive GAE, arXiv 2504.05118); the paper's is 0.05.",
    )
    value_lambda: float = Key(
        1.0, "λ of the returns that the critic learns; apart from the policy's as in arXiv 2503.01491.", ge=0, le=1
    )
    critic: Critic = Critic()

    @property
    def needs(self) -> frozenset[str]:
        return super().needs | {"values"}


class Opd(Unshaped, Clipped):
    """On-policy distillation (arXiv 2306.13649, 2306.08543): the reverse KL to a teacher is the whole objective;
    rewards are only reported."""

    because = "of which 'opd' makes nothing: leave it out, or give another algorithm the teacher beside its rewards, such as 'grpo'"
    name: Literal["opd"] = Key("opd", "On-policy distillation.")
    teacher: Path = Key(
        help="A model directory of the same vocabulary: a token's advantage is minus the behavior policy's reverse KL to it.",
        looked_up=True,
    )


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
    dynamic_sampling: ClassVar[DynamicSampling] = DynamicSampling()
    sample_reuse: ClassVar[int] = 0
    needs: ClassVar[frozenset[str]] = frozenset()


class OwnAlgorithm(Algorithm):
    """An algorithm of your own."""

    name: Literal["own"] = Key("own", "An algorithm of your own.")
    factory: str = Key(
        help="MODULE:FUNCTION or FILE.py:FUNCTION, called with `options`; returns a relax_hpc.algorithms.Algorithm.",
        looked_up=True,
    )
    options: dict[str, Any] = Key({}, "Keyword arguments for the factory.")
    teacher: Path | None = Key(
        None,
        "A model directory of the same vocabulary, whose logprobs an algorithm with the need 'teacher' is given.",
        looked_up=True,
    )


AnyAlgorithm = Annotated[
    Union[
        Annotated[Grpo, Tag("grpo")],
        Annotated[DrGrpo, Tag("dr_grpo")],
        Annotated[Dapo, Tag("dapo")],
        Annotated[Gspo, Tag("gspo")],
        Annotated[Sapo, Tag("sapo")],
        Annotated[Cispo, Tag("cispo")],
        Annotated[Gmpo, Tag("gmpo")],
        Annotated[Dppo, Tag("dppo")],
        Annotated[MaxRl, Tag("maxrl")],
        Annotated[Gdpo, Tag("gdpo")],
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
