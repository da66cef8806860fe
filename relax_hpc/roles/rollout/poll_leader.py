"""The poll leader: of a node's waiting workers one looks for requests, so that idle workers cost the shared file system
nothing.

    worker ─┬─ has the lock of its node ──► looks into RUN/requests/open, claims ──► releases the lock, generates
            └─ waits for it: a thread, in the kernel, which hands it on at once, and opens it when its holder dies

The lock's file is on the node's own disk. Its time is that of the last look: if that is long ago, the holder hangs, and
every worker looks. Every worker looks, too, where that disk has no such locks.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import threading
import time
from pathlib import Path
from typing import IO

from relax_hpc.files.errors import RunError
from relax_hpc.files.node_disk import lock_file
from relax_hpc.files.run_dir import RunDir

log = logging.getLogger(__name__)
TAKEN = (errno.EAGAIN, errno.EACCES)
"""Errors that mean that another process has the lock."""
SILENT_S = 5.0
"""Seconds without a look after which a poll leader is not relied on."""


class PollLeader:
    """One worker's part in electing its node's poll leader."""

    def __init__(self, run: RunDir) -> None:
        self._changes = threading.Lock()
        self._held = self._wanted = self._asking = False
        self.called = threading.Event()
        """Set when it is this worker's turn to look."""
        self._last_look = (0, float("-inf"))
        """The lock file's time, and when we first saw that time, by a monotonic clock."""
        self._file: IO[str] | None = None
        """The lock's file; None where there are no locks."""
        try:
            self._file = file_of(run).open("a+")
        except (OSError, RunError) as error:
            self._do_without(error)

    def looks(self) -> bool:
        """Return True if this worker is to look for requests now; otherwise it waits to become the poll leader."""
        with self._changes:
            self._wanted = True
            if not self._held and not self._asking:
                self._take()
            if self._file is None:
                return True
            if self._held:
                os.utime(self._file.fileno())
                return True
            looked, now = os.fstat(self._file.fileno()).st_mtime_ns, time.monotonic()
            if looked != self._last_look[0]:
                self._last_look = (looked, now)
            return now - self._last_look[1] > SILENT_S

    def leave(self) -> None:
        """Stop looking: this worker has work, the next one looks."""
        with self._changes:
            self._wanted = False
            self._give()

    def _take(self) -> None:
        """Take the lock, or start a thread that waits for it."""
        if self._file is None:
            return
        try:
            # a record lock: children that are forked do not hold it
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._hold()
        except OSError as error:
            if error.errno not in TAKEN:
                self._do_without(error)
                return
            self._asking = True
            threading.Thread(target=self._ask, args=(self._file,), daemon=True).start()

    def _ask(self, file: IO[str]) -> None:
        failed: OSError | None = None
        try:
            fcntl.lockf(file, fcntl.LOCK_EX)
        except OSError as error:
            failed = error
        with self._changes:
            self._asking = False
            if failed is not None:
                self._do_without(failed)
                return
            self._hold()
            if not self._wanted:  # it found a request otherwise
                self._give()

    def _hold(self) -> None:
        self._held = True
        self.called.set()

    def _give(self) -> None:
        if self._held and self._file is not None:
            fcntl.lockf(self._file, fcntl.LOCK_UN)
        self._held = False
        self.called.clear()

    def _do_without(self, error: Exception) -> None:
        log.warning("this node's disk has no locks (%s): every worker looks for requests itself", error)
        self._file = None


def clear(run: RunDir) -> None:
    """Remove the lock's file from this node."""
    with contextlib.suppress(OSError, RunError):
        file_of(run).unlink()


def file_of(run: RunDir) -> Path:
    """Raise RunError if the node's disk has no folder that is ours alone."""
    return lock_file(run, "poll_leader")
