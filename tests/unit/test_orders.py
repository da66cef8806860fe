"""The book of orders under every schedule: a simulated run with random completion times, deaths and restarts.

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

from relax_hpc.spool.orders import MAX_DROPS, Choice, Order, OrderBook, order_seed


@dataclass(frozen=True)
class Ref:
    source: int
    index: int


class Counting:
    """A cursor: prompt i is (0, i)."""

    def __init__(self) -> None:
        self.position = 0

    def take(self, count: int) -> list[Ref]:
        self.position += count
        return [Ref(0, i) for i in range(self.position - count, self.position)]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


@dataclass(frozen=True)
class Sampled:
    """Dynamic sampling: what a book is given for it, and the share of groups that pass."""

    refills: int = 0
    oversample: float = 1.0
    share: float = 0.5

    def passing(self, order: str) -> int:
        """Of an order's two groups; a function of its name."""
        rng = random.Random(f"{self.share}/{order}")
        return sum(rng.random() < self.share for _ in range(2))


def make_book(
    n: int, staleness: int, late: Any, ahead: int | None = None, batches: int = 10**6, sampled: Sampled | None = None
) -> OrderBook:
    book = OrderBook(n, 2, 4, staleness, late, 7, Counting(), staleness if ahead is None else ahead, batches)
    if sampled:
        book.wanted, book.refills, book.oversample = 2 * n, sampled.refills, sampled.oversample
    return book


