"""Job steps: a process group as one srun, for the trainer ranks, the scorers and critic beside them, the node agents.

Step ──srun──► task 0 … n−1 on the nodes of this job; srun's own words are in logs/srun-NAME.ATTEMPT.log
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace

from relax_hpc.files.run_dir import RunDir
from relax_hpc.recipe.schema import Recipe
from relax_hpc.recipe.tables.run import Supervision
from relax_hpc.roles.common.process import Exit
from relax_hpc.slurm.client import ask
from relax_hpc.slurm.plan import SidecarName
from relax_hpc.slurm.srun import TRAINER_COMPONENT, step_environment, with_options
from relax_hpc.supervise.environment import role_environment, start_logged
from relax_hpc.supervise.processes import Ended, ProcessGroup, end
from relax_hpc.supervise.restarts import KeptGroup
from relax_hpc.supervise.rollout_workers import sidecar_names

WORDS_BYTES = 2000
KILL_WAIT_S = 10.0
"""How long srun may take to kill its tasks before srun itself is killed."""
_BLAMED = re.compile(r"(?:^|; )(?P<host>\S+): tasks? ")
"""Finds the host that srun blames, as in "t2: task 1: Killed"."""


class Step(ProcessGroup):
    """One srun. It passes USR2 on to its tasks; TERM makes it kill them (seen with 22.05)."""

    stop_signal = signal.SIGUSR2

    def __init__(
        self, run: RunDir, limits: Supervision, name: str, processes: Sequence[str], srun: list[str], output: str
    ) -> None:
        """srun: `srun … python`, all words before the module; output: srun's pattern for the log of each task."""
        super().__init__(run, limits, name, processes)
        self.id = uuid.uuid4().hex[:8]
        """Our own id for the step: Slurm numbers steps too, but tells srun's parent only in words."""
        self.srun, self._output = srun, output
        self.srun_log = run.logs / f"srun-{name}.log"

    def _srun(self) -> list[str]:
        return self.srun

    def _spawn(self, arguments: Sequence[str]) -> None:
        """Start `python -m ARGUMENTS` behind srun."""
        number, logs, srun = f"{self.attempt:04d}", self.run.logs, self._srun()
        self.srun_log = logs / f"srun-{self.name}.{number}.log"
        options = [f"--output={logs / f'{self._output}.{number}.log'}", "--open-mode=append", "--unbuffered"]
        command = [srun[0], *options, *srun[1:], "-P", "-m", *arguments]
        self.processes.append(start_logged(command, self.srun_log, step_environment(role_environment(self.run))))

    @property
    def code(self) -> int | None:
        """srun's exit code; None while it runs."""
        return self.processes[0].poll() if self.processes else None

    def _ending(self) -> Ended | None:
        if self.code is None:
            return None
        words = self.error() or f"srun ended with exit code {self.code}"
        blamed = _BLAMED.search(words)
        return Ended(None, words, blamed["host"] if blamed else "")

    def stop(self, grace_s: float) -> None:
        """Wait for the tasks to leave; kill those that have not within `grace_s`."""
        for process in self.processes:
            # Where its node is gone, srun waits for an answer that never comes.
            end(process, (None, grace_s), (signal.SIGTERM, KILL_WAIT_S))

    def error(self) -> str:
        """The end of srun's log, its errors where there are any."""
        with contextlib.suppress(OSError):
            lines = self.srun_log.read_bytes()[-WORDS_BYTES:].decode(errors="replace").strip().splitlines()
            said = [line for line in lines if "error" in line] or lines[-1:]
            return "; ".join(line.removeprefix("srun: error: ") for line in said[-3:])
        return ""


