"""Starts programs of a run in a session of their own: the environment that a role has, the log that it writes to."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from relax_hpc.files.run_dir import RunDir

KEPT_ARRAY_BYTES = 64 << 20
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(KEPT_ARRAY_BYTES), "MALLOC_TRIM_THRESHOLD_": str(4 * KEPT_ARRAY_BYTES)}
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")


def snapshot_code(run: RunDir) -> Path | None:
    """The run's copy of the code; None where relax_hpc is installed and its version says it all."""
    code = run.snapshot / "code"
    return code if code.is_dir() else None


def start_logged(
    command: Sequence[str], log: Path, environment: Mapping[str, str], *kept: int
) -> subprocess.Popen[bytes]:
    """Start a command in a session of its own, with its output appended to `log`. kept: file descriptors that it gets."""
    with log.open("ab") as file:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, env=environment, pass_fds=kept,
            start_new_session=True,
        )  # fmt: skip


def role_environment(run: RunDir) -> dict[str, str]:
    """The environment of a role.

    The run's own snapshot of the code comes first, so a restart runs what was submitted.
    """
    environment = dict(os.environ)
    if code := snapshot_code(run):
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(code), environment.get("PYTHONPATH")]))
    environment["PYTHONUNBUFFERED"] = "1"
    # Arrays of megabytes come and go every step: kept by the allocator, their pages need not be faulted in each time.
    for name, value in ALLOCATOR.items():
        environment.setdefault(name, value)
    for name in OFFLINE:  # compute nodes have no internet; nothing here looks a model up by name
        environment.setdefault(name, "1")
    return environment
