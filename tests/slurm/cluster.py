"""A Slurm cluster for tests: tools/slurm-cluster as a user has it, and the few questions that tests ask of Slurm."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.runs import wait_for

TOOL = Path(__file__).resolve().parents[2] / "tools" / "slurm-cluster"
COMMAND_TIMEOUT_S = 300.0


class SlurmCluster:
    """Nodes t1, t2 (partition `trainer`) and r1, r2 (`rollout`); `low` and `high` span all of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder  # short: Slurm's sockets lie in it
        self.shared = folder.with_name(folder.name + "-shared")  # jobs of all nodes and the test see it alike
        self.shared.mkdir()

    def tool(self, action: str, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """tools/slurm-cluster ACTION DIR ARGUMENTS."""
        return self._run([action, str(self.folder), *arguments], check=check)

    def up(self, *options: str) -> None:
        self.tool("up", *options)

    def down(self, *options: str) -> None:
        self.tool("down", *options)

    def exec(
        self,
        *command: str,
        node: str | None = None,
        stdin: str = "",
        check: bool = True,
        timeout: float = COMMAND_TIMEOUT_S,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the controller, or on a node outside of any job; it must succeed unless `check` is False."""
        where = [f"--node={node}"] if node else []
        return self._run(["exec", str(self.folder), *where, "--", *command], stdin, check, timeout)

    def sbatch(self, script: str, *options: str) -> str:
        """Submit the lines of a batch script (without #!); the job's id. Its output goes to shared/ID.out."""
        output = f"--output={self.shared}/%j.out"
        chdir = f"--chdir={self.shared}"
        command = ["sbatch", "--parsable", output, chdir, *options]
        return self.exec(*command, stdin=f"#!/bin/bash\n{script}\n").stdout.strip()

    def output(self, job: str) -> str:
        path = self.shared / f"{job}.out"
        return path.read_text() if path.exists() else ""

    def fields(self, job: str) -> dict[str, str]:
        """What `scontrol show job` says; of a het job, its leader."""
        line = self.exec("scontrol", "--oneliner", "show", "job", job).stdout.splitlines()[0]
        return dict(item.split("=", 1) for item in line.split() if "=" in item)

    def state(self, job: str) -> str:
        """RUNNING, PENDING, COMPLETED, NODE_FAIL, … also for an hour after the job's end."""
        return self.fields(job)["JobState"]

    def wait_for_state(self, job: str, *states: str, timeout: float = 120) -> str:
        """The first of these states that is seen."""
        return self._wait(f"job {job}", lambda: self.state(job), states, timeout)

    def cancel(self, *jobs: str) -> None:
        self.exec("scancel", *jobs)

    def cancel_all(self) -> None:
        """End all jobs and wait until the nodes are free."""
        if not self.exec("squeue", "--noheader").stdout:
            return
        self.exec("scancel", "--state=PENDING", "--me")
        self.exec("scancel", "--state=RUNNING", "--me")
        wait_for(lambda: not self.exec("squeue", "--noheader").stdout)

    def node_state(self, node: str) -> str:
        """As sinfo says it in short: idle, mix, alloc, down*, …"""
        return self.exec("sinfo", "--noheader", f"--nodes={node}", "--format=%t").stdout.split()[0]

    def wait_for_node(self, node: str, *states: str, timeout: float = 120) -> str:
        return self._wait(node, lambda: self.node_state(node), states, timeout)

    def node_kill(self, node: str) -> None:
        self.tool("node-kill", node)

    def node_start(self, node: str) -> None:
        self.tool("node-start", node)

    def link_down(self, node: str) -> None:
        self.tool("link-down", node)

    def link_up(self, node: str) -> None:
        self.tool("link-up", node)

    def logs(self) -> str:
        """The last lines of the controller's log, for a test that fails."""
        path = self.folder / "log" / "slurmctld.log"
        return "\n".join(path.read_text().splitlines()[-30:]) if path.exists() else "no log"

    def _wait(self, what: str, look: Callable[[], str], states: tuple[str, ...], timeout: float) -> str:
        try:
            return str(wait_for(lambda: (state := look()) in states and state, timeout))
        except AssertionError as error:
            raise AssertionError(f"{what} is {look()}, not {states}: {error}\n{self.logs()}") from None

    def _run(
        self, arguments: list[str], stdin: str = "", check: bool = True, timeout: float = COMMAND_TIMEOUT_S
    ) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(TOOL), *arguments]
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=timeout, check=False)
        assert not check or done.returncode == 0, f"{arguments}: exit {done.returncode}\n{done.stdout}{done.stderr}"
        return done
