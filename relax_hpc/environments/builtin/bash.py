"""A shell: each sample has a folder of its own, which is there from its first turn to its last."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from relax_hpc.environments.builtin.commands import run
from relax_hpc.environments.builtin.with_tools import WithTools, schema
from relax_hpc.records import Prompt

LIMIT_S, LONGEST = 10.0, 2000
"""Seconds of a command, and characters that the model reads of what it says."""


class InFolder(WithTools):
    """An environment with a folder of its own for each sample."""

    def __init__(self, *, time_limit_s: float = LIMIT_S, longest: int = LONGEST) -> None:
        """time_limit_s: of each command, below rollout.step_time_limit_s; longest: characters that the model reads of what
        it says."""
        self._limit_s, self._longest = time_limit_s, longest
        self._root: Path | None = None

    def reset(self, prompt: Prompt) -> None:
        super().reset(prompt)
        self._root = Path(tempfile.mkdtemp(prefix="relax-hpc-sample-"))
        self.folder = self._root / "folder"
        self.folder.mkdir()

    def run(self, *command: str) -> str:
        """Run a command in the folder; returns what it said."""
        return run(command, self.folder, self._limit_s, self._longest)

    def close(self) -> None:
        if self._root is not None:
            shutil.rmtree(self._root, ignore_errors=True)


class Bash(InFolder):
    """Answers calls of `bash`; files stay from call to call, variables and the current folder do not."""

    schemas = (
        schema("bash", "Run a command in a shell; files stay between calls.", command=("string", "the command")),
    )

    def use_bash(self, command: str) -> str:
        return self.run("bash", "-c", command)
