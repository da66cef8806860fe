"""A role's process: its recipe, heartbeat and signals, and the code with which it ends.

The supervisor that started it decides by the Exit code what follows.
"""

from __future__ import annotations

import argparse
import errno
import logging
import re
import signal
import traceback
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from typing import Any, TypeVar

import tenacity

from relax_hpc.files.errors import RunError
from relax_hpc.files.permissions import keep_private
from relax_hpc.files.run_dir import RunDir
from relax_hpc.recipe.schema import Recipe
from relax_hpc.roles.common.caches import Caches
from relax_hpc.telemetry import Telemetry

T = TypeVar("T")
QUIET_SHARE = 24
"""A role with nothing new to say beats this many times within the time after which it would count as lost."""
FULL = (errno.ENOSPC, errno.EDQUOT)


class Exit(IntEnum):
    """Exit codes of a role's process."""

    DONE = 0
    STOPPED = 10
    """Asked to stop; its work is on disk."""
    FATAL = 11
    """A person must mend something first: another start would end the same way."""
    FENCED = 12
    """A successor has taken over."""
    CRASHED = 13
    """An unexpected error; starting it again may help."""


class Stop(BaseException):
    """Raised where the role was asked to stop in the middle of work that can be given up."""


class RoleProcess:
    """The process of a role: arguments, recipe, heartbeat, stop flag."""

    def __init__(self, arguments: argparse.Namespace, run: RunDir, recipe: Recipe) -> None:
        self.arguments, self.run, self.recipe = arguments, run, recipe
        self.name: str = arguments.name
        keep_private(self.recipe.run.group_access)
        quiet_s = self.recipe.supervision.hang_s / QUIET_SHARE
        self.telemetry = Telemetry(self.run, self.name, arguments.attempt, arguments.supervisor, quiet_s)
        self.caches = Caches(self.run, arguments.role)
        self.log = logging.getLogger(self.name)
        self.stopping = False
        signal.signal(signal.SIGTERM, self._stop)
        signal.signal(signal.SIGUSR2, self._stop)  # USR2 and not USR1: NCCL takes USR1
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the supervisor decides

    def _stop(self, number: int, frame: Any) -> None:
        self.stopping = True

    def when_room(self, action: Callable[[], T], what: str) -> T:
        """Return `action()`; while the disk is full, wait and try again. Raises RunError when that takes too long."""
        limit_s = self.recipe.spool.full_disk_wait_s

        def waiting(retry: tenacity.RetryCallState) -> None:
            self.log.warning(
                "no room for %s in %s: waiting (%.0f s of %.0f)",
                what,
                self.run.root,
                retry.seconds_since_start or 0,
                limit_s,
            )
            self.telemetry.heartbeat("waiting for room")
            if self.stopping:
                raise Stop

        attempts = tenacity.Retrying(
            retry=tenacity.retry_if_exception(is_full),
            wait=tenacity.wait_exponential(0.25, max=5),
            stop=tenacity.stop_after_delay(limit_s),
            before_sleep=waiting,
            reraise=True,
        )
        try:
            return attempts(action)
        except Exception as error:
            if not is_full(error):
                raise
            raise RunError(
                f"no room for {what} in '{self.run.root}' after {limit_s:.0f} s (spool.full_disk_wait_s): {error}; "
                'free space, or set spool.keep = "needed", then resume with `relax-hpc run RUN_DIR`; nothing is lost'
            ) from error


ANSWERS = frozenset(
    {
        errno.ENOENT, errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR, errno.EXDEV, errno.EINVAL, errno.ENAMETOOLONG,
        errno.ELOOP, errno.EBADF, errno.EPIPE, errno.ECHILD, errno.ESRCH, errno.ENOEXEC, errno.E2BIG, errno.ENOTSUP,
    }
)  # fmt: skip
"""Errors that the same call would meet again: they say what is there, or that the request was wrong. ENOENT is how a
superseded process is fenced. ESTALE is not among them: the handle is old, and what the path leads to is not known. All
others may pass, if only when a person sees to it: EIO, ESTALE, a server or a network that is gone; a full disk or
quota; a file system made read-only after an error; permissions refused while a Kerberos ticket or name server is
renewed."""
BEGINNING = (None, "starting", "syncing")
"""States of a role that has done nothing yet."""
_OF_THE_MOMENT = (
    "OutOfMemoryError",
    "AcceleratorError",
    "DistError",
    "DistBackendError",
    "DistNetworkError",
    "DistStoreError",
)
"""Errors of torch that another start may not meet: memory that another process holds, a peer that is gone."""
_PEER = re.compile(r"gloo/transport|by peer", re.IGNORECASE)
"""Words in a plain RuntimeError by which gloo reports a peer that left; the peer itself says why."""


def passes(error: BaseException) -> bool:
    """Return True if an error is trouble of the file system that may pass, so that the same call may succeed later."""
    return isinstance(error, OSError) and error.errno is not None and error.errno not in ANSWERS


def place_of(error: BaseException) -> str:
    """Return FILE:LINE of our code where an error came from; empty for errors that tell of the moment rather than of
    the request."""
    if passes(error) or isinstance(error, (TimeoutError, ConnectionError)) or type(error).__name__ in _OF_THE_MOMENT:
        return ""
    if isinstance(error, RuntimeError) and _PEER.search(str(error)):
        return ""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "relax_hpc" in Path(frame.filename).parts]
    return f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else ""


def is_full(error: BaseException) -> bool:
    """Return True if `error` says that the disk or the quota is full (safetensors says it in words only)."""
    if isinstance(error, OSError) and error.errno in FULL:
        return True
    return type(error).__name__ == "SafetensorError" and ("code: 28" in str(error) or "os error 28" in str(error))
