"""The environment of a plain question: one answer, and it is over. The source's reward judges it."""

from __future__ import annotations

from relax_hpc.environments.base import Turn
from relax_hpc.records import Prompt


class SingleTurn:
    """Done after one answer."""

    def reset(self, prompt: Prompt) -> None: ...

    def step(self, answer: str) -> Turn:
        return Turn(done=True)

    def close(self) -> None: ...
