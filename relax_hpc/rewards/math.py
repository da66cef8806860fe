"""Mathematical equivalence by math-verify, as a reward of its own and in those of problems with pictures."""

from __future__ import annotations

import functools

from math_verify import LatexExtractionConfig, parse, verify

from relax_hpc.records import Prompt
from relax_hpc.rewards.hub.texts import THOUGHT, references
from relax_hpc.rewards.tags import BEGIN, tagged

BOXED, THINK = "\\boxed{", "<think>"
FORMAT_SHARE = 0.1


def equivalent(prompt: Prompt, answer: str) -> float:
    """1.0 when the answer's final expression (boxed, LaTeX or plain) equals the reference answer.

    math-verify gives up on one expression after 5 s, and the answer is then wrong. Raises ValueError for a reference
    answer without an expression: that is a fault of the data, not of the model.
    """
    return float(verify(_reference(prompt), parse(answer)))


def geo3k(prompt: Prompt, answer: str) -> dict[str, float]:
    """0.9 for the right expression in the last \\boxed{…}, 0.1 for the form `<think>…</think>…\\boxed{…}`; both are extras.

    Raises ValueError for a reference answer without an expression.
    """
    found = parse(_last_box(answer), extraction_config=[LatexExtractionConfig()])
    accuracy = float(verify(_reference(prompt), found))
    form = float(answer.startswith(THINK) and _in_order(answer, THOUGHT, BOXED, "}"))
    return {"reward": (1 - FORMAT_SHARE) * accuracy + FORMAT_SHARE * form, "accuracy": accuracy, "format": form}


def openr1mm(prompt: Prompt, answer: str) -> float:
    """1.0 for an equivalent expression, or else the same text in `<answer>`; 0.0 with a second `</think>` or `<answer>`.

    Where either has no `<answer>`, its whole text is compared.
    """
    if answer.count(THOUGHT) > 1 or answer.count(BEGIN) > 1:
        return 0.0
    reference = prompt.answer or ""
    expected, said = (text.strip() if (inside := tagged(text)) is None else inside for text in (reference, answer))
    return float(verify(list(_expressions(expected)), parse(said)) or said == expected)


def deepscaler(prompt: Prompt, answer: str) -> float:
    """1.0 where the last \\boxed{…} behind `</think>` equals one of the reference answers; 0.0 too where there is no
    `</think>` (DeepScaleR).

    The reference is one expression, or a JSON list of them. Raises ValueError for one without an expression.
    """
    expected = [_expected(reference) for reference in references(prompt)]
    thought, _, said = answer.rpartition(THOUGHT)
    found = parse(_last_box(said), extraction_config=[LatexExtractionConfig()]) if thought else []
    return float(any(verify(one, found) for one in expected))


def _last_box(text: str) -> str:
    """The last `\\boxed{…}` to its closing brace; empty where it is not closed."""
    begin, depth = text.rfind(BOXED), 0
    for at in range(max(begin, 0), len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0 and text[at] == "}":
            return text[begin : at + 1]
    return ""


def _in_order(text: str, *parts: str) -> bool:
    at = 0
    for part in parts:
        at = text.find(part, at) + len(part)
        if at < len(part):
            return False
    return True


def _reference(prompt: Prompt) -> list[object]:
    return _expected(prompt.answer or "")


def _expected(answer: str) -> list[object]:
    expressions = _expressions(answer)
    if not expressions:
        raise ValueError(f"the reference answer {answer!r} has no mathematical expression")
    return list(expressions)


@functools.lru_cache(maxsize=1024)
def _expressions(answer: str) -> tuple[object, ...]:
    # Data sets give references bare ("\\frac12"), and math-verify reads LaTeX only in an environment.
    return tuple(parse(answer if "$" in answer or "\\boxed" in answer else f"${answer}$") or parse(answer))
