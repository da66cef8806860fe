"""Process groups of one machine: rollout workers, scorers and critic, each restarted apart from the trainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from relax_hpc.files.node_cache import NodeCache
from relax_hpc.files.publish import read_json
from relax_hpc.files.run_dir import RunDir
from relax_hpc.recipe.schema import Recipe
from relax_hpc.recipe.tables.weights import FileWeights
from relax_hpc.roles.common import gpus
from relax_hpc.roles.common.device_lock import lock_of
from relax_hpc.roles.rollout import poll_leader
from relax_hpc.slurm.plan import SidecarName
from relax_hpc.supervise.fork_server import ForkServer
from relax_hpc.supervise.processes import LocalProcesses, ProcessGroup
from relax_hpc.supervise.restarts import KeptGroup


def clear_node(run: RunDir, recipe: Recipe) -> None:
    """Remove what the run keeps on this node."""
    kept = [recipe.spool.node_cache, recipe.weights.node_cache if isinstance(recipe.weights, FileWeights) else None]
    for folder in filter(None, kept):
        NodeCache(run, folder).clear()
    poll_leader.clear(run)
    if recipe.run.placement == "colocate":
        lock_of(run).unlink(missing_ok=True)


def sidecar_names(run: RunDir, recipe: Recipe, role: SidecarName) -> list[str]:
    """Names of a role's processes on the trainer's nodes, beside trainer and workers; none where nothing is trained."""
    config = recipe.scorer if role == "scorer" else recipe.critic
    trains = read_json(run.identity)["debug"] != "rollout-only"
    return [f"{role}-{i}" for i in range(config.processes)] if config and trains else []


class RolloutWorker(KeptGroup):
    """A rollout worker; what it had claimed is given back when it ends."""

    def __init__(
        self, group: ProcessGroup, say: Callable[..., None], tag: str, give_back: Callable[[str, bool], list[str]]
    ) -> None:
        """tag: of its claim directories; give_back: called when it ended, with its claim directory and True if it was
        lost (it died on its requests); returns the requests that were given back.
        """
        super().__init__(group, say)
        self._tag, self._give_back = tag, give_back
        self.claim_dir = ""
        """Its claim directory; empty before its start, and once that is given back."""

    def _start(self) -> None:
        claim_dir = f"{self.group.name}-{self._tag}-{self.group.attempt:04d}"
        self._arguments = ("--claim-dir", claim_dir)
        super()._start()
        self.claim_dir = claim_dir

    def end(self, grace_s: float) -> None:
        super().end(grace_s)
        self._gone(lost=False)

    def _gone(self, lost: bool) -> dict[str, Any]:
        given = self._give_back(self.claim_dir, lost) if self.claim_dir else []
        self.claim_dir = ""
        return {"requests_given_back": given}


def workers_here(
    run: RunDir,
    recipe: Recipe,
    fork_server: ForkServer,
    names: list[str],
    tag: str,
    give_back: Callable[[str, bool], list[str]],
    say: Callable[..., None],
) -> list[RolloutWorker]:
    """Make the rollout workers of this machine; each sees its share of the GPUs."""

    def group(index: int, name: str) -> ProcessGroup:
        share = _share_of_gpus(index, len(names))
        return LocalProcesses(run, recipe.supervision, "rollout", name, [name], fork_server, share)

    return [RolloutWorker(group(index, name), say, tag, give_back) for index, name in enumerate(names)]


def _share_of_gpus(index: int, workers: int) -> dict[str, str]:
    """A worker's share of the GPUs that we see, as environment variables; with fewer GPUs than workers, some share one."""
    visible = gpus.visible()
    if not visible:
        return {}
    share = max(len(visible) // workers, 1)
    begin = index * share % len(visible)
    return {gpus.VARIABLE: ",".join(visible[begin : begin + share])}


def sidecars_here(run: RunDir, recipe: Recipe, fork_server: ForkServer, say: Callable[..., None]) -> list[KeptGroup]:
    """Make the scorers, each alone or all as one group, and the critic of this machine."""

    def kept(role: SidecarName, name: str, processes: list[str], *arguments: str) -> KeptGroup:
        group = LocalProcesses(run, recipe.supervision, role, name, processes, fork_server)
        return KeptGroup(group, say, *arguments)

    scorers, critics = (sidecar_names(run, recipe, role) for role in ("scorer", "critic"))
    groups = [kept("critic", "critic", critics)] if critics else []
    if recipe.scores_together:
        return [kept("scorer", "scorer", scorers), *groups] if scorers else groups
    return [*(kept("scorer", name, [name], "--rank", str(rank)) for rank, name in enumerate(scorers)), *groups]
