"""Kill -9 anything at any moment, and count what is lost, trained twice, torn or biased.

Three pairs of runs of one small recipe, each against an undisturbed run:

    max_staleness 0   half of the kills; the final weights must have the same bits
    max_staleness 1   the other half, with a policy that stands still (when a worker dies decides which versions answer, and
                      policies that learn drift apart); lengths of groups against the undisturbed run (Kolmogorov-Smirnov)
    spare worker      rollout workers alone are killed, one more than the trainer needs: how long it waits then

That the bits say something: every step has a gradient (gradient_fraction), and one bit of one token that is trained on ends
in other weights (control_differs).

A kill hits the supervisor, a trainer or a rollout worker: at a random moment, or as soon as a file that is being published
or a checkpoint that is being written is seen. A killed supervisor is followed by the same command again, as a person or a
scheduler would do. What was trained is counted from the samples that entered the loss (relax_hpc.monitor.analysis.audit).
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import psutil
from scipy.stats import ks_2samp

from relax_hpc.files.publish import read_json
from relax_hpc.files.run_dir import RunDir
from relax_hpc.monitor.analysis.audit import audit
from relax_hpc.supervise.lease import holder
from relax_hpc.telemetry import read_heartbeat, read_metrics
from tools.bench import common
from tools.bench.bits import final_weights, flip_a_bit, gradient_fraction

STEPS_A_KILL = 8
STEPS_A_SPARE_KILL = 150
"""Enough for a killed worker to be back before the next kill."""
MOMENTS = ("any", "publishing a shard", "checkpointing")
MOMENT_S = 1.0
"""How long a kill waits for its moment before it comes anyway."""
CONTROL_STEPS = 20
STILL = "trainer.learning_rate=1e-30"
"""Smaller than any weight's last bit: lengths of two runs are then of one policy."""
RECIPE = common.ROOT / "tools" / "bench" / "chaos.toml"


