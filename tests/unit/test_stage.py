"""An environment on the node's own disk: unpacked once, run from there, and what is wrong with it named."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from relax_hpc.files.errors import RunError
from relax_hpc.recipe import RecipeError, load_recipe
from relax_hpc.slurm.plan import Plan, make_plan
from relax_hpc.slurm.srun import step_command
from relax_hpc.slurm.submission.submit import refuse_missing_environment
from tests.runs import SMALL, write_recipe

ROOT = Path(__file__).resolve().parents[2]


def plan(folder: Path, slurm: str) -> Plan:
    return make_plan(load_recipe(write_recipe(folder, SMALL + slurm)))


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment that was packed, and is gone."""
    folder = tmp_path_factory.mktemp("packed")
    venv.create(folder / "made", symlinks=True)
    subprocess.run(["tar", "--zstd", "-cf", folder / "env.tar", "-C", folder / "made", "."], check=True)
    (folder / "made").rename(folder / "gone")
    return folder / "env.tar"


def staged(packed: Path, disk: Path) -> subprocess.CompletedProcess[str]:
    disk.mkdir(exist_ok=True)
    step = [sys.executable, "-P", "-m", "relax_hpc.slurm.stage", str(packed)]
    told = "import sys, os; print(sys.prefix, sys.base_prefix, os.environ['PATH'].split(':')[0], *sys.argv[1:])"
    environment = {**os.environ, "SLURM_TMPDIR": str(disk), "PYTHONPATH": str(ROOT)}
    return subprocess.run([*step, "-c", told, "a b"], env=environment, capture_output=True, text=True, check=False)


def test_a_packed_environment_runs_from_the_nodes_disk(tmp_path: Path, packed: Path) -> None:
    with ThreadPoolExecutor(3) as ranks:
        said = {done.stdout for done in ranks.map(lambda _: staged(packed, tmp_path / "disk"), range(3))}
    (folder,) = (tmp_path / "disk").glob("relax_hpc-*/environment-*")
    assert said == {f"{folder} {sys.base_prefix} {folder}/bin a b\n"}
    os.utime(packed)
    assert str(folder) not in staged(packed, tmp_path / "disk").stdout, "packed again, it is another one"


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "No such file or directory on"), (b"no tar", "tar cannot unpack it on .*: "), ("empty", "no bin/python at its top")],
)  # fmt: skip
def test_what_cannot_be_staged_is_named(tmp_path: Path, content: bytes | str | None, words: str) -> None:
    path = tmp_path / "env.tar"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content:
        subprocess.run(["tar", "-cf", path, "-T", "/dev/null"], check=True)
    done = staged(path, tmp_path / "disk")
    assert done.returncode == 1 and re.search(f"^error: slurm.stage_environment = '{path}': .*{words}", done.stderr)
    assert not list(tmp_path.glob("disk/relax_hpc-*/[!.]*"))


def test_steps_start_by_way_of_the_staged_environment(tmp_path: Path, packed: Path) -> None:
    p = plan(tmp_path, f"[slurm]\npython = 'py'\nstage_environment = '{packed}'\n")
    assert step_command(p) == ["py", "-P", "-m", "relax_hpc.slurm.stage", str(packed)]
    assert step_command(plan(tmp_path, "[slurm]\npython = 'py'\n")) == ["py"]
    with pytest.raises(RecipeError, match="stage_environment.*container = 'apptainer'"):
        plan(tmp_path, f"[slurm]\nstage_environment = '{packed}'\n[slurm.container]\nimage = 'a.sif'\n")
    with pytest.raises(RunError, match="is no file: make it with `tar"):
        refuse_missing_environment(plan(tmp_path, "[slurm]\nstage_environment = '/nowhere/env.tar'\n"))
