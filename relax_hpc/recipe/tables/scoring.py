"""[scorer] and [critic]: models beside the policy as processes of their own, beside the trainer's."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveInt, model_validator

from relax_hpc.recipe.tables.algorithm import AnyAlgorithm, Ppo
from relax_hpc.recipe.tables.algorithm_keys import PolicyGradient
from relax_hpc.recipe.tables.table import Key, Table, conflict
from relax_hpc.recipe.tables.trainer import Parallel, Sizes, misfit

Score = Literal["recomputed", "reference", "teacher"]


class Scorer(Table):
    """The scorer role: it holds the reference, the teacher, or a published version of the policy, and publishes their
    logprobs of each request's tokens while the trainer trains. The trainer's backend, device, threads and
    tokens_per_micro_batch hold for it as well; its processes take first the GPUs that no trainer process has. Under
    megatron they are one group, split by trainer.parallel."""

    scores: list[Score] = Key(
        help="Models that the scorer holds; the algorithm must need each of them, and the trainer holds the others that it needs. `recomputed` is the "
        "newest version of the policy when a request is scored, in place of the step's own.",
        min_length=1,
    )
    processes: PositiveInt = Key(
        1,
        "Processes on the trainer's nodes: of the torch backend, each with the whole of these models; of megatron, one group on one node.",
        resume=True,
    )

    @model_validator(mode="after")
    def _once(self) -> Scorer:
        if len(set(self.scores)) < len(self.scores):
            raise conflict(f"scorer.scores = {self.scores} names one model twice: once is enough")
        return self


def refuse_scorer(
    scorer: Scorer, algorithm: AnyAlgorithm, backend: str, parallel: Parallel, sizes: Sizes | None
) -> None:
    """Raise a conflict where a scorer would hold a model that a built-in algorithm does not need, or one that changes,
    or cannot be split as the plan says.

    sizes: those of a model that is made here.
    """
    if backend == "megatron" and (wrong := misfit(parallel, scorer.processes, sizes, "scorer")):
        raise conflict(wrong)
    if not isinstance(algorithm, PolicyGradient):
        return  # the needs of a user's own algorithm are known once it is made
    mend = {
        "recomputed": "set algorithm.old_logprobs = 'recomputed'",
        "reference": "set algorithm.kl_coef above 0",
        "teacher": "name one with algorithm.teacher",
    }
    for score in scorer.scores:
        if score not in algorithm.needs:
            rest = [other for other in scorer.scores if other in algorithm.needs]
            raise conflict(
                f"scorer.scores has '{score}', of which algorithm.name = '{algorithm.name}' makes nothing here: {mend[score]}, "
                f"or {f'set scores = {rest}' if rest else 'leave [scorer] out'}"
            )
    if "reference" in scorer.scores and algorithm.reference_refresh_steps:
        raise conflict(
            f"algorithm.reference_refresh_steps = {algorithm.reference_refresh_steps} makes another reference while requests wait "
            "that were scored against this one: leave it out, or 'reference' out of scorer.scores, so that the trainer holds it"
        )


class CriticRole(Table):
    """The critic role: it publishes the values of each request's tokens, and learns from the steps in the ledger while
    the trainer trains. [algorithm.critic] says how it learns; the trainer's backend, parallel plan, device and threads hold for it as
    well. It takes first the GPUs that neither trainer nor scorers have."""

    processes: PositiveInt = Key(
        1, "Processes that share its work, on one node; on a cluster on one of the trainer's.", resume=True
    )


def refuse_critic(
    critic: CriticRole, algorithm: AnyAlgorithm, scored: tuple[str, ...], parallel: Parallel, sizes: Sizes | None
) -> None:
    """Raise a conflict where there is nothing for a critic to do, or it could not do it.

    scored: columns that the scorer makes; sizes: those of a model that is made here.
    """
    if not isinstance(algorithm, Ppo):
        raise conflict(
            f"[critic] is for algorithm.name = 'ppo', and it is '{algorithm.name}', which has none: leave the table out, or set that"
        )
    if algorithm.kl_coef > 0 and algorithm.kl_in == "reward" and "reference" not in scored:
        raise conflict(
            f"[critic] learns returns less the KL to the reference (algorithm.kl_coef = {algorithm.kl_coef}, kl_in = 'reward'), and the "
            "trainer holds that: set scorer.scores = ['reference'], whose column both read, or algorithm.kl_in = 'loss'"
        )
    if wrong := misfit(parallel, critic.processes, sizes, "critic"):
        raise conflict(wrong)
