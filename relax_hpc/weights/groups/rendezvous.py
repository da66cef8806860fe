"""Rendezvous: the members of a group find each other in the run directory, whether they then use gloo, NCCL or MPI.

    worker:  weights/members/NAME             "I am here" ──► the trainer sees a name that its group lacks
    trainer: weights/group.json {id, names} ──► every worker named there answers ──► those who did are connected

Nobody waits for the dead: a worker that does not answer within seconds is left out, and its name is removed. If it
lives, it announces its name again.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from relax_hpc.files.publish import read_json, replace, to_json
from relax_hpc.files.run_dir import RunDir
from relax_hpc.weights.groups.protocol import BufferPool, Group

CHECK_IN_S = 5.0
"""Seconds for a worker to answer, which a thread of its own does; attribute caches of NFS may take three of them."""


@dataclass(frozen=True, slots=True)
class Called:
    """A group as group.json names it."""

    id: str
    names: tuple[str, ...]
    local: bool
    """True where all members are on one host."""


class Rendezvous(ABC):
    """Forms groups of processes for one kind of transport. commit_dir: the trainer's folder; a worker has none."""

    buffers: BufferPool
    """Memory for its groups to send from, or to receive into."""

    def __init__(self, run: RunDir, timeout_s: float, commit_dir: Path | None = None) -> None:
        self._run, self._timeout_s, self._commit_dir = run, timeout_s, commit_dir
        self.buffers = BufferPool()

    @abstractmethod
    def form(self, names: frozenset[str]) -> tuple[Group, frozenset[str]]:
        """Form a group, on the trainer's side, of those of `names` that answer, and name them. Raises GroupError."""

    @abstractmethod
    def join(self, group: Called, name: str, given_up: Callable[[], bool]) -> Group:
        """Join a group, on a worker's side. Raises GroupError when left out, or when `given_up` returns True."""

    def call(self, group_id: str, names: frozenset[str]) -> Called:
        """Name a group. Raises FileNotFoundError if fenced."""
        assert self._commit_dir is not None
        hosts = {str((read_json(members_folder(self._run) / name) or {}).get("host", "")) for name in names}
        group = Called(group_id, tuple(sorted(names)), hosts <= {os.uname().nodename})
        path = self._run.weights / "group.json"
        replace(path, to_json(asdict(group)), commit_dir=self._commit_dir, durable=False)
        return group


def members_folder(run: RunDir) -> Path:
    return run.weights / "members"


def announce(run: RunDir, name: str) -> None:
    """Announce a worker, on its own side, unless its name is there already."""
    path = members_folder(run) / name
    if not path.exists():
        members_folder(run).mkdir(exist_ok=True)
        replace(path, to_json({"host": os.uname().nodename}), durable=False)


def leave_out(run: RunDir, names: Iterable[str]) -> None:
    for name in names:
        (members_folder(run) / name).unlink(missing_ok=True)


def called(run: RunDir) -> Called | None:
    """The group that was called last, formed or still forming; None before the first."""
    about: dict[str, Any] | None = read_json(run.weights / "group.json")
    return None if about is None else Called(about["id"], tuple(about["names"]), about["local"])