@dataclass
class Monkey:
    """Runs a recipe to its end and kills along the way."""

    run: RunDir
    arguments: list[str]
    roles: list[str]
    random: random.Random
    done: Callable[[], None] = lambda: None
    spare: bool = False
    """Kill only while all roles work: one worker is always left."""
    kills: list[str] = field(default_factory=list)
    process: subprocess.Popen[bytes] | None = None
    command: list[str] = field(default_factory=lambda: [sys.executable, "-m", "relax_hpc"])

    def drive(self, kills: int, steps: int) -> None:
        """Kill `kills` times, spread over `steps` steps, then let the run end. Raises SystemExit when it does not."""
        for k in range(kills):
            self._until(lambda due=k * steps // kills: self.step() >= due)  # type: ignore[misc]
            if self.spare:
                self._until(lambda: all(self._works(role) for role in self.roles))
            self.kill()
            self.done()
        self._until(self._over)
        if self.process is not None:
            self.process.wait(60)

    def drive_until(self, step: int) -> None:
        """Run until this step is made, and on."""
        self._until(lambda: self.step() >= step)

    def step(self) -> int:
        return int((read_heartbeat(self.run, "trainer-0") or {}).get("step", 0)) if self.run.exists else -1

    def _over(self) -> bool:
        return (read_json(self.run.outcome) or {}).get("outcome") == "done"

    def kill(self) -> None:
        """One kill -9."""
        role, moment = self.random.choice(self.roles), self.random.choice(MOMENTS)
        if moment == "any":
            time.sleep(self.random.uniform(0, 1.0))
        else:
            pattern = "shards/*/.*" if moment == "publishing a shard" else "lease/*/i*/checkpoint-*/*"
            deadline = time.monotonic() + MOMENT_S
            while time.monotonic() < deadline and not self._seen(pattern):
                self._alive()
        while (pid := self._pid(role)) is not None:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:  # it ended in between: the next one then
                continue
            self.kills.append(f"{role} while {moment}")
            return

    def _seen(self, pattern: str) -> bool:
        try:
            return next(self.run.root.glob(pattern), None) is not None
        except FileNotFoundError:  # a lease was taken over while its folder was listed
            return False

    def _works(self, role: str) -> bool:
        heartbeat = read_heartbeat(self.run, role) or {"state": "starting"}
        return heartbeat["state"] != "starting" and _is_alive(int(heartbeat["pid"]))

    def _pid(self, role: str) -> int | None:
        """The process of a role now; waits for one to be there."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not self._over():
            self._alive()
            about = holder(self.run) if role == "supervisor" else read_heartbeat(self.run, role)
            if about and _is_alive(int(about["pid"])):
                return int(about["pid"])
            time.sleep(0.02)
        return None

    def _until(self, reached: Callable[[], bool]) -> None:
        step, since = self.step(), time.monotonic()
        while not reached():
            self._alive()
            if (now := self.step()) != step:
                step, since = now, time.monotonic()
            if time.monotonic() > since + 300:
                raise SystemExit(
                    f"no progress in 300 s at step {self.step()} after {self.kills[-3:]}: see {self.run.root}"
                )
            time.sleep(0.02)

    def _alive(self) -> None:
        """Give the command again when its process is gone and the run is not done."""
        if self.process is not None and self.process.poll() is None:
            return
        if self._over():
            return
        if self.process is not None and self.process.returncode not in (0, -signal.SIGKILL):
            raise SystemExit(
                f"the run ended with {self.process.returncode}: {read_json(self.run.outcome)}; see {self.run.root}"
            )
        log = (self.run.root.parent / f"{self.run.root.name}.log").open("ab")
        command = [*self.command, "run", *self.arguments]
        self.process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=common.ROOT)


def monkey(
    folder: Path, name: str, steps: int, seed: int, roles: list[str], done: Callable[[], None], *sets: str
) -> Monkey:
    """A monkey for a run called `name` in `folder`."""
    values = [f"run.root={folder}", f"run.name={name}", f"run.steps={steps}", *sets]
    arguments = [str(RECIPE), *(word for value in values for word in ("--set", value))]
    return Monkey(RunDir(folder / name), arguments, roles, random.Random(seed), done)


def waits(run: RunDir) -> list[float]:
    """Seconds that the trainer waited for data, step by step, the first ones (loading) left out."""
    records, _ = read_metrics(run.metrics / "trainer-0.jsonl")
    return [r["wait_s"] for r in records if r["kind"] == "step" and r["step"] >= 5]


def request_seconds(run: RunDir) -> float:
    """How long a request takes, median."""
    records = [r for path in run.metrics.glob("rollout-?.jsonl") for r in read_metrics(path)[0]]
    return float(
        statistics.median(r["generate_s"] + r["score_s"] + r["publish_s"] for r in records if r["kind"] == "request")
    )


def control_differs(folder: Path, seed: int) -> bool:
    """Whether one bit of one token makes a difference to the weights at the end."""
    untouched, flipped = (
        monkey(folder, name, CONTROL_STEPS, seed, [], lambda: None, "async.max_staleness=0")
        for name in ("untouched", "flipped")
    )
    untouched.drive(0, CONTROL_STEPS)
    flipped.drive_until(CONTROL_STEPS // 2)
    flip_a_bit(flipped.run)
    flipped.drive(0, CONTROL_STEPS)
    return final_weights(untouched.run, CONTROL_STEPS) != final_weights(flipped.run, CONTROL_STEPS)


def measure(kills: int, spare_kills: int, seed: int) -> dict[str, Any]:
    folder = common.disk_directory("chaos") / time.strftime("%H%M%S")
    folder.mkdir()
    half = kills - kills // 2
    everyone = ["supervisor", "trainer-0", "rollout-0"]
    result: dict[str, Any] = {"kills": 0, "lost": 0, "twice": 0, "torn": 0}
    with common.progress("kills", kills + spare_kills) as done:
        pairs = {}
        for bound, count in ((0, half), (1, kills - half)):
            steps = max(count * STEPS_A_KILL, 20)
            for name, number in (("calm", 0), ("killed", count)):
                common.console.print(f"max_staleness {bound}: {steps} steps, {number} kills")
                sets = [f"async.max_staleness={bound}", *([STILL] if bound else [])]
                each = monkey(folder, f"{name}-{bound}", steps, seed, everyone, done, *sets)
                each.drive(number, steps)
                pairs[name, bound] = each
                found = audit(each.run.root)
                result["kills"] += len(each.kills)
                for key in ("lost", "twice", "torn"):
                    result[key] += len(getattr(found, key))
        steps = max(half * STEPS_A_KILL, 20)
        calm, killed = pairs["calm", 0].run, pairs["killed", 0].run
        result["bit_identical"] = final_weights(calm, steps) == final_weights(killed, steps)
        result["gradient_fraction"] = min(map(gradient_fraction, (calm, killed)))
        common.console.print(f"control: {CONTROL_STEPS} steps, and again with one bit of a token flipped")
        result["control_differs"] = control_differs(folder, seed)
        lengths = {name: audit(pairs[name, 1].run.root).mean_lengths for name in ("calm", "killed")}
        result["ks_p"] = float(ks_2samp(lengths["calm"], lengths["killed"]).pvalue)

        spare, steps = {}, 100 + spare_kills * STEPS_A_SPARE_KILL
        for name, number in (("calm", 0), ("killed", spare_kills)):
            common.console.print(f"a spare worker: {steps} steps, {number} kills")
            workers = ["rollout-0", "rollout-1"]
            spare[name] = monkey(
                folder, f"{name}-spare", steps, seed, workers, done, "rollout.workers=2", "async.max_staleness=2"
            )
            spare[name].spare = True
            spare[name].drive(number, steps)
        result["kills"] += len(spare["killed"].kills)
        result["trainer_wait_s"] = max(waits(spare["killed"].run)) - max(waits(spare["calm"].run))
        result["request_s"] = request_seconds(spare["calm"].run)
    return result


def _is_alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def main() -> None:
    arguments = common.parser(__doc__)
    arguments.add_argument("--kills", type=int, default=30, help="kills of any role (default: %(default)s)")
    arguments.add_argument(
        "--spare-kills", type=int, default=3, help="kills of a worker that is not needed (default: %(default)s)"
    )
    arguments.add_argument("--seed", type=int, default=0, help="of the kills")
    given = arguments.parse_args()
    common.finish(measure(given.kills, given.spare_kills, given.seed), given.json)


if __name__ == "__main__":
    main()
