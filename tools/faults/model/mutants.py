"""Mutants of the protocol: each has one step removed or weakened, and must be found out.

    Mutant ──its text must match exactly once──► the function, compiled anew, in the place of the real one ─┬─► a schedule ──► Violation
                                                                                                            └─► a test ──► fails

A refactoring that makes a mutant void is an error, so that no step goes unguarded unnoticed. Steps that only clocks, caches or
a crash at one place can tell from others have a test of their own: the machine seldom comes there by chance.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Mutant:
    """A step of the protocol that is left out."""

    says: str
    """The step, and how it is weakened."""
    where: str
    """MODULE:FUNCTION or MODULE:CLASS.METHOD."""
    edits: tuple[tuple[str, str], ...]
    """Texts of the function's source, each with the text in its place."""
    killer: int | str | None = None
    """What finds it out: the seed of a schedule, or the name of a test for pytest."""

    def source(self) -> str:
        """Return the mutated source. Raises LookupError where a text is not there exactly once."""
        source = textwrap.dedent(inspect.getsource(self.target()[2]))
        for old, new in self.edits:
            if (found := source.count(old)) != 1:
                raise LookupError(f"mutant '{self.says}': '{old}' is {found} times in {self.where}, expected once")
            source = source.replace(old, new)
        return source

    def target(self) -> tuple[Any, str, Callable[..., Any]]:
        """Return the module or class, the name in it, and the function."""
        module, _, path = self.where.partition(":")
        owner: Any = importlib.import_module(module)
        *classes, name = path.split(".")
        for one in classes:
            owner = getattr(owner, one)
        found = inspect.getattr_static(owner, name)
        return owner, name, found.__func__ if isinstance(found, (classmethod, staticmethod)) else found


@contextlib.contextmanager
def applied(mutant: Mutant) -> Iterator[None]:
    """Run with the mutant in place of the function, wherever that was imported to."""
    owner, name, real = mutant.target()
    module = inspect.unwrap(real).__globals__
    scope: dict[str, Any] = {}
    code = compile(mutant.source(), mutant.where, "exec", flags=annotations.compiler_flag)
    exec(code, module, scope)
    if inspect.isclass(owner):
        places: list[tuple[Any, str]] = [(owner, name)]
    else:
        ours = [m for key, m in [*sys.modules.items()] if key.startswith(("relax_hpc", "tools.faults"))]
        places = [(m, key) for m in ours for key, value in [*vars(m).items()] if value is real]
    before = [inspect.getattr_static(place, key) for place, key in places]
    try:
        for place, key in places:
            setattr(place, key, scope[name])
        yield
    finally:
        for (place, key), value in zip(places, before, strict=True):
            setattr(place, key, value)


_PUBLISH, _QUEUE, _LEASE = "relax_hpc.files.publish:", "relax_hpc.spool.queue:", "relax_hpc.supervise.lease:"
_SCHEDULER = "relax_hpc.roles.training.batch_scheduler:BatchScheduler."
_VERSIONS, _CHECKPOINT = "relax_hpc.weights.versions:Versions.", "relax_hpc.checkpoint:"
_WATCH, _LEDGER = "relax_hpc.files.watch:FolderWatch.", "relax_hpc.spool.ledger:"
_RETENTION = "relax_hpc.roles.training.retention:Retention."


def _m(killer: int | str | None, says: str, where: str, *texts: str) -> Mutant:
    return Mutant(says, where, tuple(zip(texts[::2], texts[1::2], strict=True)), killer)


