"""Orders as files that move by rename: released, claimed, published, given back.

    open/ORDER.aATTEMPT.vOLDEST ──claim──► claimed/WORKER/ORDER.aATTEMPT.vSTARTED ──► SHARDS/ORDER.h5, claim removed
              ▲                                     │
              └────────────── give back ────────────┘   (the worker died: attempt + 1; it was drained: same attempt;
                                                         it gave back what it had half-played (spool.parts): .pPARTS)

Names carry what a claim is decided on, so that deciding costs no read: the oldest version an order may start from, and
how many workers died on it, and which part of it there is already. Orders are not fsynced: what a power failure takes, the trainer's book puts back.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
import uuid
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from relax_hpc.run_dir import Data, RunDir, is_there, names, publish, read_json, rename_once, to_json
from relax_hpc.spool.orders import Order
from relax_hpc.spool.watch import FolderWatch

LOOK_AT_STARTS_S = 0.1
"""Between two calls of `in_play`, which costs a folder a worker."""
KNOWN_CLAIMS = 1000
"""A worker's latest claims, of which an old listing may speak still."""
_TICKET = re.compile(r"(o\d{6}-\w+|e\d{6}(?:l\d+)?-\w+)\.a(\d+)\.v(\d+)(?:\.p(\d+))?")


@dataclass(frozen=True, slots=True)
class Ticket:
    """An order file's name, read."""

    order_id: str
    attempt: int
    version: int
    """The oldest version it may start from while it is open; the version it was started with once it is claimed, or half-played. An
    evaluation's is always the one that it names."""
    parts: int = 0
    """How often it was given back half-played."""

    @property
    def keeps_version(self) -> bool:
        """Whether it stays of its version whoever claims it: evaluations, and orders whose first tokens there are."""
        return self.order_id.startswith("e") or self.parts > 0

    @property
    def name(self) -> str:
        begun = f".p{self.parts}" if self.parts else ""
        return f"{self.order_id}.a{self.attempt}.v{self.version}{begun}"

    @classmethod
    def parse(cls, name: str) -> Ticket | None:
        """What a name says; None where it is no order's: somebody else put it there."""
        match = _TICKET.fullmatch(name)
        return Ticket(match[1], int(match[2]), int(match[3]), int(match[4] or 0)) if match else None


@dataclass(frozen=True, slots=True)
class Claim:
    """An order that this worker plays."""

    order: Order
    ticket: Ticket
    path: Path


