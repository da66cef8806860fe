"""The base of every table of the recipe: strict models, keys with a sentence, unions told apart by a key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import BaseModel, ConfigDict, Discriminator, Field
from pydantic_core import PydanticCustomError

TAGS = ("name", "transport")
"""Keys that tell the members of a union apart."""


def Key(
    default: Any = ...,
    help: str = "",
    *,
    resume: bool = False,
    looked_up: bool = False,
    decided: Callable[[dict[str, Any]], Any] | None = None,
    **constraints: Any,
) -> Any:
    """Define a recipe key: its default, its sentence, and whether a resumed run may change it.

    `looked_up`: a path or FILE.py:NAME that must exist; a relative one is looked up beside the recipe first. `decided`:
    makes the default from the keys of the table that stand before this one.
    """
    made: dict[str, Any] = {"default": default} if decided is None else {"default_factory": decided}
    return Field(**made, description=help, json_schema_extra={"resume": resume, "looked_up": looked_up}, **constraints)


def conflict(message: str) -> PydanticCustomError:
    """Make an error about keys that do not fit together; `message` names every number and the fix."""
    return PydanticCustomError("conflict", "{message}", {"message": message})


def even_share(key: str, count: int, nodes_key: str, nodes: int) -> None:
    """Raise a conflict when `count` processes do not spread evenly over the nodes."""
    if count % nodes:
        raise conflict(
            f"{key} = {count} is the total over {nodes_key} = {nodes} nodes and must be divisible by it: "
            f"use {count // nodes * nodes or nodes} or {(count // nodes + 1) * nodes}, or change {nodes_key}"
        )


class Table(BaseModel):
    """A table of the recipe: unknown keys are refused, values do not change after they were checked."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


def named(key: str = "name", *, default: Any) -> Discriminator:
    """Pick a union's member by `key`; where it is not given, `default(table)` says which."""

    def pick(value: Any) -> str:
        if isinstance(value, Table):
            return str(getattr(value, key))
        if not isinstance(value, dict):
            return "?"
        return str(value.get(key, default(value)))

    return Discriminator(pick)
