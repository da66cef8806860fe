"""The user's own files in a run: copied when it is made, and again when a person says so. A run loads nothing but its copies.

    RUN/snapshot/user/v0/0/rewards.py, helpers.py   files of one folder of the user's, with the modules beside them that they import
    RUN/snapshot/user/v0/origins.json               where each came from, and its checksum
    RUN/recipe.toml                                 source.0.reward = "snapshot/user/v0/0/rewards.py:judge", seen from the run: it may be moved

Copies are never changed: edited files become v1, v2, …, and the recipe names those.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import xxhash

from relax_hpc.files.errors import RunError
from relax_hpc.files.publish import read_json, to_json, write_file
from relax_hpc.files.run_dir import RunDir
from relax_hpc.recipe import Recipe, with_files
from relax_hpc.registry import ORIGINS

Modules = dict[str, list[Path]]
"""Name -> Python files, for the modules and packages beside a file."""


class Edited(NamedTuple):
    """A file of the user's that differs from its copy in the run: checksums (XXH3-128) of both, None for a missing
    one."""

    file: str
    old: str | None
    new: str | None


def copy(recipe: Recipe, run: RunDir, number: int = 0) -> Recipe:
    """Copy the files that `recipe` names, and what they import beside them, as version `number`; return the recipe that
    names the copies.

    Raises RunError if a module beside them is not the one that Python would import.
    """
    wanted = {file: _beside(file) for file in sorted(map(Path, _files(recipe))) if file.is_file()}
    _refuse_clashes(wanted)
    folders = list(dict.fromkeys(file.parent for file in wanted))
    version = run.snapshot / "user" / f"v{number}"
    in_copy: Callable[[Path, Path], Path] = lambda path, file: Path(
        str(folders.index(file.parent)), path.relative_to(file.parent)
    )
    sources = {
        in_copy(path, file): path
        for file, modules in wanted.items()
        for path in [file, *(p for ps in modules.values() for p in ps)]
    }
    for name, path in sources.items():
        (version / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, version / name)
    if sources:
        origins = {
            str(name): {"from": _origin(path), "checksum": _checksum(version / name)} for name, path in sources.items()
        }
        write_file(version / ORIGINS, to_json(origins))
    return with_files(
        recipe, lambda file: str(version / in_copy(Path(file), Path(file))) if Path(file) in wanted else file
    )


def seen_from(run: RunDir, recipe: Recipe) -> Recipe:
    """Return the recipe for RUN/recipe.toml, in which the run's copies are named relative to its directory."""
    relative = lambda file: os.path.relpath(file, run.root) if Path(file).is_relative_to(run.snapshot) else file
    return with_files(recipe, relative)


def edited(run: RunDir, recipe: Recipe) -> list[Edited]:
    """Return the user's files that differ from the run's copies; missing files are not looked at."""
    origins = _origins(run, recipe).values()
    now = {path: _checksum(Path(path)) for path in (origin["from"] for origin in origins) if Path(path).is_file()}
    return [
        Edited(origin["from"], origin["checksum"], now[origin["from"]])
        for origin in origins
        if now.get(origin["from"], origin["checksum"]) != origin["checksum"]
    ]


