"""Description of the schema in words, for errors and docs: a table's keys, their types and defaults."""

from __future__ import annotations

import difflib
import types
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
import tomli_w
from pydantic.fields import FieldInfo

from relax_hpc.recipe.schema import Recipe
from relax_hpc.recipe.tables.table import TAGS, Table

_WORDS = {str: "text", int: "integer", float: "number", bool: "true or false", Path: "path", Any: "anything"}
_BOUNDS = {annotated_types.Gt: ">", annotated_types.Ge: ">=", annotated_types.Lt: "<", annotated_types.Le: "<="}


@dataclass(frozen=True, slots=True)
class KeyInfo:
    """One key of a table, described as text."""

    name: str
    type: str
    default: str | None
    """The default in TOML. None: the key must be given; empty: it may be absent."""
    resume: bool
    help: str


@dataclass(frozen=True, slots=True)
class Place:
    """The place in a recipe that a pydantic error points to."""

    key: str
    """Dotted, as `--set` takes it; empty for the whole recipe."""
    table: type[Table] | None
    """The innermost table on the way; None where a union's member was not found."""
    field: FieldInfo | None
    """The key's field; None for an unknown key."""


def keys(table: type[Table]) -> list[KeyInfo]:
    """The keys of `table` that are not tables themselves."""
    return [_key_info(alias(n, f), f) for n, f in table.model_fields.items() if not tables(f.annotation)]


def alias(name: str, field: FieldInfo) -> str:
    """Translate a field's name to the one in TOML ("async" for async_)."""
    return field.alias or name


def mark(field: FieldInfo, name: str) -> bool:
    """Return True if schema.Key put the mark `name` on the field: "resume" or "looked_up"."""
    return isinstance(field.json_schema_extra, dict) and bool(field.json_schema_extra.get(name))


def tables(annotation: Any) -> list[type[Table]]:
    """List the tables that an annotation allows: one, the members of a union, or none."""
    if isinstance(annotation, type) and issubclass(annotation, Table):
        return [annotation]
    if get_origin(annotation) is Annotated:
        return tables(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType, list):
        return [table for argument in get_args(annotation) for table in tables(argument)]
    return []


def member_key(table: type[Table]) -> str:
    """The key that tells this member of a union from the others; "name" for a table that is not a member."""
    return next((key for key in TAGS if key in table.model_fields), TAGS[0])


def member_name(table: type[Table]) -> str:
    """The value of that key for this member; empty for a table that is not a member."""
    field = table.model_fields.get(member_key(table))
    return str(field.default) if field and get_origin(field.annotation) is Literal else ""


def locate(loc: Sequence[int | str]) -> Place:
    """Translate a pydantic location, which names union members too, into a key of the recipe."""
    key: list[str] = []
    candidates: list[type[Table]] = [Recipe]
    field: FieldInfo | None = None
    for part in loc:
        if len(candidates) > 1 and isinstance(part, str):
            candidates = [table for table in candidates if member_name(table) == part]
            continue
        key.append(str(part))
        if isinstance(part, int) or len(candidates) != 1:
            continue
        found = [f for n, f in candidates[0].model_fields.items() if alias(n, f) == part]
        field = found[0] if found else None
        if field and tables(field.annotation):
            candidates = tables(field.annotation)
    return Place(".".join(key), candidates[0] if len(candidates) == 1 else None, field)


def closest(word: str, words: Sequence[str]) -> str:
    """Suggest the nearest of `words`, as the text '; did you mean WORD?'; empty when none is near."""
    near = difflib.get_close_matches(word, words, n=1)
    return f"; did you mean '{near[0]}'?" if near else ""


def toml(value: Any) -> str:
    """Format a value as TOML text; a table becomes an inline one."""
    if value is None:
        return "(absent)"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {toml(item)}" for name, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(toml(item) for item in value) + "]"
    plain = str(value) if isinstance(value, Path) else value
    return tomli_w.dumps({"v": plain}).removeprefix("v = ").strip()


def type_text(annotation: Any, constraints: Sequence[Any] = ()) -> str:
    """Describe a type for a person: "integer > 0", "'wait' or 'drop'", "list of text"."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_text(arguments[0], [*arguments[1:], *constraints])
    if origin is Literal:
        return " or ".join(f"'{argument}'" for argument in arguments)
    if tables(annotation):
        return "one table or more" if origin is list else "table"
    if origin in (Union, types.UnionType):
        return " or ".join(type_text(a, constraints) for a in arguments if a is not type(None))
    if origin is list:
        return f"list of {type_text(arguments[0])}"
    if origin is tuple:
        return "[" + ", ".join(type_text(argument) for argument in arguments) + "]"
    if origin is dict:
        return "table"
    return " ".join([_WORDS.get(annotation, str(annotation)), *_constraint_texts(constraints)])


def _constraint_texts(constraints: Sequence[Any]) -> list[str]:
    bounds = [f"{_BOUNDS[type(c)]} {getattr(c, type(c).__name__.lower())}" for c in constraints if type(c) in _BOUNDS]
    patterns = [f"that matches {c.pattern}" for c in constraints if getattr(c, "pattern", None)]
    return [" and ".join(bounds)] * bool(bounds) + patterns


def _key_info(name: str, field: FieldInfo) -> KeyInfo:
    if field.is_required():
        default = None
    elif field.default is None or field.default_factory is not None:
        default = ""
    else:
        default = toml(field.default)
    expected = type_text(field.annotation, field.metadata)
    return KeyInfo(name, expected, default, mark(field, "resume"), field.description or "")


def overview(table: type[Table]) -> str:
    """Describe a table in one line: its valid keys with their defaults."""
    texts = []
    for name, field in table.model_fields.items():
        inner = tables(field.annotation)
        if inner:
            many = get_origin(field.annotation) is list
            texts.append(f"[[{alias(name, field)}]]" if many else f"[{alias(name, field)}]")
            continue
        info = _key_info(alias(name, field), field)
        texts.append(f"{info.name} ({'required' if info.default is None else info.default or 'absent'})")
    return ", ".join(texts)
