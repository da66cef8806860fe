"""What is read ahead is what is in the files, given once, to be kept; and a torn file of an optimizer is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from relax_hpc import checkpoint, read_ahead
from relax_hpc.run_dir import RunDir, RunError
from relax_hpc.trainers import state_files

MOMENTS = {f"exp_avg/layer.{i}": torch.randn(10 + i, 7) for i in range(9)} | {"step/layer.0": torch.tensor(3.0)}


def saved(folder: Path, stem: str = state_files.OPTIMIZER) -> Path:
    folder.mkdir(parents=True)
    state_files.write_all(folder, state_files.in_parts(stem, MOMENTS))
    (folder / "DONE").touch()
    return folder


def same(found: dict[str, torch.Tensor]) -> bool:
    return found.keys() == MOMENTS.keys() and all(torch.equal(found[name], MOMENTS[name]) for name in found)


@pytest.mark.parametrize("ahead", [True, False])
def test_an_optimizer_is_read_into_memory_that_is_the_readers_own(tmp_path: Path, ahead: bool) -> None:
    run = RunDir(tmp_path)
    folder = saved(run.checkpoint(5))
    if ahead:
        checkpoint.begin_reading(run)
    found = state_files.read_parts(folder, state_files.OPTIMIZER)
    assert same(found)
    for tensor in found.values():
        tensor.add_(1.0)  # as AdamW does
    assert same(state_files.read_parts(folder, state_files.OPTIMIZER)), "the files changed, or memory was given twice"


def test_a_newer_checkpoint_is_read_itself_and_what_was_read_ahead_is_let_go(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    saved(run.checkpoint(5))
    checkpoint.begin_reading(run)
    assert same(state_files.read_parts(saved(run.checkpoint(6)), state_files.OPTIMIZER))
    assert not read_ahead._ahead


def test_before_the_first_checkpoint_there_is_nothing_to_read(tmp_path: Path) -> None:
    checkpoint.begin_reading(RunDir(tmp_path))
    assert not read_ahead._ahead


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize(("left", "words"), [(None, "incomplete"), (0, "older checkpoint"), (50, "older checkpoint")])
def test_a_file_that_is_torn_or_gone_is_named(tmp_path: Path, left: int | None, words: str, ahead: bool) -> None:
    run = RunDir(tmp_path)
    folder = saved(run.checkpoint(5))
    path = folder / "optimizer-2.safetensors"
    data = path.read_bytes()
    path.unlink()
    if left is not None:
        path.write_bytes(data[:left])
    if ahead:
        checkpoint.begin_reading(run)
    with pytest.raises(RunError, match=rf"optimizer-2\.safetensors.*{words}"):
        state_files.read_parts(folder, state_files.OPTIMIZER)


def test_parts_have_about_as_many_bytes_each() -> None:
    sizes = [sum(t.nbytes for t in part.values()) for part in state_files.in_parts("optimizer", MOMENTS).values()]
    assert len(sizes) == state_files.PARTS and max(sizes) < 1.5 * min(sizes)
    assert len(state_files.in_parts("optimizer", {})) == state_files.PARTS, "before the first step"
