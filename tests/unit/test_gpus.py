"""Which GPU a process takes, and what is refused; torch's part is not run here, there is no GPU."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from relax_hpc.files.errors import RunError
from relax_hpc.recipe import RecipeError, load_recipe
from relax_hpc.recipe.schema import Recipe
from relax_hpc.roles.common import gpus
from tests.runs import write_recipe

FOUR = ("trainer.processes=8", "trainer.nodes=2", "trainer.device=cpu")


def take(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    sees: str,
    *sets: str,
    rank: int = 5,
    local: int = 1,
    step: bool = True,
) -> list[str]:
    """Names of the GPUs that are taken after a rank that sees these."""
    monkeypatch.setenv(gpus.VARIABLE, sees)
    monkeypatch.setenv("SLURM_LOCALID", str(local))
    recipe = load_recipe(write_recipe(folder), [*FOUR, *sets])
    process: Any = Namespace(recipe=recipe, arguments=Namespace(rank=rank, slurm_task=step))
    (folder / "i").mkdir(exist_ok=True)
    gpus.assign(process, folder / "i")
    return sorted(path.name.rpartition("-")[2] for path in (folder / "i").iterdir())


@pytest.mark.parametrize(
    ("sees", "key", "taken"),
    [
        ("0,1,2,3", "gpus_per_node=4", ["1"]),
        ("3", "gpus_per_node=4", ["3"]),
        ("3", "gpus_per_task=1", ["3"]),
        ("6,7", "gpus_per_task=2", ["6"]),
        ("MIG-1/2/0", 'gres="gpu:a100:4,shard:2"', ["1_2_0"]),
        ("NoDevFiles", 'gres="shard:2"', []),
        ("", "time=60", []),
    ],
)
def test_a_rank_takes_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sees: str, key: str, taken: list[str]
) -> None:
    assert take(tmp_path, monkeypatch, sees, f"slurm.{key}") == taken


@pytest.mark.parametrize(
    ("sees", "key", "words"),
    [
        ("", "gpus_per_node=4", r"trainer rank 5 on \S+ sees 0 GPUs \(CUDA_VISIBLE_DEVICES = ''\), expected 1 .* or 4 .* by slurm.gpus_per_node = 4"),
        ("NoDevFiles", "gpus_per_task=1", "sees 0 GPUs .*expected 1 "),
        ("0,1", "gpus_per_node=4", "sees 2 GPUs .*slurm.gpus_per_task = 1"),
        ("0,1", "gpus_per_task=1", r"sees 2 GPUs .*expected 1 \(its own\)"),
    ],
)  # fmt: skip
def test_what_slurm_did_not_bind_as_the_recipe_says_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sees: str, key: str, words: str
) -> None:
    with pytest.raises(RunError, match=words):
        take(tmp_path, monkeypatch, sees, f"slurm.{key}")


def test_two_ranks_of_a_node_have_not_the_same_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert take(tmp_path, monkeypatch, "0", "slurm.gpus_per_node=4", rank=4, local=0) == ["0"]
    with pytest.raises(RunError, match=r"rank 5 on \S+ sees the same single GPU \(0\) as rank 4.*gpus_per_task = 1"):
        take(tmp_path, monkeypatch, "0", "slurm.gpus_per_node=4")


def test_outside_of_slurm_the_table_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert take(tmp_path, monkeypatch, "", "slurm.gpus_per_node=4", step=False) == []


def test_a_node_of_workers_has_what_the_recipe_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(gpus.VARIABLE, "0,1")
    path = write_recipe(tmp_path)
    assert gpus.check_node(load_recipe(path, ["slurm.gpus_per_task=1"]), 2) == ""
    assert "sees 2 GPUs" in gpus.check_node(load_recipe(path, ["slurm.gpus_per_task=1"]), 3)


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees a GPU")
def test_gpus_that_torch_does_not_see_are_not_replaced_by_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(gpus.VARIABLE, "0")
    assert not gpus.computes_on_gpu("cpu", "trainer")
    with pytest.raises(RunError, match=r"CUDA_VISIBLE_DEVICES = '0' .* sees no GPU.*rollout.device = 'cpu'"):
        gpus.computes_on_gpu("auto", "rollout")
    monkeypatch.setenv(gpus.VARIABLE, "NoDevFiles")
    assert not gpus.computes_on_gpu("auto", "rollout")


def test_fewer_gpus_than_trainer_processes_are_refused_before_anything_starts(tmp_path: Path) -> None:
    few = ["trainer.processes=8", "trainer.nodes=2", "slurm.gpus_per_node=a100:2"]
    with pytest.raises(RecipeError, match="slurm.gpus_per_node = 'a100:2' for 4 trainer processes"):
        load_recipe(write_recipe(tmp_path), few)
    assert isinstance(load_recipe(write_recipe(tmp_path), [*few, "trainer.device=cpu"]), Recipe)
