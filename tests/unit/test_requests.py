"""The request planner under every schedule: a simulated run with random completion times, deaths and restarts.

The oracle for the bound is its own: jobs with deadlines, n a step, scheduled earliest deadline first.
"""

from __future__ import annotations

import copy
import json
import math
import random
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_hpc.spool.planner import MAX_DROPS, Choice, RequestPlanner
from relax_hpc.spool.request import Request, request_seed


@dataclass(frozen=True)
class Ref:
    source: int
    index: int


class Counting:
    """A cursor: prompt i is (0, i)."""

    def __init__(self) -> None:
        self.position = 0

    def draw(self, count: int) -> list[Ref]:
        self.position += count
        return [Ref(0, i) for i in range(self.position - count, self.position)]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


@dataclass(frozen=True)
class Sampled:
    """Dynamic sampling: what a book is given for it, and the share of groups that pass."""

    extra_requests: int = 0
    oversample: float = 1.0
    share: float = 0.5

    def passing(self, request: str) -> int:
        """Of a request's two groups; a function of its name."""
        rng = random.Random(f"{self.share}/{request}")
        return sum(rng.random() < self.share for _ in range(2))


def make_planner(
    n: int,
    staleness: int,
    on_stale: Any,
    ahead: int | None = None,
    batches: int = 10**6,
    sampled: Sampled | None = None,
) -> RequestPlanner:
    planner = RequestPlanner(
        n, 2, 4, staleness, on_stale, 7, Counting(), staleness if ahead is None else ahead, batches
    )
    if sampled:
        planner.wanted, planner.extra_requests, planner.oversample = 2 * n, sampled.extra_requests, sampled.oversample
    return planner


