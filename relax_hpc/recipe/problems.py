"""Messages about the problems of a recipe, for the person who wrote it."""

from __future__ import annotations

from typing import Any, get_origin

from pydantic import ValidationError

from relax_hpc.recipe.describe import (
    Place,
    alias,
    closest,
    locate,
    member_key,
    member_name,
    overview,
    tables,
    toml,
    type_text,
)
from relax_hpc.recipe.schema import Recipe
from relax_hpc.recipe.tables.table import Table

_LONGEST_VALUE = 120
"""Characters of a wrong value that an error shows."""
_RENAMED = {
    "warmup": "sft_warm_start",
    "refill": "dynamic_sampling.max_extra_batches",
    "max_extra_batches": "dynamic_sampling.max_extra_batches",
    "oversample": "dynamic_sampling.oversample",
    "tau_positive": "tau",
    "tau_negative": "tau",
    "binds": "mounts",
    "reward_processes": "code_processes",
    "environment_processes": "code_processes",
    "replay": "sample_reuse",
    "behaviour": "old_logprobs",
    "normalise_std": "normalize",
    "normalize_std": "normalize",
    "late": "on_stale",
    "groups_per_order": "groups_per_request",
    "front": "node_cache",
    "agent_silent_s": "node_agent_silent_s",
}
"""Key of a recipe from before version 0.2 -> its name now. An error says the new name; old names are not accepted."""


class RecipeError(Exception):
    """A recipe cannot be used; the message names the key, the value, what was expected and the fix."""


def explain(error: ValidationError, where: str) -> RecipeError:
    """Put all problems of a recipe in one error; with more than one, a line each."""
    # A default that is made from other keys is missing only because one of those is wrong, which is said already.
    problems = [p for p in error.errors(include_url=False) if p["type"] != "default_factory_not_called"]
    lines = list(dict.fromkeys(_line(dict(problem)) for problem in problems))
    if len(lines) == 1:
        return RecipeError(f"{where}: {lines[0]}")
    return RecipeError("\n  ".join([f"{where}: {len(lines)} problems", *lines]))


def _line(problem: dict[str, Any]) -> str:
    place, kind, value = locate(problem["loc"]), problem["type"], problem["input"]
    if kind == "conflict":
        return str(problem["msg"])
    if kind == "extra_forbidden":
        return _unknown_key(place)
    if kind == "missing":
        return _missing(place)
    if kind == "union_tag_invalid":
        return _unknown_member(place, value)
    return _wrong_value(place, value, str(problem["msg"]))


def _unknown_key(place: Place) -> str:
    table = place.table or Recipe
    owner, _, name = place.key.rpartition(".")
    names = [alias(n, f) for n, f in table.model_fields.items()]
    if (new := _RENAMED.get(name, "")).partition(".")[0] in names:
        return f"unknown key '{place.key}': it is called '{new}' now"
    member = f" ({member_key(table)} = '{member_name(table)}')" if member_name(table) else ""
    return f"unknown key '{place.key}'{closest(name, names)} {_header(owner)}{member} takes: {overview(table)}"


def _missing(place: Place) -> str:
    help_text = place.field.description if place.field else None
    if place.field and place.key.rpartition(".")[2].isdecimal():
        return f"'{place.key}' is missing: expected {type_text(place.field.annotation)} ({help_text})"
    inner = tables(place.field.annotation) if place.field else []
    if inner:
        header = f"[[{place.key}]]" if place.field and get_origin(place.field.annotation) is list else f"[{place.key}]"
        return f"no {header} table: it must be given, with {' or '.join(map(_least, inner))}"
    return f"'{place.key}' is missing: {help_text}"


def _unknown_member(place: Place, value: Any) -> str:
    members = tables(place.field.annotation) if place.field else []
    names = [member_name(table) for table in members]
    key = member_key(members[0]) if members else "name"
    if not isinstance(value, dict):
        return f"{place.key} = {_shown(value)}: expected a table, such as [{place.key}] with {key} = '{names[0]}'"
    name = str(value.get(key))
    return f"{place.key}.{key} = '{name}'{closest(name, names)} expected one of {names}"


def _wrong_value(place: Place, value: Any, message: str) -> str:
    if place.field is None or not place.key:
        return f"{place.key or 'recipe'} = {_shown(value)}: {message}"
    expected = type_text(place.field.annotation, place.field.metadata)
    if expected == "table":
        inner = tables(place.field.annotation)
        takes = f" with {overview(inner[0])}" if len(inner) == 1 else ""
        return f"{place.key} = {_shown(value)}: expected a table{takes}"
    quote = f', such as "{value}"' if expected.startswith(("text", "path")) and isinstance(value, (int, float)) else ""
    return f"{place.key} = {_shown(value)}: expected {expected}{quote} ({place.field.description})"


def _shown(value: Any) -> str:
    text = toml(value)
    return text if len(text) <= _LONGEST_VALUE else text[:_LONGEST_VALUE] + "…"


def _header(owner: str) -> str:
    return f"[{owner}]" if owner else "a recipe"


def _least(table: type[Table]) -> str:
    """The shortest line that makes a table of this kind."""
    required = next((alias(n, f) for n, f in table.model_fields.items() if f.is_required()), None)
    return f"{required} = …" if required else f"{member_key(table)} = '{member_name(table)}'"
