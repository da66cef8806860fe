"""Runs on the cluster of a test: submitted as a user does it, watched through their directory."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from relax_hpc.files.publish import read_json
from relax_hpc.files.run_dir import RunDir
from relax_hpc.slurm.submission.sbatch import jobs
from relax_hpc.telemetry import read_heartbeat, read_metrics
from tests.runs import SMALL, audited, outcome, pid_of, step_now, steps_of, wait_for
from tests.slurm.cluster import SlurmCluster
from tools.bench.common import SIDES

SLURM = """
[slurm]
time = "00:10:00"
signal_lead_s = 20
"""
GROUPS = """
[slurm.trainer]
partition = "trainer"
[slurm.rollout]
partition = "rollout"
"""
STEPS = 80
LONG = (f"run.steps={STEPS}", "run.checkpoint_every=10", "async.max_staleness=0")
SLEEP = "#SBATCH --partition=high --time=1 --nodes=1 --exclusive --nodelist={}\nsleep {}"
QUICK = ("supervision.node_agent_silent_s=4.0", "supervision.leader_silent_s=8.0", "slurm.ask_every_s=4.0")
"""Set by all tests: nodes are lost often here."""
SLOWLY = f'algorithm={{name="own", factory="{SIDES / "paced.py"}:paced", options={{seconds=0.4}}, group_size=4}}'
"""The same algorithm, with a rest before each step."""


@dataclass(slots=True)
class ClusterRun:
    """A run of SMALL on the cluster."""

    cluster: SlurmCluster
    run: RunDir

    def relax_hpc(self, *arguments: str | Path, code: int = 0) -> str:
        """A command on the login node; what it printed."""
        command = [
            "env",
            "COLUMNS=200",
            sys.executable,
            "-m",
            "relax_hpc",
            *map(str, arguments),
        ]  # tables as on a wide terminal
        done = self.cluster.exec(*command, check=False)
        assert done.returncode == code, f"{arguments}: exit {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def leaders(self) -> list[str]:
        """Ids of the jobs that lead, or will."""
        return [job["id"] for job in jobs(self.run) if job["kind"] == "leader"]

    def job_of(self, kind: str) -> str:
        """The newest running job of a kind."""
        found = [job["id"] for job in jobs(self.run) if job["kind"] == kind]
        return next(job for job in reversed(found) if self.cluster.state(job) == "RUNNING")

    def node_of(self, job: str) -> str:
        return self.cluster.fields(job)["BatchHost"]

    def wait_for_step(self, step: int, timeout: float = 180) -> None:
        wait_for(lambda: step_now(self.run) >= step, timeout, lambda: step_now(self.run))

    def wait_for_end(self, timeout: float = 240) -> dict[str, object]:
        """The outcome, when all of the run's jobs have left too."""
        try:
            wait_for(
                lambda: self.run.outcome.exists() and not self.cluster.exec("squeue", "--noheader").stdout,
                timeout,
                lambda: step_now(self.run),
            )
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.cluster.exec('squeue').stdout}\n{self.logs()}") from None
        return outcome(self.run)

    def active_agents(self) -> list[str]:
        """Nodes whose workers generate, as their node agents say."""
        heartbeats = [read_json(path) for path in self.run.heartbeats.glob("node-agent-*.json")]
        return [heartbeat["host"] for heartbeat in heartbeats if heartbeat["state"] == "active"]

    def kill(self, role: str) -> None:
        """kill -9 of a role's process, on whatever node it is."""
        heartbeat = read_heartbeat(self.run, role)
        assert heartbeat is not None and pid_of(self.run, role)
        self.cluster.exec("kill", "-9", str(heartbeat["pid"]), node=heartbeat["host"])

    def log_of(self, job: str) -> str:
        """What a job's own script printed."""
        return next((self.run.logs / "slurm").glob(f"*-{job}.out")).read_text()

    def logs(self) -> str:
        files = [*(self.run.logs / "slurm").glob("*"), *self.run.logs.glob("*.log")]
        return "\n".join(f"== {path.name}\n{path.read_text()[-1500:]}" for path in files)


def submit(
    cluster: SlurmCluster, name: str, *sets: str, slurm: str = SLURM + GROUPS, recipe: str = SMALL
) -> ClusterRun:
    """Send SMALL as a run of this name."""
    return sent(cluster, name, *sets, slurm=slurm, recipe=recipe)[0]


def sent(
    cluster: SlurmCluster, name: str, *sets: str, slurm: str = SLURM + GROUPS, recipe: str = SMALL, code: int = 0
) -> tuple[ClusterRun, str]:
    """The same, and what `relax-hpc submit` said, which ended with `code`."""
    path = cluster.shared / f"{name}.toml"
    path.write_text(recipe.format(root=cluster.shared / "runs").replace('name = "small"', f'name = "{name}"') + slurm)
    made = ClusterRun(cluster, RunDir(cluster.shared / "runs" / name))
    options = [word for one in (*QUICK, *sets) for word in ("--set", one)]
    return made, made.relax_hpc("submit", path, "--local-root-ok", *options, code=code)


def array(cluster: SlurmCluster, name: str, seeds: int, *sets: str) -> list[ClusterRun]:
    """Send a job array of runs of SMALL that differ in their seed, as `relax-hpc render --seeds` writes it."""
    path = cluster.shared / f"{name}.toml"
    path.write_text(SMALL.format(root=cluster.shared / "runs").replace('name = "small"', f'name = "{name}"') + SLURM)
    ours = [ClusterRun(cluster, RunDir(cluster.shared / "runs" / f"{name}-{i}")) for i in range(seeds)]
    options = [w for one in (*QUICK, 'slurm.shape="single"', "slurm.partition=low", *sets) for w in ("--set", one)]
    ours[0].relax_hpc("render", path, *options, "--seeds", str(seeds), "-o", cluster.shared)
    cluster.exec("sbatch", f"--chdir={cluster.shared}", f"{cluster.shared}/{name}-seeds.sbatch")
    return ours


def preempted(ours: ClusterRun) -> None:
    leader = ours.job_of("leader")
    ours.cluster.sbatch(SLEEP.format(ours.node_of(leader), 3))
    wait_for(lambda: ours.cluster.state(leader) != "RUNNING")


def sound(ours: ClusterRun, steps: int) -> None:
    """Every step made, no prompt lost, none trained twice, no token over the bound."""
    assert {s["step"] for s in steps_of(ours.run)} == set(range(steps))
    audited(ours.run)


def undisturbed(ours: ClusterRun) -> None:
    """Nobody was taken for silent or lost: no process was started twice, and no node is avoided."""
    files = [ours.run.metrics / "supervisor.jsonl", *ours.run.metrics.glob("node-agent-*.jsonl")]
    events = [event for path in files for event in read_metrics(path)[0] if event["kind"] in ("lost", "silent")]
    assert not events, f"{events}\n{ours.logs()}"
    assert len(list(ours.run.logs.glob("srun-node-agents.*.log"))) == 1
    assert not (ours.run.slurm / "excluded.json").exists()