def feasible(due: list[int], step: int, n: int) -> bool:
    """Whether n jobs a step from `step` on can do all of these by their deadlines: by doing it, most urgent first."""
    return all(step + i // n <= deadline for i, deadline in enumerate(sorted(due)))


@dataclass
class World:
    """Workers, weights and files around a book, with random timing."""

    planner: RequestPlanner
    rng: random.Random
    open: dict[str, int] = field(default_factory=dict)  # oldest version it may start from
    claimed: dict[str, int] = field(default_factory=dict)  # version it was started with
    done: dict[str, int] = field(default_factory=dict)
    requests: dict[str, Request] = field(default_factory=dict)
    entries: list[Choice] = field(default_factory=list)
    states: list[str] = field(default_factory=list)
    extra_requests: list[int] = field(default_factory=list)
    sampled: Sampled = Sampled()

    def put(self, requests: list[Request]) -> None:
        for request in requests:
            assert request.id not in self.requests, "a request is released once"
            self.requests[request.id] = request
            self.open[request.id] = request.min_version

    def happen(self, version: int) -> None:
        """Something of a worker's: it claims (holding weights as old as it may), publishes, or dies."""
        what = self.rng.random()
        if what < 0.45 and self.open:
            i = self.rng.choice(sorted(self.open))
            if self.open[i] <= version:
                self.claimed[i] = self.rng.randint(self.open.pop(i), version)
        elif what < 0.85 and self.claimed:
            i = self.rng.choice(sorted(self.claimed))
            self.done[i] = self.claimed.pop(i)
        elif self.claimed:
            i = self.rng.choice(sorted(self.claimed))
            self.open[i] = self.claimed.pop(i)

    def finish_everything(self, version: int) -> None:
        for i in sorted(self.open):
            assert self.open[i] <= version, "a request that nobody may ever start"
            self.claimed[i] = self.rng.randint(self.open.pop(i), version)
        self.done |= self.claimed
        self.claimed.clear()

    def step(self, s: int) -> Choice:
        """Until step s can be taken, as the trainer does it: names first, then starts of what is in progress."""
        for _ in range(self.rng.randint(0, 60)):
            self.happen(s)
        for attempt in range(400):
            complete = {i: v for i, v in self.done.items() if i in self.planner.outstanding}
            passing = {i: self.sampled.passing(i) for i in complete}
            self.put(self.planner.extend(s, passing))
            choice = self.planner.choose(s, complete, {}, passing)
            if choice is None or choice.drop:
                self.open = {i: max(v, s) for i, v in self.open.items()}
                choice = self.planner.choose(s, complete, self.open | self.claimed, passing)
            if choice is not None:
                self.extra_requests.append(self.planner.extended)
                return choice
            if attempt >= 300:
                self.finish_everything(s)
            self.happen(s)
        raise AssertionError("everything is complete, and the trainer waits")


def simulate(seed: int, n: int, staleness: int, on_stale: str, steps: int = 12) -> World:
    world = World(make_planner(n, staleness, on_stale), random.Random(seed))
    planner = world.planner
    world.put(planner.release(upto=staleness))
    for s in range(steps):
        world.states.append(json.dumps(planner.state_dict()))
        assert len(planner.outstanding) <= (staleness + 1) * n
        choice = world.step(s)
        assert len(choice.take) == n and list(choice.take) == sorted(choice.take)
        assert not set(choice.take) & set(choice.drop)
        for i in choice.take:
            assert s - staleness <= world.done[i] <= s
        for i in choice.drop:
            assert on_stale == "drop" and world.requests[i].drops < MAX_DROPS
        world.put(planner.apply(s, choice.take, choice.drop))
        for i in choice.drop:
            world.open.pop(i, None)
        world.entries.append(choice)
        due = [
            world.done.get(i, world.claimed.get(i, world.open.get(i, o.min_version))) + staleness
            for i, o in planner.outstanding.items()
        ]
        assert feasible(due, s + 1, n), f"after step {s} the bound cannot be kept any more: {sorted(due)}"
        world.put(planner.release(upto=s + 1 + staleness))
    return world


worlds = st.tuples(st.integers(0, 10**9), st.integers(1, 4), st.integers(0, 4), st.sampled_from(["wait", "drop"]))


@settings(max_examples=150, deadline=None)
@given(worlds)
def test_every_schedule_keeps_the_bound_and_loses_nothing(given: tuple[int, int, int, str]) -> None:
    world = simulate(*given)
    taken = Counter(i for entry in world.entries for i in entry.take)
    dropped = Counter(i for entry in world.entries for i in entry.drop)
    assert set((taken + dropped).values()) <= {1}
    assert set(taken) | set(dropped) | set(world.planner.outstanding) == set(world.requests)
    # Every prompt is asked for by one request and its replacements, of which all but the last were dropped.
    chains: dict[tuple[tuple[int, int], ...], list[str]] = {}
    for request in world.requests.values():
        chains.setdefault(request.prompts, []).append(request.id)
    for chain in chains.values():
        last = max(chain, key=len)
        assert set(chain) - {last} == set(chain) & set(dropped)
        assert [world.requests[i].drops for i in sorted(chain, key=lambda i: (len(i), i))] == list(range(len(chain)))
        assert len(chain) <= MAX_DROPS + 1


@settings(max_examples=40, deadline=None)
@given(worlds, st.integers(0, 11))
def test_a_planner_replayed_from_any_checkpoint_is_the_live_one(given: tuple[int, int, int, str], begin: int) -> None:
    world = simulate(*given)
    _, n, staleness, on_stale = given
    planner = make_planner(n, staleness, on_stale)
    planner.load_state_dict(json.loads(world.states[begin]))
    for s in range(begin, len(world.entries)):
        assert json.dumps(planner.state_dict()) == world.states[s]
        planner.apply(s, world.entries[s].take, world.entries[s].drop)
        planner.release(upto=s + 1 + staleness)
    assert planner.outstanding == world.planner.outstanding
    assert planner.state_dict() == world.planner.state_dict()


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**9), st.integers(0, 10**9), st.integers(1, 3), st.integers(0, 3))
def test_names_prompts_and_seeds_do_not_depend_on_timing(one: int, other: int, n: int, staleness: int) -> None:
    first, second = simulate(one, n, staleness, "drop").requests, simulate(other, n, staleness, "drop").requests
    assert {i for i in first if "x" not in i} == {i for i in second if "x" not in i}
    for i in first.keys() & second.keys():
        assert replace(first[i], min_version=0) == replace(second[i], min_version=0)


