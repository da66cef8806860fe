"""`relax-hpc environments try`: an episode played by hand, or by a script."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from relax_hpc.cli.errors import friendly
from relax_hpc.cli.options import Sets, Site, option, path_option

if TYPE_CHECKING:
    from relax_hpc.environments import Turn
    from relax_hpc.launch.try_environment import Episode

app = typer.Typer(
    name="environments",
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Look at environments: what answers the model's turns in a rollout.",
)


@app.callback()
def environments() -> None:
    pass


@app.command("try")
def try_(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME|RECIPE",
            show_default=False,
            help="An environment, as `environment` names it in a recipe, or a recipe (TOML), one of whose rows is the prompt.",
        ),
    ],
    sets: Sets = [],  # noqa: B006
    site: Site = None,
    source: Annotated[int, typer.Option(help="Of a recipe: which source.", min=0)] = 0,
    row: Annotated[int, typer.Option(help="Of a recipe: which row of the source.", min=0)] = 0,
    prompt: Annotated[str, typer.Option(help="Of a NAME: the prompt's text.", show_default=False)] = "",
    answer: Annotated[Optional[str], option(help="Of a NAME: the prompt's reference answer.")] = None,
    metadata: Annotated[str, typer.Option(metavar="JSON", help="Of a NAME: further columns of the row.")] = "{}",
    options: Annotated[str, typer.Option(metavar="JSON", help="Of a NAME: its environment_options.")] = "{}",
    sandbox: Annotated[str, typer.Option(help="Of a NAME: the kind of sandbox.")] = "none",
    script: Annotated[
        Optional[Path], path_option(help="Answers to give, a line each, in place of a person's at the terminal.")
    ] = None,
) -> None:
    """Play one episode of an environment, without a model: you answer in its place, a line a turn; Ctrl-D ends it.

    The environment runs as in a rollout: in a process of its own, in its sandbox, with its time limits. What fails a sample there is told here.

    [dim]relax-hpc environments try calculator --prompt "What is 12 * 7?"[/dim]
    [dim]relax-hpc environments try examples/environment.toml --row 3[/dim]
    [dim]relax-hpc environments try my_env.py:Shop --options '{"items": 3}' --script answers.txt[/dim]
    """  # fmt: skip
    from rich.console import Console

    console = Console()
    with friendly():
        from relax_hpc.launch.try_environment import of_name, of_recipe, play, score

        if name.endswith(".toml"):
            from relax_hpc.recipe import load_recipe, site_file

            episode = of_recipe(load_recipe(Path(name), sets, site_file(site)), source, row)
        else:
            about, given = _object("--metadata", metadata), _object("--options", options)
            episode = of_name(name, given, sandbox, prompt, answer, about)
        _begin(console, episode)
        said: list[str] = []
        turns = play(episode, _answers(console, script, said), lambda turn: _tell(console, turn))
        reward = score(episode, said, turns)
    ended = "done" if turns and turns[-1].done else "not done: no answer is left"
    console.print(f"[bold]{ended}[/] after {len(turns)} turns" + ("" if reward is None else f", reward {reward:g}"))
    for column, value in (turns[-1].extra if turns else {}).items():
        console.print(f"  extra/{column} {value:g}")


def _object(which: str, text: str) -> dict[str, Any]:
    import json

    from relax_hpc.files.errors import RunError

    try:
        found = json.loads(text)
    except ValueError as error:
        raise RunError(f"{which} '{text}' is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise RunError(f"{which} '{text}': expected an object, such as '{{\"key\": 1}}'")
    return found


def _answers(console: Any, script: Path | None, said: list[str]) -> Iterator[str]:
    """Yield the answers, and note them in `said`: the script's lines, or what is typed."""
    lines = iter(script.read_text().splitlines()) if script else _typed(console)
    for line in lines:
        said.append(line)
        if script or not sys.stdin.isatty():
            console.print("[bold green]model[/]", line, markup=True, highlight=False)
        yield line


def _typed(console: Any) -> Iterator[str]:
    while True:
        try:
            yield console.input("[bold green]model[/] ") if sys.stdin.isatty() else input()
        except EOFError:
            return


def _begin(console: Any, episode: Episode) -> None:
    """Show the prompt and the tools."""
    from rich.markup import escape
    from rich.panel import Panel
    from rich.pretty import Pretty

    console.print(Panel(escape(episode.prompt.text) or "[dim]empty[/]", title="prompt", title_align="left"))
    for tool in episode.tools:
        console.print(Panel(Pretty(tool.get("function", tool)), title="tool", title_align="left", border_style="dim"))


def _tell(console: Any, turn: Turn) -> None:
    """Show an environment's turn."""
    from rich.markup import escape

    about = "" if turn.reward is None else f" [dim]reward {turn.reward:g}[/]"
    console.print(f"[bold cyan]environment[/]{about} {escape(_words(turn.observation))}", highlight=False)


def _words(observation: Any) -> str:
    """An observation as text; what is no text is named by its type."""
    if isinstance(observation, str):
        return observation
    said = []
    for one in observation:
        content = one.get("content", one) if "role" in one else one
        parts = content if isinstance(content, list) else [content]
        said += [p if isinstance(p, str) else p.get("text", f"<{p.get('type', '?')}>") for p in parts]
    return "\n".join(map(str, said))
