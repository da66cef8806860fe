"""The follower of a run (relax_hpc.monitor.tracking) as a process of the supervisor's.

A follower that fails never changes the run's outcome.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence

from relax_hpc.files.run_dir import RunDir
from relax_hpc.recipe.schema import Recipe
from relax_hpc.supervise.environment import role_environment, start_logged
from relax_hpc.supervise.processes import Ended, ProcessGroup, how_it_ended
from relax_hpc.supervise.restarts import KeptGroup

NAME = "tracking"
GRACE_S = 30.0
"""How long the follower may take to copy what is left and to close what other libraries have open."""


class Follower(ProcessGroup):
    """The follower's process. It has no heartbeat: nobody waits for it."""

    def _spawn(self, arguments: Sequence[str]) -> None:
        command = [
            sys.executable, "-P", "-m", "relax_hpc.monitor.tracking", str(self.run.root), "--supervisor", str(os.getpid()),
            *arguments,
        ]  # fmt: skip
        self.processes.append(start_logged(command, self.log(), role_environment(self.run)))

    def _ending(self) -> Ended | None:
        code = self.processes[0].poll()
        return None if code is None else Ended(None, how_it_ended(code))

    def _silent(self) -> None: ...

    def error(self) -> str:
        return f"see {self.log()}"


def tracker(run: RunDir, recipe: Recipe, say: Callable[..., None]) -> list[KeptGroup]:
    """Make the follower where the recipe asks for tracking or messages."""
    if not (recipe.tracking or recipe.notify):
        return []
    return [KeptGroup(Follower(run, recipe.supervision, NAME, [NAME]), say, "--since", str(time.time()))]