@settings(max_examples=300, deadline=None)
@given(
    st.integers(1, 3), st.integers(0, 3), st.integers(0, 6),
    st.lists(st.tuples(st.integers(0, 9), st.booleans()), min_size=1, max_size=9),
)  # fmt: skip
def test_it_waits_exactly_when_taking_now_would_break_the_bound(
    n: int, staleness: int, step: int, given: list[tuple[int, bool]]
) -> None:
    """Against the oracle: n that are complete and in time exist, and what is left after the most urgent ones is feasible."""
    versions = {f"r{k:06d}-000": max(v, step - staleness) for k, (v, _) in enumerate(given)}
    done = {i: versions[i] for i, (_, is_done) in zip(versions, given, strict=True) if is_done}
    planner = make_planner(n, staleness, "wait")
    planner.outstanding = {i: Request(i, ((0, 0),), 1, 0, v) for i, v in versions.items()}
    best = sorted(done, key=lambda i: (done[i], i))[:n]
    left = [versions[i] + staleness for i in versions if i not in best]
    expected = tuple(sorted(best)) if len(best) == n and feasible(left, step + 1, n) else None
    choice = planner.choose(step, done, versions)
    assert (choice.take if choice else None) == expected


def simulate_sampled(seed: int, n: int, staleness: int, on_stale: str, sampled: Sampled, steps: int = 10) -> World:
    """A run to its end that takes requests until enough groups pass."""
    world = World(
        make_planner(n, staleness, on_stale, batches=steps, sampled=sampled), random.Random(seed), sampled=sampled
    )
    planner = world.planner
    world.put(planner.release(upto=planner.last_batch(0)))
    for s in range(steps):
        world.states.append(json.dumps(planner.state_dict()))
        choice = world.step(s)
        passed = sum(map(sampled.passing, choice.take))
        batches = planner.last_batch(s) - s + 1
        most = sampled.extra_requests + math.ceil((sampled.oversample - 1) * n * batches)
        assert planner.extended <= most
        if passed < planner.wanted:
            rest = set(planner.outstanding) - set(choice.take)
            assert rest <= set(world.done) and planner.extended == most, "a step is short though more could come"
        later = [i for i in choice.take if world.done[i] + staleness > s]
        if later:
            last = max(later, key=lambda i: (world.done[i], -world.requests[i].drops, i))
            assert passed - sampled.passing(last) < planner.wanted, "a request was taken that is neither needed nor due"
        assert all(s - staleness <= world.done[i] <= s for i in choice.take)
        assert all(on_stale == "drop" and world.requests[i].drops < MAX_DROPS for i in choice.drop)
        world.put(planner.apply(s, choice.take, choice.drop))
        for i in choice.drop:
            world.open.pop(i, None)
        world.entries.append(choice)
        world.put(planner.release(upto=planner.last_batch(s + 1)))
    return world


samplings = st.builds(
    Sampled, st.integers(0, 6), st.sampled_from([1.0, 1.5, 3.0]), st.sampled_from([0.0, 0.3, 0.7, 1.0])
).filter(lambda s: s.extra_requests > 0 or s.oversample > 1)


@settings(max_examples=60, deadline=None)
@given(worlds, samplings)
def test_a_step_takes_requests_until_enough_groups_pass_within_the_bound(
    given: tuple[int, int, int, str], sampled: Sampled
) -> None:
    world = simulate_sampled(*given, sampled)
    settled = Counter(i for e in world.entries for i in (*e.take, *e.drop))
    assert set(settled.values()) <= {1}
    assert set(settled) | set(world.planner.outstanding) == set(world.requests)
    prompts = [p for i, o in world.requests.items() if "x" not in i for p in o.prompts]
    assert sorted(prompts) == [(0, i) for i in range(len(prompts))], "a prompt was left out, or asked for twice"


@settings(max_examples=40, deadline=None)
@given(worlds, samplings, st.integers(0, 9))
def test_further_requests_are_replayed_from_what_the_ledger_counts(
    given: tuple[int, int, int, str], sampled: Sampled, begin: int
) -> None:
    world, (_, n, staleness, on_stale) = simulate_sampled(*given, sampled), given
    planner = make_planner(n, staleness, on_stale, batches=10, sampled=sampled)
    planner.load_state_dict(json.loads(world.states[begin]))
    for s in range(begin, len(world.entries)):
        assert json.dumps(planner.state_dict()) == world.states[s]
        planner.extend_upto(s, world.extra_requests[s])
        planner.apply(s, world.entries[s].take, world.entries[s].drop)
        planner.release(upto=planner.last_batch(s + 1))
    assert planner.state_dict() == world.planner.state_dict()


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**9), st.integers(0, 10**9), st.integers(1, 3), samplings)
def test_on_policy_the_same_requests_are_taken_whatever_comes_first(
    one: int, other: int, n: int, sampled: Sampled
) -> None:
    """And no more than are needed: the fewest whose groups that pass fill the batch, or as many as oversampling asks for."""
    first, second = (simulate_sampled(seed, n, 0, "wait", sampled) for seed in (one, other))
    assert first.entries == second.entries and first.states == second.states
    at_once, extra = math.ceil(sampled.oversample * n), math.ceil((sampled.oversample - 1) * n)
    for s, entry in enumerate(first.entries):
        names = [f"r{s:06d}-{k:03d}" for k in range(n + sampled.extra_requests + extra)]
        enough = [k for k in range(1, len(names)) if sum(map(sampled.passing, names[:k])) >= 2 * n]
        assert list(entry.take) == names[: max(at_once, enough[0])] if enough else names


