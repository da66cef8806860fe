"""Retries I/O errors of a run's file system, for processes that must outlive them: supervisor, node agents, leaders.

    a tick of the loop ──OSError that passes──► logged once ► pause ► the same tick again ► … ► RunError after minutes

Everything that such a loop does can be done again: a tick goes on with what it finds half done (a start, a loss that is
being noted).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TypeVar

import tenacity

from relax_hpc.files.errors import RunError
from relax_hpc.files.run_dir import RunDir
from relax_hpc.recipe.tables.run import Supervision
from relax_hpc.roles.common.process import passes

T = TypeVar("T")

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 5.0


class IoTrouble(RunError):
    """Raised when the trouble outlasts the limit."""


class IoRetry:
    """Retries an action through a spell of I/O errors; reports each spell once when it begins, and once when it is
    over.
    """

    def __init__(self, run: RunDir, limit_s: float, say: Callable[..., None] = lambda kind, **about: None) -> None:
        """limit_s: how long a spell may last (supervision.io_wait_s); say: writes an event down."""
        self._run, self._limit_s, self._say = run, limit_s, say
        self._ended = threading.Event()
        self.log = logging.getLogger("io")

    def __call__(self, action: Callable[[], T]) -> T:
        """Call `action`, again while its errors may pass, and return its result.

        Raises IoTrouble when the trouble lasts too long; any other error at once.
        """
        attempts = tenacity.Retrying(
            retry=tenacity.retry_if_exception(_is_trouble),
            wait=tenacity.wait_exponential(FIRST_PAUSE_S, max=LONGEST_PAUSE_S),
            stop=tenacity.stop_any(tenacity.stop_after_delay(self._limit_s), tenacity.stop_when_event_set(self._ended)),
            sleep=tenacity.sleep_using_event(self._ended),
            before_sleep=self._trouble,
            reraise=True,
        )
        try:
            found = attempts(action)
        except Exception as error:
            if not _is_trouble(error):
                raise
            raise IoTrouble(
                f"the file system of '{self._run.root}' fails for {self._limit_s:.0f} s (supervision.io_wait_s): {error}; nothing "
                f"that was committed is lost: when it is well again, `relax-hpc run {self._run.root}` or `relax-hpc submit` goes on"
            ) from error
        if attempts.statistics["attempt_number"] > 1:
            self._say("io_well", seconds=round(float(attempts.statistics["idle_for"]), 1))
        return found

    def end(self) -> None:
        """Try nothing again from now on: a thread that waits for its next attempt fails at once, and delays nobody's
        end.
        """
        self._ended.set()

    def _trouble(self, state: tenacity.RetryCallState) -> None:
        if state.attempt_number == 1 and state.outcome is not None:
            error = state.outcome.exception()
            self.log.warning("the file system fails, tried again for up to %.0f s: %s", self._limit_s, error)
            self._say("io_error", reason=str(error))


def _is_trouble(error: BaseException) -> bool:
    """Return True if the error may pass: an I/O error that does, or the error for a file, such as a recipe, unreadable
    now.
    """
    return not isinstance(error, IoTrouble) and any(map(passes, filter(None, (error, error.__cause__))))


def at_first(run: RunDir) -> IoRetry:
    """Make the IoRetry to use before the recipe, which sets the limit, was read."""
    return IoRetry(run, Supervision().io_wait_s)
