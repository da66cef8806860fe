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

    what: str
    verdict: Verdict
    found: str
    expected: str = ""
    fix: str = ""
    area: str = ""
    """Where it was looked: files, python, slurm or nodes."""
    rests: str = ""
    """The part of relax_hpc that rests on it; only where a file system is looked at for itself."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def ok(what: str, found: str) -> Check:
    return Check(what, "ok", found)


def note(what: str, found: str) -> Check:
    return Check(what, "note", found)


def warning(what: str, found: str, expected: str, fix: str) -> Check:
    return Check(what, "warning", found, expected, fix)


def failed(what: str, found: str, expected: str, fix: str) -> Check:
    return Check(what, "failed", found, expected, fix)


def worst(checks: Iterable[Check]) -> Verdict:
    """The worst verdict of all."""
    return max((check.verdict for check in checks), key=ORDER.index, default="ok")
