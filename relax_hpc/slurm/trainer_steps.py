"""The trainer group as one Slurm job step, and the step itself: one srun for all trainer ranks, or all node agents."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
import uuid
from pathlib import Path
from typing import Any

from relax_hpc.files.run_dir import RunDir
from relax_hpc.recipe.schema import Recipe
from relax_hpc.roles.common.process import Exit
from relax_hpc.slurm.client import ask
from relax_hpc.slurm.srun import TRAINER_COMPONENT, step_environment
from relax_hpc.supervise.fork_server import role_environment
from relax_hpc.supervise.heartbeat_monitor import HeartbeatMonitor
from relax_hpc.supervise.processes import next_attempt, silence_limit
from relax_hpc.supervise.trainer_group import Ending
from relax_hpc.telemetry import read_heartbeat

RANKS_EVERY_S = 2.0
"""How often to read the heartbeats of all ranks: each is a file."""
WORDS_BYTES = 2000
_BLAMED = re.compile(r"(?:^|; )(?P<host>\S+): tasks? ")
"""Finds the host that srun blames, as in "t2: task 1: Killed"."""


class Step:
    """One srun. It passes USR2 on to its tasks; TERM makes it kill them (seen with 22.05)."""

    def __init__(self, run: RunDir, name: str) -> None:
        self._run, self.name = run, name
        self.id = uuid.uuid4().hex[:8]
        """Our own id for the step: Slurm numbers steps too, but tells srun's parent only in words."""
        self.process: subprocess.Popen[bytes] | None = None
        self.log = run.logs / f"{name}.log"
        self.started_at = 0.0

    def start(self, srun: list[str], command: list[str], output: str, log: str) -> None:
        """Start `command` behind `srun …`; tasks write to `output` (srun's pattern), srun itself to `log`."""
        self.log = self._run.logs / log
        environment = step_environment(role_environment(self._run))
        logs = [f"--output={self._run.logs / output}", "--open-mode=append", "--unbuffered"]
        with self.log.open("ab") as file:
            self.process = subprocess.Popen(
                [srun[0], *logs, *srun[1:], *command],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )  # fmt: skip
        self.started_at = time.monotonic()

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def code(self) -> int | None:
        """srun's exit code; None while it runs."""
        return self.process.poll() if self.process is not None else None

    def ask_to_stop(self) -> None:
        if self.running and self.process is not None:
            self.process.send_signal(signal.SIGUSR2)

    def end(self, grace_s: float) -> None:
        """Wait for the tasks to leave; kill those that have not within `grace_s`."""
        if self.process is None:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(grace_s)
        if self.running:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(KILL_WAIT_S)
            except subprocess.TimeoutExpired:  # its node is gone: srun waits for an answer that never comes
                self.process.kill()
                self.process.wait()

    def words(self) -> str:
        """The end of srun's log, its errors where there are any."""
        with contextlib.suppress(OSError):
            lines = self.log.read_bytes()[-WORDS_BYTES:].decode(errors="replace").strip().splitlines()
            said = [line for line in lines if "error" in line] or lines[-1:]
            return "; ".join(line.removeprefix("srun: error: ") for line in said[-3:])
        return ""


def node_of_task(component: str, index: int) -> str:
    """The node on which srun starts task `index` of this job's component, one task a node; empty where Slurm does not
    say.
    """
    listed = os.environ.get(f"SLURM_JOB_NODELIST_HET_GROUP_{component}") or os.environ.get("SLURM_JOB_NODELIST", "")
    done = ask(["scontrol", "show", "hostnames", listed])
    nodes = done.stdout.split() if done is not None and done.returncode == 0 else []
    return nodes[index] if index < len(nodes) else ""


KILL_WAIT_S = 10.0
"""How long srun may take to kill its tasks before srun itself is killed."""


