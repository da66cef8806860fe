"""Requests as files that move by rename: released, claimed, published, given back.

    open/REQUEST.aATTEMPT.vOLDEST ──claim──► claimed/WORKER/REQUEST.aATTEMPT.vSTARTED ──► SHARDS/REQUEST.h5, claim removed
              ▲                                     │
              └──────────── give back ──────────────┘   the worker died: attempt + 1; it was drained: same attempt;
                                                        it kept a partial rollout (spool.partial_rollouts): .pABORTS

Names carry all that a claim is decided on, so deciding costs no read: the oldest version that a request may start from,
how many workers died on it, and how often it was given back partly generated. Requests are not fsynced: what a power
failure takes, the trainer's planner puts back.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from relax_hpc.files.publish import Data, is_there, names, publish, read_json, rename_once, to_json
from relax_hpc.files.run_dir import RunDir
from relax_hpc.files.watch import FolderWatch
from relax_hpc.spool.request import Request, RequestState

LOOK_AT_STARTS_S = 0.1
"""Least time between two calls of `in_progress`, which lists a folder for each worker."""
WhenRoom = Callable[[Callable[[], None], str], None]
KNOWN_CLAIMS = 1000
"""How many of its latest claims a worker remembers: an old listing may still name them."""
_REQUEST_FILE = re.compile(r"(r\d{6}-\w+|e\d{6}(?:l\d+)?-\w+)\.a(\d+)\.v(\d+)(?:\.p(\d+))?")


@dataclass(frozen=True, slots=True)
class RequestFile:
    """A request file's name, parsed: REQUEST.aATTEMPT.vVERSION, with .pABORTS if it was given back partly generated."""

    request_id: str
    attempt: int
    version: int
    """Open: the oldest version that the request may start from. Claimed, or partly generated: the version that it was
    started with. An evaluation's is always the version that it names."""
    aborts: int = 0
    """How often the request was given back partly generated."""

    @property
    def keeps_version(self) -> bool:
        """True if `version` stays whoever claims it: evaluations, and requests that have their first tokens."""
        return self.request_id.startswith("e") or self.aborts > 0

    @property
    def name(self) -> str:
        begun = f".p{self.aborts}" if self.aborts else ""
        return f"{self.request_id}.a{self.attempt}.v{self.version}{begun}"

    @classmethod
    def parse(cls, name: str) -> RequestFile | None:
        """Parse a file name; None if it is not a request's, but something that somebody else put there."""
        match = _REQUEST_FILE.fullmatch(name)
        return RequestFile(match[1], int(match[2]), int(match[3]), int(match[4] or 0)) if match else None


@dataclass(frozen=True, slots=True)
class Claim:
    """A request that this worker has claimed and generates."""

    request: Request
    request_file: RequestFile
    path: Path


