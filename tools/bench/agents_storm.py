"""Kill -9 anything of a run of agents: its roles, and the processes and sandboxes that its environments live in.

roles alone, max_staleness 0   against an undisturbed run: the same bits, so episodes that are restored are the same
environments' processes too    a sample whose environment dies in the midst of a call has failed; nothing is lost or trained twice
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from relax_hpc.files.run_dir import RunDir
from relax_hpc.monitor.analysis.audit import audit
from tools.bench.bits import final_weights, gradient_fraction
from tools.bench.chaos import Monkey
from tools.bench.common import disk_directory, progress

STEPS_A_KILL = 3
ROLES = ["supervisor", "trainer-0", "rollout-0"]
ENVIRONMENT = "environment"
SHORT = ("async.max_staleness=0", "sft_warm_start.steps=150", "evaluation.every=100000", 'source.0.sandbox="bwrap"')


@dataclass
class AgentMonkey(Monkey):
    """Kills below the rollout worker, too: a role ENVIRONMENT is any process that it has started."""

    def _pid(self, role: str) -> int | None:
        if role != ENVIRONMENT:
            return super()._pid(role)
        while (worker := super()._pid("rollout-0")) is not None:
            try:
                below = psutil.Process(worker).children(recursive=True)
            except psutil.NoSuchProcess:
                continue
            if below:
                return int(self.random.choice(below).pid)
        return None


def storm(recipe: Path, kills: int, seed: int) -> dict[str, Any]:
    """Run the recipe calm, with its roles killed, and with environments killed too, `kills` times each."""
    folder, steps = disk_directory("agents-storm") / f"{random.Random().randrange(10**6)}", kills * STEPS_A_KILL + 3
    folder.mkdir()
    plans = {"calm": (0, ROLES), "roles": (kills, ROLES), "all": (kills, [*ROLES, *[ENVIRONMENT] * len(ROLES)])}
    runs: dict[str, RunDir] = {}
    done: dict[str, int] = {"storm_kills": 0, "storm_lost": 0, "storm_twice": 0, "storm_torn": 0}
    with progress("storm: kills", 2 * kills) as advance:
        for name, (count, roles) in plans.items():
            sets = [f"run.root={folder}", f"run.name={name}", f"run.steps={steps}", f"run.seed={seed}", *SHORT]
            words = [str(recipe), *(word for value in sets for word in ("--set", value))]
            each = AgentMonkey(RunDir(folder / name), words, roles, random.Random(seed), advance)
            each.drive(count, steps)
            runs[name], found = each.run, audit(each.run.root)
            done["storm_kills"] += len(each.kills)
            for key in ("lost", "twice", "torn"):
                done[f"storm_{key}"] += len(getattr(found, key))
    same = final_weights(runs["calm"], steps) == final_weights(runs["roles"], steps)
    return {**done, "storm_same_bits": same, "storm_gradient_fraction": round(gradient_fraction(runs["roles"]), 3)}
