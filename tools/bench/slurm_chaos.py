"""Faults on a real Slurm cluster, with nobody touching the run: what is lost, and how long until it goes on.

    faults   one run of the split shape at max_staleness 0, checkpoint every 10 steps, `--faults` of them: preemption by a
             higher partition, supervisor, trainer, worker or node agent killed -9, the rollout job cancelled, the leader's node
             lost (slurmd and all its processes), a rollout node cut off while its processes go on. Against a run without
             faults: the final weights must have the same bits.
    requeue  the same with preemptions alone and restart = "requeue"
    stall    two rollout nodes, one is lost again and again: the trainer's longest wait
    array    three seeds as a job array, restart = "requeue": each is hurt in turn, and nothing may happen to the others; then one is
             cancelled, and the others go on. Against a run of each seed without faults: the same bits.
    ettr     steps paced to `--pace` seconds, a preemption or kill every k steps: paced time of all steps over wall time

restart_s is from the end of the last step before a fault to the end of the first step beyond it, so it holds the abandoned
step, the notice, Slurm's part, the start of Python and torch, and the replay; replay_s says the last apart. `chain` counts
faults that ended the leader's job with its node there (preemption, supervisor killed); the loss of its node waits for
Slurm's or the lease's time-out besides (node_lost), and a killed trainer rank is started again in place (in_place).
A fault hits when the run has made `--gap` steps since it recovered from the one before.
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from relax_hpc.files.publish import read_json
from relax_hpc.files.run_dir import RunDir
from relax_hpc.monitor.analysis.audit import audit
from relax_hpc.slurm.submission.sbatch import jobs, read_leaders
from relax_hpc.telemetry import read_heartbeat, read_metrics
from tests.slurm.cluster import SlurmCluster
from tools.bench import common
from tools.bench.bits import final_weights, gradient_fraction
from tools.bench.chaos import RECIPE, request_seconds, waits

SLURM = """
[slurm]
time = "08:00:00"
signal_lead_s = 30
max_jobs = 10000
[slurm.trainer]
partition = "low"
exclude = "r1,r2"
[slurm.rollout]
partition = "rollout"
"""
SETS = ("run.checkpoint_every=10", "supervision.node_agent_silent_s=4.0", "supervision.leader_silent_s=6.0")
PREEMPT = "#SBATCH --partition=high --time=1 --nodes=1 --exclusive --nodelist={}\nsleep 1"
"""Over the whole node of the trainer; on which, but in ettr, there are no rollout workers: they go on."""
RECOVERY_S = 180.0
SEEDS = 3
ARRAY_PACE_S = 0.5
"""Least seconds of a step."""
ARRAY_FAULTS = ("warned", "preempted", "trainer killed", "worker killed")
SINGLE = """
[slurm]
shape = "single"
partition = "low"
restart = "requeue"
time = "08:00:00"
signal_lead_s = 30
options = {exclusive = true}  # else a preemption hits those beside it too
"""
CHAIN = ("preempted", "supervisor killed")


@dataclass
class Target:
    """A run on the cluster, and the ways to hurt it."""

    cluster: SlurmCluster
    run: RunDir
    struck: list[tuple[str, float]] = field(default_factory=list)
    """What was done to it, and when."""

    def step(self) -> int:
        return int((read_heartbeat(self.run, "trainer-0") or {}).get("step", 0)) if self.run.exists else 0

    def stop(self) -> int:
        """End it in order; the steps it made."""
        self.cluster.exec(sys.executable, "-m", "relax_hpc", "stop", str(self.run.root))
        self.until(lambda: (read_json(self.run.outcome) or {}).get("outcome") == "stopped")
        return self.run.checkpoint_steps()[-1]

    def active_node_agents(self) -> list[str]:
        heartbeats = [read_json(path) for path in self.run.heartbeats.glob("node-agent-*.json")]
        return [
            heartbeat["host"]
            for heartbeat in heartbeats
            if heartbeat["state"] == "active" and time.time() - heartbeat["time"] < 3
        ]

    def until(self, reached: Callable[[], bool]) -> None:
        """Raises SystemExit when it does not come: a person would have to do something."""
        deadline = time.monotonic() + RECOVERY_S
        while not reached():
            if time.monotonic() > deadline:
                queue = self.cluster.exec("squeue").stdout
                raise SystemExit(
                    f"no progress in {RECOVERY_S:.0f} s at step {self.step()} after {self.struck[-2:]}: see {self.run.root}\n{queue}"
                )
            time.sleep(0.05)

    def strike(self, fault: str) -> None:
        """Raises AssertionError when what it wants to hit is not there at this moment."""
        began = time.time()
        heal = getattr(self, fault.replace(" ", "_"))()
        self.struck.append((fault, began))
        if heal is not None:
            node, act = heal
            self.cluster.wait_for_node(node, "down", "down*", timeout=60)
            act(node)
            self.cluster.wait_for_node(node, "idle", "mix", "alloc", timeout=60)

    def job(self, kind: str) -> str:
        found = [job["id"] for job in jobs(self.run) if job["kind"] == kind]
        running = [job for job in reversed(found) if self.cluster.state(job) == "RUNNING"]
        assert running, f"no {kind} job runs"
        return str(running[0])

    def node(self, kind: str) -> str:
        return self.cluster.fields(self.job(kind))["BatchHost"]

    def kill(self, role: str) -> None:
        heartbeat = read_heartbeat(self.run, role)
        assert heartbeat is not None
        done = self.cluster.exec("kill", "-9", str(heartbeat["pid"]), node=heartbeat["host"], check=False)
        assert done.returncode == 0, done.stderr

    def preempted(self) -> None:
        leader = self.job("leader")
        self.cluster.sbatch(PREEMPT.format(self.node("leader")))
        self.until(lambda: self.cluster.state(leader) != "RUNNING")

    def warned(self) -> None:
        self.cluster.exec("scancel", "--batch", "--signal=USR2", self.job("leader"))

    def supervisor_killed(self) -> None:
        self.cluster.exec("scancel", "--signal=KILL", "--batch", self.job("leader"))

    def trainer_killed(self) -> None:
        self.kill("trainer-0")

    def worker_killed(self) -> None:
        self.kill("rollout-0")

    def node_agent_killed(self) -> None:
        rollout = self.job("rollout")
        heartbeats = {path.stem: read_json(path) for path in self.run.heartbeats.glob("node-agent-*.json")}
        self.kill(
            max((heartbeat["time"], name) for name, heartbeat in heartbeats.items() if heartbeat["job"] == rollout)[1]
        )

    def rollout_job_cancelled(self) -> None:
        self.cluster.cancel(self.job("rollout"))

    def leaders_node_lost(self) -> tuple[str, Callable[[str], None]]:
        node = self.node("leader")
        self.cluster.node_kill(node)
        return node, self.cluster.node_start

    def rollout_node_cut_off(self) -> tuple[str, Callable[[str], None]]:
        node = self.node("rollout")
        self.cluster.link_down(node)
        return node, self.cluster.link_up


FAULTS = {
    "preempted": 4, "supervisor killed": 4, "trainer killed": 4, "worker killed": 3, "node agent killed": 2,
    "rollout job cancelled": 3, "leaders node lost": 1, "rollout node cut off": 1,
}  # fmt: skip
"""Fault -> how often, against the others."""


def submit(cluster: SlurmCluster, name: str, *sets: str) -> Target:
    recipe, root = _recipe(cluster, name, SLURM), cluster.shared / "runs"
    values = (f"run.root={root}", f"run.name={name}", *SETS, *sets)
    options = [word for value in values for word in ("--set", value)]
    cluster.exec(sys.executable, "-m", "relax_hpc", "submit", str(recipe), "--local-root-ok", *options, timeout=120)
    return Target(cluster, RunDir(root / name))


def _recipe(cluster: SlurmCluster, name: str, slurm: str) -> Path:
    path = cluster.shared / f"{name}.toml"
    path.write_text(RECIPE.read_text().replace('"./', f'"{RECIPE.parent}/') + slurm)
    return path


def submit_array(cluster: SlurmCluster, name: str, *sets: str) -> list[Target]:
    """Send SEEDS runs as the job array that `relax-hpc render` writes."""
    recipe, root = _recipe(cluster, name, SINGLE), cluster.shared / "runs"
    values = (f"run.root={root}", f"run.name={name}", *SETS, *sets)
    options = [word for value in values for word in ("--set", value)]
    words = ("render", str(recipe), *options, "--seeds", str(SEEDS), "-o", str(cluster.shared))
    cluster.exec(sys.executable, "-m", "relax_hpc", *words)
    cluster.exec("sbatch", f"--output={cluster.shared}/%x-%A_%a.out", f"{cluster.shared}/{name}-seeds.sbatch")
    return [Target(cluster, RunDir(root / f"{name}-{seed}")) for seed in range(SEEDS)]


def hurt(target: Target, faults: Sequence[str], gap: int, done: Callable[[], None] = lambda: None) -> int:
    """Strike it, each time when it has recovered from the fault before, then stop it; the steps it made."""
    target.until(lambda: target.step() >= 12)
    for fault in faults:
        reached = newest(target.run)
        target.until(lambda: newest(target.run) >= reached + gap)  # noqa: B023
        target.until(lambda: struck(target, fault))  # noqa: B023
        done()
    reached = newest(target.run)
    target.until(lambda: newest(target.run) >= reached + gap)
    return target.stop()


def struck(target: Target, fault: str) -> bool:
    """Strike; False where what it wants to hit is not there at this moment."""
    try:
        target.strike(fault)
    except AssertionError:
        return False
    return True


def steps_of(run: RunDir) -> list[dict[str, Any]]:
    return [r for r in read_metrics(run.metrics / "trainer-0.jsonl")[0] if r["kind"] == "step"]


def newest(run: RunDir) -> int:
    """Steps made, replays not counted."""
    return max((s["step"] + 1 for s in steps_of(run)), default=0)


@dataclass(frozen=True, slots=True)
class Restart:
    """From the end of the last step of one trainer to the end of the first step of the next that goes beyond it."""

    fault: str
    seconds: float
    replay_s: float


def restarts(target: Target) -> list[Restart]:
    """One for each time that a new trainer took over, with the fault that was struck last before."""
    found, records = [], steps_of(target.run)
    for before, after in zip(records[:-1], records[1:], strict=True):
        if before["incarnation"] == after["incarnation"]:
            continue
        reached = max(s["step"] for s in records if s["time"] <= before["time"])
        beyond = next((s for s in records if s["time"] > before["time"] and s["step"] > reached), None)
        faults = [name for name, when in target.struck if when <= after["time"]]
        if beyond is None or not faults:
            continue
        replayed = [s for s in records if before["time"] < s["time"] < beyond["time"]]
        replay_s = sum(s["step_s"] for s in replayed[1:]) + (replayed[0]["train_s"] if replayed else 0.0)
        found.append(Restart(faults[-1], beyond["time"] - before["time"], replay_s))
    return found


def percentiles(values: Sequence[float], prefix: str) -> dict[str, float]:
    return {f"{prefix}_p{q}": round(float(np.percentile(values, q)), 2) for q in (50, 95)} if values else {}


def schedule(count: int, kinds: Sequence[str], seed: int) -> list[str]:
    """`count` faults of these kinds, each at least once where there are enough."""
    chosen = random.Random(seed)
    every = kinds[:count]
    faults = [*every, *chosen.choices(kinds, [FAULTS[kind] for kind in kinds], k=count - len(every))]
    chosen.shuffle(faults)
    return faults


def calm(cluster: SlurmCluster, steps: int, *sets: str, seed: int = 0) -> RunDir:
    """The same run on this machine, without Slurm and without faults."""
    root, name = cluster.shared / "calm", f"calm-{seed}-{steps}"
    values = (f"run.root={root}", f"run.name={name}", f"run.seed={seed}", f"run.steps={steps}", *sets)
    options = [word for value in values for word in ("--set", value)]
    command = [sys.executable, "-m", "relax_hpc", "run", str(RECIPE), *options]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=common.our_environment())
    return RunDir(root / name)


def part_faults(cluster: SlurmCluster, given: argparse.Namespace, done: Callable[[], None]) -> dict[str, Any]:
    sets = ("async.max_staleness=0", "run.steps=1000000", *given.set)
    target = submit(cluster, "faults", *sets)
    steps = hurt(target, schedule(given.faults, given.kinds, given.seed), given.gap, done)
    found, bits = audit(target.run.root), final_weights(target.run, steps)
    seen = restarts(target)
    by_kind = {
        "chain": [r for r in seen if r.fault in CHAIN],
        "in_place": [r for r in seen if r.fault == "trainer killed"],
        "node_lost": [r for r in seen if r.fault == "leaders node lost"],
    }
    for name, some in by_kind.items():
        for r in some:
            common.console.print(f"{name}: {r.fault}: {r.seconds:.1f} s, of which replay {r.replay_s:.1f} s")
    return {
        "faults": len(target.struck), "manual": 0, "lost": len(found.lost), "twice": len(found.twice), "torn": len(found.torn),
        "over_bound": len(found.over_bound), "steps": steps,
        "bit_identical": final_weights(calm(cluster, steps, "async.max_staleness=0", *given.set), steps) == bits,
        "gradient_fraction": gradient_fraction(target.run),
        "restart_s": {k: v for name, some in by_kind.items() for k, v in percentiles([r.seconds for r in some], name).items()},
        "replay_s": percentiles([r.replay_s for r in by_kind["chain"]], "chain"),
    }  # fmt: skip


def part_requeue(cluster: SlurmCluster, given: argparse.Namespace, done: Callable[[], None]) -> dict[str, Any]:
    target = submit(cluster, "requeue", "run.steps=1000000", 'slurm.restart="requeue"', *given.set)
    hurt(target, ["preempted"] * given.requeues, given.gap, done)
    return {"restart_s": percentiles([r.seconds for r in restarts(target)], "requeue")}


def part_array(cluster: SlurmCluster, given: argparse.Namespace, done: Callable[[], None]) -> dict[str, Any]:
    paced = f"algorithm={_paced_algorithm(ARRAY_PACE_S)}"  # else those that are not hurt make steps that take minutes to compare with
    seeds = submit_array(cluster, "array", "run.steps=1000000", "async.max_staleness=0", paced, *given.set)
    for seed in seeds:
        seed.until(lambda: newest(seed.run) >= given.gap)  # noqa: B023
    touched = 0
    for i in range(given.array_faults):
        hit, others = seeds[i % SEEDS], [seed for seed in seeds if seed is not seeds[i % SEEDS]]
        touched += _apart(hit, others, ARRAY_FAULTS[i % len(ARRAY_FAULTS)], given.gap)
        done()
    cancelled, *others = seeds
    job, before = cancelled.job("leader"), list(map(_lives, others))
    cluster.cancel(job)
    cluster.wait_for_state(job, "CANCELLED")
    for seed in others:
        reached = newest(seed.run)
        seed.until(lambda: newest(seed.run) >= reached + given.gap)  # noqa: B023
    touched += sum(_lives(seed) != was for seed, was in zip(others, before, strict=True))
    stays = cluster.state(job) == "CANCELLED"
    steps = [cancelled.run.checkpoint_steps()[-1], *(seed.stop() for seed in others)]
    audits = [audit(seed.run.root) for seed in seeds]
    with common.doing("the same runs without faults"), ThreadPoolExecutor(SEEDS) as several:
        make = lambda seed, step: calm(cluster, step, "async.max_staleness=0", *given.set, seed=seed)
        alone = list(several.map(make, range(SEEDS), steps))
    same = [
        final_weights(seed.run, step) == final_weights(run, step)
        for seed, step, run in zip(seeds, steps, alone, strict=True)
    ]
    return {
        "array": {
            "seeds": SEEDS, "faults": given.array_faults, "others_touched": touched, "cancelled_stays": stays, "steps": steps,
            "lost": sum(len(a.lost) for a in audits), "twice": sum(len(a.twice) for a in audits), "bit_identical": all(same),
            "gradient_fraction": min(gradient_fraction(seed.run) for seed in seeds),
        }
    }  # fmt: skip


def _apart(hit: Target, others: Sequence[Target], fault: str, gap: int) -> int:
    """Hurt one seed and wait until it is beyond where it was; how many others lost a process or a job meanwhile."""
    before = list(map(_lives, others))
    hit.until(lambda: struck(hit, fault))
    reached = newest(hit.run)
    hit.until(lambda: newest(hit.run) >= reached + gap)
    return sum(_lives(seed) != was for seed, was in zip(others, before, strict=True))


def _lives(seed: Target) -> tuple[int, int, int]:
    """How often a seed's job and its processes were started."""
    events = [e["kind"] for e in read_metrics(seed.run.metrics / "supervisor.jsonl")[0]]
    return len(read_leaders(seed.run)), events.count("restart"), events.count("lost")


