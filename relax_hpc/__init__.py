"""relax_hpc: Slurm-native reinforcement-learning post-training, where a run is a directory.

recipe ──► requests ──► rollout ──► shard ──► trainer ──► weights ─┐
             ▲                                                   │
             └───────────────────────────────────────────────────┘
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from os import PathLike
    from typing import Any

    from relax_hpc.monitor.analysis import RunView
    from relax_hpc.slurm.submission.run_job import RunJob

__version__ = "0.2.0"


def open_run(path: str | PathLike[str]) -> RunView:
    """Open a run directory for offline analysis (nothing is written, the run may be live)."""
    from relax_hpc.monitor.analysis import RunView

    return RunView(path)


def run(recipe: str | PathLike[str], *, sets: Sequence[str] = ()) -> dict[str, Any]:
    """Carry out a recipe, or go on with a run's directory, in this process and on this machine; how it ended.

    A plain function: `submitit.SlurmExecutor(folder).submit(relax_hpc.run, "recipe.toml")` runs it in a job of your own.
    """
    from pathlib import Path

    from rich.console import Console

    from relax_hpc.launch.create import open_or_create
    from relax_hpc.supervise.local import run_here
    from relax_hpc.supervise.supervisor import outcome_of

    opened = open_or_create(Path(recipe), sets)
    if opened.finished:
        return outcome_of(opened.run) or {}
    return run_here(opened, Console())


def submit(
    recipe: str | PathLike[str],
    *,
    sets: Sequence[str] = (),
    dry_run: bool = False,
    site: str | PathLike[str] | None = None,
    local_root_ok: bool = False,
) -> list[RunJob]:
    """Send a recipe, or a run's directory, to the Slurm cluster: its jobs (submitit's), the leader first.

    submitit's helpers take them; `.result()` waits for the run's end and is its outcome. `dry_run` prints the scripts and
    sends nothing.
    """
    from pathlib import Path

    from relax_hpc.slurm.submission import submit as slurm

    target, profile = Path(recipe), Path(site) if site is not None else None
    if dry_run:
        print("\n".join(slurm.preview(target, sets, site=profile).values()))
        return []
    return slurm.submit(target, sets, site=profile, local_root_ok=local_root_ok)
