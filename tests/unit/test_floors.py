"""The shape of the package: imports go down only, commands start fast, types and style are checked."""

from __future__ import annotations

import ast
import graphlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

import relax_hpc

PACKAGE = Path(relax_hpc.__file__).parent
ROOT = PACKAGE.parent
FLOORS = [
    {"recipe", "files", "records", "registry", "telemetry", "parent", "media"},
    {"algorithms", "spool", "data", "huggingface", "sandbox"},
    {"engines", "trainers", "weights", "rewards", "environments", "checkpoint"},
    {"gateway"},
    {"roles"},
    {"launch", "supervise", "slurm", "planning", "monitor"},
    {"cli"},
]
FREE = {0, 5}
"""Floors whose packages may import each other."""
HEAVY = {"torch", "transformers", "pandas", "h5py"}


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def floor_of(package: str) -> int:
    return next(number for number, floor in enumerate(FLOORS) if package in floor)


def imported(name: str, path: Path, known: dict[str, Path]) -> set[str]:
    """Modules of ours that this one names at module level, in TYPE_CHECKING blocks too."""
    found: set[str] = set()
    todo: list[ast.stmt] = list(ast.parse(path.read_text()).body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: imports are written in full"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.add(whole if whole in known else str(node.module))
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            todo += [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]
            todo += [s for handler in getattr(node, "handlers", []) for s in handler.body]
    return {m for m in found if m in known and m != name}


def graph() -> dict[str, set[str]]:
    known = modules()
    return {name: imported(name, path, known) for name, path in known.items()}


def package_of(module: str) -> str | None:
    """The package or module on a floor; None for relax_hpc itself and its __main__."""
    parts = module.split(".")
    return None if len(parts) == 1 or parts[1] == "__main__" else parts[1]


def test_every_package_has_a_floor() -> None:
    here = {p for m in modules() if (p := package_of(m))}
    assert here == set().union(*FLOORS)


def test_imports_go_down_only() -> None:
    wrong = []
    for module, targets in graph().items():
        for target in targets:
            a, b = package_of(module), package_of(target)
            if a is None or b is None or a == b:
                continue
            if floor_of(b) > floor_of(a) or (floor_of(a) == floor_of(b) and floor_of(a) not in FREE):
                wrong.append(f"{module} (floor {floor_of(a)}) imports {target} (floor {floor_of(b)})")
    assert not wrong, "\n".join(wrong)


def test_the_graph_sees_imports() -> None:
    found = graph()
    assert "relax_hpc.spool.request" in found["relax_hpc.spool.queue"]
    assert "relax_hpc.monitor.analysis" in found["relax_hpc"], "TYPE_CHECKING blocks count"


def test_no_folder_is_crowded() -> None:
    counts = {folder: len(list(folder.glob("*.py"))) for folder in PACKAGE.rglob("*") if folder.is_dir()}
    assert not {folder.name: count for folder, count in counts.items() if count > 16}


def test_no_module_imports_itself_in_a_circle() -> None:
    try:
        graphlib.TopologicalSorter(graph()).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def heavy_after(code: str) -> list[str]:
    """Which heavy packages a fresh interpreter holds after `code`."""
    code += f"\nimport json, sys; print(json.dumps(sorted({HEAVY!r} & set(sys.modules))))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_commands_start_without_heavy_imports() -> None:
    names = [m for m in modules() if m.startswith("relax_hpc.cli")]
    assert heavy_after(f"import {', '.join(names)}") == []
    assert heavy_after("import torch") == ["torch"], "the test can fail"


def test_help_needs_nothing_heavy() -> None:
    code = "import sys; sys.argv = ['relax-hpc', '--help']\nfrom relax_hpc.cli import app\ntry: app()\nexcept SystemExit as e: assert not e.code"
    assert heavy_after(code) == []


def test_the_command_is_installed() -> None:
    done = subprocess.run(
        [Path(sys.executable).parent / "relax-hpc", "--help"], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0 and "run" in done.stdout, done.stderr


def test_a_supervisor_never_holds_torch() -> None:
    """It lives as long as the run, on a node where memory is for others."""
    assert heavy_after("import relax_hpc.supervise.supervisor, relax_hpc.supervise.local") == []


def check(*command: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_ruff() -> None:
    check("ruff", "check", "relax_hpc", "tests", "tools", "examples")
    check("ruff", "format", "--check", "relax_hpc", "tests", "tools", "examples")


@pytest.mark.slow
def test_mypy_strict() -> None:
    check("mypy")
