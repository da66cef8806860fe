"""A server that was there before the worker, at an address of the recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from relax_hpc.engines.base import EngineError
from relax_hpc.engines.sglang.client import Client
from relax_hpc.engines.sglang.server import CONTEXT_MARGIN
from relax_hpc.files.errors import RunError

KEY_VARIABLE = "RELAX_HPC_SGLANG_KEY"
"""Environment variable with the API key of an outside server: secrets are in no recipe."""


def about_outside(client: Client, context: int, folder: Path | None) -> dict[str, Any]:
    """Ask the outside server for its description. Raises RunError unless it fits the model's context and `folder`."""
    try:
        about = client.about()
    except EngineError as error:
        raise RunError(f"{error}; rollout.sglang.address is where it should be, ${KEY_VARIABLE} its api key") from error
    room = about["context_length"]
    if room is not None and room < context + CONTEXT_MARGIN:
        needed = context + CONTEXT_MARGIN
        raise RunError(
            f"SGLang at {client.address} has room for {room} tokens a sequence, this model's context of {context} needs "
            f"{needed}: start it with --context-length {needed}"
        )
    if folder is None and about["dp_size"] > 1:
        raise RunError(
            f"SGLang at {client.address} has {about['dp_size']} data-parallel copies, which take no broadcast: set "
            "rollout.sglang.folder to one that this worker and the server see"
        )
    return about
