"""Loading of environments: from a recipe's `environment = NAME` to a function that makes them, checked before anything
starts."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from relax_hpc.environments.base import Environment
from relax_hpc.environments.builtin.bash import Bash
from relax_hpc.environments.builtin.calculator import Calculator
from relax_hpc.environments.builtin.game import PREFIX, Game
from relax_hpc.environments.builtin.image_tools import ImageTools
from relax_hpc.environments.builtin.python import Python
from relax_hpc.environments.builtin.search import Search
from relax_hpc.environments.single_turn import SingleTurn
from relax_hpc.recipe.tables.source import AnyPrompts
from relax_hpc.registry import RegistryError, check_call, resolve

IN_PROCESS = {"single_turn": SingleTurn}
"""Environments so quick that they live in the worker's own process."""
BUILT_IN: dict[str, type[Environment]] = {
    **IN_PROCESS, "bash": Bash, "calculator": Calculator, "game": Game, "image_tools": ImageTools, "python": Python,
    "search": Search,
}  # fmt: skip
METHODS: dict[str, tuple[str, ...]] = {"reset": ("prompt",), "step": ("answer",), "close": ()}


def make_environments(sources: Sequence[AnyPrompts]) -> list[Callable[[], Environment]]:
    """Return for each source a function that makes environments. Raises RegistryError for one that cannot be used."""
    return [_load(source) for source in sources]


def code_folders(sources: Sequence[AnyPrompts]) -> list[Path]:
    """Files and folders with the users' code, which a sandboxed process must read."""
    found = []
    for where in {source.environment.rpartition(":")[0] for source in sources if ":" in source.environment}:
        if where.endswith(".py"):
            found.append(Path(where).resolve().parent)
        elif (module := sys.modules.get(where.partition(".")[0])) is not None:
            found += [Path(place).resolve() for place in (getattr(module, "__path__", None) or [str(module.__file__)])]
    return found


def _load(source: AnyPrompts) -> Callable[[], Environment]:
    name, options = source.environment, source.environment_options
    if name.startswith(PREFIX):
        name, options = "game", {"game": name.removeprefix(PREFIX), **options}
    made_by = resolve("environment", name, BUILT_IN)
    check_call("environment", name, made_by, **options)
    if isinstance(made_by, type):  # a function that returns environments is as good, but shows its methods too late
        for method, arguments in METHODS.items():
            if not callable(getattr(made_by, method, None)):
                raise RegistryError(f"environment '{name}' has no method '{method}'; it needs {', '.join(METHODS)}")
            check_call("environment", f"{name}.{method}", getattr(made_by, method), "self", *arguments)
    return functools.partial(made_by, **options)
