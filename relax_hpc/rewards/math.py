"""Mathematical equivalence by math-verify: the last expression of the answer (boxed, LaTeX or plain) is compared."""

from __future__ import annotations

import functools

from math_verify import parse, verify

from relax_hpc.records import Prompt


def equivalent(prompt: Prompt, answer: str) -> float:
    """1.0 when the answer's final expression equals the reference answer.

    math-verify gives up on one expression after 5 s, and the answer is then wrong. Raises ValueError for a reference
    answer without an expression: that is a fault of the data, not of the model.
    """
    return float(verify(list(_reference(prompt.answer or "")), parse(answer)))


@functools.lru_cache(maxsize=1024)
def _reference(answer: str) -> tuple[object, ...]:
    # Data sets give references bare ("\\frac12"), and math-verify reads LaTeX only in an environment.
    expressions = parse(answer if "$" in answer or "\\boxed" in answer else f"${answer}$") or parse(answer)
    if not expressions:
        raise ValueError(f"the reference answer {answer!r} has no mathematical expression")
    return tuple(expressions)
