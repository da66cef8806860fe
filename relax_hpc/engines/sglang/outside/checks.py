"""Checks of a server that was there before the worker, at an address of the recipe."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from relax_hpc.engines.base import EngineError, Tokens
from relax_hpc.engines.sglang.client import Client
from relax_hpc.engines.sglang.server import CONTEXT_MARGIN
from relax_hpc.files.errors import RunError

KEY_VARIABLE = "RELAX_HPC_SGLANG_KEY"
"""Environment variable with the API key of an outside server: secrets are in no recipe."""


def about_outside(client: Client, context: int, folder: Path | None, shows: bool) -> dict[str, Any]:
    """Ask the outside server for its description. Raises RunError unless it fits the model's context and `folder`. shows: the
    model sees."""
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
    if shows and not about["enable_precise_embedding_interpolation"]:
        raise RunError(
            f"SGLang at {client.address} interpolates the positions of patches in its quicker way, which makes other features than "
            "the trainer's: start it with --enable-precise-embedding-interpolation"
        )
    return about


def check_lengths(
    client: Client, answers: Sequence[dict[str, Any] | None], contexts: Sequence[Tokens], samples_per_prompt: int
) -> None:
    """Raise RunError where the server made other prompts of what it was given than we did, by their lengths."""
    for i, answer in enumerate(answers):
        wanted = len(contexts[i // samples_per_prompt])
        about = answer["meta_info"] if answer else {"completion_tokens": 0}
        if about["completion_tokens"] and (found := about["prompt_tokens"]) != wanted:
            raise RunError(
                f"SGLang at {client.address} made {found} tokens of a prompt of {wanted}: it sees other pictures than the trainer; "
                "start it with the run's model folder and without mm-process-config, or leave rollout.sglang.address out"
            )
