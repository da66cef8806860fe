"""Programs that answer for others, such as sbatch."""

from __future__ import annotations

from pathlib import Path


def program(folder: Path, name: str, *lines: str) -> None:
    """Put a script into a folder of PATH: whole at once, as another thread may be about to run the one that is there."""
    draft = folder / f"{name}.new"
    draft.write_text("\n".join(["#!/bin/bash", *lines]) + "\n")
    draft.chmod(0o755)
    draft.replace(folder / name)