class RoleStep(Step):
    """A step whose tasks are processes of a role; their heartbeats say how it ended."""

    def __init__(
        self,
        run: RunDir,
        limits: Supervision,
        role: str,
        name: str,
        tasks: dict[str, int],
        srun: list[str],
        *arguments: str,
        pinned: bool = False,
    ) -> None:
        """tasks: process -> the index of its node among the trainer's; arguments: of relax_hpc.roles; pinned: all tasks
        are to run on the node of the first.
        """
        super().__init__(run, limits, name, list(tasks), srun, name if list(tasks) == [name] else f"{name}-%t")
        self._role, self._nodes, self._pinned, self._arguments = role, list(tasks.values()), pinned, arguments

    def _spawn(self, arguments: Sequence[str]) -> None:
        about = [self._role, str(self.run.root), "--name", self.name, "--attempt", str(self.attempt)]
        super()._spawn(["relax_hpc.roles", *about, *self._arguments, *arguments])

    def _srun(self) -> list[str]:
        host = node_of_task(TRAINER_COMPONENT, self._nodes[0]) if self._pinned else ""
        return with_options([f"--nodelist={host}"] if host else [], self.srun)

    def _ending(self) -> Ended | None:
        if self.code is None:
            return None
        words, states = super()._ending() or Ended(None), [beat.get("state") for beat in self.heartbeats()]
        if "failed" in states:
            return self._told(states.index("failed"), "failed")
        if self.code == Exit.FATAL:  # it gave no reason: the disk with its heartbeat may be full
            return Ended("failed", f"see {self.log()}")
        # srun's code is the highest of all tasks, and 0 where Slurm killed them for a lost node: rank 0's last heartbeat counts.
        if states[0] == "done":
            return replace(words, outcome="done")
        if self.code == Exit.STOPPED or states[0] == "stopped":
            return replace(words, outcome="stopped")
        return self._told(states.index("crashed"), None) if "crashed" in states else words

    def _told(self, rank: int, outcome: str | None) -> Ended:
        who, host = self._where(rank)
        return Ended(outcome, f"{who}: {self.heartbeats()[rank].get('error', '')}", host)

    def _where(self, rank: int) -> tuple[str, str]:
        beat = self.heartbeats()[rank]
        host = str(beat["host"]) if beat else node_of_task(TRAINER_COMPONENT, self._nodes[rank])
        who = self.names[rank].replace("trainer-", "trainer rank ")
        return f"{who}{f' on {host}' if host else ''}{'' if beat else ', which has not begun'}", host


def trainer_steps(run: RunDir, recipe: Recipe, python: list[str], deadline: float | None) -> RoleStep:
    """Make the step of all trainer ranks, which a lost rank ends.

    python: `srun … python`; deadline: Unix time at which the allocation ends, or None.
    """
    world, nodes = recipe.trainer.processes, recipe.trainer.nodes
    tasks = {f"trainer-{rank}": rank * nodes // world for rank in range(world)}
    arguments = [
        "--world",
        str(world),
        "--slurm-task",
        *(["--deadline", str(deadline)] if deadline is not None else []),
    ]
    return RoleStep(run, recipe.supervision, "trainer", "trainer", tasks, python, *arguments)


def sidecar_steps(
    run: RunDir, recipe: Recipe, role: SidecarName, python: list[str], say: Callable[..., None]
) -> list[KeptGroup]:
    """Make the steps of a role on the trainer's nodes, beside its own: one for each scorer, or one for them all; one for
    the critic.
    """
    names, nodes, limits = sidecar_names(run, recipe, role), recipe.trainer.nodes, recipe.supervision
    if role == "scorer" and not recipe.scores_together:
        steps = [
            RoleStep(run, limits, role, name, {name: rank % nodes}, python, "--rank", str(rank), pinned=True)
            for rank, name in enumerate(names)
        ]
    else:
        tasks = dict.fromkeys(names, nodes - 1 if role == "critic" else 0)
        world = ["--slurm-task", "--world", str(len(names))]
        steps = [RoleStep(run, limits, role, role, tasks, python, *world, pinned=True)] if names else []
    return [KeptGroup(step, say) for step in steps]


def node_of_task(component: str, index: int) -> str:
    """The node on which srun starts task `index` of this job's component, one task a node; empty where Slurm does not
    say.
    """
    listed = os.environ.get(f"SLURM_JOB_NODELIST_HET_GROUP_{component}") or os.environ.get("SLURM_JOB_NODELIST", "")
    done = ask(["scontrol", "show", "hostnames", listed])
    nodes = done.stdout.split() if done is not None and done.returncode == 0 else []
    return nodes[index] if index < len(nodes) else ""
