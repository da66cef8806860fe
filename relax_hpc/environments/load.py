"""Loading of environments: from a recipe's `environment = NAME` to a function that makes them, checked before anything
starts."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

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
FURTHER: dict[str, tuple[str, ...]] = {"tools": (), "state": (), "restore": ("prompt", "state")}
"""Methods that it may have, `state` and `restore` both or neither."""


def make_environments(sources: Sequence[AnyPrompts]) -> list[Callable[[], Environment]]:
    """Return for each source a function that makes environments. Raises RegistryError for one that cannot be used."""
    return [_load(source) for source in sources]


def is_async(source: AnyPrompts) -> bool:
    """Return True where an environment's methods are to be awaited, so that many can be at work in one process."""
    made_by = _made_by(source)[1]
    return any(inspect.iscoroutinefunction(getattr(made_by, method, None)) for method in METHODS)


def code_folders(sources: Sequence[AnyPrompts]) -> list[Path]:
    """Files and folders with the users' code, which a sandboxed process must read."""
    found = []
    for where in {source.environment.rpartition(":")[0] for source in sources if ":" in source.environment}:
        if where.endswith(".py"):
            found.append(Path(where).resolve().parent)
        elif (module := sys.modules.get(where.partition(".")[0])) is not None:
            found += [Path(place).resolve() for place in (getattr(module, "__path__", None) or [str(module.__file__)])]
    return found


def _made_by(source: AnyPrompts) -> tuple[str, Any, dict[str, Any]]:
    """Return the name of an environment, what makes it, and its options."""
    name, options = source.environment, source.environment_options
    if name.startswith(PREFIX):
        name, options = "game", {"game": name.removeprefix(PREFIX), **options}
    return name, resolve("environment", name, BUILT_IN), options


def _check_further(name: str, made_by: type) -> None:
    """Raise RegistryError where a method that an environment may have does not fit."""
    has = {method for method in FURTHER if callable(getattr(made_by, method, None))}
    for method in has:
        check_call("environment", f"{name}.{method}", getattr(made_by, method), "self", *FURTHER[method])
    if len(has & {"state", "restore"}) == 1:
        there, missing = ("state", "restore") if "state" in has else ("restore", "state")
        raise RegistryError(
            f"environment '{name}' has a method '{there}' but no '{missing}': it is brought back by both together, or, without "
            "them, by the answers that it had"
        )


def _load(source: AnyPrompts) -> Callable[[], Environment]:
    name, made_by, options = _made_by(source)
    check_call("environment", name, made_by, **options)
    if isinstance(made_by, type):  # a function that returns environments is as good, but shows its methods too late
        for method, arguments in METHODS.items():
            if not callable(getattr(made_by, method, None)):
                raise RegistryError(f"environment '{name}' has no method '{method}'; it needs {', '.join(METHODS)}")
            check_call("environment", f"{name}.{method}", getattr(made_by, method), "self", *arguments)
        _check_further(name, made_by)
    return functools.partial(made_by, **options)
