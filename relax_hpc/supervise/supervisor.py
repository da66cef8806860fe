"""The supervisor: starts the roles of a run, watches their heartbeats, restarts them; knows no RL.

lease ► trainer group (a new incarnation each time)
        rollout workers, scorers (each restarted alone; megatron scorers as a group), critic (as a group)
  lost worker: its claims are open again at once, then it is restarted
  lost trainer process: the whole group is ended and restarted from the newest checkpoint
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from relax_hpc.files.errors import DamagedFile
from relax_hpc.files.publish import read_json, to_json
from relax_hpc.files.run_dir import RunDir
from relax_hpc.recipe.schema import Recipe
from relax_hpc.roles.common.process import is_full
from relax_hpc.supervise.io_retry import IoRetry, IoTrouble
from relax_hpc.supervise.lease import Lease
from relax_hpc.supervise.processes import Ended, ProcessGroup
from relax_hpc.supervise.restarts import GRACE_S, KeptGroup, Together, Workers
from relax_hpc.supervise.tracker import GRACE_S as TRACKER_GRACE_S
from relax_hpc.supervise.tracker import tracker
from relax_hpc.telemetry import Telemetry, read_heartbeat

ENDED = ("done", "stopped", "failed")
"""Outcomes after which a run's processes leave; after "preempted" they wait for the next supervisor."""
POLL_S = 0.02
"""How often to look for ended children: one waitpid each, no file is touched."""
LEASE_LOOK_S = 0.5
"""How often to look whether the lease is still ours."""
FULL_WAIT_S = 5.0
"""How long the outcome may wait for room on a full disk: roles stop in a moment, and may leave some."""


class Trainers(KeptGroup):
    """The trainer group; each attempt commits through an incarnation of its own."""

    may_end = True

    def __init__(self, group: ProcessGroup, say: Callable[..., None], lease: Lease) -> None:
        super().__init__(group, say)
        self._lease = lease

    def _start(self) -> None:
        try:
            incarnation = self._lease.new_incarnation()
        except FileNotFoundError as error:
            raise self._lease.superseded() from error
        self.group.start("--incarnation", str(incarnation))
        self._say("restart", role=self.group.name, attempt=self.group.attempt, incarnation=incarnation.name)

    def _gone(self, lost: bool) -> dict[str, Any]:
        return {"step": self._progress(self.group.heartbeats())}

    def _progress(self, heartbeats: list[dict[str, Any]]) -> Any:
        return heartbeats[0].get("step")


