"""I/O errors of a run's file system as those who must outlive them see them: supervisor, agents, leaders.

    a tick of the loop ──OSError that passes──► said once ► pause ► the same tick again ► … ► RunError after minutes

Everything that such a loop does can be done again. What a tick finds half done (a start, a loss that is being noted) it goes on with.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import tenacity

from relax_hpc.roles.process import passes
from relax_hpc.run_dir import RunDir, RunError

T = TypeVar("T")

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 5.0


class IoTrouble(RunError):
    """It lasted too long."""


class IoRetry:
    """Does what may fail for a while, again and again; says so once for each spell of trouble, and once when it is over."""

    def __init__(self, run: RunDir, limit_s: float, say: Callable[..., None]) -> None:
        """limit_s: how long a spell may last (supervision.io_wait_s); say: writes an event down."""
        self._run, self._limit_s, self._say = run, limit_s, say
        self.log = logging.getLogger("io")

    def __call__(self, action: Callable[[], T]) -> T:
        """What `action` gives. Raises IoTrouble when the trouble lasts; any other error at once."""
        attempts = tenacity.Retrying(
            retry=tenacity.retry_if_exception(passes),
            wait=tenacity.wait_exponential(FIRST_PAUSE_S, max=LONGEST_PAUSE_S),
            stop=tenacity.stop_after_delay(self._limit_s),
            before_sleep=self._trouble,
            reraise=True,
        )
        try:
            found = attempts(action)
        except OSError as error:
            if not passes(error):
                raise
            raise IoTrouble(
                f"the file system of '{self._run.root}' fails for {self._limit_s:.0f} s (supervision.io_wait_s): {error}; nothing "
                f"that was committed is lost: when it is well again, `relax-hpc run {self._run.root}` or `relax-hpc submit` goes on"
            ) from error
        if attempts.statistics["attempt_number"] > 1:
            self._say("io_well", seconds=round(float(attempts.statistics["idle_for"]), 1))
        return found

    def _trouble(self, state: tenacity.RetryCallState) -> None:
        if state.attempt_number == 1 and state.outcome is not None:
            error = state.outcome.exception()
            self.log.warning("the file system fails, tried again for up to %.0f s: %s", self._limit_s, error)
            self._say("io_error", reason=str(error))
