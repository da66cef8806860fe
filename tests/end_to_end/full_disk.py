"""Body of the full-disk test, inside a mount namespace: a run on a tmpfs of a few megabytes, filled up under it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

from relax_hpc.files.run_dir import RunDir
from relax_hpc.monitor.analysis.audit import audit
from tests.runs import SMALL, outcome, relax_hpc, start, step_now, steps_of, wait_for, write_recipe

SIZE = 24 << 20


def main(folder: Path) -> None:
    small = folder / "disk"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(small)], check=True)
    recipe = write_recipe(small, SMALL.replace("steps = 6", "steps = 100000"))
    run = RunDir(small / "small")
    ballast = small / "ballast"

    process = start("run", recipe, "--set", "spool.full_disk_wait_s=4.0", "--set", "run.keep_checkpoints=1")
    wait_for(lambda: run.exists and step_now(run) >= 3)
    fill(ballast)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 2, output
    assert "no room for" in output and "spool.full_disk_wait_s" in output and "Traceback" not in output, output
    ballast.unlink()
    stopped_at = max(s["step"] for s in steps_of(run))
    relax_hpc("run", run.root, "--set", f"run.steps={stopped_at + 4}")
    assert outcome(run)["outcome"] == "done"
    found = audit(run.root)
    assert (found.lost, found.twice, found.torn) == ([], [], []), found
    waited_then_had_room(small)


def fill(ballast: Path) -> None:
    """Write until nothing more fits."""
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"\0" * 4096)


def waited_then_had_room(small: Path) -> None:
    """Room that comes back in time costs nothing but the wait."""
    run = RunDir(small / "small")
    process = start("run", run.root, "--set", "run.steps=100000", "--set", "spool.full_disk_wait_s=100.0")
    step = step_now(run)
    wait_for(lambda: step_now(run) > step)
    ballast = small / "ballast"
    fill(ballast)
    stuck = wait_for(lambda: step_stands_still(run, seconds=3.0))
    ballast.unlink()
    wait_for(lambda: step_now(run) > stuck + 2)
    relax_hpc("stop", run.root)
    assert process.wait(60) == 0


def step_stands_still(run: RunDir, seconds: float) -> int | None:
    """The step, when it stays the same that long. Nothing else tells from outside: logs have no room either."""
    step = step_now(run)
    time.sleep(seconds)
    return step if step_now(run) == step else None


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    os._exit(0)
