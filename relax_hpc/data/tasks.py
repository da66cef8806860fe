"""Prompts of reasoning-gym tasks (arXiv 2505.24760): items are made from the task's seed and their index."""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any

from relax_hpc.data.items import Item
from relax_hpc.files.errors import RunError
from relax_hpc.recipe.tables.source import TaskPrompts


def load_task(source: TaskPrompts) -> Any:
    """Load the reasoning_gym dataset that a source names. Raises RunError for a task or options that do not exist."""
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if source.task not in DATASETS:
        near = difflib.get_close_matches(source.task, DATASETS, n=3) or sorted(DATASETS)
        raise RunError(f"source.task = '{source.task}': reasoning-gym has no such task; it has {near}")
    options = {
        f.name: f.default for f in dataclasses.fields(DATASETS[source.task][1]) if f.name not in ("seed", "size")
    }
    unknown = sorted(set(source.config) - set(options))
    if unknown:
        raise RunError(f"source.config: task '{source.task}' has no option {unknown}; it has {_shown(options)}")
    try:
        return reasoning_gym.create_dataset(source.task, size=source.size, seed=source.seed, **source.config)
    except Exception as error:  # a task checks its options with asserts and whatever else it likes
        raise RunError(
            f"source.config = {source.config}: task '{source.task}' refuses it: {type(error).__name__}: {error}; "
            f"its options are {_shown(options)}"
        ) from error


class TaskItems:
    """Items of a [[source]] with `task = NAME`. An item's metadata is the task's entry, for its verifier."""

    def __init__(self, source: TaskPrompts) -> None:
        self._source = source
        self._task = load_task(source)

    def __len__(self) -> int:
        return self._source.size

    def where(self, index: int) -> str:
        return f"{self._source.task} item {index}"

    def __getitem__(self, index: int) -> Item:
        entry, template = self._task[index], self._source.template
        content = entry["question"]
        if template is not None:
            try:
                content = template.format(**entry)
            except (KeyError, IndexError, AttributeError, ValueError, TypeError) as error:
                problem = f"{type(error).__name__}: {error}"
                raise RunError(
                    f"source.template = {template!r} does not fit {self.where(index)}: {problem}; "
                    f"its fields are question, answer and metadata with {sorted(entry['metadata'])}"
                ) from error
        answer = entry["answer"]
        return Item(content, answer if answer is None else str(answer), dict(entry))


def _shown(options: dict[str, Any]) -> str:
    return ", ".join(
        f"{name} ({'required' if value is dataclasses.MISSING else value})" for name, value in options.items()
    )