MUTANTS = (
    # files appear whole, once
    _m(407, "a name is taken by rename, not by link", _PUBLISH + "link_exclusive", "os.link(temporary, final)", "os.rename(temporary, final)"),
    _m(0, "a file is written under its own name", _PUBLISH + "publish",
       "return link_exclusive(temporary, final, durable=durable)", "temporary.unlink(); write_file(final, data); return True"),
    _m(0, "a file is replaced in place", _PUBLISH + "replace",
       "rename_once(temporary, final, is_in_place)", "temporary.unlink(); final.unlink(missing_ok=True); write_file(final, data)"),
    _m(33, "content is not flushed", _PUBLISH + "write_file", "        if durable:\n            os.fsync(handle)", ""),
    _m(143, "a folder's new name is not flushed", _PUBLISH + "link_exclusive", "if mine and durable:", "if False:"),
    _m(143, "a shard is published without a flush", _QUEUE + "publish_shard", "publish(final, image):", "publish(final, image, durable=False):"),
    _m(0, "a checkpoint is written in its place", _CHECKPOINT + "commit", "    os.rename(folder, final)\n",
       "    final.mkdir(); [write_file(final / p.name, p.read_bytes()) for p in sorted(folder.iterdir())]; shutil.rmtree(folder)\n"),
    # lost answers
    _m(130, "a lost reply to link is believed", _PUBLISH + "link_exclusive",
       "temporary.stat().st_nlink > 1 and temporary.samefile(final)", "False"),
    _m(0, "any error of link says that the name is taken", _PUBLISH + "link_exclusive",
       "if not mine and not isinstance(error, FileExistsError):", "if False:"),
    _m(131, "a name that is taken counts as ours", _PUBLISH + "link_exclusive",
       "temporary.stat().st_nlink > 1 and temporary.samefile(final)", "is_there(final)"),
    _m(110, "a lost reply to rename is believed", _PUBLISH + "rename_once", "if not done():", "if True:"),
    _m(90, "a rename that failed counts as done", _PUBLISH + "rename_once", "if not done():", "if False:"),
    _m(535, "a lost reply to an incarnation's mkdir is believed", _LEASE + "Lease.new_incarnation", "mkdir(exist_ok=True)", "mkdir()"),
    _m(6, "a lease counts as ours if there is one", _LEASE + "_appears",
       '(_read(folder) or {}).get("token") == about["token"]', "is_there(folder)"),
    _m(15, "a lease that we took in vain is believed to be another's", _LEASE + "_lives", ' or about.get("token") in _given_up', ""),
    # requests
    _m(4, "a worker that lost the race for a request fails", _QUEUE + "_moved", "return False", "raise"),
    _m(2, "an old listing is believed by a worker", _QUEUE + "RequestQueue.claim", "if path in self._mine and is_there(path):", "if False:"),
    _m(1, "a given-up worker does not notice", _QUEUE + "RequestQueue.claim", "if not folder.is_dir():", "if False:"),
    _m(223, "a torn request is claimed", _QUEUE + "RequestQueue.claim", "if request is None:", "if False:"),
    _m("tests/unit/test_queue.py::test_a_request_file_that_a_power_failure_emptied_stops_nobody",
       "a torn request counts as open", _QUEUE + "RequestQueue.remove_torn", "self._remove(path)", "pass"),
    _m(20, "a dead worker's claims are not given back", _QUEUE + "RequestQueue.give_back", "self._reopen(folder, t, lost)", "False"),
    _m(0, "a dead worker's folder stays", _QUEUE + "RequestQueue.give_back",
       "folder.rmdir()  # without the folder it cannot claim", "pass",
       "    with contextlib.suppress(OSError):\n        folder.rmdir()\n    return given", "    return given"),
    _m(0, "a claim ends before its shard is there", _QUEUE + "publish_shard",
       "    if publish(final, image):\n        end_claim(run, claim)\n", "    end_claim(run, claim)\n    if publish(final, image):\n"),
    _m(0, "a claim does not end with its shard", _QUEUE + "end_claim", "    claim.path.unlink(missing_ok=True)\n", ""),
    _m(69, "a partial rollout outlives its shard", _QUEUE + "end_claim",
       "run.partial_rollout(claim.request.id, claim.request_file.aborts).unlink(missing_ok=True)", "pass"),
    _m(131, "a later attempt is not kept", _QUEUE + "publish_shard", "publish(quarantine, image, durable=False)", "pass"),
    _m(131, "a later attempt is kept without a reason", _QUEUE + "publish_shard",
       '_say_why(quarantine, "another attempt was published first", worker=worker)', "pass"),
    _m(69, "a request is opened again before its part is there", "relax_hpc.spool.partial_rollouts:put_back",
       "    mine = publish_part(", "    moved = queue.put_back(claim, aborts=number)\n    mine = publish_part(",
       "if queue.put_back(claim, aborts=number) and", "if moved and"),
    _m("tests/unit/test_partial.py::test_a_part_stays_until_the_next_one_is_there",
       "a part is removed before the next one is there", "relax_hpc.spool.partial_rollouts:put_back",
       "    number = claim.request_file.aborts + 1\n",
       "    number = claim.request_file.aborts + 1\n    run.partial_rollout(claim.request.id, number - 1).unlink(missing_ok=True)\n"),
    _m(69, "a claim is given back as an attempt of its own", _QUEUE + "RequestQueue.put_back",
       "return _moved(claim.path, self._run.open_requests / again.name)", "claim.path.unlink(); return True"),
    # restarts
    _m("tests/unit/test_queue.py::test_a_request_that_moves_while_it_is_listed_is_seen",
       "open requests are not looked at a second time", _QUEUE + "RequestQueue._folders",
       "yield from self._workers()\n    yield self._run.open_requests", "yield from self._workers()"),
    _m("tests/unit/test_queue.py::test_a_request_that_is_claimed_after_claims_were_listed_is_seen",
       "claims are looked at before open requests", _QUEUE + "RequestQueue._folders",
       "    yield self._run.open_requests\n    yield from", "    yield from"),
    _m("tests/unit/test_batch_scheduler.py::test_a_request_that_is_published_while_a_successor_looks_for_it_is_not_asked_for_again",
       "shards are looked at before requests", _SCHEDULER + "_missing",
       "    somewhere =", "    there = {o.id for o in requests if self.arrivals.is_published(o.id)}\n    somewhere =",
       "not self.arrivals.is_published(o.id)]", "o.id not in there]"),
    _m(6, "shards are not looked at after a restart", _SCHEDULER + "_missing", " and not self.arrivals.is_published(o.id)]", "]"),
    _m(41, "claims are not looked at after a restart", _QUEUE + "RequestQueue._folders", "yield from self._workers()", "yield from ()"),
    _m(330, "the ledger is not read after a restart", _SCHEDULER + "next_entry", "None if self.live else self.ledger.find(step)", "None"),
    _m(0, "missing requests are not released again", _SCHEDULER + "_reconcile", "self.queue.put(missing, oldest=version)", "pass"),
    _m(373, "torn requests are not looked for", _SCHEDULER + "_reconcile", "self.queue.remove_torn()", "pass"),
    _m(0, "a step trains on its own entry, not on the one that is there", _LEDGER + "Ledger.commit",
       "    if publish(", "    if True or publish("),
    _m("tests/unit/test_ledger.py::test_who_comes_second_adopts",
       "an entry that is there is not adopted", _LEDGER + "Ledger.commit",
       "adopted = self.find(entry.step)", "adopted = entry"),
    _m(0, "an entry's checksum is not compared", _LEDGER + "read_entry", "if written != (found := checksum(value)):", "if (found := '') is None:"),
    _m(7, "a version that was published is not made the newest", _VERSIONS + "catch_up", "self._say_newest(version)", "pass"),
    # fencing
    _m(6, "the ledger is not written through the incarnation", _LEDGER + "Ledger.commit", "commit_dir=self._commit_dir", "commit_dir=None"),
    _m("tests/unit/test_weights.py::test_a_fenced_trainer_announces_and_forgets_no_version",
       "manifests are not written through the incarnation", _VERSIONS + "announce", ", commit_dir=self.commit_dir)", ")"),
    _m(7, "the newest version is not named through the incarnation", _VERSIONS + "_say_newest", "commit_dir=self.commit_dir, ", ""),
    _m("tests/unit/test_weights.py::test_a_fenced_trainer_announces_and_forgets_no_version",
       "manifests are not removed through the incarnation", _VERSIONS + "remove", "os.rename(path, gone)", "path.unlink(); return"),
    _m("tests/unit/test_batch_scheduler.py::test_a_fenced_trainer_withdraws_nothing",
       "open requests are not removed through the incarnation", _QUEUE + "RequestQueue._remove", "if self._commit_dir is None:", "if True:"),
    _m("tests/unit/test_retention.py::test_a_fenced_trainer_removes_nothing",
       "shards are not removed through the incarnation", _RETENTION + "_remove",
       "os.rename(path, gone)\n        gone.unlink()", "path.unlink()"),
    _m("tests/unit/test_checkpoint.py::test_a_fenced_trainer_neither_adds_nor_removes",
       "checkpoints are not removed through the incarnation", _CHECKPOINT + "rotate",
       "os.rename(run.checkpoint(step), gone)\n        discard(gone)", "shutil.rmtree(run.checkpoint(step))"),
    _m("tests/unit/test_ledger.py::test_a_fenced_incarnation_cannot_commit",
       "a fenced publication makes its folder again", _PUBLISH + "publish", "(temporary.exists() if written else commit_dir is None)", "True"),
    _m(21, "a new incarnation does not fence the one before", _LEASE + "Lease.new_incarnation",
       "rename_once(old, over, partial(is_there, over))", "pass"),
    _m(6, "an incarnation's number counts only in its own lease", _LEASE + "Lease.new_incarnation",
       "for folder in folders", "for folder in [self.folder]"),
    _m(6, "numbers of what was removed are forgotten", _LEASE + "_clear_away", '(run.lease / f"{number}{GONE}").touch()', "pass"),
    _m("tests/unit/test_lease.py::test_an_incarnations_number_is_on_disk_before_its_folder_is_removed",
       "numbers of what was removed are not flushed", _LEASE + "_clear_away", "sync_folder(run.lease)", "pass"),
    _m(12, "folders of superseded leases stay", _LEASE + "acquire", "_clear_away(run)", "pass"),
    _m("tests/unit/test_lease.py::test_who_holds_the_folder_of_a_superseded_lease_open_can_neither_start_nor_commit_anything_through_it",
       "the folder of a superseded lease stays, empty", _LEASE + "_clear_away", "_remove(over)", "[_remove(over / name) for name in _incarnations(over)]"),
    _m(6, "a lease is taken beside the one that is held", _LEASE + "acquire", "_supersede(held)", "pass"),
    _m(36, "a lease's number is chosen after the look at who holds it", _LEASE + "acquire",
       "number = max((int(lease.name[:6]) for lease in _leases(run)), default=0) + 1\n", "pass\n",
       'folder, token = run.lease / f"{number:06d}"',
       'number = max((int(lease.name[:6]) for lease in _leases(run)), default=0) + 1\n    folder, token = run.lease / f"{number:06d}"'),
    _m("tests/unit/test_lease.py::test_one_that_is_overtaken_between_looking_and_taking_fails",
       "a lease's number may be given twice", _LEASE + "acquire",
       "if any(lease != folder and int(lease.name[:6]) >= number for lease in _leases(run)):", "if False:"),
    _m(0, "a lease appears before its holder", _LEASE + "_appears", "rename_once(draft, folder,",
       'folder.mkdir(); write_file(folder / "holder.json", to_json(about)); (lambda *a: None)(draft, folder,'),
    _m(6, "a superseded supervisor goes on between renewals", _LEASE + "Lease.renew", "return is_there(self.folder)", "return True"),
    _m("tests/unit/test_lease.py::test_a_superseded_holder_notices_and_can_do_nothing",
       "a superseded supervisor goes on after a renewal", _LEASE + "Lease.renew",
       "except FileNotFoundError:\n            return False", "except FileNotFoundError:\n            pass"),
    _m("tests/unit/test_lease.py::test_a_superseded_holder_notices_and_can_do_nothing",
       "outcomes are not written through the lease", _LEASE + "Lease.commit", ", commit_dir=self.folder", ""),
    # clocks and caches
    _m("tests/unit/test_lease.py::test_a_single_renewal_is_seen_though_stat_answers_from_a_cache",
       "a renewed lease is not believed", _LEASE + "_is_renewed", "if before not in (None, renewed) or asked():", "if asked():"),
    _m("tests/unit/test_lease.py::test_a_holder_on_another_host_lives_as_long_as_it_is_seen_to_renew_whatever_the_clocks_say",
       "a lease is judged by the clock on the wall", _LEASE + "_lives",
       'return _is_renewed(lease / "holder.json", limit_s, asked)', "return young"),
    _m("tests/unit/test_lease.py::test_a_holder_on_another_host_lives_as_long_as_it_is_seen_to_renew_whatever_the_clocks_say",
       "a silent holder is given no time", _LEASE + "_lives", "limit_s = SILENT_S if young else OLD_S", "limit_s = 0.0"),
    _m("tests/unit/test_lease.py::test_a_single_renewal_is_seen_though_stat_answers_from_a_cache",
       "a lease's time is taken from a cache", _LEASE + "_renewed_at",
       "    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)\n", "    return os.stat(path).st_mtime_ns\n"),
    _m("tests/unit/test_heartbeat_monitor.py::test_the_time_for_which_we_stood_still_is_nobodys_silence",
       "standing still counts as another's silence", "relax_hpc.supervise.heartbeat_monitor:HeartbeatMonitor.look",
       "passed_s if passed_s > max(BLIND_S, 3 * every_s) else 0.0", "0.0"),
    _m("tests/unit/test_queue.py::test_a_name_is_seen_at_the_next_poll_even_when_the_folders_time_stands_still",
       "a folder's time is believed at once", _WATCH + "_may_hide_more", "return unsettled and", "return False and"),
    _m("tests/unit/test_queue.py::test_where_times_are_whole_seconds_a_name_of_the_same_second_is_seen_soon",
       "times in whole seconds are taken for fine ones", _WATCH + "_may_hide_more", "coarse = self._mtime % 10**9 == 0", "coarse = False"),
    _m("tests/unit/test_queue.py::test_a_folder_is_listed_again_after_a_while_whatever_its_time_says",
       "a folder is listed only when its time changes", _WATCH + "names", "elif now - self._listed_at > self._relist_s:", "elif False:"),
    # stray names
    _m(0, "any name is a lease", _LEASE + "_leases", "if _LEASE.fullmatch(name)", "if name"),
    _m("tests/unit/test_stray_names.py::test_a_stray_name_changes_nothing[checkpoints-folder]",
       "any name that begins like a checkpoint's is one", "relax_hpc.files.run_dir:RunDir.checkpoint_steps",
       "_CHECKPOINT.fullmatch(name)", 're.match(r"step-(.*)", name)'),
    _m(0, "names that begin like a request's are requests", _QUEUE + "RequestFile.parse", "_REQUEST_FILE.fullmatch(name)", "_REQUEST_FILE.match(name)"),
    # room
    _m("tests/unit/test_retention.py::test_nothing_goes_that_the_oldest_checkpoint_replays",
       "shards are removed that a checkpoint replays", _RETENTION + "_remove_before", "range(self.removed_before, step)", "range(self.removed_before, step + 1)"),
    _m(0, "the newest checkpoint decides what is removed", _CHECKPOINT + "rotate", "return done[-keep:][0]", "return done[-1]"),
)  # fmt: skip
