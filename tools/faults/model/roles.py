"""The processes of a run, over the real code of relax_hpc: what each reads, decides and commits, without models.

    supervisor ── lease, sweep, give back, incarnations ──► trainer ── ledger, versions, checkpoints, removals
                                                        └─► workers ── claims, shards, parts        scorer ── columns

What a role computes is a digest: of a request's name for a shard, of all that was trained for a policy. Heartbeats and
processes are the machine's: a supervisor sees at once that a child has died, and believes what the driver says of others.
"""

from __future__ import annotations

import hashlib
import logging
import time
import zlib
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from relax_hpc import checkpoint
from relax_hpc.algorithms.base import TEACHER
from relax_hpc.algorithms.filters import zero_std
from relax_hpc.files.publish import Data, read_json, to_json, write_file
from relax_hpc.files.run_dir import RunDir
from relax_hpc.files.watch import SHARED_PAUSE_S, backoff
from relax_hpc.recipe.schema import Recipe
from relax_hpc.records import Finish, Group, PartialRollout, Prompt, Sample
from relax_hpc.roles.common.columns import Columns
from relax_hpc.roles.common.load_batch import load_batch
from relax_hpc.roles.common.quarantine import Quarantine
from relax_hpc.roles.common.ranks import until_fenced
from relax_hpc.roles.scoring.column_role import ColumnRole
from relax_hpc.roles.scoring.pending_columns import PendingColumns, opened
from relax_hpc.roles.training.arrivals import Arrivals
from relax_hpc.roles.training.batch_scheduler import BatchScheduler
from relax_hpc.roles.training.retention import Retention
from relax_hpc.roles.training.sample_reuse import SampleReuse
from relax_hpc.roles.training.selection import GroupSelection
from relax_hpc.spool import column, partial_rollouts
from relax_hpc.spool.ledger import Entry, Ledger
from relax_hpc.spool.planner import RequestPlanner
from relax_hpc.spool.queue import Claim, RequestQueue, end_claim, publish_shard
from relax_hpc.spool.reading import Shards
from relax_hpc.spool.shard import Shard
from relax_hpc.spool.shard_writer import encode
from relax_hpc.supervise import local
from relax_hpc.supervise.io_retry import IoRetry
from relax_hpc.supervise.lease import Lease, acquire
from relax_hpc.weights import contents, versions

if TYPE_CHECKING:
    from tools.faults.model.actors import Actor
    from tools.faults.model.world import World

STEPS, REQUESTS_PER_STEP, CHECKPOINT_EVERY = 3, 2, 1
TICK_S = 0.5
SHARDS_ON_THE_WAY = 2
RECIPE = Recipe.model_validate(
    {
        "model": {"hidden_size": 32, "intermediate_size": 64, "layers": 2, "heads": 4, "kv_heads": 2, "context": 64},
        "run": {"steps": STEPS},
        "trainer": {"learning_rate": 1e-3, "device": "cpu", "prompts_per_step": REQUESTS_PER_STEP},
        "rollout": {"max_new_tokens": 16, "groups_per_request": 1},
        "algorithm": {"group_size": 2},
        "spool": {"keep": "needed"},
        "source": [{"task": "chain_sum"}],
    }
)
_LOG = logging.getLogger("faults")


class Prompts:
    """A prompt cursor: prompt i is (0, i)."""

    position = 0

    def draw(self, count: int, weights: object = None) -> list[Any]:
        self.position += count
        return [SimpleNamespace(source=0, index=i) for i in range(self.position - count, self.position)]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class _Wait:
    """Waits between two attempts by the actor's clock."""

    def wait(self, timeout: float) -> None:
        time.sleep(timeout)

    def is_set(self) -> bool:
        return False


def policy_after(policy: str, entry: Entry) -> str:
    """Return the policy that a step makes of another: a digest of all that was trained, in order."""
    return hashlib.sha256(f"{policy} {entry.step} {[t.request for t in entry.take]}".encode()).hexdigest()


def groups_of(version: int, flat: bool = False) -> list[Group]:
    """Return one group of two samples. flat: with equal rewards, so that no step with extra requests wants it."""
    tokens = np.arange(3, dtype=np.int32)
    samples = [
        Sample(tokens, np.ones(3, np.uint8), np.zeros(3, np.float32), [(0, version)], Finish.STOP, reward=reward)
        for reward in (1.0, 1.0 if flat else 0.0)
    ]
    return [Group(Prompt(0, 0, "x", tokens[:2], "1"), samples)]


# the supervisor


