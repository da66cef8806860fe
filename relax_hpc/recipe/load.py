"""Reading and writing of recipes: a TOML file and `--set a.b=c` become a checked Recipe, and a Recipe becomes TOML
again.

    TOML file ──► + overrides ──► strict models ──► paths made absolute ──► Recipe ──► dump_recipe ──► RUN/recipe.toml

A run may be resumed from anywhere, so no relative path is kept (relax_hpc.recipe.paths).

A site profile is a TOML file with the keys that all recipes at a site share (account, partition, modules). It is laid
under the recipe: the recipe wins, and --set wins over both. It is read where a run is made, never where one is resumed.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import tomli_w
from pydantic import ValidationError

from relax_hpc.recipe.describe import alias, mark, toml
from relax_hpc.recipe.overrides import leaves, override
from relax_hpc.recipe.paths import absolute
from relax_hpc.recipe.problems import RecipeError, explain
from relax_hpc.recipe.schema import Recipe
from relax_hpc.recipe.tables.run import NAME_PATTERN
from relax_hpc.recipe.tables.table import Table

Where = Literal["default", "site", "file", "--set"]
SITE_VARIABLE = "RELAX_HPC_SITE"
SITE_FILE = Path("~/.config/relax_hpc/site.toml")


class Row(NamedTuple):
    """One key of a resolved recipe."""

    key: str
    value: str
    """The value in TOML; "(absent)" for a key or table that is not there."""
    where: Where


class Change(NamedTuple):
    """A key that differs between two recipes; None where it is absent."""

    key: str
    old: Any
    new: Any


def load_recipe(path: str | Path, overrides: Sequence[str] = (), site: Path | None = None) -> Recipe:
    """Load the recipe in the TOML file at `path` over the profile at `site`, with overrides "a.b=c". Raises
    RecipeError."""
    data = _over(_read(site) if site else {}, _read(Path(path)))
    _where_it_is(data, Path(path).absolute().parent)
    given = override(data, overrides)
    where = f"{path} (over the site profile {site})" if site else str(path)
    return _check(data, where, Path(path).parent.resolve(), given)


def _where_it_is(data: dict[str, Any], folder: Path) -> None:
    """Set name and root of a run's own recipe by the directory that it lies in now: the run may have been moved, or
    copied."""
    if (folder / "run.json").is_file():
        data["run"] = {**data.get("run", {}), "root": str(folder.parent)}
        if re.match(NAME_PATTERN, folder.name):
            data["run"]["name"] = folder.name


def site_file(given: str | Path | None = None) -> Path | None:
    """Find the site profile in force: the given one, $RELAX_HPC_SITE, or the one in ~/.config; None where there is
    none."""
    named = str(given) if given is not None else os.environ.get(SITE_VARIABLE, "")
    if not named:
        path = SITE_FILE.expanduser()
        return path if path.is_file() else None
    path = Path(named).expanduser().absolute()
    if not path.is_file():
        by = "--site" if given is not None else f"${SITE_VARIABLE}"
        raise RecipeError(
            f"{by}: no site profile at '{path}': name a TOML file with the site's defaults, or leave it out"
        )
    return path


def dump_recipe(recipe: Recipe) -> str:
    """Write a recipe as TOML text that loads back to an equal recipe."""
    return tomli_w.dumps(recipe.model_dump(mode="json", by_alias=True, exclude_none=True))


def sources(recipe: Recipe, path: str | Path, overrides: Sequence[str] = (), site: Path | None = None) -> list[Row]:
    """List every key of a recipe, loaded with `load_recipe` from the same arguments: its value, and where that comes
    from."""
    data, profile = _read(Path(path)), _read(site) if site else {}
    in_site, own = dict(leaves(profile)), dict(leaves(data))
    whole = _over(profile, data)
    given = override(whole, overrides)
    in_file = {key for key, _ in leaves(whole) if key in own}

    def where(key: str) -> Where:
        if key in given:
            return "--set"
        if key in in_file:
            return "file"
        return "site" if key in in_site else "default"

    return [Row(key, toml(value), where(key)) for key, value in leaves(_plain(recipe))]


def differences(old: Recipe, new: Recipe) -> list[Change]:
    """List the keys in which two recipes differ."""
    before, after = dict(leaves(_plain(old))), dict(leaves(_plain(new)))
    return [Change(k, before.get(k), after.get(k)) for k in {**before, **after} if before.get(k) != after.get(k)]


def change_on_resume(recipe: Recipe, overrides: Sequence[str]) -> Recipe:
    """Apply the changes that a person makes when resuming a run to its recipe. Repeating a value that is in force
    changes nothing.

    Raises RecipeError for a change of a key that would make it another run; the message names the keys that may change.
    """
    data = recipe.model_dump(mode="json", by_alias=True, exclude_none=True)
    given = override(data, overrides)
    changed = _check(data, "--set", Path.cwd(), given)
    allowed = resumable(recipe)
    refused = [change for change in differences(recipe, changed) if not _within(change.key, allowed)]
    if refused:
        listed = list(dict.fromkeys("[slurm]" if key.split(".")[0] == "slurm" else key for key in allowed))
        shown = ", ".join(f"{c.key} ({toml(c.old)} -> {toml(c.new)})" for c in refused)
        raise RecipeError(
            f"a resumed run cannot change {shown}: it would be another run; start one from a checkpoint with --fork. "
            f"What can change on resume: {', '.join(listed)}"
        )
    return changed


def resumable(recipe: Recipe) -> list[str]:
    """List the keys of this recipe that a resumed run may change."""
    return [key for key, field_is_resumable in _marked(recipe, "") if field_is_resumable]


def _within(key: str, allowed: list[str]) -> bool:
    """Return True if `key` is one of `allowed`, or lies in one that is a table."""
    return any(key == other or key.startswith(f"{other}.") for other in allowed)


def _over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Lay `above` over `below`, table by table."""
    both = {
        k: _over(below[k], v) if isinstance(v, dict) and isinstance(below.get(k), dict) else v for k, v in above.items()
    }
    return {**below, **both}


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        return tomllib.loads(text)
    except OSError as error:
        raise RecipeError(f"recipe '{path}' cannot be read: {error.strerror} (seen from {Path.cwd()})") from error
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path}: not UTF-8 text (byte {error.start}): a recipe is a TOML file") from error
    except tomllib.TOMLDecodeError as error:
        problem = str(error).replace("at end of document", f"at the end, line {len(text.splitlines())}")
        raise RecipeError(f"{path}: not TOML: {problem}") from error


def _check(data: dict[str, Any], where: str, folder: Path, given: set[str]) -> Recipe:
    """Check data with the strict models, through JSON: no number is made from text, no integer from `true`."""
    try:
        recipe = Recipe.model_validate_json(json.dumps(data, default=str), strict=True, by_alias=True, by_name=False)
    except ValidationError as error:
        raise explain(error, where) from None
    return absolute(recipe, folder, given)


def _plain(recipe: Recipe) -> dict[str, Any]:
    plain: dict[str, Any] = recipe.model_dump(mode="json", by_alias=True)
    return plain


def _marked(table: Table, prefix: str) -> Iterator[tuple[str, bool]]:
    for name, field in type(table).model_fields.items():
        value, key = getattr(table, name), prefix + alias(name, field)
        if isinstance(value, Table):
            yield from _marked(value, key + ".")
        elif isinstance(value, list) and value and isinstance(value[0], Table) and not mark(field, "resume"):
            for index, item in enumerate(value):
                yield from _marked(item, f"{key}.{index}.")
        else:
            yield key, mark(field, "resume")
