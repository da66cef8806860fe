"""Paths and FILE.py:NAME in a recipe: made absolute when it is read, renamed where a run has copies.

Things that must exist already (prompt files, model.path, FILE.py:NAME) are looked up in the recipe's folder first, then
in the working directory; a value from `--set` the other way round. Things that the run makes (run.root,
spool.node_cache) are relative to the working directory. `~` is the home directory.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from relax_hpc.recipe.describe import alias, mark
from relax_hpc.recipe.schema import Recipe
from relax_hpc.recipe.tables.table import Table

USER_FILE = re.compile(r"^(?P<file>.+\.py):(?P<name>\w+)$")
"""Matches a reference to code in a file of the user's."""


def with_files(recipe: Recipe, rename: Callable[[str], str]) -> Recipe:
    """Rename the file of each FILE.py:NAME that `recipe` looks up; options of functions stay as they are."""

    def change(value: Any, key: str, looked_up: bool) -> Any:
        if isinstance(value, list):
            return [change(item, key, looked_up) for item in value]
        match = USER_FILE.match(value) if looked_up and isinstance(value, str) else None
        return f"{rename(match['file'])}:{match['name']}" if match else value

    changed = _changed(recipe, "", change)
    assert isinstance(changed, Recipe)
    return changed


def without_folders(value: Any) -> Any:
    """Shorten FOLDER/FILE.py:NAME in a value of a recipe to FILE.py:NAME: a run's recipe names its own copies of the
    user's files."""
    if isinstance(value, list):
        return [without_folders(item) for item in value]
    match = USER_FILE.match(value) if isinstance(value, str) else None
    return f"{Path(match['file']).name}:{match['name']}" if match else value


def absolute(recipe: Recipe, folder: Path, given: set[str]) -> Recipe:
    """Make the paths in `recipe` absolute."""

    def change(value: Any, key: str, looked_up: bool) -> Any:
        if value is not None and looked_up:
            return _looked_up(value, [Path.cwd(), folder] if key in given else [folder, Path.cwd()])
        return value.expanduser().absolute() if isinstance(value, Path) else value

    changed = _changed(recipe, "", change)
    assert isinstance(changed, Recipe)
    return changed


def _changed(table: Table, prefix: str, change: Callable[[Any, str, bool], Any]) -> Table:
    """Change every value of `table`, in its tables too, by `change` (called with value, key, and True where the key is
    looked up)."""
    update: dict[str, Any] = {}
    for name, field in type(table).model_fields.items():
        value, key = getattr(table, name), prefix + alias(name, field)
        if isinstance(value, Table):
            update[name] = _changed(value, key + ".", change)
        elif isinstance(value, list) and value and isinstance(value[0], Table):
            update[name] = [_changed(item, f"{key}.{i}.", change) for i, item in enumerate(value)]
        else:
            update[name] = change(value, key, mark(field, "looked_up"))
    return table.model_copy(update=update)


def _looked_up(value: Any, folders: list[Path]) -> Any:
    if isinstance(value, list):
        return [_looked_up(item, folders) for item in value]
    if isinstance(value, Path):
        return _find(value, folders)
    if not isinstance(value, str):
        return value
    file, colon, attribute = value.rpartition(":")
    return f"{_find(Path(file), folders)}:{attribute}" if colon and file.endswith(".py") else value


def _find(path: Path, folders: list[Path]) -> Path:
    """Find the absolute path in the first folder that has it; in the working directory where none has."""
    path = path.expanduser()
    found = next((folder / path for folder in folders if (folder / path).exists()), Path.cwd() / path)
    return Path(found.absolute())
