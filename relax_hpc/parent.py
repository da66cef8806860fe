"""Child processes that must not outlive their parent, which calls `start_child` (they call `end_with`); light ones."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import ModuleSpec
from multiprocessing.context import SpawnContext, SpawnProcess
from multiprocessing.process import BaseProcess
from typing import Any

PR_SET_PDEATHSIG = 1
_starter = ThreadPoolExecutor(1, "starter")
_main_module = threading.Lock()


def start_child(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a process as subprocess.Popen does, from a thread that lives as long as this process (see end_with)."""
    return _starter.submit(lambda: subprocess.Popen[bytes](command, **options)).result()


def end_with(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it, of process `parent`, ends in any way."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(f"process {parent}, which started this one, is gone")


class _LightProcess(SpawnProcess):
    """A spawned process that does not import its parent's main module: a role's imports torch."""

    @staticmethod
    def _Popen(process_obj: BaseProcess) -> Any:
        main = sys.modules["__main__"]
        with _main_module:
            spec = main.__spec__
            # multiprocessing.spawn leaves out the main module of a package, and judges by its name
            main.__spec__ = ModuleSpec("relax_hpc.__main__", None)
            try:
                return SpawnProcess._Popen(process_obj)
            finally:
                main.__spec__ = spec


class LightContext(SpawnContext):
    """A multiprocessing context that starts light processes."""

    Process = _LightProcess
