"""Schemas of tools: JSON schemas as they are, Python functions by their type hints and docstrings."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from relax_hpc.environments.load import BUILT_IN, make_environments
from relax_hpc.recipe.schema import Recipe
from relax_hpc.recipe.tables.source import AnyPrompts
from relax_hpc.registry import RegistryError, resolve, shown

Tool = Mapping[str, Any] | Callable[..., Any]


def with_tools(recipe: Recipe) -> Recipe:
    """Return the recipe with the schemas of all tools: those that it names, and those of environments that have `tools`.
    Raises RegistryError for a tool that cannot be shown to a model."""
    made = make_environments(recipe.sources)
    shown = {id(one): _of_source(one, make) for one, make in zip(recipe.sources, made, strict=True)}
    if not any(tools != one.tools for one, tools in zip(recipe.sources, shown.values(), strict=True)):
        return recipe

    def told(ones: Sequence[AnyPrompts]) -> list[AnyPrompts]:
        return [one.model_copy(update={"tools": shown[id(one)]}) for one in ones]

    update: dict[str, Any] = {"source": told(recipe.source)}
    if recipe.evaluation:
        update["evaluation"] = recipe.evaluation.model_copy(update={"source": told(recipe.evaluation.source)})
    return recipe.model_copy(update=update)


def _of_source(source: AnyPrompts, make: Callable[[], Any]) -> list[Any]:
    tools: list[Any] = [resolve("tool", one, {}) if isinstance(one, str) else one for one in source.tools]
    if not tools and source.environment in BUILT_IN:
        tools = [*getattr(BUILT_IN[source.environment], "schemas", ())]
    elif not tools:
        own = getattr(make(), "tools", None)
        tools = _listed(own(), source.environment) if callable(own) else []
    return schemas_of(tools, source.environment)


def _listed(tools: Any, environment: str) -> list[Tool]:
    if not isinstance(tools, list | tuple):
        raise RegistryError(
            f"environment '{environment}': tools() returned {shown(tools)}, expected a list of JSON schemas or functions"
        )
    return list(tools)


def schemas_of(tools: Sequence[Tool], owner: str) -> list[dict[str, Any]]:
    """Return the JSON schema of each tool of `owner`. Raises RegistryError, which names the tool that has none."""
    return [_schema(tool, f"tool {i} of '{owner}'") for i, tool in enumerate(tools)]


def _schema(tool: Tool, which: str) -> dict[str, Any]:
    if callable(tool):
        from transformers.utils.chat_template_utils import get_json_schema

        try:
            tool = get_json_schema(tool)
        except Exception as error:
            raise RegistryError(
                f"{which}: the function '{getattr(tool, '__name__', tool)}' cannot be shown to a model: {error}; give each "
                "argument a type hint and a line under 'Args:' in the docstring"
            ) from error
    try:
        copied = json.loads(json.dumps(tool))
        function = copied.get("function", copied)
        if not isinstance(function.get("name"), str):
            raise TypeError("it has no 'name'")
    except (TypeError, ValueError, AttributeError) as error:
        raise RegistryError(
            f"{which} is no JSON schema: {error}; expected {{'type': 'function', 'function': {{'name': …, 'parameters': …}}}}, "
            "or a Python function"
        ) from error
    return copied if "function" in copied else {"type": "function", "function": copied}
