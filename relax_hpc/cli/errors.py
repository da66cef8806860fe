"""What a person can cause ends as one line that says the fix, not as a traceback."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer

from relax_hpc.registry import RegistryError
from relax_hpc.run_dir import RunError, explain_os

EXIT_USER_ERROR = 2
ANALYSIS_PACKAGES = frozenset({"pandas", "pyarrow", "matplotlib", "jinja2"})
"""What the extra `analysis` brings."""


@contextmanager
def friendly() -> Iterator[None]:
    """Print errors that a person can mend as `error: …` on stderr and exit with 2; others keep their traceback."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in ANALYSIS_PACKAGES:
            raise
        fail(f"this command needs '{error.name}': pip install 'relax-hpc[analysis]'")
    except BrokenPipeError:  # of `| head`: click ends quietly
        raise
    except OSError as error:  # somebody else's run, a full disk, a file system that is read-only
        fail(explain_os(error))
    except Exception as error:
        if not isinstance(error, _mendable()):
            raise
        fail(str(error))


def fail(message: str) -> NoReturn:
    """Say what is wrong and exit."""
    typer.secho("error: ", fg="red", bold=True, nl=False, err=True)
    typer.echo(message, err=True)
    raise typer.Exit(EXIT_USER_ERROR) from None


def warn(message: str) -> None:
    """Say what goes on all the same, but may be meant otherwise."""
    typer.secho("warning: ", fg="yellow", bold=True, nl=False, err=True)
    typer.echo(message, err=True)


def _mendable() -> tuple[type[Exception], ...]:
    # Importing the recipe package costs more than most commands; where nobody has, nobody raised its error.
    recipe = sys.modules.get("relax_hpc.recipe")
    return (RunError, RegistryError, *([recipe.RecipeError] if recipe is not None else []))
