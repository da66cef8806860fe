"""Rewards of your own, in the three forms there are: a function, an `async def`, and one that takes a group's answers at once.

Each is called with the prompt (`.text`, `.answer`, `.metadata`, `.tokens`) and with what the model said. reward.toml uses all three.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from relax_hpc.records import Prompt


def near(prompt: Prompt, answer: str, *, form: float = 0.2) -> dict[str, float]:
    """1 for the right number, `form` for any other number, else 0. `digits` becomes a column of the shard."""
    said = answer.strip()
    return {
        "reward": 1.0 if said == prompt.answer else form * said.isdecimal(),
        "digits": sum(character.isdecimal() for character in said) / max(1, len(said)),
    }


async def asked(prompt: Prompt, answer: str) -> float:
    """Wait for something outside, as for a verifier behind HTTP: `await client.post(…)` would stand where the sleep is."""
    await asyncio.sleep(0.01)
    # The row's other columns; for a reasoning-gym task, the whole item.
    expression = prompt.metadata["metadata"]["expression"]
    return float(answer.strip() == str(sum(int(term) for term in expression.split("+"))))


def shortest(prompt: Prompt, answers: Sequence[str]) -> list[float]:
    """Compare the answers of a group: 1 for the shortest of those with a digit in them, 0 for the others."""
    good = [any(character.isdecimal() for character in answer) for answer in answers]
    least = min((len(answer) for answer, ok in zip(answers, good, strict=True) if ok), default=0)
    return [float(ok and len(answer) == least) for answer, ok in zip(answers, good, strict=True)]


shortest.batch = True  # type: ignore[attr-defined]
