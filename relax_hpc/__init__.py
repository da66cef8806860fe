"""relax_hpc: Slurm-native reinforcement-learning post-training, where a run is a directory.

recipe ──► orders ──► rollout ──► shard ──► trainer ──► weights ─┐
             ▲                                                   │
             └───────────────────────────────────────────────────┘
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from os import PathLike

    from relax_hpc.analysis import RunView

__version__ = "0.1.0"


def open_run(path: str | PathLike[str]) -> RunView:
    """Open a run directory for offline analysis (nothing is written, the run may be live)."""
    from relax_hpc.analysis import RunView

    return RunView(path)
