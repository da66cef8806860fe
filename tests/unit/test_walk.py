"""The walk of a recipe from the command line to the trainer's loop: through few modules, which docs/design.md lists."""

from __future__ import annotations

import argparse
import gc
import re
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from relax_hpc.cli import app
from relax_hpc.files.run_dir import RunDir, open_existing
from relax_hpc.launch import create
from relax_hpc.recipe import load_recipe
from relax_hpc.roles import __main__ as roles
from relax_hpc.roles.common.process import Exit, RoleProcess
from relax_hpc.roles.training import trainer
from relax_hpc.supervise.fork_server import ForkServer
from tests.runs import write_recipe

DESIGN = Path(__file__).parents[2] / "docs" / "design.md"
MOST = 8
WITHOUT_RECIPE = {"relax_hpc.supervise.io_retry", "relax_hpc.supervise.restarts"}
"""On the stack too: they say when the next one is called, and are given neither recipe nor run to hand on."""


class Reached(Exception):
    pass


def ours() -> list[str]:
    """Modules of ours on the stack, the outermost first."""
    frames = traceback.walk_stack(sys._getframe(1))
    found = [str(frame.f_globals.get("__name__")) for frame, _ in frames]
    return [name for name in dict.fromkeys(reversed(found)) if name.startswith("relax_hpc.")]


def test_a_recipe_reaches_the_trainer_through_the_modules_that_the_design_lists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    walk, words = list[str](), list[str]()

    def prepare(run: RunDir, fork_server: ForkServer, **options: Any) -> None:
        walk.extend(ours())

    def spawn(server: ForkServer, arguments: Sequence[str], *more: Any) -> None:
        walk.extend(ours())
        walk.append(ForkServer.__module__)
        words.extend(arguments)
        raise Reached

    def train(process: RoleProcess) -> Exit:
        walk.extend(ours())
        walk.append(trainer.__name__)
        return Exit.DONE

    monkeypatch.setattr(create, "prepare", prepare)
    monkeypatch.setattr(ForkServer, "spawn", spawn)
    recipe = write_recipe(tmp_path)
    done = CliRunner().invoke(app, ["run", str(recipe), "--set", "algorithm={name='sft'}"])
    assert isinstance(done.exception, Reached), done.output
    monkeypatch.setattr(trainer, "body", train)
    monkeypatch.setattr(gc, "freeze", lambda: None)
    role, root, *_ = words
    about = argparse.Namespace(run=root, name="trainer-0", attempt=0, supervisor=None, role=role, final_message=None)
    run = open_existing(root)
    assert roles.run(RoleProcess(about, run, load_recipe(run.recipe)), role) is Exit.DONE

    passed = [name for name in dict.fromkeys(walk) if name not in WITHOUT_RECIPE]
    listed = re.findall(r"^\d+\. `([a-z_/]+)\.py`", DESIGN.read_text().partition("## The walk of a recipe")[2], re.M)
    assert passed == [f"relax_hpc.{name.replace('/', '.')}" for name in listed] and len(passed) <= MOST
