"""The `agent` of a source: a program that plays the attempts at its prompts by itself, through the gateway."""

from __future__ import annotations

from pathlib import Path

from pydantic import PositiveFloat, PositiveInt

from relax_hpc.recipe.sandbox import AnySandbox, Sandbox
from relax_hpc.recipe.tables.table import Key, Table


class Agent(Table):
    """A program that is started once for each sample, in place of an environment. It asks the policy by an API that it knows, and
    leaves its reward in the file $RELAX_HPC_RESULT."""

    command: list[str] = Key(
        help="The program and its arguments, such as `['python', 'agent.py']`; no shell reads it.", min_length=1
    )
    cwd: Path | None = Key(
        None,
        "Folder in which it begins, which its sandbox lets it write; absent: a new one for each sample.",
        looked_up=True,
    )
    timeout_s: PositiveFloat = Key(600.0, "Seconds after which it is ended, and its sample fails.")
    at_once: PositiveInt = Key(16, "Most agents of a worker that run at once.")
    sandbox: AnySandbox = Key(Sandbox(), "Sandbox in which it runs: a kind, or a table.")
