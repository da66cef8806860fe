"""A child that must not outlive who started it: `start_child` here, `end_with` there."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

PR_SET_PDEATHSIG = 1
_starter = ThreadPoolExecutor(1, "starter")


def start_child(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """subprocess.Popen, by a thread that lives as long as this process: it is whose end the kernel looks at."""
    return _starter.submit(lambda: subprocess.Popen[bytes](command, **options)).result()


def end_with(parent: int) -> None:
    """From here on the kernel kills this process when the thread that started it ends, however it does. parent: its process."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(f"process {parent}, which started this one, is gone")