def part_stall(cluster: SlurmCluster, given: argparse.Namespace, done: Callable[[], None]) -> dict[str, Any]:
    target = submit(cluster, "stall", "run.steps=1000000", "async.max_staleness=2", *given.set)
    cluster.exec(sys.executable, "-m", "relax_hpc", "scale", str(target.run.root), "rollout=2", "--partition", "low")
    for _ in range(given.stalls):
        target.until(lambda: len(target.active_node_agents()) == 2)
        reached = newest(target.run)
        target.until(lambda: newest(target.run) >= reached + 20)  # noqa: B023
        target.until(lambda: struck(target, "rollout job cancelled"))
        done()
    target.until(lambda: len(target.active_node_agents()) == 2)
    target.stop()
    return {"trainer_stall_s": round(max(waits(target.run)), 3), "request_s": round(request_seconds(target.run), 3)}


def part_ettr(cluster: SlurmCluster, given: argparse.Namespace, done: Callable[[], None]) -> dict[str, Any]:
    """Both rates at once, on nodes of their own: a paced run sleeps most of the time."""
    algorithm = _paced_algorithm(given.pace)
    found: dict[str, Any] = {}
    with ThreadPoolExecutor(len(given.every)) as several:
        runs = {k: several.submit(_paced, cluster, i, k, given, algorithm, done) for i, k in enumerate(given.every)}
        for k, future in runs.items():
            found[f"every_{k}_steps"] = future.result()
    return {"ettr": found}


