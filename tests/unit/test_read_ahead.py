"""What is read ahead is what is in the files, given once, to be kept; and a torn file of an optimizer is named."""

from __future__ import annotations

import shutil
from concurrent.futures import wait
from pathlib import Path

import pytest
import torch

from relax_hpc import checkpoint
from relax_hpc.files import read_ahead
from relax_hpc.files.errors import RunError
from relax_hpc.files.run_dir import RunDir
from relax_hpc.trainers import state_files

MOMENTS = {f"exp_avg/layer.{i}": torch.randn(10 + i, 7) for i in range(9)} | {"step/layer.0": torch.tensor(3.0)}


def saved(folder: Path, stem: str = state_files.OPTIMIZER) -> Path:
    folder.mkdir(parents=True)
    state_files.write(folder, state_files.in_parts(stem, MOMENTS))
    (folder / "DONE").write_text('{"checksums": {}}')
    return folder


def same(found: dict[str, torch.Tensor]) -> bool:
    return found.keys() == MOMENTS.keys() and all(torch.equal(found[name], MOMENTS[name]) for name in found)


def test_an_optimizer_is_read_into_memory_that_is_the_readers_own(tmp_path: Path) -> None:
    folder = saved(tmp_path / "5")
    found = state_files.read_parts(folder, state_files.OPTIMIZER, keep=True)
    assert same(found)
    for tensor in found.values():
        tensor.add_(1.0)  # as AdamW does
    assert same(state_files.read_parts(folder, state_files.OPTIMIZER, keep=True)), (
        "files changed, or memory was given twice"
    )
    assert same(state_files.read_parts(folder, state_files.OPTIMIZER, keep=False))


@pytest.mark.parametrize("stem", [state_files.OPTIMIZER, state_files.CRITIC_OPTIMIZER])
def test_what_was_read_ahead_needs_no_file_any_more(tmp_path: Path, stem: str) -> None:
    run = RunDir(tmp_path)
    saved(run.checkpoint(4), stem)
    folder = saved(run.checkpoint(5), stem)
    checkpoint.begin_reading(run, stem)
    wait(read_ahead._ahead.values())
    shutil.rmtree(folder)
    assert same(state_files.read_parts(folder, stem, keep=True)) and not read_ahead._ahead
    with pytest.raises(RunError, match="incomplete"):
        state_files.read_parts(folder, stem, keep=True)


def test_a_newer_checkpoint_is_read_itself_and_what_was_read_ahead_is_let_go(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    saved(run.checkpoint(5))
    checkpoint.begin_reading(run, state_files.OPTIMIZER)
    assert len(read_ahead._ahead) == state_files.PARTS
    assert same(state_files.read_parts(saved(run.checkpoint(6)), state_files.OPTIMIZER, keep=True))
    assert not read_ahead._ahead


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize(("left", "words"), [(None, "incomplete"), (0, "older checkpoint"), (50, "older checkpoint")])
def test_a_file_that_is_torn_or_gone_is_named(tmp_path: Path, left: int | None, words: str, keep: bool) -> None:
    folder = saved(tmp_path / "5")
    path = folder / "optimizer-2.safetensors"
    data = path.read_bytes()
    path.unlink()
    if left is not None:
        path.write_bytes(data[:left])
    with pytest.raises(RunError, match=rf"optimizer-2\.safetensors.*{words}"):
        state_files.read_parts(folder, state_files.OPTIMIZER, keep=keep)


def test_parts_have_about_as_many_bytes_each() -> None:
    sizes = [sum(t.nbytes for t in part.values()) for part in state_files.in_parts("optimizer", MOMENTS).values()]
    assert len(sizes) == state_files.PARTS and max(sizes) < 1.5 * min(sizes)
    assert len(state_files.in_parts("optimizer", {})) == state_files.PARTS, "before the first step"
