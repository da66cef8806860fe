"""The command line: `relax-hpc COMMAND --help` says what each one does. Heavy imports wait until a command needs them."""

from __future__ import annotations

from typing import Annotated

import typer

from relax_hpc import __version__
from relax_hpc.cli import doctor, environments, evaluate, plan, report, run, scale, shards, simulate, status, submit
from relax_hpc.cli.errors import App

app = App(
    name="relax-hpc",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_show_locals=False,
    help="""Reinforcement-learning post-training where a run is a directory.

    A [bold]recipe[/bold] (TOML) says all of a run. Begin with [bold]relax-hpc run recipes/quickstart.toml[/bold].
    """,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"relax-hpc {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


app.command("run")(run.run)
app.command("submit")(submit.submit)
app.command("render")(submit.render)
app.command("plan")(plan.plan)
app.command("simulate")(simulate.simulate)
app.command("scale")(scale.scale)
app.command("doctor")(doctor.doctor)
app.command("status")(status.status)
app.command("watch")(status.watch)
app.command("logs")(status.logs)
app.command("stop")(status.stop)
app.command("recipe")(status.recipe)
app.add_typer(shards.app)
app.add_typer(environments.app)
app.command("eval")(evaluate.evaluate)
app.command("report")(report.report)
app.command("trace")(report.trace)
app.command("track")(report.track)
app.command("export")(status.export)
app.command("convert")(status.convert)
