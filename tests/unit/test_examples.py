"""Every example is run as its page says, through the real code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import relax_hpc
from tests import runs

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


def trained(name: str, folder: Path, *arguments: str) -> Any:
    """Run a recipe of the examples to its end; its trajectories."""
    runs.relax_hpc("run", EXAMPLES / f"{name}.toml", "--set", f"run.root={folder}", *arguments)
    return relax_hpc.open_run(folder / name).trajectories()


@pytest.mark.slow
def test_reward(tmp_path: Path) -> None:
    rows = trained("reward", tmp_path)
    assert set(rows.status) == {"trained"} and set(rows.source) == {0, 1, 2}
    near, shortest = rows[rows.source == 0], rows[rows.source == 2]
    assert near["extra/digits"].between(0, 1).all() and near["extra/digits"].nunique() > 2
    assert rows[rows.source == 1]["extra/digits"].isna().all()
    assert set(near.raw_reward.round(2)) <= {0.0, 0.3, 1.0}
    assert set(shortest.raw_reward) == {0.0, 1.0}
    assert (tmp_path / "reward/snapshot/user/v0/0/reward.py").read_bytes() == (EXAMPLES / "reward.py").read_bytes()