class Queue:
    """The order files of a run."""

    def __init__(self, run: RunDir, workers: int = 1) -> None:
        """workers: how many claim from it."""
        self._run = run
        self._open = FolderWatch(run.open_orders, workers)
        self._names: frozenset[str] = frozenset()
        self._tickets: list[Ticket] = []
        """Those of `_names`, evaluations first."""
        self._mine = deque[Path](maxlen=KNOWN_CLAIMS)
        """What was claimed here, and not put back."""

    # the trainer's side

    def put(self, orders: Iterable[Order], oldest: int = 0, parts: int = 0) -> None:
        """Release orders; one that is open already stays as it is. `oldest` raises what they may start from; `parts`: which one there is."""
        for order in orders:
            ticket = Ticket(order.id, 0, max(order.min_version, oldest), parts)
            publish(self._run.open_orders / ticket.name, to_json(order.to_json()), durable=False)

    def in_play(self) -> dict[str, int]:
        """Version of every order that is open (oldest it may start from) or claimed (started with)."""
        # Open ones twice: an order that is claimed or given back meanwhile is seen at least once.
        before = _tickets(self._run.open_orders)
        claimed = [ticket for worker in self._workers() for ticket in _tickets(worker)]
        versions: dict[str, int] = {}
        for ticket in [*before, *claimed, *_tickets(self._run.open_orders)]:
            versions[ticket.order_id] = min(ticket.version, versions.get(ticket.order_id, ticket.version))
        return versions

    def remove_torn(self) -> None:
        """Remove order files that a power failure left without their content, so that they count as missing."""
        for folder in (self._run.open_orders, *self._workers()):
            for path in (folder / ticket.name for ticket in _tickets(folder)):
                try:
                    read_json(path)
                except ValueError:
                    path.unlink(missing_ok=True)

    def raise_oldest(self, version: int) -> bool:
        """Orders that nobody has started may not start from versions before `version` any more; True if any was raised.

        Nothing was generated for them yet, so giving them a later deadline favours no answer.
        """
        raised = False
        for ticket in _tickets(self._run.open_orders):
            if not ticket.keeps_version and ticket.version < version:
                later = replace(ticket, version=version)
                raised |= _moved(self._run.open_orders / ticket.name, self._run.open_orders / later.name)
        return raised

    def withdraw(self, order_ids: Iterable[str]) -> None:
        """Remove orders that nobody needs any more, where they are still open."""
        gone = set(order_ids)
        for ticket in _tickets(self._run.open_orders):
            if ticket.order_id in gone:
                (self._run.open_orders / ticket.name).unlink(missing_ok=True)

    # a worker's side

    def has_open(self) -> bool:
        """Whether there is an order that nobody has claimed; most often one stat."""
        return bool(self._open_tickets())

    def _open_tickets(self) -> list[Ticket]:
        now = self._open.names()
        if now is not self._names:
            strays = {name for name in now - self._names if Ticket.parse(name) is None}
            if strays:
                logging.getLogger("queue").warning(
                    "no orders, left alone in '%s': %s", self._open.folder, sorted(strays)
                )
            found = [ticket for name in now if (ticket := Ticket.parse(name)) is not None]
            self._names, self._tickets = now, sorted(found, key=lambda ticket: ticket.order_id)
        return self._tickets

    def claim(self, worker: str, version: int) -> Claim | None:
        """Claim the first order that may be started where `version` is the newest, evaluations first; None when there is none.

        Raises FileNotFoundError when this worker counted as lost: its workplace is gone, only a new one can claim.
        """
        folder = self._run.claimed_orders / worker
        for ticket in self._open_tickets():
            if ticket.version > version:
                continue
            mine = ticket if ticket.keeps_version else replace(ticket, version=version)
            path = folder / mine.name
            if path in self._mine and is_there(path):
                continue  # a listing of before we took it; once our claim is gone, the order was released again
            if _moved(self._run.open_orders / ticket.name, path):
                order = _read(path)
                if order is None:  # torn; or given back to others since the rename: this worker counts as lost
                    path.unlink(missing_ok=True)
                    continue
                self._mine.append(path)
                return Claim(order, mine, path)
            if not folder.is_dir():
                raise FileNotFoundError(
                    f"'{folder}' is gone: this worker counted as lost, its orders were given to others"
                )
        return None

    def put_back(self, claim: Claim, parts: int | None = None) -> bool:
        """Open a claim again: no worker died on it. `parts`: which part there is of it now. False when it is ours no more."""
        again = claim.ticket if parts is None else replace(claim.ticket, parts=parts)
        with contextlib.suppress(ValueError):
            self._mine.remove(claim.path)  # it may be ours again
        return _moved(claim.path, self._run.open_orders / again.name)

    def open_workplace(self, worker: str) -> None:
        (self._run.claimed_orders / worker).mkdir(exist_ok=True)

    # the supervisor's side

    def give_back(self, worker: str, lost: bool) -> list[str]:
        """Open a worker's claims again; `lost`: it died on them. Returns the order ids. Its folder is removed."""
        folder = self._run.claimed_orders / worker
        self._mine = deque((path for path in self._mine if path.parent != folder), KNOWN_CLAIMS)
        given = []
        while tickets := _tickets(folder):  # again while a worker that counts as lost goes on claiming
            given += [t.order_id for t in tickets if self._reopen(folder, t, lost)]
            with contextlib.suppress(OSError):
                folder.rmdir()  # from here on it cannot claim
        with contextlib.suppress(OSError):
            folder.rmdir()
        return given

    def _reopen(self, folder: Path, ticket: Ticket, lost: bool) -> bool:
        again = replace(ticket, attempt=ticket.attempt + lost)
        return _moved(folder / ticket.name, self._run.open_orders / again.name)

    def workers(self) -> list[str]:
        return [folder.name for folder in self._workers()]

    def _workers(self) -> list[Path]:
        return [Path(entry.path) for entry in os.scandir(self._run.claimed_orders) if entry.is_dir()]


def publish_shard(run: RunDir, claim: Claim, image: Data, worker: str) -> bool:
    """Publish a claim's shard and end the claim; False when another attempt came first (ours is put aside)."""
    final = run.shard(claim.order.id)
    if publish(final, image):
        end_claim(run, claim)
        return True
    aside = run.aside / f"{claim.order.id}.{worker}.h5"
    publish(aside, image, durable=False)
    _say_why(aside, "another attempt was published first", worker=worker)
    end_claim(run, claim)
    return False


def put_aside(run: RunDir, shard: Path, reason: str) -> None:
    """Take a published shard out of the run: it is kept, with the reason, and its order counts as never played."""
    aside = run.aside / f"{shard.stem}.{uuid.uuid4().hex[:8]}.h5"
    _say_why(aside, reason)
    os.rename(shard, aside)


def _say_why(aside: Path, reason: str, **about: str) -> None:
    words = {"order": aside.name.partition(".")[0], **about, "reason": reason, "time": time.time()}
    publish(aside.with_suffix(".reason.json"), to_json(words), durable=False)


def end_claim(run: RunDir, claim: Claim) -> None:
    """Remove a claim whose shard is there, and what it went on from."""
    claim.path.unlink(missing_ok=True)
    if claim.ticket.parts:
        run.part(claim.order.id, claim.ticket.parts).unlink(missing_ok=True)


def _tickets(folder: Path) -> list[Ticket]:
    """The orders in a folder; a missing one has none."""
    return [ticket for name in names(folder) if (ticket := Ticket.parse(name)) is not None]


def _read(path: Path) -> Order | None:
    """The order in a file; None where there is none, or a torn one."""
    try:
        content = read_json(path)
    except ValueError:
        return None
    return None if content is None else Order.from_json(content)


def _moved(source: Path, target: Path) -> bool:
    """Rename, and say whether it was us. The reply to a rename that succeeded can be lost: look for the target."""
    try:
        rename_once(source, target, lambda: is_there(target))
    except FileNotFoundError:
        return False
    return True
