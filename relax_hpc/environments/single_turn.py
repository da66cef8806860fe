"""The environment of a plain question: it is done after one answer, which the source's reward scores."""

from __future__ import annotations

from relax_hpc.environments.base import Turn
from relax_hpc.records import Prompt


class SingleTurn:
    """An environment that is done after one answer."""

    def reset(self, prompt: Prompt) -> None: ...

    def step(self, answer: str) -> Turn:
        return Turn(done=True)

    def close(self) -> None: ...