def test_what_passes_and_is_not_needed_waits_for_the_next_step() -> None:
    planner = make_planner(2, 1, "wait", sampled=Sampled(extra_requests=4))
    planner.release(upto=1)
    every = dict.fromkeys(planner.outstanding, 0)
    assert planner.choose(0, every, {}, dict.fromkeys(every, 2)) == Choice(("r000000-000", "r000000-001"))
    short = dict.fromkeys(every, 2) | {"r000000-001": 0}
    assert [o.id for o in planner.extend(0, short)] == ["r000000-002"]
    assert planner.choose(0, every, {}, short) == Choice(("r000000-000", "r000000-001", "r000001-000"))


def test_what_was_dropped_too_often_is_waited_for() -> None:
    planner = make_planner(1, 0, "drop")
    planner.release(upto=0)
    planner.outstanding["r000000-001"] = Request("r000000-001", ((0, 9),), 1, 0, 0, drops=MAX_DROPS)
    assert planner.choose(0, {"r000000-000": 0}, {}) is None
    planner.outstanding["r000000-001"] = Request("r000000-001", ((0, 9),), 1, 0, 0, drops=MAX_DROPS - 1)
    assert planner.choose(0, {"r000000-000": 0}, {}) == Choice(("r000000-000",), ("r000000-001",))


def test_replacements_have_names_of_their_own_and_seeds_of_their_names() -> None:
    planner = make_planner(1, 1, "drop")
    (request, _) = planner.release(upto=1)
    (again,) = planner.apply(0, [], [request.id])
    (third,) = planner.apply(5, [], [again.id])
    assert [request.id, again.id, third.id] == ["r000000-000", "r000000-000x1", "r000000-000x2"]
    assert len({request.seed, again.seed, third.seed}) == 3 and third.seed == request_seed(7, third.id)
    assert request.prompts == third.prompts and (again.min_version, third.min_version) == (1, 6) and third.batch == 0


def test_a_request_survives_json() -> None:
    (request,) = make_planner(1, 0, "wait").release(upto=0)
    assert Request.from_json(json.loads(json.dumps(request.to_json()))) == request


@pytest.mark.parametrize("run_seed", [0, 2**40])
def test_seeds_differ_between_requests_and_runs(run_seed: int) -> None:
    names = [f"r{b:06d}-{k:03d}" for b in range(50) for k in range(20)]
    seeds = {request_seed(run_seed, i) for i in names}
    assert len(seeds) == 1000 and not seeds & {request_seed(run_seed + 1, i) for i in names}
    assert max(seeds) < 2**63


def test_loading_does_not_share_state() -> None:
    planner = make_planner(2, 1, "wait")
    planner.release(upto=1)
    state = planner.state_dict()
    before = copy.deepcopy(state)
    other = make_planner(2, 1, "wait")
    other.load_state_dict(state)
    other.release(upto=3)
    assert state == before and len(planner.outstanding) == 4


def test_nothing_is_asked_for_beyond_the_last_step():
    planner = RequestPlanner(2, 2, 4, 3, "wait", 7, Counting(), 3, batches=5)
    assert [len(planner.release(planner.last_batch(step))) for step in range(6)] == [8, 2, 0, 0, 0, 0]


def test_where_old_tokens_are_masked_the_oldest_requests_are_taken_and_none_is_waited_for_or_dropped() -> None:
    planner = make_planner(2, 1, "mask")
    planner.release(upto=1)
    assert planner.choose(5, {"r000001-000": 4}, {"r000000-000": 0}) is None
    ready = {"r000001-000": 4, "r000001-001": 1, "r000000-001": 0}
    assert planner.choose(5, ready, {"r000000-000": 0}) == Choice(("r000000-001", "r000001-001"))
