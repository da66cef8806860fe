"""A whole run whose environment raises, hangs, dies and answers nonsense: each costs one sample, and the others are trained."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
import tomli_w

from relax_hpc import open_run
from relax_hpc.files.run_dir import RunDir
from tests.runs import SMALL, audited, relax_hpc

MISDEEDS = {
    "raise": "raised KeyError in step",
    "hang": "took longer than 1 s in step",
    "die": "died with exit status 3 in step",
    "nonsense": "returned a wrong value from step",
}
ENVIRONMENT = '''
"""Misbehaves by the model's own words, of which no two answers have the same."""
import os, time, zlib
from relax_hpc.environments import ToolError, Turn

class Wild:
    def reset(self, prompt):
        self.turns = 0

    def step(self, answer):
        self.turns += 1
        odd = zlib.crc32(answer.encode()) % 24
        if odd == 0:
            return {}["key"]
        if odd == 1:
            time.sleep(3600)
        if odd == 2:
            os._exit(3)
        if odd == 3:
            return "nonsense"
        if self.turns == 1:
            raise ToolError("again")
        return Turn(done=True, reward=float(odd % 2))

    def close(self): ...
'''


@pytest.mark.parametrize("lockstep", [False, True], ids=["by themselves", "lockstep"])
def test_what_environments_do_wrong_costs_samples_and_nothing_else(tmp_path: Path, lockstep: bool) -> None:
    (tmp_path / "wild.py").write_text(ENVIRONMENT)
    recipe = tomllib.loads(SMALL.format(root=tmp_path / "runs"))
    recipe["run"] |= {"steps": 3, "checkpoint_every": 3}
    recipe["rollout"] |= {"max_turns": 2, "lockstep": lockstep, "step_time_limit_s": 1.0}
    recipe["source"][0] |= {"environment": f"{tmp_path}/wild.py:Wild"}
    path = tmp_path / "recipe.toml"
    path.write_text(tomli_w.dumps(recipe))

    relax_hpc("run", path)

    root = tmp_path / "runs" / "small"
    audited(RunDir(root))
    seen = open_run(root).trajectories()
    taken = seen[seen.step.notna() & (seen.reason == "")]
    lost, trained = taken[taken.status == "failed"], taken[taken.status == "trained"]
    assert len(lost) and set(lost.finish) == {"failed"} and "failed" not in set(trained.finish)
    assert (
        taken.groupby(["request", "group"]).apply(lambda g: (g.status == "trained").sum(), include_groups=False).min()
        >= 2
    )
    details = "\n".join(seen.detail)
    assert {name for name, said in MISDEEDS.items() if said in details} == set(MISDEEDS)
    assert trained.turns.max() == 2