class RequestQueue:
    """The request files of a run."""

    def __init__(
        self,
        run: RunDir,
        workers: int = 1,
        when_room: WhenRoom = lambda put, what: put(),
        commit_dir: Path | None = None,
    ) -> None:
        """workers: how many workers claim from the queue. when_room: calls its first argument, again and again while
        the disk is full; the second says what needs the room. commit_dir: the folder of the trainer's incarnation:
        superseded, it removes nothing."""
        self._run, self._when_room, self._commit_dir = run, when_room, commit_dir
        self._open = FolderWatch(run.open_requests, workers)
        self._names: frozenset[str] = frozenset()
        self._request_files: list[RequestFile] = []
        """Requests parsed from `_names`, evaluations first."""
        self._mine = deque[Path](maxlen=KNOWN_CLAIMS)
        """Paths of claims made here and not put back."""

    # the trainer's side

    def put(self, requests: Iterable[Request], oldest: int = 0, aborts: int = 0) -> None:
        """Release requests; one that is open already stays as it is.

        oldest: raises the oldest version that they may start from. aborts: how often they were given back partly
        generated.
        """
        released = [*requests]

        def put() -> None:
            for request in released:
                name = RequestFile(request.id, 0, max(request.min_version, oldest), aborts).name
                publish(self._run.open_requests / name, to_json(request.to_json()), durable=False)

        self._when_room(put, f"{len(released)} requests")

    def in_progress(self) -> dict[str, int]:
        """Return request id -> version, for every open request (the oldest it may start from) and claimed one (started
        with)."""
        versions: dict[str, int] = {}
        for _, found in self._files():
            versions[found.request_id] = min(found.version, versions.get(found.request_id, found.version))
        return versions

    def states(self) -> dict[str, RequestState]:
        """Return request id -> its state, for every open, partial and claimed request."""
        return {found.request_id: state for state, found in self._files()}

    def _files(self) -> Iterator[tuple[RequestState, RequestFile]]:
        """Yield all request files, those that move meanwhile at least once."""
        for folder in self._folders():
            for found in _request_files(folder):
                waiting = RequestState.PARTIAL if found.aborts else RequestState.OPEN
                yield waiting if folder == self._run.open_requests else RequestState.CLAIMED, found

    def _folders(self) -> Iterator[Path]:
        """Yield the folders of request files, the open ones' twice: a request that is claimed or given back while they
        are listed, one by one, is in a later one."""
        yield self._run.open_requests
        yield from self._workers()
        yield self._run.open_requests

    def remove_torn(self) -> None:
        """Remove request files that a power failure left without their content, so that they count as missing."""
        for folder in self._folders():
            for path in (folder / request_file.name for request_file in _request_files(folder)):
                try:
                    read_json(path)
                except ValueError:
                    self._remove(path)

    def _remove(self, path: Path) -> None:
        """Remove a request file if it is still there. Raises FileNotFoundError for a superseded trainer."""
        if self._commit_dir is None:
            path.unlink(missing_ok=True)
            return
        gone = self._commit_dir / path.name
        try:
            os.rename(path, gone)
        except FileNotFoundError:
            if not is_there(self._commit_dir):
                raise
        else:
            gone.unlink()

    def raise_oldest(self, version: int) -> bool:
        """Raise to `version` the oldest version that open requests not yet started may start from. Return True if any
        was raised.

        Nothing was generated for them yet, so a later deadline favors no answer.
        """
        raised = False
        for request_file in _request_files(self._run.open_requests):
            if not request_file.keeps_version and request_file.version < version:
                later = replace(request_file, version=version)
                raised |= _moved(self._run.open_requests / request_file.name, self._run.open_requests / later.name)
        return raised

    def withdraw(self, request_ids: Iterable[str]) -> None:
        """Remove open requests that nobody needs any more."""
        gone = set(request_ids)
        for request_file in _request_files(self._run.open_requests):
            if request_file.request_id in gone:
                self._remove(self._run.open_requests / request_file.name)

    # a worker's side

    def has_open(self) -> bool:
        """Return True if some request is open; most often this costs one stat."""
        return bool(self._open_request_files())

    def _open_request_files(self) -> list[RequestFile]:
        now = self._open.names()
        if now is not self._names:
            strays = {name for name in now - self._names if RequestFile.parse(name) is None}
            if strays:
                logging.getLogger("queue").warning(
                    "no requests, left alone in '%s': %s", self._open.folder, sorted(strays)
                )
            found = [request_file for name in now if (request_file := RequestFile.parse(name)) is not None]
            self._names, self._request_files = now, sorted(found, key=lambda request_file: request_file.request_id)
        return self._request_files

    def upcoming(self, place: int) -> Request | None:
        """Read the open request at `place`, or the last one before; None if there is none. It stays open."""
        found = self._open_request_files()[: place + 1]
        return _read(self._run.open_requests / found[-1].name) if found else None

    def is_open(self, request_id: str) -> bool:
        """Return True if the request is open, as far as is known here."""
        return any(found.request_id == request_id for found in self._open_request_files())

    def claim(self, worker: str, version: int, prefers: str = "") -> Claim | None:
        """Claim the first request that may be started when `version` is the newest, evaluations first; None if there is
        none.

        prefers: a request that is claimed before the others of its own batch, whose order does not matter.

        Raises FileNotFoundError if this worker was given up for lost: its claim directory is gone, only a new one can
        claim.
        """
        folder = self._run.claimed_requests / worker
        startable = [found for found in self._open_request_files() if found.version <= version]
        if startable and _batch(startable[0].request_id) == _batch(prefers):
            startable.sort(key=lambda found: found.request_id != prefers)
        for request_file in startable:
            mine = request_file if request_file.keeps_version else replace(request_file, version=version)
            path = folder / mine.name
            if path in self._mine and is_there(path):
                continue  # an old listing: we have claimed it since. Once our claim is gone, the request was released again
            if _moved(self._run.open_requests / request_file.name, path):
                request = _read(path)
                if request is None:  # torn; or given back to others since the rename: this worker counts as lost
                    path.unlink(missing_ok=True)
                    continue
                self._mine.append(path)
                return Claim(request, mine, path)
            if not folder.is_dir():
                raise FileNotFoundError(
                    f"'{folder}' is gone: this worker counted as lost, its requests were given to others"
                )
        return None

    def put_back(self, claim: Claim, aborts: int | None = None) -> bool:
        """Open a claim again with the same attempt: no worker died on it. Return False if the claim is no longer ours.

        aborts: how often the request was given back partly generated, this time included.
        """
        again = claim.request_file if aborts is None else replace(claim.request_file, aborts=aborts)
        with contextlib.suppress(ValueError):
            self._mine.remove(claim.path)  # we may claim it again
        return _moved(claim.path, self._run.open_requests / again.name)

    def open_claim_dir(self, worker: str) -> None:
        (self._run.claimed_requests / worker).mkdir(exist_ok=True)

    # the supervisor's side

    def give_back(self, worker: str, lost: bool) -> list[str]:
        """Open a worker's claims again and remove its claim directory. Return the request ids. lost: the worker died on
        them."""
        folder = self._run.claimed_requests / worker
        self._mine = deque((path for path in self._mine if path.parent != folder), KNOWN_CLAIMS)
        given = []
        while request_files := _request_files(folder):  # repeated: a worker given up for lost may still be claiming
            given += [t.request_id for t in request_files if self._reopen(folder, t, lost)]
            with contextlib.suppress(OSError):
                folder.rmdir()  # without the folder it cannot claim
        with contextlib.suppress(OSError):
            folder.rmdir()
        return given

    def _reopen(self, folder: Path, request_file: RequestFile, lost: bool) -> bool:
        again = replace(request_file, attempt=request_file.attempt + lost)
        return _moved(folder / request_file.name, self._run.open_requests / again.name)

    def workers(self) -> list[str]:
        return [folder.name for folder in self._workers()]

    def _workers(self) -> list[Path]:
        return [Path(entry.path) for entry in os.scandir(self._run.claimed_requests) if entry.is_dir()]


