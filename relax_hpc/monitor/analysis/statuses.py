"""The status of every group that was generated, from the ledger alone.

ledger entries ──► request: a RequestState ──► group: trained | filtered | failed | dropped | unused | evaluation
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from relax_hpc.files.errors import RunError
from relax_hpc.files.publish import read_json
from relax_hpc.files.run_dir import RunDir
from relax_hpc.spool.ledger import FAILED, Entry, read_entry
from relax_hpc.spool.request import RequestState

GroupStatus = Literal["trained", "filtered", "failed", "dropped", "unused", "evaluation"]
STATUSES: tuple[GroupStatus, ...] = ("trained", "filtered", "failed", "dropped", "unused", "evaluation")
"""The statuses of a group.

trained: in the loss. filtered: taken by a step, kept out of its loss by a filter, or since the batch was full.
failed: the group could not be generated or scored, whatever became of its request. dropped: its request was given up,
too old. unused: no step has taken its request, or its file lost a race. evaluation: a held-out prompt.
"""
OF_STATE: dict[RequestState, GroupStatus] = {
    RequestState.TRAINED: "trained",
    RequestState.DROPPED: "dropped",
    RequestState.PUBLISHED: "unused",
    RequestState.QUARANTINED: "unused",
}
"""The status of a request's groups, as far as they have none of their own."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The status of one group, with its reason."""

    status: GroupStatus
    reason: str = ""
    detail: str = ""
    """For a group that failed: which prompt, and the error."""


@dataclass(frozen=True, slots=True)
class RequestStatus:
    """The status of one request and of each of its groups."""

    state: RequestState
    step: int | None = None
    """The step that took the request."""
    reason: str = ""
    filtered: dict[int, str] | None = None
    """Group -> why a filter kept it out of the loss."""
    evaluates: bool = False

    @property
    def status(self) -> GroupStatus:
        """The status of its groups, as far as they have none of their own."""
        return "evaluation" if self.evaluates else OF_STATE[self.state]

    def group(self, group: int, failure: str = "", detail: str = "") -> Verdict:
        """Return the verdict on a group; `failure` and `detail` are what the shard says of a group that failed."""
        if self.status == "evaluation":
            return Verdict("evaluation", failure, detail)
        if failure:
            return Verdict("failed", failure, detail)
        if self.filtered and group in self.filtered:
            return Verdict("filtered", self.filtered[group])
        return Verdict(self.status, self.reason)


class GroupStatuses:
    """The ledger, indexed by request."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self.requests: dict[str, RequestStatus] = {}
        """Every request that an entry names."""
        for entry in entries:
            filtered: dict[str, dict[int, str]] = {}
            for name, reason in entry.filtered.items():
                if reason.startswith(FAILED):  # the shard says it too, of requests that no step took as well
                    continue
                request, _, group = name.rpartition("/")
                filtered.setdefault(request, {})[int(group)] = reason
            for taken in entry.take:
                kept_out = filtered.get(taken.request)
                self.requests[taken.request] = RequestStatus(RequestState.TRAINED, entry.step, "", kept_out)
            for dropped in entry.dropped:
                self.requests[dropped.request] = RequestStatus(RequestState.DROPPED, None, dropped.reason)

    def of(self, path: Path) -> RequestStatus:
        """The status of the request whose shard is at `path` (in shards/, evals/ or quarantine/)."""
        if path.parent.name == "quarantine":
            note: dict[str, Any] = read_json(path.with_suffix(".reason.json")) or {}
            return RequestStatus(RequestState.QUARANTINED, None, str(note.get("reason", "quarantined")))
        published = RequestStatus(RequestState.PUBLISHED, evaluates=path.parent.name == "evals")
        return self.requests.get(path.stem, published)


def read_entries(run: RunDir, broken: list[RunError] | None = None) -> list[Entry]:
    """All ledger entries, by step. Raises RunError naming an entry that cannot be read, unless `broken` is given, which collects them."""
    entries: list[Entry] = []
    for path in sorted(path for path in run.ledger.glob("*/*.json") if path.stem.isdigit()):
        with collected(broken):
            entry = read_entry(path)
            if entry is not None:
                entries.append(entry)
    return entries


@contextmanager
def collected(broken: list[RunError] | None) -> Iterator[None]:
    """Add a RunError to `broken` and go on behind the block; raise it where there is no such list."""
    try:
        yield
    except RunError as error:
        if broken is None:
            raise
        broken.append(error)
