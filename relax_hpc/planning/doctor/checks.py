"""A check and its verdict; light, since nodes use it too."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

Verdict = Literal["ok", "note", "warning", "failed"]
ORDER: tuple[Verdict, ...] = ("ok", "note", "warning", "failed")
"""Verdicts from good to bad; a note says what was not looked at, or is only worth knowing."""


@dataclass(frozen=True, slots=True)
class Check:
    """One row of the table."""

    area: str
    what: str
    verdict: Verdict
    found: str
    expected: str = ""
    fix: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def ok(area: str, what: str, found: str) -> Check:
    return Check(area, what, "ok", found)


def note(area: str, what: str, found: str) -> Check:
    return Check(area, what, "note", found)


def warning(area: str, what: str, found: str, expected: str, fix: str) -> Check:
    return Check(area, what, "warning", found, expected, fix)


def failed(area: str, what: str, found: str, expected: str, fix: str) -> Check:
    return Check(area, what, "failed", found, expected, fix)


def worst(checks: Iterable[Check]) -> Verdict:
    """The worst verdict of all."""
    return max((check.verdict for check in checks), key=ORDER.index, default="ok")


def gigabytes(count: float) -> str:
    """Format a number of bytes in gigabytes for a person."""
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"
