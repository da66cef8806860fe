"""`relax-hpc scale`: set the desired size, the number of rollout nodes."""

from __future__ import annotations

import re
from typing import Annotated, Optional

import typer

from relax_hpc.cli.errors import friendly
from relax_hpc.cli.options import RunPath


def scale(
    run: RunPath,
    desired_size: Annotated[
        Optional[str], typer.Argument(metavar="rollout=N", help="Rollout nodes in all.", show_default=False)
    ] = None,
    partition: Annotated[
        Optional[str],
        typer.Option(help="Where the further jobs go, such as a preemptible partition.", show_default=False),
    ] = None,
    cancel: Annotated[bool, typer.Option("--cancel", help="Back to the nodes that the recipe asks for.")] = False,
) -> None:
    """Say how many rollout nodes a run on Slurm shall have; its leader sends or drains one-node jobs until it has them.

    The number counts all rollout nodes; those of the recipe (rollout.nodes) always stay. Saying it twice changes nothing. A job that is lost or preempted is sent again.

    [dim]relax-hpc scale runs/big rollout=4 --partition low[/dim]
    [dim]relax-hpc scale runs/big --cancel[/dim]
    """
    import getpass

    from relax_hpc.files.errors import RunError
    from relax_hpc.files.run_dir import open_existing
    from relax_hpc.recipe import load_recipe
    from relax_hpc.slurm.elastic import clear_desired_size, set_desired_size
    from relax_hpc.slurm.elastic import desired_size as desired

    with friendly():
        opened = open_existing(run)
        recipe = load_recipe(opened.recipe)
        if recipe.slurm is None:
            raise RunError(f"'{run}' has no [slurm] table: it runs on one machine, where rollout.workers says how many")
        if not recipe.generates:
            raise RunError(
                f"'{run}' is supervised fine-tuning without [evaluation]: rollout nodes would have nothing to do"
            )
        if cancel == (desired_size is not None):
            now = desired(opened)
            asked = f"{now.rollout} by {now.by}" if now else f"{recipe.rollout.nodes}, as the recipe says"
            raise RunError(f"say either rollout=N or --cancel; rollout nodes asked for now: {asked}")
        if desired_size is None:
            clear_desired_size(opened, recipe.rollout.nodes)
            typer.echo(f"back to {recipe.rollout.nodes} rollout nodes, as the recipe says")
            return
        number = re.fullmatch(r"rollout=(\d+)", desired_size)
        if number is None:
            raise RunError(f"'{desired_size}': expected rollout=N, such as rollout=4")
        set_desired_size(opened, recipe.rollout.nodes, int(number[1]), partition, getpass.getuser())
        typer.echo(f"asked for {number[1]} rollout nodes; `relax-hpc status {run}` shows how far it is")
