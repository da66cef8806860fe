"""`--set a.b=c`: overrides of a recipe's TOML data, and the walk over its keys."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from typing import Any

from relax_hpc.recipe.describe import toml
from relax_hpc.recipe.problems import RecipeError


def override(data: dict[str, Any], overrides: Sequence[str]) -> set[str]:
    """Apply "a.b=c" to `data` in place; returns the keys that were given so."""
    given: set[str] = set()
    for text in overrides:
        key, equals, value_text = text.partition("=")
        parts = key.strip().split(".")
        if not equals or not all(parts):
            raise RecipeError(f"--set '{text}': expected KEY=VALUE, such as run.steps=200 or source.0.task=chain_sum")
        value = _value(value_text.strip())
        _assign(data, parts, value, text)
        given |= {leaf for leaf, _ in leaves({key.strip(): value})} | {key.strip()}
    return given


def _value(text: str) -> Any:
    """Parse a TOML value; text that is none stays text."""
    try:
        parsed = tomllib.loads(f"v = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return parsed["v"] if set(parsed) == {"v"} else text


def _assign(data: dict[str, Any], parts: list[str], value: Any, text: str) -> None:
    here: Any = data
    for depth, part in enumerate(parts):
        last, position = depth == len(parts) - 1, ".".join(parts[:depth])
        if isinstance(here, list):
            if not part.isdecimal() or int(part) >= len(here):
                raise RecipeError(f"--set '{text}': no '{part}' in {position}, which has 0 … {len(here) - 1}")
            if last:
                here[int(part)] = value
            else:
                here = here[int(part)]
        elif isinstance(here, dict):
            if last:
                here[part] = value
            else:
                here = here.setdefault(part, {})
        else:
            raise RecipeError(f"--set '{text}': {position} is {toml(here)}, not a table")


def leaves(data: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of everything that is not a table; an empty table is a value."""
    for name, value in data.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{name}.")
        elif isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            for index, item in enumerate(value):
                yield from leaves(item, f"{prefix}{name}.{index}.")
        else:
            yield prefix + name, value