class StepTrainers:
    """All trainer ranks in one srun; a lost rank ends the step."""

    def __init__(self, run: RunDir, recipe: Recipe, python: list[str], deadline: float | None) -> None:
        """python: `srun … python`, all words before the module; deadline: Unix time at which the allocation ends, or
        None.
        """
        self._run, self._recipe, self._python, self._deadline = run, recipe, python, deadline
        self._step = Step(run, "srun-trainer")
        self._attempt = next_attempt(run, "trainer-0")
        self._heartbeats_read = float("-inf")
        self._heartbeat_monitor = HeartbeatMonitor()

    @property
    def started(self) -> bool:
        return self._step.process is not None

    @property
    def attempt(self) -> int:
        return self._attempt

    def start(self, incarnation: Path) -> None:
        command = [
            "-P", "-m", "relax_hpc.roles", "trainer", str(self._run.root), "--name", "trainer", "--attempt", str(self._attempt),
            "--incarnation", str(incarnation), "--world", str(self._recipe.trainer.processes), "--slurm-task",
        ]  # fmt: skip
        if self._deadline is not None:
            command += ["--deadline", str(self._deadline)]
        self._heartbeat_monitor = HeartbeatMonitor()
        number = f"{self._attempt:04d}"
        self._step.start(self._python, command, f"trainer-%t.{number}.log", f"srun-trainer.{number}.log")

    def ending(self) -> Ending | None:
        if self._step.running or self._step.process is None:
            return None
        code = self._step.process.poll()
        said = {rank: heartbeat for rank, heartbeat in self._heartbeats().items() if heartbeat is not None}
        for rank, heartbeat in said.items():
            if heartbeat.get("state") == "failed":
                return Ending("failed", f"{_where(rank, heartbeat, heartbeat['host'])}: {heartbeat.get('error', '')}")
        if code == Exit.FATAL:  # it gave no reason: the disk with its heartbeat may be full
            return Ending("failed", f"see {self._run.logs / f'trainer-0.{self._attempt:04d}.log'}")
        # srun's code is the highest of all tasks, and 0 where Slurm killed them for a lost node: rank 0's last heartbeat counts.
        if said.get(0, {}).get("state") == "done":
            return Ending("done")
        if code == Exit.STOPPED or said.get(0, {}).get("state") == "stopped":
            return Ending("stopped")
        for rank, heartbeat in said.items():
            if heartbeat.get("state") == "crashed":
                return Ending(
                    None,
                    f"{_where(rank, heartbeat, heartbeat['host'])}: {heartbeat.get('error', '')}",
                    heartbeat["host"],
                )
        words = self._step.words() or f"srun ended with exit code {code}"
        blamed = _BLAMED.search(words)
        return Ending(None, words, blamed["host"] if blamed else "")

    def ask_to_stop(self) -> None:
        self._step.ask_to_stop()

    def silent(self) -> Ending | None:
        if not self._step.running or time.monotonic() - self._heartbeats_read < RANKS_EVERY_S:
            return None
        self._heartbeats_read = time.monotonic()
        heartbeats, limits = self._heartbeats(), self._recipe.supervision
        for rank, silent_s in self._heartbeat_monitor.look(
            {rank: heartbeat["time"] if heartbeat else None for rank, heartbeat in heartbeats.items()}
        ).items():
            heartbeat = heartbeats[rank]
            if silent_s > silence_limit(heartbeat, limits):
                trainer = self._recipe.trainer
                host = (
                    heartbeat["host"]
                    if heartbeat
                    else node_of_task(TRAINER_COMPONENT, rank * trainer.nodes // trainer.processes)
                )
                return Ending(None, f"{_where(rank, heartbeat, host)}: no heartbeat for {silent_s:.0f} s", host)
        return None

    def end(self, grace_s: float) -> None:
        self._step.end(grace_s)
        if self._step.process is not None:
            self._step.process = None
            self._attempt += 1

    def final_message(self) -> str:
        return self._step.words()

    def _heartbeats(self) -> dict[int, dict[str, Any] | None]:
        """Rank -> heartbeat of this attempt."""
        heartbeats: dict[int, dict[str, Any] | None] = {}
        for rank in range(self._recipe.trainer.processes):
            heartbeat = read_heartbeat(self._run, f"trainer-{rank}")
            heartbeats[rank] = heartbeat if heartbeat is not None and heartbeat["attempt"] == self._attempt else None
        return heartbeats


def _where(rank: int, heartbeat: dict[str, Any] | None, host: str) -> str:
    return f"trainer rank {rank}{f' on {host}' if host else ''}{'' if heartbeat else ', which has not begun'}"
