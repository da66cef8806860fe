"""`relax-hpc eval`: scores of a checkpoint or a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from relax_hpc.cli.errors import friendly, warn
from relax_hpc.cli.options import Sets, Site, option, path_argument, path_option

if TYPE_CHECKING:
    from relax_hpc.launch.evaluate import Evaluated


Asked = Annotated[
    Optional[Path],
    path_argument(metavar="[RECIPE]", help="What is asked, and how it is generated. [dim]default: the run's own[/dim]"),
]
Output = Annotated[
    Optional[Path],
    path_option(
        "--output",
        "-o",
        help="The directory to make. [dim]default: RUN/evaluated/step-…, or run.root/eval-MODEL[/dim]",
    ),
]


def evaluate(
    target: Annotated[Path, path_argument(metavar="RUN|MODEL", help="A run's directory, or a Hugging Face model's.")],
    recipe: Asked = None,
    sets: Sets = [],  # noqa: B006
    site: Site = None,
    step: Annotated[Optional[int], option(help="Which checkpoint of the run; the newest by default.")] = None,
    output: Output = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the scores as JSON.")] = False,
) -> None:
    """Score a run's checkpoint, or a model, on the evaluation prompts of a recipe: its held-out share and [bold]evaluation.source[/bold]s.

    One engine of this machine generates them, as a worker of a run would; `relax-hpc shards` and `report` open the directory that it makes. The same command again goes on with what is missing. A run may be going on meanwhile.

    [dim]relax-hpc eval runs/gsm --set evaluation.samples=16 --set evaluation.temperature=0.6[/dim]
    [dim]relax-hpc eval models/Qwen3-4B recipes/math.toml --json[/dim]
    """  # fmt: skip
    import json

    from rich.console import Console
    from rich.progress import Progress

    from relax_hpc.roles.__main__ import prepare_cpu

    prepare_cpu()
    errors = Console(stderr=True)
    with friendly(), Progress(console=errors, transient=True, disable=not errors.is_terminal) as progress:
        from relax_hpc.launch.evaluate import evaluate as generate

        task = progress.add_task("evaluating", total=None)
        done = generate(
            target, recipe, sets, step=step, output=output, site=site,
            begin=lambda done, requests: progress.update(task, completed=done, total=requests),
            advance=lambda: progress.advance(task),
        )  # fmt: skip
    if done.seen:
        warn(done.seen)
    if as_json:
        typer.echo(json.dumps({"folder": str(done.folder), "step": done.step, **done.score.to_json()}, indent=1))
    else:
        _print(done)


def _print(done: Evaluated) -> None:
    from rich import box
    from rich.markup import escape
    from rich.table import Column, Table

    from relax_hpc.cli.tables import wide_console

    console, score = wide_console(), done.score
    passes = list(score.all.pass_at)
    numbers = (
        "prompts",
        "samples",
        "reward",
        "95% interval",
        *(f"pass@{k}" for k in passes),
        "length",
        "truncated",
        "failed",
    )
    columns = [Column("source", no_wrap=True), *(Column(name, justify="right") for name in numbers)]
    table = Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False)
    for one in [*score.sources, *([score.all] if len(score.sources) > 1 else [])]:
        table.add_row(
            escape(one.name), str(one.prompts), str(one.samples), f"{one.score:.3f}", f"{one.low:.3f} – {one.high:.3f}",
            *(f"{one.pass_at.get(k, float('nan')):.3f}" for k in passes), f"{one.length_mean:.1f}", f"{one.truncated:.1%}", str(one.failed),
            end_section=one is score.sources[-1],
        )  # fmt: skip
    console.print(table)
    how = dict.fromkeys(one.interval for one in score.sources)
    console.print(
        f"intervals: {', '.join(how)}; answers: [bold]relax-hpc shards ls {escape(str(done.folder))}[/bold]",
        soft_wrap=True,
    )