def supervisor(world: World, me: Actor) -> str:
    """Take the lease, clear up, start the roles, and start again what ends, until all is trained."""
    run = world.run
    io = IoRetry(run, RECIPE.supervision.io_wait_s)
    setattr(io, "_ended", _Wait())  # noqa: B010 - its pauses are the actor's
    lease = io(lambda: acquire(run))
    world.checks.took_over(me, lease)
    queue = RequestQueue(run)
    io(lambda: local._clear(run, queue))
    while not io(partial(_tick, world, me, lease, queue)):
        time.sleep(TICK_S)
    io(lambda: lease.commit(run.outcome, to_json({"outcome": "done"})))
    world.end_children(me)
    io(lease.release)
    return "done"


def _tick(world: World, me: Actor, lease: Lease, queue: RequestQueue) -> bool:
    """Renew the lease, and start what is not there; returns True when the trainer has trained all."""
    if not lease.renew():
        raise lease.superseded()
    world.checks.renewed(me)
    trainer_ = world.children(me).get("trainer")
    if trainer_ is not None and trainer_.result == "done":
        return True
    if trainer_ is None or not trainer_.alive or trainer_ in world.suspects:
        try:
            folder = lease.new_incarnation()
        except FileNotFoundError as error:
            raise lease.superseded() from error
        child = world.start(me, "trainer", partial(trainer, world, commit_dir=folder))
        world.checks.began(me, child, folder)
    mine = {child.name for child in world.children(me).values() if child.alive and child not in world.suspects}
    for claim_dir in queue.workers():  # as RolloutNodes.look does: also those of which nobody speaks
        if claim_dir not in mine:
            queue.give_back(claim_dir, lost=True)
            world.checks.gave_back(claim_dir)
    for role, program in world.programs.items():
        child_ = world.children(me).get(role)
        if child_ is None or not child_.alive or child_ in world.suspects:
            world.start(me, role, program)
    return False


# the trainer


def trainer(world: World, me: Actor, commit_dir: Path) -> str:
    """Train all steps, or end because a successor took over."""
    process: Any = SimpleNamespace(log=_LOG)
    ended: Any = until_fenced(process, commit_dir, lambda: Training(world, me, commit_dir).train())  # type: ignore[arg-type,return-value]
    return ended if ended == "done" else "fenced"


class Training:
    """One incarnation of the trainer: rank 0, with a digest for a policy."""

    def __init__(self, world: World, me: Actor, commit_dir: Path) -> None:
        self.world, self.me, self.run, self.commit_dir = world, me, world.run, commit_dir
        shape, ledger = world.shape, Ledger(world.run, commit_dir)
        self.columns = (TEACHER,) if shape.columns else ()
        wanted = REQUESTS_PER_STEP * shape.extra
        planner = RequestPlanner(
            n=REQUESTS_PER_STEP, groups_per_request=1, samples_per_prompt=2, max_staleness=shape.staleness, on_stale=shape.on_stale,
            seed=0, cursor=Prompts(), ahead=shape.staleness, batches=STEPS, wanted=wanted, extra_requests=2 * wanted,
        )  # fmt: skip
        selection = GroupSelection([zero_std] if wanted else [], wanted)
        say = lambda kind, **about: None
        self.shard_reader = Shards(self.run, None)
        self.retention = Retention(self.run, RECIPE, commit_dir, ledger, context=64)
        arrivals = Arrivals(
            self.shard_reader,
            Columns(self.run, self.columns, commit_dir, say),
            Quarantine(self.run, commit_dir, say),
            self.retention,
        )
        reuse = SampleReuse(ledger, self.shard_reader, 0, shape.staleness)
        self.scheduler = BatchScheduler(
            planner, ledger, RequestQueue(self.run, commit_dir=commit_dir), arrivals, selection, self.retention, reuse
        )
        self.versions = versions.Versions(self.run, commit_dir, ledger.incarnation)
        self.step, self.policy = 0, ""

    def train(self) -> str:
        aside = partial(checkpoint.move_to_quarantine, self.run, self.commit_dir, self.run.quarantine)
        state = checkpoint.restore(self.run, lambda folder: None, str, aside)
        if state is not None:
            self.step, self.policy = state["step"], state["policy"]
            self.retention.removed_before = state["removed_before"]
            self.retention.remove_before(min(self.run.checkpoint_steps()))
        self.scheduler.begin(state)
        self.publish()
        if state is None:
            self.save()
        while self.step < STEPS:
            self.train_step(self.next_entry())
        return "done"

    def next_entry(self) -> Entry:
        for pause_s in backoff():
            self.world.checks.looks(self.me)
            entry = self.scheduler.next_entry(self.step, self.step, 0)
            if entry is not None:
                return entry
            time.sleep(pause_s)
        raise AssertionError

    def train_step(self, entry: Entry) -> None:
        self.world.checks.trains(self.me, entry)
        load_batch(entry, self.run, self.shard_reader, self.columns)
        self.policy = policy_after(self.policy, entry)
        self.step += 1
        self.publish()
        self.scheduler.settle(entry, self.step)
        if self.step % CHECKPOINT_EVERY == 0:
            self.save()

    def publish(self) -> None:
        """Publish the policy as FilePublisher does, but for its tensors."""
        found: contents.Contents = {"w": contents.Entry("F32", (1,), self.policy or "0")}
        published = self.versions.find(self.step)
        if published and contents.checksum(found) == published.version.checksum:
            self.versions.catch_up(published)
        else:
            self.versions.announce(self.versions.new(self.step, found, published), found)

    def save(self) -> None:
        folder = checkpoint.begin(self.commit_dir, self.step)
        write_file(folder / "policy", self.policy.encode())
        own = {"policy": self.policy, "removed_before": self.retention.removed_before}
        checkpoint.commit(self.run, folder, self.step, self.scheduler.state_dict() | own)
        oldest = checkpoint.rotate(self.run, self.commit_dir, self.world.shape.keep)
        self.retention.remove_before(oldest)
        self.versions.forget(oldest, ())


