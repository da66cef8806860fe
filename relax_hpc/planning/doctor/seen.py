"""Judges what one node saw of another's changes (two_nodes.Watch): a check each, with the keys to set."""

from __future__ import annotations

import math

from relax_hpc.planning.doctor.checks import Check, failed, note, ok, warning
from relax_hpc.planning.doctor.files import ELSEWHERE, LONG_HANDOVERS
from relax_hpc.planning.doctor.two_nodes import Look, Watch
from relax_hpc.recipe.tables.run import Supervision

NOTICEABLE_S = 0.8
CALL_S = 3.0
"""From this on, workers may answer the trainer's call to a broadcast too late (CHECK_IN_S of weights/groups/rendezvous.py)."""
BY_FILES = "weights.transport = 'file': workers may answer the call to a broadcast too late"
WHAT = {
    "stat": "attribute cache of files",
    "folder": "attribute cache of folders",
    "missing": "negative lookups",
    "listing": "listing cache",
    "opened": "close-to-open",
}


def seen(watch: Watch, host: str, tick_s: float = 0.0) -> list[Check]:
    """Judge what `host` saw. tick_s: the tick of folders' times, by which they are late anyhow."""
    if not any(look.changes > 0 or look.error for look in watch.looks.values()):
        words = f"{host} saw no change in {watch.looked_s:.0f} s: caches that last longer, or nobody is there any more"
        return [failed("changes by another node", words, "changes that are seen", f"start the second again, and this; else {ELSEWHERE}")]  # fmt: skip
    late = [_late(name, look, watch.looked_s, tick_s if name == "folder" else 0.0) for name, look in watch.looks.items()]  # fmt: skip
    return [*late, _whole(watch), _race(watch), _held(watch), _locks(watch)]


def _late(name: str, look: Look, looked_s: float, tick_s: float) -> Check:
    """Judge how late one kind of look told of changes."""
    what, late_s = WHAT[name], look.longest_s
    if look.error and look.changes <= 0:
        return failed(what, f"each look failed: {look.error}", "an answer", ELSEWHERE)
    words = f"changes by another node are seen within {late_s:.1f} s" + (
        f" (a tick is {tick_s:.1f} s)" if tick_s >= NOTICEABLE_S else ""
    )
    if look.changes <= 0:
        words = f"no change by another node was seen in {looked_s:.0f} s: cached for longer"
    if look.error:
        return warning(what, f"{words}; looks failed in between: {look.error}", "an answer", "supervision.io_wait_s: how long a run outlives it")  # fmt: skip
    if late_s <= NOTICEABLE_S + tick_s:
        return ok(what, words)
    if name == "opened":
        return _opened(words, late_s, look.changes > 0)
    if name == "listing":
        return warning(what, words, f"{NOTICEABLE_S:.1f} s: each hand-over of a request or shard waits for it", LONG_HANDOVERS)  # fmt: skip
    if name == "missing" and late_s > CALL_S:
        return warning(what, words, f"{CALL_S:.0f} s at most", BY_FILES)
    return note(what, f"{words}: roles open what they wait for, and list folders again each second, all the same")


def _opened(words: str, late_s: float, changed: bool) -> Check:
    """Judge how old an opened file may be: by opening them, living processes are told from dead ones."""
    limits = Supervision()
    if not changed:
        return failed(WHAT["opened"], words, "a file that is opened anew is as new as its last close", "mount without nocto, with a short actimeo; else " + ELSEWHERE)  # fmt: skip
    more_s = math.ceil(late_s)
    keys = f"supervision.node_agent_silent_s = {limits.node_agent_silent_s + more_s:.0f}, supervision.leader_silent_s = {limits.leader_silent_s + more_s:.0f}"
    if late_s > CALL_S:
        keys += f"; {BY_FILES}"
    return warning(WHAT["opened"], words, "a file that is opened anew is as new as its last close", keys)


def _whole(watch: Watch) -> Check:
    what = "visibility after close"
    if watch.torn:
        words = f"{len(watch.torn)} of {len(watch.read)} published files were not whole when they were listed: {', '.join(watch.torn[:3])}"
        return failed(what, words, "names that appear with their content", ELSEWHERE)
    return ok(what, f"{len(watch.read)} files by another node, each whole as soon as it was listed")


def _race(watch: Watch) -> Check:
    what, theirs = "one winner among nodes", watch.about.get("won", [])
    both = sorted(set(watch.won) & set(theirs))
    if both:
        return failed(what, f"both nodes got {len(both)} names: {', '.join(both[:3])}", "each name for one node", ELSEWHERE)  # fmt: skip
    return ok(what, f"{2 * len(watch.raced)} names that both tried to link or rename: {len(watch.won)} got here, none by both")  # fmt: skip


def _held(watch: Watch) -> Check:
    what = "replaced while open"
    if watch.held_error:
        return note(what, f"a file that another node replaced can no longer be read: {watch.held_error}; it is opened again, and weights are copied first with weights.node_cache")  # fmt: skip
    return ok(what, "a file that another node replaced can still be read")


def _locks(watch: Watch) -> Check:
    what = "flock between nodes"
    if error := watch.lock_error():
        fix = "mount with locks (Lustre: -o flock), or trainer.nodes = 1 and weights.transport = 'file'"
        return warning(what, error, "a lock that one node holds, another does not get", fix)
    return ok(what, "a lock that one node holds, another does not get")
