"""Verifiers that reasoning-gym's tasks bring along (arXiv 2505.24760), as rewards."""

from __future__ import annotations

from typing import Any

from relax_hpc.data.tasks import load_task
from relax_hpc.files.errors import RunError
from relax_hpc.recipe.tables.source import TaskPrompts
from relax_hpc.records import Prompt

QUICK_VERIFIERS = frozenset({"chain_sum", "products"})
"""Tasks whose own verifier is reasoning_gym.utils.compute_decimal_reward: it compares decimals and nothing else."""


class Verifier:
    """The task's own score of an answer, between 0 and 1.

    Many tasks give a part for an answer that merely contains the right one. White space around the answer does not
    count. An answer that makes the verifier raise is wrong: some tasks parse it without care.
    """

    def __init__(self, source: TaskPrompts) -> None:
        from reasoning_gym.dataset import ProceduralDataset

        self._task: Any = load_task(source)
        inherited = type(self._task).score_answer is ProceduralDataset.score_answer
        self.is_quick = inherited or source.task in QUICK_VERIFIERS
        """True where the verifier compares text or decimals; others evaluate the model's text and may never return."""
        entry = self._task[0]
        try:
            self._task.score_answer(entry["answer"], entry)
        except Exception as error:  # whatever a task does
            raise RunError(f"task '{source.task}': its verifier fails on its own answer: {error!r}") from error

    def __call__(self, prompt: Prompt, answer: str) -> float:
        try:
            return float(self._task.score_answer(answer.strip(), prompt.metadata))
        except Exception:  # __init__ has seen the verifier work: what it stumbles over is the model's answer
            return 0.0