def feasible(due: list[int], step: int, n: int) -> bool:
    """Whether n jobs a step from `step` on can do all of these by their deadlines: by doing it, most urgent first."""
    return all(step + i // n <= deadline for i, deadline in enumerate(sorted(due)))


@dataclass
class World:
    """Workers, weights and files around a book, with random timing."""

    book: OrderBook
    rng: random.Random
    open: dict[str, int] = field(default_factory=dict)  # oldest version it may start from
    claimed: dict[str, int] = field(default_factory=dict)  # version it was started with
    done: dict[str, int] = field(default_factory=dict)
    orders: dict[str, Order] = field(default_factory=dict)
    entries: list[Choice] = field(default_factory=list)
    states: list[str] = field(default_factory=list)
    refills: list[int] = field(default_factory=list)
    sampled: Sampled = Sampled()

    def put(self, orders: list[Order]) -> None:
        for order in orders:
            assert order.id not in self.orders, "an order is released once"
            self.orders[order.id] = order
            self.open[order.id] = order.min_version

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
            assert self.open[i] <= version, "an order that nobody may ever start"
            self.claimed[i] = self.rng.randint(self.open.pop(i), version)
        self.done |= self.claimed
        self.claimed.clear()

    def step(self, s: int) -> Choice:
        """Until step s can be taken, as the trainer does it: names first, then starts of what is in play."""
        for _ in range(self.rng.randint(0, 60)):
            self.happen(s)
        for attempt in range(400):
            complete = {i: v for i, v in self.done.items() if i in self.book.outstanding}
            passing = {i: self.sampled.passing(i) for i in complete}
            self.put(self.book.refill(s, passing))
            choice = self.book.choose(s, complete, {}, passing)
            if choice is None or choice.drop:
                self.open = {i: max(v, s) for i, v in self.open.items()}
                choice = self.book.choose(s, complete, self.open | self.claimed, passing)
            if choice is not None:
                self.refills.append(self.book.refilled)
                return choice
            if attempt >= 300:
                self.finish_everything(s)
            self.happen(s)
        raise AssertionError("everything is complete, and the trainer waits")


def simulate(seed: int, n: int, staleness: int, late: str, steps: int = 12) -> World:
    world = World(make_book(n, staleness, late), random.Random(seed))
    book = world.book
    world.put(book.release(upto=staleness))
    for s in range(steps):
        world.states.append(json.dumps(book.state_dict()))
        assert len(book.outstanding) <= (staleness + 1) * n
        choice = world.step(s)
        assert len(choice.take) == n and list(choice.take) == sorted(choice.take)
        assert not set(choice.take) & set(choice.drop)
        for i in choice.take:
            assert s - staleness <= world.done[i] <= s
        for i in choice.drop:
            assert late == "drop" and world.orders[i].drops < MAX_DROPS
        world.put(book.apply(s, choice.take, choice.drop))
        for i in choice.drop:
            world.open.pop(i, None)
        world.entries.append(choice)
        due = [
            world.done.get(i, world.claimed.get(i, world.open.get(i, o.min_version))) + staleness
            for i, o in book.outstanding.items()
        ]
        assert feasible(due, s + 1, n), f"after step {s} the bound cannot be kept any more: {sorted(due)}"
        world.put(book.release(upto=s + 1 + staleness))
    return world


worlds = st.tuples(st.integers(0, 10**9), st.integers(1, 4), st.integers(0, 4), st.sampled_from(["wait", "drop"]))


@settings(max_examples=150, deadline=None)
@given(worlds)
def test_every_schedule_keeps_the_bound_and_loses_nothing(given: tuple[int, int, int, str]) -> None:
    world = simulate(*given)
    taken = Counter(i for entry in world.entries for i in entry.take)
    dropped = Counter(i for entry in world.entries for i in entry.drop)
    assert set((taken + dropped).values()) <= {1}
    assert set(taken) | set(dropped) | set(world.book.outstanding) == set(world.orders)
    # Every prompt is asked for by one order and its replacements, of which all but the last were dropped.
    chains: dict[tuple[tuple[int, int], ...], list[str]] = {}
    for order in world.orders.values():
        chains.setdefault(order.prompts, []).append(order.id)
    for chain in chains.values():
        last = max(chain, key=len)
        assert set(chain) - {last} == set(chain) & set(dropped)
        assert [world.orders[i].drops for i in sorted(chain, key=lambda i: (len(i), i))] == list(range(len(chain)))
        assert len(chain) <= MAX_DROPS + 1


@settings(max_examples=40, deadline=None)
@given(worlds, st.integers(0, 11))
def test_a_book_replayed_from_any_checkpoint_is_the_live_one(given: tuple[int, int, int, str], begin: int) -> None:
    world = simulate(*given)
    _, n, staleness, late = given
    book = make_book(n, staleness, late)
    book.load_state_dict(json.loads(world.states[begin]))
    for s in range(begin, len(world.entries)):
        assert json.dumps(book.state_dict()) == world.states[s]
        book.apply(s, world.entries[s].take, world.entries[s].drop)
        book.release(upto=s + 1 + staleness)
    assert book.outstanding == world.book.outstanding
    assert book.state_dict() == world.book.state_dict()


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**9), st.integers(0, 10**9), st.integers(1, 3), st.integers(0, 3))
def test_names_prompts_and_seeds_do_not_depend_on_timing(one: int, other: int, n: int, staleness: int) -> None:
    first, second = simulate(one, n, staleness, "drop").orders, simulate(other, n, staleness, "drop").orders
    assert {i for i in first if "r" not in i} == {i for i in second if "r" not in i}
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
    versions = {f"o{k:06d}-000": max(v, step - staleness) for k, (v, _) in enumerate(given)}
    done = {i: versions[i] for i, (_, is_done) in zip(versions, given, strict=True) if is_done}
    book = make_book(n, staleness, "wait")
    book.outstanding = {i: Order(i, ((0, 0),), 1, 0, v) for i, v in versions.items()}
    best = sorted(done, key=lambda i: (done[i], i))[:n]
    left = [versions[i] + staleness for i in versions if i not in best]
    expected = tuple(sorted(best)) if len(best) == n and feasible(left, step + 1, n) else None
    choice = book.choose(step, done, versions)
    assert (choice.take if choice else None) == expected