class Supervisor:
    """Carries out a run until it is done, stopped or failed."""

    def __init__(
        self,
        run: RunDir,
        recipe: Recipe,
        lease: Lease,
        trainers: ProcessGroup,
        workers: Sequence[Workers],
        telemetry: Telemetry,
        look: Callable[[], None] = lambda: None,
        interrupted: str = "stopped",
        signalled: Callable[[], None] = lambda: None,
        asked: Callable[[], bool] = lambda: False,
    ) -> None:
        """interrupted: the outcome after a signal, where no person asked for a `stop`; signalled: called at the first
        signal; asked: returns True if a signal came before we listened.
        """
        self.run, self.recipe, self.lease, self.look = run, recipe, lease, look
        self.trainers, self.workers = Trainers(trainers, telemetry.metrics, lease), Together(workers)
        self.telemetry = telemetry
        self.io = IoRetry(run, recipe.supervision.io_wait_s, telemetry.metrics)
        self.tracker = Together(self.io(lambda: tracker(run, recipe, telemetry.metrics)))
        self._interrupted, self._signalled, self._asked_before = interrupted, signalled, asked
        # Slurm sends TERM after USR2, and leaves time in between.
        self._hasty = interrupted == "stopped"
        self.interrupts = 0
        self._asked = False
        self._renewed_at = float("-inf")

    def supervise(self) -> dict[str, Any]:
        """Run to the end and return the outcome as it stands in outcome.json.

        Raises RunError when another supervisor took over.
        """
        self.io(lambda: self.run.outcome.unlink(missing_ok=True))
        self.telemetry.metrics("start", lease=self.lease.number)
        with self._signals():
            if self._asked_before():
                self.interrupts = 1
            try:
                while (outcome := self.io(self._tick)) is None:
                    time.sleep(POLL_S)
                outcome |= {"step": self.io(self._steps_made), "time": time.time()}
                self._write_outcome(
                    outcome
                )  # before anything that takes time: if we are killed now, the outcome is known
            finally:
                self._end_all()
        self.io(self.lease.release)
        return outcome

    def _tick(self) -> dict[str, Any] | None:
        """Look after everything once; return the outcome when there is one.

        Safe to call again where the file system failed in the middle.
        """
        if self.interrupts > 1 and self._hasty:
            return _outcome(self._interrupted, "interrupted twice: stopped at once")
        if (self.interrupts or self.workers.failed) and not self._asked:
            self._ask_to_stop()
        self._renew_lease()
        self.trainers.look_after()
        if (outcome := self._outcome()) is None:
            self.workers.look_after()
            self.tracker.look_after()
            self.look()
        return outcome

    def _ask_to_stop(self) -> None:
        """Begin an orderly stop: the trainer ends its step and checkpoints; workers give their requests back."""
        self._asked = True
        if self.interrupts:
            self._signalled()
        self.trainers.ask_to_stop()
        self.workers.ask_to_stop()

    def _outcome(self) -> dict[str, Any] | None:
        trainers, failed = self.trainers, self.workers.failed
        # Trainers that were lost and wait for their next start have nothing to end, and are not asked.
        ended = trainers.ended if trainers.group.started or not self._asked else Ended("stopped")
        if trainers.failure or (failed and ended):
            part = failed or trainers
            about = {"fatal": part.fatal or trainers.fatal, "suspect": part.suspect}
            return _outcome("failed", part.failure) | about
        if ended is None:
            return None
        if ended.outcome == "done":
            return _outcome("done", "")
        reason = "" if ended.outcome else f"lost while stopping: {ended.reason}"
        return _outcome("stopped" if self.run.stop.exists() else self._interrupted, reason)

    def _renew_lease(self) -> None:
        """Renew the lease, at most twice a second. Raises RunError when it was taken over."""
        if time.monotonic() - self._renewed_at >= LEASE_LOOK_S:
            if not self.lease.renew():
                raise self.lease.superseded()
            self._renewed_at = time.monotonic()  # not before: a tick that is tried again looks again

    def _end_all(self) -> None:
        grace_s = 0 if self.interrupts > 1 and self._hasty else GRACE_S
        self.trainers.ask_to_stop()
        try:
            self.io(lambda: self.workers.end(grace_s))
        finally:
            self.trainers.end(grace_s)
            self.tracker.end(grace_s and TRACKER_GRACE_S)  # last: it copies the others' last metrics

    def _steps_made(self) -> int:
        """The run's step: that of the newest checkpoint, or of the trainer's heartbeat where that is further on.

        The checkpoint is the truth; a heartbeat may be late.
        """
        said = int((read_heartbeat(self.run, "trainer-0") or {}).get("step", 0))
        return max([said, *self.run.checkpoint_steps()])

    def _write_outcome(self, outcome: dict[str, Any]) -> None:
        give_up_at = time.monotonic() + FULL_WAIT_S

        def write() -> None:
            try:
                self.lease.commit(self.run.outcome, to_json(outcome))
            except OSError as error:
                if not is_full(error) or time.monotonic() < give_up_at:
                    raise
                self.io.log.warning("'%s' is not written: %s", self.run.outcome, error)

        with contextlib.suppress(IoTrouble):  # neither it nor a full disk may hide the reason that is printed next
            self.io(write)
        self.telemetry.metrics("outcome", **{k: v for k, v in outcome.items() if k != "time"})

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Handle signals: the first Ctrl-C, TERM or USR2 stops in order, the second at once.

        HUP, the end of the terminal, may come twice and counts as the first.
        """

        def count(number: int, frame: Any) -> None:
            self.interrupts = max(self.interrupts, 1) if number == signal.SIGHUP else self.interrupts + 1

        wanted = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR2]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup has it ignored
            wanted.append(signal.SIGHUP)
        before = {s: signal.signal(s, count) for s in wanted}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def sweep(run: RunDir, older_than_s: float = 0.0) -> None:
    """Remove unfinished files of killed processes; a process that still writes one does so in vain.

    A damaged latest.json of the weights is removed too: the next trainer writes it again, and workers wait for that.
    older_than_s: least age of a file to remove, by the file server's clock, which stamped the files.
    """
    # The probe keeps its name until it is looked at: some file systems of user space have no attributes for a file without one.
    with tempfile.NamedTemporaryFile(prefix=".", dir=run.heartbeats) as probe:
        latest = os.fstat(probe.fileno()).st_mtime - older_than_s
    for folder in (
        run.shards,
        run.evals,
        run.columns,
        run.open_requests,
        run.partial_rollouts,
        run.heartbeats,
        run.caches,
    ):
        for path in folder.rglob(".*"):
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_mtime <= latest:
                    path.unlink()
    newest = run.weights / "latest.json"
    try:
        read_json(newest)
    except DamagedFile as error:
        logging.getLogger("supervisor").warning("%s: removed, the trainer writes it again", error)
        newest.unlink(missing_ok=True)


def _outcome(outcome: str, reason: str) -> dict[str, Any]:
    return {"outcome": outcome, "reason": reason}


def is_final(outcome: dict[str, Any] | None) -> bool:
    """Return True if the run stays ended until a person sends it again."""
    return outcome is not None and (outcome["outcome"] in ("done", "stopped") or bool(outcome.get("fatal")))


def outcome_of(run: RunDir) -> dict[str, Any] | None:
    """The outcome with which the run last ended; None while it runs, or when its supervisor was killed."""
    value: dict[str, Any] | None = read_json(run.outcome)
    return value
