"""Starts, restarts and ends the follower of a run (relax_hpc.monitor.tracking) for the supervisor.

A follower that fails never changes the run's outcome.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable

from relax_hpc.files.run_dir import RunDir
from relax_hpc.recipe.schema import Recipe
from relax_hpc.supervise.fork_server import role_environment
from relax_hpc.supervise.processes import RestartPolicy, how_it_ended, next_attempt

NAME = "tracking"
GRACE_S = 30.0
"""How long the follower may take to copy what is left and to close what other libraries have open."""


class Tracker:
    """The follower's process; nothing where the recipe asks for no tracking or messages."""

    def __init__(self, run: RunDir, recipe: Recipe, say: Callable[..., None]) -> None:
        """say: writes an event down."""
        self._run, self._say = run, say
        self._wanted, self._since = bool(recipe.tracking or recipe.notify), time.time()
        self._restart_policy = RestartPolicy(recipe.supervision)
        self._process: subprocess.Popen[bytes] | None = None

    def look_after(self) -> None:
        """Start the follower if it does not run; to be called often."""
        if not self._wanted:
            return
        if self._process is None:
            if time.monotonic() >= self._restart_policy.not_before:
                self._start()
        elif (code := self._process.poll()) is not None:
            self._process = None
            self._say("lost", role=NAME, reason=how_it_ended(code))
            self._wanted = self._restart_policy.failed(how_it_ended(code), None)

    def _start(self) -> None:
        attempt = next_attempt(self._run, NAME)
        command = [
            sys.executable, "-P", "-m", "relax_hpc.monitor.tracking", str(self._run.root), "--supervisor", str(os.getpid()),
            "--since", str(self._since),
        ]  # fmt: skip
        with (self._run.logs / f"{NAME}.{attempt:04d}.log").open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=role_environment(self._run),
                start_new_session=True,
            )  # fmt: skip
        self._say("restart", role=NAME, attempt=attempt)

    def end(self, grace_s: float) -> None:
        """Let the follower copy what is left; kill it when that takes longer than `grace_s`."""
        self._wanted = False
        if self._process is None:
            return
        if grace_s > 0:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(grace_s)
        self._process.kill()
        self._process.wait()