def simulate_sampled(seed: int, n: int, staleness: int, late: str, sampled: Sampled, steps: int = 10) -> World:
    """A run to its end that takes orders until enough groups pass."""
    world = World(make_book(n, staleness, late, batches=steps, sampled=sampled), random.Random(seed), sampled=sampled)
    book = world.book
    world.put(book.release(upto=book.last_batch(0)))
    for s in range(steps):
        world.states.append(json.dumps(book.state_dict()))
        choice = world.step(s)
        passed = sum(map(sampled.passing, choice.take))
        batches = book.last_batch(s) - s + 1
        most = sampled.refills + math.ceil((sampled.oversample - 1) * n * batches)
        assert book.refilled <= most
        if passed < book.wanted:
            rest = set(book.outstanding) - set(choice.take)
            assert rest <= set(world.done) and book.refilled == most, "a step is short though more could come"
        later = [i for i in choice.take if world.done[i] + staleness > s]
        if later:
            last = max(later, key=lambda i: (world.done[i], -world.orders[i].drops, i))
            assert passed - sampled.passing(last) < book.wanted, "an order was taken that is neither needed nor due"
        assert all(s - staleness <= world.done[i] <= s for i in choice.take)
        assert all(late == "drop" and world.orders[i].drops < MAX_DROPS for i in choice.drop)
        world.put(book.apply(s, choice.take, choice.drop))
        for i in choice.drop:
            world.open.pop(i, None)
        world.entries.append(choice)
        world.put(book.release(upto=book.last_batch(s + 1)))
    return world


samplings = st.builds(
    Sampled, st.integers(0, 6), st.sampled_from([1.0, 1.5, 3.0]), st.sampled_from([0.0, 0.3, 0.7, 1.0])
).filter(lambda s: s.refills > 0 or s.oversample > 1)


@settings(max_examples=60, deadline=None)
@given(worlds, samplings)
def test_a_step_takes_orders_until_enough_groups_pass_within_the_bound(
    given: tuple[int, int, int, str], sampled: Sampled
) -> None:
    world = simulate_sampled(*given, sampled)
    settled = Counter(i for e in world.entries for i in (*e.take, *e.drop))
    assert set(settled.values()) <= {1}
    assert set(settled) | set(world.book.outstanding) == set(world.orders)
    prompts = [p for i, o in world.orders.items() if "r" not in i for p in o.prompts]
    assert sorted(prompts) == [(0, i) for i in range(len(prompts))], "a prompt was left out, or asked for twice"


@settings(max_examples=40, deadline=None)
@given(worlds, samplings, st.integers(0, 9))
def test_further_orders_are_replayed_from_what_the_ledger_counts(
    given: tuple[int, int, int, str], sampled: Sampled, begin: int
) -> None:
    world, (_, n, staleness, late) = simulate_sampled(*given, sampled), given
    book = make_book(n, staleness, late, batches=10, sampled=sampled)
    book.load_state_dict(json.loads(world.states[begin]))
    for s in range(begin, len(world.entries)):
        assert json.dumps(book.state_dict()) == world.states[s]
        book.refill_upto(s, world.refills[s])
        book.apply(s, world.entries[s].take, world.entries[s].drop)
        book.release(upto=book.last_batch(s + 1))
    assert book.state_dict() == world.book.state_dict()


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**9), st.integers(0, 10**9), st.integers(1, 3), samplings)
def test_on_policy_the_same_orders_are_taken_whatever_comes_first(
    one: int, other: int, n: int, sampled: Sampled
) -> None:
    """And no more than are needed: the fewest whose groups that pass fill the batch, or as many as oversampling asks for."""
    first, second = (simulate_sampled(seed, n, 0, "wait", sampled) for seed in (one, other))
    assert first.entries == second.entries and first.states == second.states
    at_once, extra = math.ceil(sampled.oversample * n), math.ceil((sampled.oversample - 1) * n)
    for s, entry in enumerate(first.entries):
        names = [f"o{s:06d}-{k:03d}" for k in range(n + sampled.refills + extra)]
        enough = [k for k in range(1, len(names)) if sum(map(sampled.passing, names[:k])) >= 2 * n]
        assert list(entry.take) == names[: max(at_once, enough[0])] if enough else names


