"""The ledger: one file a step that says what the step trains on, created exclusively before any process steps.

Whoever finds entry s adopts it; a request in the ledger is never taken again, whether its shard is still there or not. What is
trained on once more is named as that, group by group, and was taken before.

Entry ──commit──► LEDGER/STEP.json {…, "checksum": XXH3-64 of all else} ──► compared by whoever reads it
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from relax_hpc.files.errors import Damaged
from relax_hpc.files.publish import publish, read_json, to_json
from relax_hpc.files.run_dir import RunDir

FAILED = "failed: "
SURPLUS = "surplus: "
"""How the reasons begin of groups that could not be generated or scored, and of those that pass in a batch that is full."""
CHECKSUM = "checksum"
MEND = "put it back from a copy of the run; a fork from a checkpoint after its step needs it no more"


@dataclass(frozen=True, slots=True)
class Taken:
    """A request that a step trains on."""

    request: str
    first_version: int
    columns: dict[str, str] = field(default_factory=dict)
    """Versions of the columns that others made of it: the weights' checksum, or version, and the numbers' checksum."""


@dataclass(frozen=True, slots=True)
class Dropped:
    """A request that a step gave up."""

    request: str
    reason: str
    replacement: str


@dataclass(frozen=True, slots=True)
class Entry:
    """What a step trains on."""

    step: int
    incarnation: int
    lineage: int
    take: tuple[Taken, ...]
    filtered: dict[str, str] = field(default_factory=dict)
    """REQUEST/GROUP -> why this group is kept out of the loss."""
    dropped: tuple[Dropped, ...] = ()
    reused: dict[str, int] = field(default_factory=dict)
    """REQUEST/GROUP -> the step whose loss this group was in first, of what is trained on once more (algorithm.sample_reuse)."""
    solved: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Source -> samples that solved their prompts, of how many that were generated for this step ([curriculum])."""
    extra_requests: int = 0
    """Further requests that were released for this step, before it was taken."""
    learned: tuple[tuple[int, int, int], ...] = ()
    """Of supervised fine-tuning, which takes no requests: (source, index, epoch) of the prompts whose answers the step learns."""
    time: float = field(default_factory=time.time)

    @property
    def sft_examples(self) -> list[str]:
        """A name for each of `learned`, as samples have one."""
        return [f"l{self.step:06d}/{k}" for k in range(len(self.learned))]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Entry:
        take = tuple(Taken(**t) for t in value["take"])
        dropped = tuple(Dropped(**d) for d in value["dropped"])
        learned = tuple((int(s), int(i), int(e)) for s, i, e in value.get("learned", ()))
        # Older versions wrote whatever a filter of the user's returned.
        filtered = {
            name: r if isinstance(r, str) else f"a filter returned {r!r}"
            for name, r in value.get("filtered", {}).items()
        }
        return cls(**{**value, "take": take, "filtered": filtered, "dropped": dropped, "learned": learned})


def read_entry(path: Path) -> Entry | None:
    """The entry in a file; None where there is none. Raises Damaged naming one that is damaged."""
    try:
        value = read_json(path)
        if value is None:
            return None
        written = value.pop(CHECKSUM, None)  # older versions wrote none
        if written is not None and written != (found := checksum(value)):
            raise Damaged(f"ledger entry '{path}' has checksum {found}, {written} was written: it was damaged; {MEND}")
        return Entry.from_json(value)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(
            f"ledger entry '{path}' cannot be read ({type(error).__name__}: {error}); "
            f"entries are published whole, so it was damaged or written by another version of relax_hpc: {MEND}"
        ) from error


def checksum(content: dict[str, Any]) -> str:
    """XXH3-64 of an entry as JSON with sorted keys and without spaces: of what it says, however it is laid out."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return xxhash.xxh3_64_hexdigest(text.encode())


class Ledger:
    """The entries of a run. `commit_dir`: the folder of the incarnation that commits; None only reads."""

    def __init__(self, run: RunDir, commit_dir: Path | None = None) -> None:
        self._run, self._commit_dir = run, commit_dir

    def find(self, step: int) -> Entry | None:
        """The entry of a step; None when nobody has committed one. Raises Damaged naming one that is damaged."""
        return read_entry(self._run.ledger_entry(step))

    def commit(self, entry: Entry) -> Entry:
        """Commit `entry`, or adopt the one that is there. Raises FileNotFoundError in a superseded incarnation."""
        content = entry.to_json()
        sealed = to_json({**content, CHECKSUM: checksum(content)})
        if publish(self._run.ledger_entry(entry.step), sealed, commit_dir=self._commit_dir):
            return entry
        adopted = self.find(entry.step)
        assert adopted is not None, f"ledger entry {entry.step} exists and cannot be read"
        return adopted