def publish_shard(run: RunDir, claim: Claim, image: Data, worker: str) -> bool:
    """Publish a claim's shard and end the claim. Return False if another attempt came first; ours is then
    quarantined."""
    final = run.shard(claim.request.id)
    if publish(final, image):
        end_claim(run, claim)
        return True
    quarantine = run.quarantine / f"{claim.request.id}.{worker}.h5"
    publish(quarantine, image, durable=False)
    _say_why(quarantine, "another attempt was published first", worker=worker)
    end_claim(run, claim)
    return False


def move_to_quarantine(run: RunDir, shard: Path, reason: str) -> None:
    """Move a published shard to quarantine, with the reason; its request then counts as never generated."""
    quarantine = run.quarantine / f"{shard.stem}.{uuid.uuid4().hex[:8]}.h5"
    _say_why(quarantine, reason)
    os.rename(shard, quarantine)


def _say_why(quarantine: Path, reason: str, **about: str) -> None:
    words = {"request": quarantine.name.partition(".")[0], **about, "reason": reason, "time": time.time()}
    publish(quarantine.with_suffix(".reason.json"), to_json(words), durable=False)


def end_claim(run: RunDir, claim: Claim) -> None:
    """Remove a claim whose shard is there, and the partial rollout that it went on from."""
    claim.path.unlink(missing_ok=True)
    if claim.request_file.aborts:
        run.partial_rollout(claim.request.id, claim.request_file.aborts).unlink(missing_ok=True)


def _request_files(folder: Path) -> list[RequestFile]:
    """Return the requests in a folder; none if the folder is missing."""
    return [request_file for name in names(folder) if (request_file := RequestFile.parse(name)) is not None]


def _batch(request_id: str) -> str:
    return request_id.partition("-")[0]


def _read(path: Path) -> Request | None:
    """Read the request in a file; None if there is no file, or a torn one."""
    try:
        content = read_json(path)
    except ValueError:
        return None
    return None if content is None else Request.from_json(content)


def _moved(source: Path, target: Path) -> bool:
    """Rename; return True if this call did it. The reply to a rename that succeeded can be lost, so the target is
    looked for."""
    try:
        rename_once(source, target, lambda: is_there(target))
    except FileNotFoundError:
        return False
    return True