def copy_edited(run: RunDir, recipe: Recipe) -> tuple[Recipe, list[Edited]]:
    """Copy the user's files as they are now. Return the recipe that names the new copies, and what differs from the old
    ones.

    Raises RunError if there are no such files, some are missing, or the run does not know where its copies came from.
    """
    copies = {file for file in _files(recipe) if Path(file).is_relative_to(run.snapshot)}
    if not copies:
        raise RunError(
            "--code new: this run has no copy of code of yours, for its recipe names no FILE.py:NAME; leave it out"
        )
    origins = _origins(run, recipe)
    unknown, gone = (
        copies - origins.keys(),
        [o["from"] for f, o in origins.items() if f in copies and not Path(o["from"]).is_file()],
    )
    if unknown:
        raise RunError(
            f"--code new: the run does not say where {sorted(unknown)} came from: edit these copies, and leave it out"
        )
    if gone:
        raise RunError(f"--code new: {gone} are gone, which the run's copies came from: put them back, or leave it out")
    number = 1 + max(int(folder.name[1:]) for folder in (run.snapshot / "user").glob("v[0-9]*"))
    new = copy(with_files(recipe, lambda file: origins[file]["from"] if file in copies else file), run, number)
    before, after = ({o["from"]: o["checksum"] for o in of.values()} for of in (origins, _origins(run, new)))
    changed = [Edited(f, before.get(f), after.get(f)) for f in sorted(before | after) if before.get(f) != after.get(f)]
    return new, changed


def _files(recipe: Recipe) -> set[str]:
    """Return the files that a recipe names as FILE.py:NAME."""
    found: list[str] = []
    with_files(recipe, lambda file: found.append(file) or file)  # type: ignore[func-returns-value]
    return set(found)


def _origins(run: RunDir, recipe: Recipe) -> dict[str, dict[str, str]]:
    """Return copy -> where it came `from`, and its `checksum`, for the copies that `recipe` names and those beside
    them."""
    versions = {Path(file).parents[1] for file in _files(recipe) if Path(file).is_relative_to(run.snapshot)}
    return {
        str(version / name): origin
        for version in sorted(versions)
        for name, origin in (read_json(version / ORIGINS) or {}).items()
    }


def _origin(file: Path) -> str:
    """Return where a file came from: for another run's copy (a fork's is one) its origin, else the file itself."""
    for folder in file.parents[1:]:
        if (folder / ORIGINS).is_file():
            return str(read_json(folder / ORIGINS).get(str(file.relative_to(folder)), {}).get("from", file))
    return str(file)


def _beside(file: Path) -> Modules:
    """Return the modules in the folder of `file` that it imports, anywhere in it, and those that they import."""
    found: Modules = {}
    todo = [file]
    while todo:
        for name in _imports(todo.pop()) - found.keys():
            module, package = file.parent / f"{name}.py", file.parent / name
            if module.is_file():
                found[name] = [module]
            elif (package / "__init__.py").is_file() or (package.is_dir() and _elsewhere(name, package) is None):
                found[name] = sorted(package.rglob("*.py"))
            todo += found.get(name, [])
    return found


def _imports(file: Path) -> set[str]:
    """Return the first parts of the names that a file imports; none if it is not Python, which is refused where it is
    loaded."""
    try:
        nodes = list(ast.walk(ast.parse(file.read_bytes())))
    except (SyntaxError, ValueError):
        return set()
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level]
    return {name.partition(".")[0] for name in names}


def _refuse_clashes(wanted: dict[Path, Modules]) -> None:
    """Raise RunError if a module beside a file has the name of another that would be imported in its place."""
    seen: dict[str, Path] = {}
    for file, modules in wanted.items():
        for name, paths in modules.items():
            here = paths[0] if paths == [file.parent / f"{name}.py"] else file.parent / name
            other = _elsewhere(name, here) or str(seen.setdefault(name, here))
            if other != str(here):
                raise RunError(
                    f"'{file}' imports '{name}', which both '{here}' and '{other}' are: rename the one beside it"
                )


def _elsewhere(name: str, here: Path) -> str | None:
    """Return where Python finds a module, if not `here` (its file, or its package's folder); None if it is there, or
    found nowhere."""
    try:
        spec = importlib.util.find_spec(name)
    except ValueError:  # __main__
        return None
    if spec is None:
        return None
    places = [place for place in (spec.origin, *(spec.submodule_search_locations or ())) if place]
    return None if any(Path(place).is_relative_to(here) for place in places) else str(places[0])


def _checksum(path: Path) -> str:
    return xxhash.xxh3_128_hexdigest(path.read_bytes())
