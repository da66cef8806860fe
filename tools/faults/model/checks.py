"""The promises of the protocol, compared with the server's own directory after every change that an actor makes.

    a name appears ──► whole? its first? by whom? ──► Violation        a name goes ──► who needed it? ──► Violation

The checks know what no process of a run knows: every name at the moment it changes, and who holds the run.
"""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from relax_hpc.files.errors import Damaged
from relax_hpc.files.publish import Data
from relax_hpc.spool.ledger import Entry, read_entry
from relax_hpc.spool.queue import Claim, RequestFile
from relax_hpc.supervise.lease import OLD_S, Lease
from tools.faults.model.actors import READS, Actor, Call, Violation

if TYPE_CHECKING:
    from tools.faults.model.world import World

HIDDEN_FIRST = ("requests", "shards", "columns", "ledger", "weights", "quarantine", "checkpoints", "outcome.json")
"""Where a file has its name only when it is whole."""
NEVER = 10**9
RENEWS_S = 5.5
"""A holder renews this often while it runs: one that was seen to within this time of OLD_S lives."""
_INCARNATION = re.compile(r"lease/[^/]+/i\d{6}")


def digest(data: Data) -> str:
    return xxhash.xxh3_128_hexdigest(data if isinstance(data, bytes) else b"".join(data))


def expect(holds: bool, promise: str, *about: object) -> None:
    if not holds:
        raise Violation(f"{promise}: {', '.join(map(str, about))}")


