"""Errors as people see them: one that they can mend is one line with the fix; for any other the traceback goes into a
file.
"""

from __future__ import annotations

import os
import platform
import shlex
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import typer

from relax_hpc import __version__
from relax_hpc.files.errors import RunError, explain_os
from relax_hpc.files.run_dir import RunDir
from relax_hpc.registry import RegistryError

EXIT_USER_ERROR = 2
EXIT_UNEXPECTED = os.EX_SOFTWARE
ANALYSIS_PACKAGES = frozenset({"pandas", "pyarrow", "matplotlib", "jinja2"})
"""Packages that the extra `analysis` installs."""


class App(typer.Typer):
    """The group of all commands; an unforeseen error, too, ends in a few lines."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().__call__(*args, **kwargs)
        except Exception as error:
            _unexpected(error)


@contextmanager
def friendly(elsewhere: str = "") -> Iterator[None]:
    """Print errors that a person can mend as `error: …` on stderr and exit with 2; others are left to the App.

    elsewhere: an option that makes the command write to another place.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in ANALYSIS_PACKAGES:
            raise
        fail(f"this command needs '{error.name}': pip install 'relax-hpc[analysis]'")
    except BrokenPipeError:  # of `| head`: click ends quietly
        raise
    except OSError as error:  # somebody else's run, a full disk, a file system that is read-only
        fail(explain_os(error) + (f"; {elsewhere}" if elsewhere else ""))
    except Exception as error:
        if not isinstance(error, _mendable()):
            raise
        fail(str(error))


def fail(message: str) -> NoReturn:
    """Print what is wrong and exit."""
    typer.secho("error: ", fg="red", bold=True, nl=False, err=True)
    typer.echo(message, err=True)
    raise typer.Exit(EXIT_USER_ERROR) from None


def warn(message: str) -> None:
    """Print a warning: the command goes on, but something may be meant otherwise."""
    typer.secho("warning: ", fg="yellow", bold=True, nl=False, err=True)
    typer.echo(message, err=True)


def _unexpected(error: Exception) -> NoReturn:
    """Say what was being done, what happened, and where the traceback is."""
    command = shlex.join(["relax-hpc", *sys.argv[1:]])
    said = f"{type(error).__name__}: {error}".splitlines()[0]
    about = f"command: {command}\nfolder: {Path.cwd()}\nrelax-hpc {__version__}, Python {sys.version}, {platform.platform()}\n\n"
    text = about + "".join(traceback.format_exception(error))
    typer.secho("unexpected error: ", fg="red", bold=True, nl=False, err=True)
    typer.echo(f"{said}, in `{command}`", err=True)
    if (written := _write_traceback(text)) is None:
        typer.echo(text, err=True)
        typer.echo("the traceback is above, for it could not be written to a file; ", nl=False, err=True)
    else:
        typer.echo(f"the traceback is in {written}; ", nl=False, err=True)
    typer.echo(
        "this is a bug of relax-hpc or of a library: please report it with the traceback. What the run has committed is safe, and the "
        "same command may be given again",
        err=True,
    )
    sys.exit(EXIT_UNEXPECTED)


def _write_traceback(text: str) -> Path | None:
    """Write it into the logs of the run that the command line names, else the temporary folder; return its path."""
    runs = [run.logs for word in sys.argv[1:] if _is_run(run := RunDir(word))]
    name = f"error-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.txt"
    for folder, begin in [*((logs, "") for logs in runs), (Path(tempfile.gettempdir()), "relax-hpc-")]:
        path = folder / f"{begin}{name}"
        try:
            with path.open("x") as file:
                file.write(text)
        except OSError:  # somebody else's run, a full disk
            continue
        return path
    return None


def _is_run(run: RunDir) -> bool:
    try:
        return run.exists
    except OSError:
        return False


def _mendable() -> tuple[type[Exception], ...]:
    # Importing the recipe package costs more than most commands; where nobody has, nobody raised its error.
    recipe = sys.modules.get("relax_hpc.recipe")
    return (RunError, RegistryError, *([recipe.RecipeError] if recipe is not None else []))
