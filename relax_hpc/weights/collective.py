"""Broadcast of versions from the trainer to all workers, while they are exported: the common part of gloo, NCCL, MPI.

    trainer: export ──► parts ──► threads: checksums; broadcast, one after the other ──► manifest ──► latest
    worker:  a thread of its own receives into memory, whatever the engine does ──► latest names these bits? ──► engine

A version that was received is not served before latest.json names its checksum, so a sender that was superseded, or
died in the middle, changes nothing. A worker that missed a broadcast (it came later, or was left out of a group that
broke) asks for files, and the trainer writes that version before its next step. When a member dies the broadcast fails
within the time limit; that version goes by files, and a new group is formed by a thread while the trainer continues.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from relax_hpc.files.run_dir import RunDir
from relax_hpc.files.watch import FolderWatch
from relax_hpc.records import Progress
from relax_hpc.weights.base import Export, Fetched, Version
from relax_hpc.weights.contents import checksum
from relax_hpc.weights.file import FilePublisher, FileReceiver
from relax_hpc.weights.groups.protocol import Group, GroupError, Incoming, Outgoing, Received
from relax_hpc.weights.groups.rendezvous import Called, Rendezvous, announce, called, members_folder
from relax_hpc.weights.parts import BUCKET_BYTES
from relax_hpc.weights.versions import Manifest, expected, tensors_path

log = logging.getLogger(__name__)
POLL_S = 0.02
GRACE_S = 1.0
"""Seconds that a version which latest.json just named may still be on its way to a member of the group."""
ANNOUNCE_EVERY_S = 1.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 300.0
"""Pauses in seconds between two tries to form a group of the same members: each try costs all of them something."""


class CollectivePublisher(FilePublisher):
    """The trainer's side; versions that the group cannot deliver go by files."""

    def __init__(
        self,
        run: RunDir,
        commit_dir: Path,
        incarnation: int,
        rendezvous: Rendezvous,
        *,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        super().__init__(run, commit_dir, incarnation, bucket_bytes=bucket_bytes)
        self._rendezvous, self._members = rendezvous, FolderWatch(members_folder(run))
        self.line: Outgoing | None = None
        self.joined: frozenset[str] = frozenset()
        self._forming: threading.Thread | None = None
        self._formed: tuple[Group, frozenset[str]] | None = None
        self._failed: frozenset[str] = frozenset()
        """Names with which no group could be formed; they are called again at `_again_at`, other names at once."""
        self._again_at = self._pause_s = 0.0

    def wanted(self) -> bool:
        self._look_after_group()
        return super().wanted()

    def close(self) -> None:
        if self.line is not None:
            self.line.dismiss()
            self.line = None

    def _bring(self, number: int, export: Export, replayed: Manifest | None, progress: Progress) -> Version:
        self._look_after_group()
        if self.line is None:
            return super()._bring(number, export, replayed, progress)
        contents, broken = self.line.send(export, self._bucket_bytes, progress)
        if broken is not None:
            log.warning("version %d: the group of %s broke: %s", number, sorted(self.joined), broken)
            self.line.group.close()
            self.line, self.joined = None, frozenset()
        version = self._versions.new(number, contents, replayed)
        self._versions.announce(version, contents)
        return version

    def _look_after_group(self) -> None:
        """Take over a group that was formed; have a thread form one when other workers are here than its members."""
        if self._forming is not None and not self._forming.is_alive():
            self._forming = None
            if self._formed is not None:
                self.close()
                (group, self.joined), self._formed = self._formed, None
                self.line = Outgoing(group, self._rendezvous.buffers)
                log.info("weights are broadcast to %s", sorted(self.joined))
        names = self._members.names()
        again = names != self._failed or time.monotonic() >= self._again_at
        if self._forming is None and names and names != self.joined and again:
            self._forming = threading.Thread(target=self._form, args=(names,), daemon=True)
            self._forming.start()

    def _form(self, names: frozenset[str]) -> None:
        try:
            self._formed = self._rendezvous.form(names)
            self._failed = frozenset()
        except (GroupError, OSError) as error:
            log.warning("no group of %s: %s; versions go by files until there is one", sorted(names), error)
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S) if names == self._failed else FIRST_PAUSE_S
            self._failed, self._again_at = names, time.monotonic() + self._pause_s


class CollectiveReceiver(FileReceiver):
    """A worker's side. `name`: the worker's, which no other has had."""

    def __init__(self, run: RunDir, name: str, rendezvous: Rendezvous) -> None:
        super().__init__(run)
        self._name, self._rendezvous = name, rendezvous
        self._received: dict[str, Received] = {}
        """The version received last, by its checksum; empty once it was fetched."""
        self._swap = threading.Lock()
        self._on_its_way, self.sessions, self._closed = False, 0, False
        threading.Thread(target=self._watch, daemon=True).start()

    @contextlib.contextmanager
    def fetch(self, version: Version, progress: Progress = lambda: None) -> Iterator[Fetched]:
        expected(self._run, version)
        deadline = time.monotonic() + GRACE_S
        while (received := self._received.pop(version.checksum, None)) is None:
            late = time.monotonic() > deadline and not self._on_its_way
            comes = self.sessions and not late and version == self.newest()
            if not comes or tensors_path(self._run, version).exists():
                with super().fetch(version, progress) as read:
                    yield read
                return
            progress()
            time.sleep(POLL_S / 10)
        try:
            yield Fetched(received.tensors.items())
        finally:
            self._rendezvous.buffers.give_back(received.segments)

    def close(self) -> None:
        self._closed = True
        (members_folder(self._run) / self._name).unlink(missing_ok=True)

    def _watch(self) -> None:
        """Announce this worker, and take part in every group that names it, each in a thread: one may hang."""
        last, announced = "", 0.0
        while not self._closed:
            try:
                if time.monotonic() - announced > ANNOUNCE_EVERY_S:
                    announce(self._run, self._name)
                    announced = time.monotonic()
                group = called(self._run)
                if group is not None and group.id != last and self._name in group.names:
                    last = group.id
                    threading.Thread(target=self._take_part, args=(group,), daemon=True).start()
            except OSError as error:
                log.warning("the run directory does not answer: %s", error)
            time.sleep(POLL_S)

    def _take_part(self, called_group: Called) -> None:
        """Receive what this group sends, until it breaks or is given up."""
        group: Group | None = None

        def outdated() -> bool:
            now = called(self._run)
            return self._closed or now is None or now.id != called_group.id

        try:
            group = self._rendezvous.join(called_group, self._name, outdated)
            self.sessions += 1
            line = Incoming(group, self._rendezvous.buffers)
            while (received := line.receive(self._begun)) is not None:
                came = {checksum(received.contents): received}
                with self._swap:  # another group may end at this moment
                    unread, self._received = self._received, came
                self._on_its_way = False
                for old in unread.values():
                    self._rendezvous.buffers.give_back(old.segments)
        except (GroupError, OSError) as error:
            log.warning("left the group: %s", error)
        finally:
            self._on_its_way = False
            if group is not None:
                self.sessions -= 1
                group.close()

    def _begun(self) -> None:
        self._on_its_way = True
