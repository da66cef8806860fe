"""Rewards that compare an answer's last statement with a reference: `dapo`, `gpqa`, `f1`."""

from __future__ import annotations

import re
import string
from collections import Counter
from decimal import Decimal, InvalidOperation

from relax_hpc.records import Prompt
from relax_hpc.rewards.hub.texts import after_thinking, references
from relax_hpc.rewards.tags import tagged

DAPO_CHARACTERS = 300
"""DAPO looks for the answer among the last characters only, so that an early guess does not count."""
_ANSWER_LINE = re.compile(r"answer\s*:[ \t]*([^\n]+)", re.IGNORECASE)
_UNITS = re.compile(
    r"\\?%|\^\{?\\circ\}?|\\degrees?|\bdegrees?\b|\bdollars?\b|\bcents?\b|\b(?:square )?(?:units?|inches|feet|meters?|miles?|cm|mm|km|kg|mph)\b"
    r"|\b(?:hours?|minutes?|days?|seconds?)\b"
)
_WRAPPED = re.compile(r"\\(?:text|textbf|mathrm|mbox|boxed|overline|mathbf)\{([^{}]*)\}")
_STATED = (
    re.compile(
        r"\b(?i:answer)\b(?:\s+is)?[\s:=*_$({\[\\]*(?:(?i:option|choice)[\s(]*)?(?:(?:boxed|text)\{[(\\]*)*([A-Z])"
        r"(?=\s*(?:[.,;:!)\]}*_$<]|$|because\b|since\b|which\b))",
        re.MULTILINE,
    ),
    re.compile(r"\\boxed\{\s*(?:\\text\{)?\s*\(?([A-Z])\)?\s*\}?\}"),
    re.compile(r"^[\s*_(\[]*([A-Z])[\s*_)\].:]*$", re.MULTILINE),
)
"""Ways to state a letter: "the answer is (C)", \\boxed{C}, and a line with nothing else. "The answer is A proton" is none."""
_NAMED = re.compile(r"\(([A-Z])\)|\b(?i:option|choice)\s+([A-Z])\b")
"""A letter that is spoken of; it counts where none is stated."""
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ALL_OR_NOTHING = frozenset({"yes", "no", "noanswer"})


def dapo(prompt: Prompt, answer: str) -> dict[str, float]:
    """1.0 where the last `Answer: …` within the final 300 characters is the reference, else -1.0; extra: accuracy
    (DAPO, arXiv 2503.14476).

    Both are normalized: units, `$`, \\text{…}, spaces and commas in numbers do not count. Numbers are compared as
    decimals, anything else as text.
    """
    found = _ANSWER_LINE.findall(answer[-DAPO_CHARACTERS:])
    right = bool(found) and any(_same(_normalized(found[-1]), _normalized(one)) for one in references(prompt))
    return {"reward": 1.0 if right else -1.0, "accuracy": float(right)}


def gpqa(prompt: Prompt, answer: str) -> float:
    """1.0 where the letter that the answer states last, behind `</think>`, is the reference's; else 0.0.

    "The answer is (C)", \\boxed{C} or a line of its own state a letter. Where none does, the last "(C)" or "option C"
    counts. Raises ValueError for a reference that is no letter.
    """
    expected = references(prompt)[0].strip("()[]. ")
    if not re.fullmatch("[A-Za-z]", expected):
        raise ValueError(f"the reference answer {prompt.answer!r} is no letter, expected one such as 'C' or '(C)'")
    return float(_letter(after_thinking(answer)) == expected.upper())


def f1(prompt: Prompt, answer: str) -> float:
    """Harmonic mean of precision and recall of words, the best over the references (SQuAD, arXiv 1606.05250).

    Case, punctuation and articles do not count. yes, no and noanswer must be the whole answer. Compared is the text in
    `<answer>`, or what stands behind `</think>`, or all.
    """
    said = tagged(answer)
    words = _words(after_thinking(answer) if said is None else said)
    return max(_overlap(words, _words(one)) for one in references(prompt))


def _normalized(text: str) -> str:
    text = text.strip().strip("*").strip().rsplit("=", 1)[-1]
    text = text.replace("\\$", "").replace("$", "").replace("\\!", "").replace("\\,", "").replace("\\ ", " ")
    while (inside := _WRAPPED.sub(r"\1", text)) != text:
        text = inside
    text = _UNITS.sub("", text.replace("\\left", "").replace("\\right", "").replace("\\dfrac", "\\frac"))
    text = re.sub(r"^(?:an?|the)\s+", "", text.strip(), flags=re.IGNORECASE)
    text = "".join(text.split()).rstrip(".")
    text = re.sub(r"\\frac([^{])([^{])", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\sqrt([^{\[])", r"\\sqrt{\1}", text)
    return text.replace(",", "") if re.fullmatch(r"[-+]?\d{1,3}(,\d{3})+(\.\d+)?", text) else text


def _same(said: str, expected: str) -> bool:
    try:
        return Decimal(said) == Decimal(expected)
    except InvalidOperation:
        return said == expected


def _letter(text: str) -> str | None:
    stated = [(found.start(1), found.group(1)) for pattern in _STATED for found in pattern.finditer(text)]
    stated = stated or [(found.start(), found.group(1) or found.group(2)) for found in _NAMED.finditer(text)]
    return max(stated)[1] if stated else None


def _words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def _overlap(said: list[str], expected: list[str]) -> float:
    if said == expected:
        return 1.0
    if _ALL_OR_NOTHING & {" ".join(said), " ".join(expected)}:
        return 0.0
    common = sum((Counter(said) & Counter(expected)).values())
    return 2 * common / (len(said) + len(expected)) if common else 0.0