def test_what_passes_and_is_not_needed_waits_for_the_next_step() -> None:
    book = make_book(2, 1, "wait", sampled=Sampled(refills=4))
    book.release(upto=1)
    every = dict.fromkeys(book.outstanding, 0)
    assert book.choose(0, every, {}, dict.fromkeys(every, 2)) == Choice(("o000000-000", "o000000-001"))
    short = dict.fromkeys(every, 2) | {"o000000-001": 0}
    assert [o.id for o in book.refill(0, short)] == ["o000000-002"]
    assert book.choose(0, every, {}, short) == Choice(("o000000-000", "o000000-001", "o000001-000"))


def test_what_was_dropped_too_often_is_waited_for() -> None:
    book = make_book(1, 0, "drop")
    book.release(upto=0)
    book.outstanding["o000000-001"] = Order("o000000-001", ((0, 9),), 1, 0, 0, drops=MAX_DROPS)
    assert book.choose(0, {"o000000-000": 0}, {}) is None
    book.outstanding["o000000-001"] = Order("o000000-001", ((0, 9),), 1, 0, 0, drops=MAX_DROPS - 1)
    assert book.choose(0, {"o000000-000": 0}, {}) == Choice(("o000000-000",), ("o000000-001",))


def test_replacements_have_names_of_their_own_and_seeds_of_their_names() -> None:
    book = make_book(1, 1, "drop")
    (order, _) = book.release(upto=1)
    (again,) = book.apply(0, [], [order.id])
    (third,) = book.apply(5, [], [again.id])
    assert [order.id, again.id, third.id] == ["o000000-000", "o000000-000r1", "o000000-000r2"]
    assert len({order.seed, again.seed, third.seed}) == 3 and third.seed == order_seed(7, third.id)
    assert order.prompts == third.prompts and (again.min_version, third.min_version) == (1, 6) and third.batch == 0


def test_an_order_survives_json() -> None:
    (order,) = make_book(1, 0, "wait").release(upto=0)
    assert Order.from_json(json.loads(json.dumps(order.to_json()))) == order


@pytest.mark.parametrize("run_seed", [0, 2**40])
def test_seeds_differ_between_orders_and_runs(run_seed: int) -> None:
    names = [f"o{b:06d}-{k:03d}" for b in range(50) for k in range(20)]
    seeds = {order_seed(run_seed, i) for i in names}
    assert len(seeds) == 1000 and not seeds & {order_seed(run_seed + 1, i) for i in names}
    assert max(seeds) < 2**63


def test_loading_does_not_share_state() -> None:
    book = make_book(2, 1, "wait")
    book.release(upto=1)
    state = book.state_dict()
    before = copy.deepcopy(state)
    other = make_book(2, 1, "wait")
    other.load_state_dict(state)
    other.release(upto=3)
    assert state == before and len(book.outstanding) == 4


def test_nothing_is_asked_for_beyond_the_last_step():
    book = OrderBook(2, 2, 4, 3, "wait", 7, Counting(), 3, batches=5)
    assert [len(book.release(book.last_batch(step))) for step in range(6)] == [8, 2, 0, 0, 0, 0]


def test_where_old_tokens_are_masked_the_oldest_orders_are_taken_and_none_is_waited_for_or_dropped() -> None:
    book = make_book(2, 1, "mask")
    book.release(upto=1)
    assert book.choose(5, {"o000001-000": 4}, {"o000000-000": 0}) is None
    ready = {"o000001-000": 4, "o000001-001": 1, "o000000-001": 0}
    assert book.choose(5, ready, {"o000000-000": 0}) == Choice(("o000000-001", "o000001-001"))
