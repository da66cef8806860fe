"""`relax-hpc plan`: how large a run is, and whether it fits, before anything is sent."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from relax_hpc.cli.errors import friendly
from relax_hpc.cli.options import RecipeFile, Sets, Site, option, path_option

if TYPE_CHECKING:
    from relax_hpc.recipe.schema import Recipe

DOES_NOT_FIT = 1


Config = Annotated[
    Optional[Path],
    path_option(
        help="The model's config.json, where model.path is on another machine. [dim]default: models/NAME/config.json beside the recipe[/dim]"
    ),
]
Bandwidth = Annotated[
    float,
    typer.Option(
        metavar="GB/S",
        help="How fast the trainer's process 0 sends weights, or the file system takes and gives them.",
        min=0.001,
    ),
]
PromptTokens = Annotated[
    Optional[int], option(help="Tokens of a prompt. [dim]default: 256, or what the context has room for[/dim]", min=1)
]
AnswerTokens = Annotated[
    Optional[int], option(help="Tokens of an answer. [dim]default: the longest there can be[/dim]", min=1)
]


def plan(
    path: RecipeFile,
    sets: Sets = [],  # noqa: B006
    site: Site = None,
    config: Config = None,
    device_memory: Annotated[float, typer.Option(metavar="GIB", help="Memory of a device.", min=0.1)] = 80.0,
    bandwidth: Bandwidth = 2.0,
    prompt_tokens: PromptTokens = None,
    answer_tokens: AnswerTokens = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print numbers as JSON: bytes, tokens, seconds.")] = False,
) -> None:
    """Say what a run takes: processes, nodes and GPUs, memory of each, bytes a step; from the recipe and the model's config.json alone.

    Nothing is made, loaded or asked for; but files of prompts whose rows may be left out are read, and those counted. The exit code is 1 when something does not fit, and what would help is said.

    [dim]relax-hpc plan recipes/qwen3-4b-grpo.toml[/dim]
    [dim]relax-hpc plan recipe.toml --set trainer.parallel.tensor=4 --device-memory 40[/dim]
    """  # fmt: skip
    import json

    from relax_hpc.cli.tables import wide_console
    from relax_hpc.cli.tables.plan_tables import show
    from relax_hpc.planning.sizing.estimate import GIB, Asked, estimate
    from relax_hpc.planning.sizing.model import shape_of
    from relax_hpc.recipe import load_recipe, site_file
    from relax_hpc.recipe.tables.source import left_out

    with friendly():
        recipe = load_recipe(path, sets, site_file(site))
        shape, where = shape_of(recipe.model, path, config)
        made = estimate(recipe, shape, Asked(device_memory * GIB, bandwidth * 1e9, prompt_tokens, answer_tokens))
        rows, not_counted = _rows(recipe)
    if as_json:
        typer.echo(
            json.dumps({"config": where, **made.to_json(), "rows": rows, "rows_not_counted": not_counted}, indent=1)
        )
    else:
        show(
            made,
            where,
            [f"rows left out were not counted: {not_counted}"] if not_counted else left_out(rows),
            wide_console(),
        )
    if made.problems:
        raise typer.Exit(DOES_NOT_FIT)


def _rows(recipe: Recipe) -> tuple[dict[str, dict[str, int]], str]:
    """How many rows of each source are left out; and why they could not be counted, as where files or tokenizer are on another machine."""
    from relax_hpc.files.errors import RunError
    from relax_hpc.launch.child import count_rows

    try:
        return count_rows(recipe), ""
    except RunError as error:
        return {}, str(error)
