"""Resolve names in recipes to objects: built-ins by their short name, a user's own by MODULE:NAME or FILE.py:NAME."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import math
import reprlib
import struct
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from numbers import Real
from pathlib import Path
from typing import Any

from relax_hpc.files.errors import RunError

MEND = "mend it and go on with `relax-hpc run RUN_DIR --code new`, which takes the edited file into the run"
"""Advice at the end of error messages about a user's code: how its run is continued."""
ORIGINS = "origins.json"
"""Name of the file, beside the folder with copies of a user's files, that says where they came from."""
SAID_CHARACTERS = 1000
"""Characters that are kept of an exception's message."""
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80


class RegistryError(Exception):
    """A name in the recipe does not lead to a usable object; the message says what would."""


def resolve(kind: str, name: str, builtin: Mapping[str, Any]) -> Any:
    """Find the object called `name`: a built-in, or `MODULE:NAME`, or `FILE.py:NAME`. Raises RegistryError naming the
    built-ins, or the module, file or attribute that is missing."""
    if name in builtin:
        return builtin[name]
    where, _, attribute = name.rpartition(":")
    if not where or not attribute:
        raise RegistryError(f"unknown {kind} '{name}': use one of {sorted(builtin)}, or MODULE:NAME, or FILE.py:NAME")
    module = _from_file(kind, Path(where)) if where.endswith(".py") else _from_module(kind, where)
    if not hasattr(module, attribute):
        public = [n for n in vars(module) if not n.startswith("_")]
        raise RegistryError(f"{kind} '{name}': {where} has no '{attribute}'; it has {public}")
    return getattr(module, attribute)


def check_call(kind: str, name: str, function: Callable[..., Any], *args: str, **options: Any) -> None:
    """Check, before anything starts, that `function` takes positional arguments called `args`, and these options. Raises
    RegistryError."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        if not callable(function):
            raise RegistryError(f"{kind} '{name}' is a {type(function).__name__}, not something to call") from None
        return
    try:
        signature.bind(*args, **options)
    except TypeError as error:
        wanted = ", ".join([*args, *(f"{k}={v!r}" for k, v in options.items())])
        raise RegistryError(f"{kind} '{name}{signature}' cannot be called as ({wanted}): {error}") from None


@contextlib.contextmanager
def users_code(kind: str, name: str, *passed_on: type[Exception]) -> Iterator[None]:
    """Turn errors of the user's code called `name` into a RunError that says where they arose, since starting the role
    again would only raise them again. passed_on: exceptions that are raised unchanged."""
    try:
        yield
    except RunError:
        raise
    except (Exception, SystemExit) as error:
        if isinstance(error, passed_on):
            raise
        # behind this function and its caller
        raise RunError(f"{kind} '{name}' raised {said(error, behind=2)}; {MEND}") from error


def said(error: BaseException, behind: int) -> str:
    """Describe an exception of a user's code and where it arose there, behind the first `behind` frames, which are ours."""
    inside = traceback.extract_tb(error.__traceback__)[behind:]
    at = next((frame for frame in reversed(inside) if frame.filename == inside[0].filename), None)
    where = f" ({at.filename}:{at.lineno}, in {at.name})" if at else ""
    # It stands in shards and ledger: no lone surrogates, and no pages.
    return f"{type(error).__name__}: {error}"[:SAID_CHARACTERS].encode(errors="replace").decode() + where


class WrongValue(ValueError):
    """A user's code returned a value that is not allowed."""


def finite_number(name: str, value: object) -> float:
    """Return a number that a user's code returned as `name`. Raises WrongValue unless it is finite in 32 bits."""
    if isinstance(value, Real):
        with contextlib.suppress(OverflowError):
            number = float(value)
            if math.isfinite(struct.unpack("f", struct.pack("f", number))[0]):
                return number
    raise WrongValue(f"returned {shown(value)} as {name}, expected a finite number (of 32 bits)")


def finite_numbers(values: Mapping[Any, object]) -> dict[str, float]:
    """Return numbers that become columns under their names. Raises WrongValue."""
    return {_column(name): finite_number(f"'{name}'", value) for name, value in values.items()}


def _column(name: object) -> str:
    # It becomes an HDF5 dataset in a shard, and a column of tables.
    if isinstance(name, str) and name.isprintable() and name.strip(".") and "/" not in name:
        return name
    raise WrongValue(f"returned a value under the name {shown(name)}, expected printable text without '/'")


def shown(value: object) -> str:
    """Describe `value` and its type briefly, whatever it is."""
    return f"{_SHORT.repr(value)} ({type(value).__name__})"


def _from_module(kind: str, where: str) -> Any:
    try:
        return importlib.import_module(where)
    except ImportError as error:
        raise RegistryError(f"{kind}: cannot import '{where}': {error}; is it installed in {sys.prefix}?") from error
    except Exception as error:
        raise RegistryError(f"{kind}: '{where}' does not load: {type(error).__name__}: {error}") from error


def _from_file(kind: str, path: Path) -> Any:
    if not path.is_file():
        raise RegistryError(f"{kind}: no file '{path}' (seen from {Path.cwd()})")
    name = f"relax_hpc_user_{path.stem}_{abs(hash(path.resolve())):x}"
    if name in sys.modules:
        return sys.modules[name]
    folder = path.resolve().parent
    if str(folder) not in sys.path:
        # The modules beside it. A run's copies come first, before the files that they were copied from; a folder of which
        # nothing is known comes last, so that what happens to lie in it stands in nobody's way.
        sys.path.insert(0 if (folder.parent / ORIGINS).is_file() else len(sys.path), str(folder))
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise RegistryError(f"{kind}: '{path}' is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise RegistryError(f"{kind}: '{path}' does not load: {type(error).__name__}: {error}{_hint(error)}") from error
    return module


def _hint(error: Exception) -> str:
    if not isinstance(error, FileNotFoundError):
        return ""
    return (
        ". A run takes along the file and the Python modules beside it that it imports, no other files: name those by an absolute "
        "path, for roles run on other nodes and in other directories"
    )
