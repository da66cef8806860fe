"""An environment of your own: a sum in two steps of help. environment.toml uses it.

The model answers; where it is wrong it is told so, and may try again. The environment gives the reward itself: less for each further try.
"""

from __future__ import annotations

from relax_hpc.environments import Turn
from relax_hpc.records import Prompt


class Retry:
    """One instance generates one sample: reset once, step for each turn of the model's, close."""

    def __init__(self, *, tries: int = 3, discount: float = 0.5) -> None:
        """The recipe's `environment_options`."""
        self.tries, self.discount = tries, discount

    def reset(self, prompt: Prompt) -> None:
        """Begin. All that `step` needs later is kept in the object."""
        self.expected = prompt.answer or ""
        self.turn = 0

    def step(self, answer: str) -> Turn:
        """The model said `answer` in this turn; say what it reads next, or that the sample is over."""
        said = answer.strip()
        self.turn += 1
        right = said == self.expected
        if right or self.turn == self.tries:
            reward = self.discount ** (self.turn - 1) if right else 0.0
            return Turn(done=True, reward=reward, extra={"tries": self.turn})
        return Turn(done=False, observation="no, again: ")

    def close(self) -> None:
        """End what `reset` began: a sandbox, a server, a file. Here there is nothing."""
