"""`relax-hpc stop`: a run at work checkpoints and ends; one that only waits in the queue leaves it."""

from __future__ import annotations

import time

from relax_hpc.files.errors import RunError
from relax_hpc.files.publish import publish, replace, to_json
from relax_hpc.files.run_dir import RunDir
from relax_hpc.slurm.client import cancel
from relax_hpc.slurm.overview import job_rows
from relax_hpc.supervise.lease import holder


def stop(run: RunDir) -> str:
    """End the run; return in words how. Raises RunError when there is nothing to stop."""
    held = holder(run)
    if held is not None:
        publish(run.stop, b"")
        where = f"job {held['job']} on {held.get('host')}" if held.get("job") else f"pid {held.get('pid')} on {held.get('host')}"  # fmt: skip
        return f"asked {where} to stop; `relax-hpc status {run.root}` shows when it has"
    alive = [job.id for job in job_rows(run) if job.alive]
    if not alive:
        raise RunError(f"'{run.root}' is not running: nothing to stop")
    # Before its jobs go: one that begins at this moment finds the run stopped and leaves.
    reason = f"stopped while it waited; cancelled: {' '.join(alive)}"
    made = run.checkpoint_steps()
    about = {"outcome": "stopped", "reason": reason, "step": made[-1] if made else 0, "time": time.time()}
    replace(run.outcome, to_json(about))
    if not cancel(alive):
        raise RunError(
            f"'{run.root}' is marked as stopped, but scancel failed: `scancel {' '.join(alive)}` removes its jobs"
        )
    return f"it was waiting: cancelled {', '.join(alive)}; `relax-hpc submit {run.root}` sends it again"