def _paced_algorithm(seconds: float) -> str:
    """The recipe's algorithm, with a rest before each step: the same bits."""
    return f'{{name="own", factory="{common.SIDES / "paced.py"}:paced", options={{seconds={float(seconds)}}}, group_size=4}}'


def _paced(
    cluster: SlurmCluster, number: int, every: int, given: argparse.Namespace, algorithm: str, done: Callable[[], None]
) -> dict[str, Any]:
    others = "t1,r1" if number else "t2,r2"  # else a preemption would hit both
    target = submit(
        cluster, f"ettr-{every}", "run.steps=1000000", f"algorithm={algorithm}", "run.checkpoint_every=2",
        "trainer.prompts_per_step=8", "supervision.hang_s=60.0",
        f"slurm.trainer.exclude={others}", f"slurm.rollout.exclude={others}",
    )  # fmt: skip
    target.until(lambda: newest(target.run) >= 1)
    began, first = steps_of(target.run)[0]["time"], steps_of(target.run)[0]["step"]
    for fault in range(given.ettr_faults[given.every.index(every)]):
        strike_at = began + (fault + 0.5) * every * given.pace
        time.sleep(max(strike_at - time.time(), 0))
        target.until(lambda: struck(target, CHAIN[fault % 2]))  # noqa: B023
        done()
    while time.time() < began + given.ettr_faults[given.every.index(every)] * every * given.pace:
        time.sleep(1)
    target.until(lambda: target.step() > 0)
    records = steps_of(target.run)
    made, wall = newest(target.run) - 1 - first, max(s["time"] for s in records) - began
    target.stop()
    return {
        "ettr": round(made * given.pace / wall, 3), "faults": len(target.struck), "mtbf_s": every * given.pace,
        "restart_s": round(statistics.median(r.seconds for r in restarts(target)), 1), "checkpoint_every": 2, "wall_s": round(wall),
    }  # fmt: skip