# workers


def worker(world: World, me: Actor) -> str:
    """Claim requests and publish their shards, until nobody waits for this worker. As with ShardPublisher, the next claim is
    made before the last one's shard is there."""
    run, queue, name = world.run, RequestQueue(world.run, world.shape.watchers), me.name
    queue.open_claim_dir(name)
    pauses = backoff(last_s=SHARED_PAUSE_S, watchers=world.shape.watchers)
    made = deque[tuple[Claim, Data]]()
    while not world.drained(me):
        claim = None
        if queue.has_open():
            newest = versions.latest(run)
            claim = queue.claim(name, newest.number) if newest else None
        if made and (claim is None or len(made) == SHARDS_ON_THE_WAY):
            _publish(world, me, *made.popleft())
        elif claim is None:
            time.sleep(next(pauses))
        if claim is None:
            continue
        pauses = backoff(last_s=SHARED_PAUSE_S, watchers=world.shape.watchers)
        world.checks.claimed(me, claim)
        if world.drained(me):
            queue.put_back(claim)
            world.checks.let_go(me, claim)
        elif world.gives_back_parts(me, claim):
            groups = groups_of(claim.request_file.version)
            partial_rollouts.put_back(run, queue, claim, PartialRollout(groups, [[0], [0]], [0, 1]), "none")
            world.checks.let_go(me, claim)
        elif (image := _generate(world, me, claim)) is not None:
            made.append((claim, image))
    for claim, image in made:
        _publish(world, me, claim, image)
    return "drained"


def _generate(world: World, me: Actor, claim: Claim) -> Data | None:
    """Make a request's shard, as RolloutWorker.generate does; None if it is there already."""
    run, request = world.run, claim.request
    if run.shard(request.id).exists():
        end_claim(run, claim)
        world.checks.let_go(me, claim)
        return None
    partial_rollouts.read(run, request, claim.request_file)
    version = claim.request_file.version
    about = {"version": version, "run": "this", "worker": me.name, "attempt": world.checks.attempts, "created": 0.0}
    flat = world.shape.extra and zlib.crc32(request.id.encode()) % 3 == 0
    image = encode(request.id, groups_of(version, flat), about)
    world.checks.generated(claim, image)
    return image


def _publish(world: World, me: Actor, claim: Claim, image: Data) -> None:
    mine = publish_shard(world.run, claim, image, me.name)
    world.checks.published(me, claim, image, mine)


# the scorer


def scorer(world: World, me: Actor) -> str:
    """Make the columns of published shards, as the scorer role does."""
    run, shard_reader = world.run, Shards(world.run, None)
    pending = PendingColumns(run, run, (TEACHER,), world.shape.staleness)
    stub: Any = SimpleNamespace(world=1, rank=0, commit_dir=None)
    pauses = backoff()
    while True:
        request, _ = pending.first(shard_reader, None, lambda: None)
        if request is None:
            time.sleep(next(pauses))
            continue
        read: Callable[[Shard], tuple[int, int]] = lambda shard: (shard.checksum, int(shard.offsets[-1]))
        found = opened(run, shard_reader, request, read)
        if found is not None:
            values = np.zeros(found[1], np.float32)
            image = column.encode(TEACHER, request, found[0], "teacher", values)
            ColumnRole._publish(stub, run.column(request, TEACHER), image, run.shard(request))
        pending.done(request)


def make_run(root: Path) -> RunDir:
    """Make a run's folders, with names in them that are nobody's."""
    run = RunDir(root)
    run.create()
    run.identity.write_bytes(to_json({"id": "this", "debug": None}))
    assert read_json(run.identity)["id"] == "this"
    strays = ["notes", "r000000-000.bak", "r000000-001.a0.v0.orig", ".swp", "000001.txt", "step-old", "lost+found"]
    for folder in (run.lease, run.open_requests, run.checkpoints, run.partial_rollouts, run.ledger, run.weights):
        for name in strays:
            (folder / name).write_bytes(b"?")
    return run
