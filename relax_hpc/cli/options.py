"""Arguments and options that several commands take, and short ways to declare those of one."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Optional

import typer

option = partial(typer.Option, show_default=False)
"""An option whose default is nothing, or is told by its help."""
path_option = partial(option, readable=False)
path_argument = partial(typer.Argument, show_default=False, readable=False)
"""A path whose command says itself what is wrong with it."""

Target = Annotated[Path, path_argument(help="A recipe (TOML) or a run's directory.")]
RecipeFile = Annotated[Path, path_argument(metavar="RECIPE", help="The recipe (TOML).")]
RunPath = Annotated[Path, path_argument(help="The run's directory.")]
Sets = Annotated[
    list[str],
    typer.Option("--set", "-s", metavar="KEY=VALUE", help="Override a recipe key, such as run.steps=500. Repeatable."),
]
Site = Annotated[
    Optional[Path],
    path_option(
        "--site",
        metavar="FILE",
        help="Site profile laid under the recipe. [dim]default: $RELAX_HPC_SITE, ~/.config/relax_hpc/site.toml[/dim]",
    ),
]
Code = Annotated[
    Optional[str],
    option(
        metavar="new",
        help="Of a run that goes on: take your files (rewards, filters, …) as they are now; else it goes on with its own copies. Failed groups that no step has taken yet are scored again.",
    ),
]
Redo = Annotated[
    Optional[str],
    option(
        metavar="score|generate",
        help="Of a run that goes on: failed groups that no step has taken yet are scored, or generated, again.",
    ),
]
LocalRootOk = Annotated[
    bool,
    typer.Option("--local-root-ok", help="run.root is shared by the nodes although it looks local, as /tmp does."),
]