PARTS = {"faults": part_faults, "requeue": part_requeue, "stall": part_stall, "array": part_array, "ettr": part_ettr}


def main() -> None:
    arguments = common.parser(__doc__)
    arguments.add_argument("--parts", nargs="+", choices=PARTS, default=["faults", "requeue", "stall"])
    arguments.add_argument("--faults", type=int, default=16)
    arguments.add_argument("--kinds", nargs="+", choices=FAULTS, default=list(FAULTS), help="faults: only these")
    arguments.add_argument("--requeues", type=int, default=2)
    arguments.add_argument("--stalls", type=int, default=2)
    arguments.add_argument("--array-faults", type=int, default=6)
    arguments.add_argument("--gap", type=int, default=12, help="steps from a recovery to the next fault")
    arguments.add_argument("--pace", type=float, default=10.0, help="ettr: seconds a step")
    arguments.add_argument("--every", type=int, nargs=2, default=[10, 100], help="ettr: steps between two faults")
    arguments.add_argument("--ettr-faults", type=int, nargs=2, default=[10, 2], help="ettr: faults for each --every")
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="of the recipe, for all parts"
    )
    given = common.parse(arguments)
    folder = common.disk_directory("slurm") / time.strftime("%H%M%S")
    folder.mkdir()
    cluster = SlurmCluster(folder / "c")
    total = {
        "faults": given.faults,
        "requeue": given.requeues,
        "stall": given.stalls,
        "array": given.array_faults,
        "ettr": sum(given.ettr_faults),
    }
    result: dict[str, Any] = {}
    try:
        cluster.up()
        with common.progress("faults", sum(total[part] for part in given.parts)) as done:
            for name in given.parts:
                for key, value in PARTS[name](cluster, given, done).items():
                    result[key] = result.get(key, {}) | value if isinstance(value, dict) else value
                cluster.cancel_all()
    finally:
        cluster.down()
    common.finish(result, given.json)


if __name__ == "__main__":
    main()
