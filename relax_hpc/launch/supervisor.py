"""The supervisor: starts the roles of a run, watches their heartbeats, starts them again; knows no RL.

lease ► trainer group (a new incarnation each time) + rollout workers (each on its own)
  lost worker: its claims are open again at once, then it is started again
  lost trainer process: the whole group is ended and started again from the newest checkpoint
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

from relax_hpc.launch.lease import Lease
from relax_hpc.launch.members import Member, Patience, how_it_ended
from relax_hpc.recipe.schema import Recipe
from relax_hpc.roles.process import Exit
from relax_hpc.run_dir import RunDir, RunError, read_json, replace, to_json
from relax_hpc.spool.queue import Queue
from relax_hpc.telemetry import Telemetry, read_beat

POLL_S = 0.02
"""How often ended children are looked for: one waitpid each, no file is touched."""
BEATS_S = 0.5
"""How often heartbeat files are read."""
GRACE_S = 5.0
"""How long a worker may take to leave when it is asked to; what it played is played again."""
FINAL = {Exit.DONE: "done", Exit.STOPPED: "stopped", Exit.FATAL: "failed"}


class Supervisor:
    """Carries out a run on this machine until it is done, stopped or failed."""

    def __init__(self, run: RunDir, recipe: Recipe, lease: Lease, look: Callable[[], None] = lambda: None) -> None:
        self.run, self.recipe, self.lease, self.look = run, recipe, lease, look
        self.queue = Queue(run)
        self.telemetry = Telemetry(run, "supervisor", lease.number)
        self.trainers = [self._member("trainer", f"trainer-{i}") for i in range(recipe.trainer.processes)]
        wanted = 0 if read_json(run.identity)["debug"] == "train-only" else recipe.rollout.workers
        self.workers = [self._member("rollout", f"rollout-{i}") for i in range(wanted)]
        self.patience = {name: Patience(recipe.supervision) for name in ["trainer", *(w.name for w in self.workers)]}
        self.interrupts = 0
        self.failure = ""
        self._asked = False
        self._beats_read = 0.0
        self._lease_seen = 0.0

    def supervise(self) -> dict[str, Any]:
        """Run to the end; the outcome, as it stands in outcome.json. Raises RunError when another supervisor took over."""
        self.run.stop.unlink(missing_ok=True)
        self.run.outcome.unlink(missing_ok=True)
        for workplace in self.queue.workers():  # of a supervisor that died; its lease is ours now
            self.queue.give_back(workplace, lost=False)  # it fell with its supervisor: not a fault of its orders
        self._sweep()
        self._say("start", lease=self.lease.number)
        with self._signals():
            try:
                outcome = self._watch()
            finally:
                self._end_all()
        self._write_outcome(outcome)
        self.lease.release()
        return outcome

    def _sweep(self) -> None:
        """Remove what killed processes had not finished writing; whoever still writes there does so in vain."""
        for folder in (self.run.shards, self.run.evals, self.run.open_orders, self.run.heartbeats):
            for path in folder.rglob(".*"):
                path.unlink(missing_ok=True)

    def _watch(self) -> dict[str, Any]:
        self._start_trainers()
        while True:
            if not self._still_ours():
                raise RunError(
                    f"another supervisor has taken over '{self.run.root}': this one ends its processes and leaves"
                )
            if self.interrupts > 1:
                return self._outcome("stopped", "interrupted twice: stopped at once")
            if (self.interrupts or self.failure) and not self._asked:
                self._ask_to_stop()
            outcome = self._look_after_trainers()
            if outcome is not None:
                return outcome
            for worker in self.workers:
                self._look_after_worker(worker)
            self._look_for_silence()
            self.look()
            time.sleep(POLL_S)

    def _still_ours(self) -> bool:
        """Whether no successor has taken the lease; looked at as often as heartbeats are."""
        if time.time() - self._lease_seen < BEATS_S:
            return True
        self._lease_seen = time.time()
        return self.lease.renew()

    def _ask_to_stop(self) -> None:
        """An orderly stop: the trainer ends its step and checkpoints; workers give their orders back."""
        self._asked = True
        for member in [*self.trainers, *self.workers]:
            if member.running and member.process is not None:
                member.process.send_signal(signal.SIGTERM)

    def _look_after_trainers(self) -> dict[str, Any] | None:
        if all(m.process is None for m in self.trainers):
            if time.time() >= self.patience["trainer"].not_before:
                self._start_trainers()
            return None
        codes = {m: m.process.poll() for m in self.trainers if m.process is not None}
        if all(code is None for code in codes.values()):
            return None
        lead = codes[self.trainers[0]]
        if lead in FINAL:
            final = FINAL[Exit(lead)]
            reason = self.failure or (self.trainers[0].error() if final == "failed" else "")
            return self._outcome("failed" if self.failure else final, reason)
        if lead is None and all(code in (None, *FINAL) for code in codes.values()):
            return None  # the others leave a moment before rank 0
        ended = {m.name: how_it_ended(code) for m, code in codes.items() if code is not None}
        return self._lost_trainer(", ".join(f"{name}: {how}" for name, how in ended.items()))

    def _lost_trainer(self, reason: str) -> dict[str, Any] | None:
        if self._asked:
            return self._outcome(
                "failed" if self.failure else "stopped", self.failure or f"lost while stopping: {reason}"
            )
        for member in self.trainers:
            member.end(grace_s=0)
            member.process = None
        step = (read_beat(self.run, "trainer-0") or {}).get("step")
        self._say("lost", role="trainer", reason=reason, step=step)
        if not self.patience["trainer"].failed(reason, step):
            return self._outcome("failed", self._too_often("trainer", self.trainers[0], reason))
        for member in self.trainers:
            member.attempt += 1
        return None

    def _start_trainers(self) -> None:
        incarnation = self.lease.new_incarnation()
        for rank, member in enumerate(self.trainers):
            member.start(["--incarnation", str(incarnation), "--rank", str(rank), "--world", str(len(self.trainers))])
        self._say("restart", role="trainer", attempt=self.trainers[0].attempt, incarnation=incarnation.name)

    def _look_after_worker(self, worker: Member) -> None:
        patience = self.patience[worker.name]
        if worker.process is None:
            if not self._asked and time.time() >= patience.not_before:
                self._start_worker(worker)
            return
        code = worker.process.poll()
        if code is None:
            return
        worker.process = None
        orderly = code == Exit.STOPPED
        given = self.queue.give_back(worker.workplace, lost=not orderly)
        if code == Exit.FATAL:
            self.failure = self.failure or f"{worker.name}: {worker.error()}"
        if self._asked or code == Exit.FATAL:
            return
        reason = how_it_ended(code)
        orders = (read_beat(self.run, worker.name) or {}).get("orders")
        self._say("lost", role=worker.name, reason=reason, orders_given_back=given)
        if not patience.failed(reason, (worker.attempt, orders) if orders else None):
            self.failure = self._too_often(worker.name, worker, reason)
            return
        worker.attempt += 1

    def _start_worker(self, worker: Member) -> None:
        worker.workplace = f"{worker.name}-{self.lease.number:06d}-{worker.attempt:04d}"
        worker.start(["--workplace", worker.workplace])
        self._say("restart", role=worker.name, attempt=worker.attempt)

    def _look_for_silence(self) -> None:
        """Kill what has not said a word for too long; that it ended is noticed like any other end."""
        if time.time() - self._beats_read < BEATS_S:
            return
        self._beats_read = time.time()
        for member in [*self.trainers, *self.workers]:
            silent_s = member.silent_for(self.recipe.supervision) if member.running else None
            if silent_s is not None and member.process is not None:
                self._say("silent", role=member.name, reason=f"no heartbeat for {silent_s:.0f} s: killed")
                member.process.kill()

    def _end_all(self) -> None:
        for member in [*self.workers, *self.trainers]:
            if member.running and member.process is not None:
                member.process.send_signal(signal.SIGTERM)
        for member in self.workers:
            member.end(GRACE_S if self.interrupts < 2 else 0)
            if member.workplace:
                self.queue.give_back(member.workplace, lost=False)
        for member in self.trainers:
            member.end(GRACE_S if self.interrupts < 2 else 0)

    def _too_often(self, name: str, member: Member, reason: str) -> str:
        return (
            f"{name} was lost {self.patience[name].failures} times without progress (supervision.max_restarts = "
            f"{self.recipe.supervision.max_restarts}), last: {reason}; {member.error()}; its log: {member.log}"
        )

    def _outcome(self, outcome: str, reason: str) -> dict[str, Any]:
        beat = read_beat(self.run, "trainer-0") or {}
        return {"outcome": outcome, "reason": reason, "step": beat.get("step", 0), "time": time.time()}

    def _write_outcome(self, outcome: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # a full disk must not hide the reason that is printed next
            replace(self.run.outcome, to_json(outcome))
        self._say("outcome", **outcome)

    def _say(self, kind: str, **values: Any) -> None:
        self.telemetry.metrics(kind=kind, **{k: v for k, v in values.items() if k != "time"})

    def _member(self, role: str, name: str) -> Member:
        before = len(list(self.run.logs.glob(f"{name}.*.log")))
        return Member(self.run, role, name, attempt=before)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Ctrl-C, TERM and USR2 mean: stop in order; a second time: at once."""

        def count(number: int, frame: Any) -> None:
            self.interrupts += 1

        before = {s: signal.signal(s, count) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def outcome_of(run: RunDir) -> dict[str, Any] | None:
    """How the run ended last; None while it runs or when its supervisor was killed."""
    value: dict[str, Any] | None = read_json(run.outcome)
    return value
