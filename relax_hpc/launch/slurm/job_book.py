"""The rollout jobs of a run as its leader keeps them in mind, however many there were: each record is read once, and Slurm is
asked only for those that are not known to be over.

They are sent with --no-requeue: one that has ended does not come back.
"""

from __future__ import annotations

from typing import Any

from relax_hpc.launch.slurm.plan import Kind
from relax_hpc.launch.slurm.queue_state import ALIVE, job_state, number
from relax_hpc.run_dir import RunDir, read_json


class JobBook:
    """All jobs of one kind."""

    def __init__(self, run: RunDir, kind: Kind) -> None:
        self._folder, self._kind = run.slurm / "jobs", kind
        self._records: dict[str, dict[str, Any]] = {}
        self._over: dict[str, str | None] = {}

    def sent(self) -> dict[str, float]:
        """When each was sent, the oldest first."""
        for path in self._folder.glob("[0-9]*.json"):
            if path.stem not in self._records:
                self._records[path.stem] = read_json(path)
        ours = [about for about in self._records.values() if about["kind"] == self._kind]
        return {a["id"]: a["submitted"] for a in sorted(ours, key=lambda a: (a["submitted"], number(a["id"])))}

    def states(self) -> dict[str, str | None]:
        """Of all of them, the oldest first; None where Slurm does not answer."""
        sent = self.sent()
        asked = job_state([job for job in sent if job not in self._over])
        self._over |= {job: state for job, state in asked.items() if state is not None and state not in ALIVE}
        return {job: asked.get(job, self._over.get(job)) for job in sent}
