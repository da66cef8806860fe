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
from collections.abc import Callable, Iterator
from typing import Any

from relax_hpc.files.errors import DamagedFile
from relax_hpc.files.publish import read_json, to_json
from relax_hpc.files.run_dir import RunDir
from relax_hpc.recipe.schema import Recipe
from relax_hpc.roles.common.process import is_full
from relax_hpc.supervise.io_retry import IoRetry, IoTrouble
from relax_hpc.supervise.lease import Lease
from relax_hpc.supervise.processes import RestartPolicy
from relax_hpc.supervise.rollout_workers import GRACE_S, Workers
from relax_hpc.supervise.tracker import GRACE_S as TRACKER_GRACE_S
from relax_hpc.supervise.tracker import Tracker
from relax_hpc.supervise.trainer_group import Ending, Trainers
from relax_hpc.telemetry import Telemetry, read_heartbeat

ENDED = ("done", "stopped", "failed")
"""Outcomes after which a run's processes leave; after "preempted" they wait for the next supervisor."""
POLL_S = 0.02
"""How often to look for ended children: one waitpid each, no file is touched."""
HEARTBEATS_S = 0.5
"""How often to read heartbeat files."""


class Supervisor:
    """Carries out a run until it is done, stopped or failed."""

    def __init__(
        self,
        run: RunDir,
        recipe: Recipe,
        lease: Lease,
        trainers: Trainers,
        workers: Workers,
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
        self.trainers, self.workers, self.telemetry = trainers, workers, telemetry
        self.restart_policy = RestartPolicy(recipe.supervision)
        self.io = IoRetry(run, recipe.supervision.io_wait_s, telemetry.metrics)
        self.tracker = Tracker(run, recipe, telemetry.metrics)
        self._interrupted, self._signalled, self._asked_before = interrupted, signalled, asked
        # Slurm sends TERM after USR2, and leaves time in between.
        self._hasty = interrupted == "stopped"
        self.interrupts = 0
        self._asked = False
        self._looked_at_heartbeats = float("-inf")

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
        if (self.interrupts or self.workers.failure) and not self._asked:
            self._ask_to_stop()
        outcome = self._look_after_trainers(self._look_for_silence())
        if outcome is None:
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

    def _look_after_trainers(self, silence: Ending | None) -> dict[str, Any] | None:
        if not self.trainers.started and not self._asked:
            if time.monotonic() >= self.restart_policy.not_before:
                self._start_trainers()
            return None
        # Trainers that were lost and wait for their next start have nothing to end, and are not asked again.
        ending = (self.trainers.ending() or silence) if self.trainers.started else Ending("stopped")
        if ending is None:
            return None
        if ending.final is None and not self._asked:
            return self._lost_trainers(ending)
        if self.workers.failure or ending.final == "failed":
            fatal = self.workers.fatal or ending.final == "failed"
            about = {"fatal": fatal, "suspect": self.workers.suspect}
            return _outcome("failed", self.workers.failure or ending.reason) | about
        reason = ending.reason if ending.final else f"lost while stopping: {ending.reason}"
        if ending.final == "done":
            return _outcome("done", reason)
        return _outcome("stopped" if self.run.stop.exists() else self._interrupted, reason)

    def _lost_trainers(self, ending: Ending) -> dict[str, Any] | None:
        heartbeats = [
            read_heartbeat(self.run, f"trainer-{rank}") or {} for rank in range(self.recipe.trainer.processes)
        ]
        step, ours = (
            heartbeats[0].get("step"),
            [heartbeat for heartbeat in heartbeats if heartbeat.get("attempt") == self.trainers.attempt],
        )
        self.telemetry.metrics("lost", role="trainer", reason=ending.reason, step=step)
        log = self.run.logs / f"trainer-0.{self.trainers.attempt:04d}.log"
        self.trainers.end(grace_s=0)
        said = self.trainers.final_message()
        if not self.restart_policy.failed(ending.reason, step, *ours):
            about = {"fatal": bool(self.restart_policy.again), "suspect": ending.host}
            return _outcome("failed", self.restart_policy.exhausted("trainer", ending.reason, said, log)) | about
        return None

    def _start_trainers(self) -> None:
        try:
            incarnation = self.lease.new_incarnation()
        except FileNotFoundError as error:
            raise self.lease.superseded() from error
        try:
            self.trainers.start(incarnation)
        except OSError:
            self.trainers.end(grace_s=0)  # some of them may have begun
            raise
        self.telemetry.metrics("restart", role="trainer", attempt=self.trainers.attempt, incarnation=incarnation.name)

    def _look_for_silence(self) -> Ending | None:
        """Renew the lease and look for trainers and workers silent too long; None when no trainer is. At most twice a
        second.

        Raises RunError when the lease was taken over.
        """
        if time.monotonic() - self._looked_at_heartbeats < HEARTBEATS_S:
            return None
        self._looked_at_heartbeats = time.monotonic()
        if not self.lease.renew():
            raise self.lease.superseded()
        self.workers.look_for_silence()
        return self.trainers.silent()

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
        def write() -> None:
            try:
                self.lease.commit(self.run.outcome, to_json(outcome))
            except OSError as error:
                if not is_full(error):
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
