"""The ledger: one file a step that says what the step trains on, created exclusively before any process steps.

    Entry ──commit──► LEDGER/STEP.json {…, "checksum": XXH3-64 of all else} ──► compared by every reader

A process that finds entry s adopts it. A request in the ledger is never taken again, whether its shard is still there
or not. Groups that a step trains on once more (sample reuse) are listed apart, with the step that took them first.
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
from relax_hpc.spool.request import RequestState

FAILED = "failed: "
SURPLUS = "surplus: "
"""Prefixes of reasons: groups that could not be generated or scored, and groups that pass but are not needed in a full
batch."""
CHECKSUM = "checksum"
MEND = "put it back from a copy of the run; a fork from a checkpoint after its step needs it no more"


@dataclass(frozen=True, slots=True)
class Taken:
    """A request that a step trains on."""

    request: str
    first_version: int
    columns: dict[str, str] = field(default_factory=dict)
    """Column -> its version: MODEL/CHECKSUM, the weights (or version) that made the numbers, and the numbers'
    checksum."""


@dataclass(frozen=True, slots=True)
class Dropped:
    """A request that a step gave up, and the request that replaces it."""

    request: str
    reason: str
    replacement: str


@dataclass(frozen=True, slots=True)
class Entry:
    """A step's ledger entry: what it trains on, what it leaves out of the loss, and what it gave up."""

    step: int
    incarnation: int
    lineage: int
    take: tuple[Taken, ...]
    filtered: dict[str, str] = field(default_factory=dict)
    """REQUEST/GROUP -> why the group is kept out of the loss."""
    dropped: tuple[Dropped, ...] = ()
    reused: dict[str, int] = field(default_factory=dict)
    """REQUEST/GROUP -> the step that trained on the group first, for groups trained on once more
    (algorithm.sample_reuse)."""
    solved: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Source -> (samples that solved their prompt, samples generated) for this step ([curriculum])."""
    extra_requests: int = 0
    """Extra requests released for this step before it was taken."""
    learned: tuple[tuple[int, int, int], ...] = ()
    """(source, index, epoch) of the prompts whose answers the step learns. Only supervised fine-tuning has them; it
    takes no requests."""
    time: float = field(default_factory=time.time)

    @property
    def states(self) -> dict[str, RequestState]:
        """Request id -> its state, for those that the entry settles."""
        return {t.request: RequestState.TRAINED for t in self.take} | {
            d.request: RequestState.DROPPED for d in self.dropped
        }

    @property
    def sft_examples(self) -> list[str]:
        """Names for the examples in `learned`, one each, like the ids of samples."""
        return [f"l{self.step:06d}/{k}" for k in range(len(self.learned))]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Entry:
        take = tuple(Taken(**t) for t in value["take"])
        dropped = tuple(Dropped(**d) for d in value["dropped"])
        learned = tuple((int(s), int(i), int(e)) for s, i, e in value["learned"])
        return cls(**{**value, "take": take, "dropped": dropped, "learned": learned})


def read_entry(path: Path) -> Entry | None:
    """Read the entry in a file; None if there is no file. Raises Damaged, which names the file."""
    try:
        value = read_json(path)
        if value is None:
            return None
        written = value.pop(CHECKSUM)
        if written != (found := checksum(value)):
            raise Damaged(f"ledger entry '{path}' has checksum {found}, {written} was written: it was damaged; {MEND}")
        return Entry.from_json(value)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(
            f"ledger entry '{path}' cannot be read ({type(error).__name__}: {error}); "
            f"entries are published whole, so it was damaged or written by another version of relax_hpc: {MEND}"
        ) from error


def sealed(entry: Entry) -> bytes:
    """Return the content of an entry's file."""
    content = entry.to_json()
    return to_json({**content, CHECKSUM: checksum(content)})


def checksum(content: dict[str, Any]) -> str:
    """Return the XXH3-64 of an entry as JSON with sorted keys and no spaces, so that the layout of the file does not
    matter."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return xxhash.xxh3_64_hexdigest(text.encode())


class Ledger:
    """The ledger entries of a run. `commit_dir`: the folder of the incarnation that commits; None if it only reads."""

    def __init__(self, run: RunDir, commit_dir: Path | None = None) -> None:
        self._run, self._commit_dir = run, commit_dir

    @property
    def incarnation(self) -> int:
        """The number of the incarnation that commits."""
        assert self._commit_dir is not None, "a ledger that is only read"
        return int(self._commit_dir.name[1:])

    def find(self, step: int) -> Entry | None:
        """Return the entry of a step; None if nobody has committed one. Raises Damaged, which names the file."""
        return read_entry(self._run.ledger_entry(step))

    def commit(self, entry: Entry) -> Entry:
        """Commit `entry`; if there is one for its step already, return that one instead. Raises FileNotFoundError in a
        superseded incarnation."""
        if publish(self._run.ledger_entry(entry.step), sealed(entry), commit_dir=self._commit_dir):
            return entry
        adopted = self.find(entry.step)
        assert adopted is not None, f"ledger entry {entry.step} exists and cannot be read"
        return adopted
