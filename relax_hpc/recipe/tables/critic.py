"""[critic]: the critic of `ppo` as processes of its own, beside the trainer's."""

from __future__ import annotations

from pydantic import PositiveInt

from relax_hpc.recipe.tables.algorithm import AnyAlgorithm, Ppo
from relax_hpc.recipe.tables.parallel import Parallel, Sizes, misfit
from relax_hpc.recipe.tables.table import Key, Table, conflict


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