class Checks:
    """What is promised, and what was seen until now."""

    def __init__(self, world: World) -> None:
        self.world, self.run, self._root = world, world.run, f"{world.run.root}/"
        self.holder: Actor | None = None
        self.holders: set[Actor] = set()
        """All supervisors that have held the run."""
        self.reigning: Actor | None = None
        """The trainer that may commit."""
        self._lease: Lease | None = None
        self._numbers, self._incarnations = [0], [0]
        self._renewed: dict[Actor, float] = {}
        self._fenced_after_s = 0.0
        self._seen_silent: dict[Actor, float] = {}
        """Seconds for which the holder was silent, not counting those in which nobody ran, when this actor last looked."""
        self.places: dict[str, set[str]] = defaultdict(set)
        """Request -> its files among open and claimed ones."""
        self._moves: dict[str, list[int]] = defaultdict(list)
        self._looked: dict[Actor, int] = {}
        self.changes = self.attempts = 0
        self.images: dict[str, set[str]] = defaultdict(set)
        self.shards: dict[str, str] = {}
        """Request -> digest of its published shard, also where retention has removed it."""
        self._present: set[str] = set()
        self.entries: dict[int, bytes] = {}
        self.settled: dict[str, int] = {}
        """Request -> the step that took or dropped it."""
        self.trained_steps: set[int] = set()
        self._held: dict[str, Actor] = {}
        """Claims by path, each with the worker to whom the queue gave it."""
        self._said: set[str] = set()
        """Requests whose worker knows that it published the shard."""
        self.torn: set[str] = set()

    # what changes in the directory

    def saw(self, actor: Actor, call: Call) -> None:
        """Judge a change that an actor made."""
        if call.op in (*READS, "read"):
            if call.path.endswith("/holder.json") and self.holder is not None:
                self._seen_silent[actor] = self._silent_s(self.holder)
            return
        self.changes += 1
        path, to = call.path.removeprefix(self._root), call.to.removeprefix(self._root)
        if call.op in ("open", "write"):
            final = path.startswith(HIDDEN_FIRST) and not os.path.basename(path).startswith(".")
            expect(not final, "a file is written under a hidden name", path)
        elif call.op == "mkdir":
            self._made(actor, path)
        elif call.op == "utime" and path.endswith("holder.json"):
            self._renewed[actor] = self.world.server.now_s
        elif call.op in ("link", "rename"):
            self._appeared(actor, call, to)
        if call.op in ("rename", "unlink", "rmdir"):
            self._went(actor, path, to)

    def _made(self, actor: Actor, path: str) -> None:
        expect(not re.fullmatch(r"lease/\d{6}", path), "a lease appears together with its holder", path)
        if _INCARNATION.fullmatch(path):
            held = self.holder in (actor, None) or self._renewed.get(actor, 0) == 0
            expect(held, "a superseded supervisor starts nothing", actor.name, path)

    def _appeared(self, actor: Actor, call: Call, to: str) -> None:
        path, (folder, name) = Path(call.to), os.path.split(to)
        if name.startswith("."):
            return
        if folder.startswith("shards") and name.endswith(".h5"):
            request = name.removesuffix(".h5")
            again = request in self.settled and request not in self._present  # retention removed it
            expect(request not in self.shards or again, "the first shard of a request stays", to)
            self._present.add(request)
            self.shards[request] = digest(path.read_bytes())
            expect(self.shards[request] in self.images[request], "a shard is complete or absent", to)
        elif folder.startswith("ledger") and name.endswith(".json"):
            self._committed(actor, to)
            self._entered(path, to)
        elif folder == "requests/open" or folder.startswith("requests/claimed/"):
            self._moved(actor, folder, name, to, released=call.op == "link")
        elif folder in ("weights", "checkpoints"):
            self._committed(actor, to)
            if folder == "checkpoints":
                expect((path / "DONE").exists(), "a checkpoint is complete or absent", to)
            else:
                json.loads(path.read_bytes())
        elif to == "outcome.json":
            expect(actor is self.holder, "a superseded supervisor commits nothing", actor.name, to)
        elif re.fullmatch(r"lease/\d{6}", to):
            expect((path / "holder.json").exists(), "a lease appears together with its holder", to)

    def _committed(self, actor: Actor, what: str) -> None:
        expect(actor is self.reigning, "a superseded trainer commits nothing, and removes nothing", actor.name, what)

    def _entered(self, path: Path, to: str) -> None:
        entry = read_entry(path)
        assert entry is not None
        expect(entry.step not in self.entries, "a ledger entry stays as it was first seen", to)
        expect(entry.step == len(self.entries), "entries follow one another", to)
        for request in (*(t.request for t in entry.take), *(d.request for d in entry.dropped)):
            expect(request not in self.settled, "a request is trained once", request, to)
            self.settled[request] = entry.step
        for taken in entry.take:
            expect(self.run.shard(taken.request).exists(), "what is taken is published", taken.request, to)
        self.entries[entry.step] = path.read_bytes()

    def _moved(self, actor: Actor, folder: str, name: str, to: str, released: bool) -> None:
        """Note a request's file that appeared. released: it is new, not renamed."""
        found = RequestFile.parse(name)
        if found is None:
            return
        request = found.request_id
        if released and actor is self.reigning and self.world.fresh:
            moved = [at for at in self._moves[request] if at > self._looked.get(actor, 0)]
            known = self.places[request] or request in self.settled or self.run.shard(request).exists()
            expect(not known or len(moved) > 1, "what is open, claimed or published is not released again", to)
        if found.aborts and self.world.fresh:
            part = self.run.partial_rollout(request, found.aborts)
            later = request in self.shards or any(f".p{found.aborts + 1}" in p for p in self.places[request])
            expect(part.exists() or later, "a part is there before its request is open again", to)
        self.places[request].add(to)
        self._moves[request].append(self.changes)

    def _went(self, actor: Actor, path: str, to: str) -> None:
        folder, name = os.path.split(path)
        if self._lease is not None and path == f"lease/{self._lease.number:06d}":
            self._fenced_after_s = NEVER if actor is self.holder else self._seen_silent.get(actor, 0.0)
        if folder == "requests/open" or folder.startswith("requests/claimed/"):
            if actor.role == "trainer" and RequestFile.parse(name) and not to.startswith("requests/"):
                self._committed(actor, path)
            self._left(actor, path, name, to)
        elif name.startswith("."):
            return
        elif folder.startswith("ledger") and name.endswith(".json"):
            expect(False, "a ledger entry stays as it was first seen", path)
        elif folder.startswith("checkpoints/"):
            self._committed(actor, path)
        elif folder in ("weights", "checkpoints") or (folder.startswith("shards") and name.endswith(".h5")):
            if name != "latest.json":
                self._committed(actor, path)
            if folder.startswith("shards"):
                self._present.discard(name.removesuffix(".h5"))
                kept = min(self.run.checkpoint_steps(), default=0)
                step = self.settled.get(name.removesuffix(".h5"), NEVER)
                expect(step < kept, "nothing is removed that the oldest checkpoint replays", path)

    def _left(self, actor: Actor, path: str, name: str, to: str) -> None:
        """Check a request's file that went: somebody has the request still, unless it is over."""
        found = RequestFile.parse(name)
        if found is None:
            expect(os.path.basename(path).startswith("."), "names that are nobody's are left alone", path)
            return
        request = found.request_id
        was_torn = path in self.torn
        self.torn.discard(path)
        if was_torn and to:
            self.torn.add(to)
        self.places[request].discard(path)
        self._moves[request].append(self.changes)
        over = request in self.settled or request in self.shards or actor is self.reigning  # it asks again when it must
        expect(bool(self.places[request]) or over or was_torn, "no request is lost", path)

    # what the roles say

    @property
    def _quiet(self) -> bool:
        """True while nobody was ever taken for lost that lives, and nothing old was shown."""
        return self.world.fresh and not self.world.suspects and len(self.holders) == 1

    def took_over(self, actor: Actor, lease: Lease) -> None:
        before, self.holder = self.holder, actor
        self.holders.add(actor)
        expect(lease.number > self._numbers[-1], "a lease's number is given once", lease.number, self._numbers)
        if self._lease is not None:
            expect(not self._lease.folder.exists(), "one supervisor holds a run", actor.name, before and before.name)
        if before is not None and before.alive:
            was_silent = self._fenced_after_s >= OLD_S - RENEWS_S  # as seen by who fenced it
            expect(was_silent, "a holder that renews its lease keeps it", before.name, self._fenced_after_s)
        self._numbers.append(lease.number)
        self._lease, self.reigning = lease, None
        self._renewed[actor] = self.world.server.now_s

    def _silent_s(self, holder: Actor) -> float:
        at = self._renewed.get(holder, 0.0)
        return self.world.server.now_s - at - self.world.stalled_since(at)

    def renewed(self, actor: Actor) -> None:
        """A supervisor believes that it holds the run."""
        if actor is not self.holder and not self.world.ever_stale:
            expect(False, "a superseded supervisor learns of it", actor.name)

    def began(self, by: Actor, child: Actor, folder: Path) -> None:
        """A supervisor has started a trainer."""
        number = int(folder.name[1:])
        if by is self.holder:
            expect(number > max(self._incarnations), "an incarnation's number is given once", folder.name)
            self._incarnations.append(number)
            self.reigning = child

    def gave_back(self, worker: str) -> None:
        """A supervisor has given back a worker's claims."""
        folder = self.run.claimed_requests / worker
        empty = folder.exists() and not os.listdir(folder)
        expect(not empty or self.world.ever_stale, "a given-up worker's folder goes", folder)

    def looks(self, actor: Actor) -> None:
        """The trainer begins to look which requests are where."""
        self._looked[actor] = self.changes

    def trains(self, actor: Actor, entry: Entry) -> None:
        found = read_entry(self.run.ledger_entry(entry.step))
        expect(found == entry, "a step trains on what its ledger entry says", actor.name, entry.step, found, entry)
        self.trained_steps.add(entry.step)

    def claimed(self, actor: Actor, claim: Claim) -> None:
        key = str(claim.path)
        expect(key not in self._held, "a claim is given to a worker once", key)
        of_it = [a for path, a in self._held.items() if Path(path).name.startswith(f"{claim.request.id}.")]
        others = [a.name for a in of_it if a.alive]
        if self._quiet:
            expect(not others, "one worker at a time generates a request", actor.name, others, claim.request.id)
        self._held[key] = actor

    def let_go(self, actor: Actor, claim: Claim) -> None:
        self._held.pop(str(claim.path), None)

    def generated(self, claim: Claim, image: Data) -> None:
        self.attempts += 1
        self.images[claim.request.id].add(digest(image))

    def published(self, actor: Actor, claim: Claim, image: Data, mine: bool) -> None:
        self._held.pop(str(claim.path), None)
        request, made = claim.request.id, digest(image)
        expect(request in self.shards, "a shard is there when its worker goes on", request)
        if self._quiet:
            expect(not claim.path.exists(), "a claim ends with its shard", claim.path)
            part = self.run.partial_rollout(request, claim.request_file.aborts)
            expect(not part.exists(), "a part goes when its shard is there", part)
        if mine:
            self._said.add(request)
            expect(self.shards[request] == made, "the first shard of a request stays", request)
            return
        expect(self.shards[request] != made, "a worker whose shard was published knows it", request)
        aside = self.run.quarantine / f"{request}.{actor.name}.h5"
        kept = aside.exists() and aside.with_suffix(".reason.json").exists()
        expect(kept, "what lost is kept, with the reason", aside)

    def lost_power(self, lost: list[str]) -> None:
        """Take back what may go with the power, and refuse what may not."""
        for path in lost:
            name = path.removeprefix(self._root)
            if os.path.basename(name).startswith("."):
                continue
            if name.startswith("requests/"):
                found = RequestFile.parse(os.path.basename(name))
                if found:
                    self.places[found.request_id].discard(name)
            elif name.startswith("shards/"):
                request = os.path.basename(name).removesuffix(".h5")
                expect(request not in self._said, "a published shard outlives a loss of power", name)
                self.shards.pop(request, None)
                self._present.discard(request)
            elif name.startswith("ledger/") and name.endswith(".json"):
                step = int(Path(name).stem)
                expect(step not in self.trained_steps, "a ledger entry outlives a loss of power", name)
                self.entries.pop(step, None)
                self.settled = {request: at for request, at in self.settled.items() if at != step}
        for paths in self.places.values():
            self.torn |= {path for path in paths if (self.run.root / path).stat().st_size == 0}
        self.unchanged()

    # at any time, and at the end

    def unchanged(self) -> None:
        """Compare shards and ledger entries with what they were."""
        for step, content in self.entries.items():
            same = self.run.ledger_entry(step).read_bytes() == content
            expect(same, "a ledger entry stays as it was first seen", step)
        for request, known in self.shards.items():
            path = self.run.shard(request)
            if path.exists():
                expect(digest(path.read_bytes()) == known, "a shard never changes", request)
            else:
                expect(request in self.settled, "a published shard stays until it is trained on", request)

    def finished(self) -> None:
        """Judge a run that is done."""
        from tools.faults.model.roles import REQUESTS_PER_STEP, STEPS, policy_after

        self.unchanged()
        expect(sorted(self.entries) == [*range(STEPS)], "every step has its entry", sorted(self.entries))
        policy, taken = "", list[str]()
        for step in range(STEPS):
            entry = read_entry(self.run.ledger_entry(step))
            assert entry is not None
            policy = policy_after(policy, entry)
            names = [t.request.partition("x")[0] for t in entry.take]
            taken += [name for name in names if int(name[-3:]) < REQUESTS_PER_STEP]  # the others are extra
        wanted = sorted(f"r{step:06d}-{k:03d}" for step in range(STEPS) for k in range(REQUESTS_PER_STEP))
        expect(sorted(taken) == wanted, "every request is trained exactly once", sorted(taken))
        self._refuses_another_entry()
        state: Any = json.loads((self.run.checkpoint(STEPS) / "state.json").read_bytes())
        expect(state["policy"] == policy, "what was trained is what the ledger says", state["policy"], policy)

    def _refuses_another_entry(self) -> None:
        """Change an entry as a bad disk does: its reader must refuse it."""
        path = self.run.ledger_entry(0)
        content = path.read_bytes()
        path.write_bytes(content.replace(b'"lineage": 0', b'"lineage": 1', 1))
        try:
            read_entry(path)
            refused = False
        except Damaged:
            refused = True
        path.write_bytes(content)
        expect(refused, "a damaged entry is refused", path)
