"""Plan rollout requests: which prompts are asked for, which requests are outstanding, what a step may take.

    cursor ──release──► outstanding ──(a worker publishes)──► choose ──► ledger entry ──apply──► gone

Pure: no file is touched here. The planner after step s is a function of the recipe, the checkpoint that it began from
and the ledger entries since. So a restart finds exactly the requests that were outstanding.

The bound, for a batch of n requests a step and deadlines d (version of the first token + max_staleness): step s takes
the earliest deadlines first, and the rest must fit: for every k >= 0 at most k * n requests are due by step s + k. This
is Hall's condition for unit jobs with deadlines: with it every later step can keep the bound too, whatever comes when.

With `wanted` groups (dynamic sampling, arXiv 2503.14476), a step takes requests until that many groups pass the
filters. Extra requests are released as soon as the outstanding ones could not fill every batch asked for, even if all
groups not yet known were to pass. So their number depends on how the groups turn out, not on which comes first.
Requests due now are taken even if the batch is full, so there is no condition on the rest; groups that pass and are not
needed stay out of the loss.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from relax_hpc.spool.request import OnStale, Request, replacement_id, request_name, request_seed

MAX_DROPS = 2
"""Drops after which a prompt is waited for: dropping again would train on short answers only."""


class Weights(Protocol):
    """Sampling weights of the sources that follow how many prompts were solved (data.curriculum)."""

    def at(self, step: int) -> Sequence[float]: ...
    def note(self, step: int, solved: Mapping[str, tuple[int, int]], forget_before: int) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Cursor(Protocol):
    """A checkpointable stream of prompts (data.cursor)."""

    def draw(self, count: int, weights: Sequence[float] | None = None) -> list[Any]: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True, slots=True)
class Choice:
    """A step's choice: the requests that it trains on, and those that it gives up."""

    take: tuple[str, ...]
    """Request ids, sorted, so that the batch's order does not depend on when they came."""
    drop: tuple[str, ...] = ()


@dataclass(slots=True)
class RequestPlanner:
    """The trainer's account of requests: asked for, outstanding, taken. A batch has `n` requests."""

    n: int
    groups_per_request: int
    samples_per_prompt: int
    max_staleness: int
    on_stale: OnStale
    seed: int
    cursor: Cursor
    ahead: int
    """Batches that may be outstanding besides the one that is trained next: max_staleness, or fewer."""
    batches: int
    """Batches of the whole run; no more are asked for."""
    wanted: int = 0
    """Groups that must pass the filters in each step; 0: a step takes n requests, whatever passes."""
    extra_requests: int = 0
    """Most extra requests that may be released for one step, in place of groups that do not pass."""
    oversample: float = 1.0
    """How many times the groups that the batches want are asked for at once."""
    weights: Weights | None = None
    """Sampling weights of the sources, where these change."""
    next_batch: int = 0
    extended: int = 0
    """Extra requests released for the next step."""
    outstanding: dict[str, Request] = field(default_factory=dict)

    def last_batch(self, step: int) -> int:
        """Return the last batch that may be outstanding while `step` is the next to train."""
        return min(step + self.ahead, self.batches - 1)

    def release(self, upto: int) -> list[Request]:
        """Release new requests for all batches up to `upto`; at most max_staleness + 1 batches are outstanding."""
        new = []
        while self.next_batch <= upto:
            for k in range(self.n):
                name, oldest = request_name(self.next_batch, k), self.next_batch - self.max_staleness
                new.append(self._request(name, oldest, self.next_batch - self.ahead))
            self.next_batch += 1
        return new

    def _request(self, name: str, oldest: int, step: int) -> Request:
        """Make a request and count it as outstanding. step: the earliest step before which it may be released."""
        weights = () if self.weights is None else (self.weights.at(step),)
        prompts = tuple((ref.source, ref.index) for ref in self.cursor.draw(self.groups_per_request, *weights))
        request = Request(name, prompts, self.samples_per_prompt, request_seed(self.seed, name), max(0, oldest))
        self.outstanding[name] = request
        return request

    def extend(self, step: int, passing: Mapping[str, int]) -> list[Request]:
        """Release extra requests for `step` if the outstanding ones cannot fill the batches, or are fewer than
        oversampling asks for.

        passing: complete request -> how many of its groups pass the filters. Returns at most n requests a call.
        """
        last = self.last_batch(step)
        if not self.wanted or self.next_batch <= last:  # whole batches are released first: they are next by the cursor
            return []
        batches, size = last - step + 1, self.groups_per_request
        most = self.extra_requests + math.ceil((self.oversample - 1) * self.n * batches)
        hoped = sum(passing.get(i, size) for i in self.outstanding)
        missing = max(
            batches * self.wanted - hoped, self.oversample * batches * self.wanted - len(self.outstanding) * size
        )
        return self.extend_upto(step, self.extended + min(math.ceil(missing / size), self.n, most - self.extended))

    def extend_upto(self, step: int, count: int) -> list[Request]:
        """Release extra requests for `step` until there were `count` of them."""
        numbers = range(self.n + self.extended, self.n + count)
        self.extended = max(self.extended, count)
        return [self._request(request_name(step, k), step + self.ahead - self.max_staleness, step) for k in numbers]

    def choose(
        self,
        step: int,
        complete: Mapping[str, int],
        started: Mapping[str, int],
        passing: Mapping[str, int] | None = None,
    ) -> Choice | None:
        """Choose what step `step` takes; None while it must wait.

        complete: published request -> its first version. started: request in progress -> the version that it was
        started with (or the oldest version that it may now start from, if that was raised). Both may name requests that
        are not outstanding.
        passing: complete request -> how many of its groups pass the filters, where groups are `wanted`.
        """
        due = {
            i: complete.get(i, started.get(i, o.min_version)) + self.max_staleness for i, o in self.outstanding.items()
        }
        urgent = sorted(due, key=lambda i: (due[i], -self.outstanding[i].drops, i))
        if self.wanted:
            return self._fill(step, urgent, due, complete, passing or {})
        if self.on_stale == "mask":  # tokens that are too old stay out of the loss one by one: no request is ever late
            ready = [i for i in urgent if i in complete]
            return Choice(tuple(sorted(ready[: self.n]))) if len(ready) >= self.n else None
        ready = [i for i in urgent if i in complete and due[i] >= step]
        if len(ready) < self.n:
            return None
        take = set(ready[: self.n])
        drop = self._surplus(step, [i for i in urgent if i not in take], due)
        if self._must_wait(step, drop, due):
            return None
        return Choice(tuple(sorted(take)), tuple(sorted(drop)))

    def _fill(
        self,
        step: int,
        urgent: Iterable[str],
        due: Mapping[str, int],
        complete: Mapping[str, int],
        passing: Mapping[str, int],
    ) -> Choice | None:
        """Choose the most urgent requests until enough groups pass, and all others due now; everything there is, if no
        more will come."""
        take, left, groups, masks = list[str](), list[str](), 0, self.on_stale == "mask"
        for i in urgent:
            needed = groups < self.wanted or (due[i] == step and not masks)
            if i in complete and needed and (due[i] >= step or masks):
                take.append(i)
                groups += passing[i]
            else:
                left.append(i)
        if not take or (groups < self.wanted and any(i not in complete for i in left)):
            return None
        drop = [i for i in left if due[i] <= step and not masks]
        if self._must_wait(step, drop, due):
            return None
        return Choice(tuple(sorted(take)), tuple(sorted(drop)))

    def _must_wait(self, step: int, drop: Iterable[str], due: Mapping[str, int]) -> bool:
        """Return True if a request in `drop` could still be in time and is to be waited for."""
        late = [i for i in drop if due[i] >= step]
        return bool(late) and (self.on_stale == "wait" or any(self.outstanding[i].drops >= MAX_DROPS for i in late))

    def _surplus(self, step: int, left: Iterable[str], due: Mapping[str, int]) -> list[str]:
        """Return the requests of `left` (most urgent first) that no later step can take in time; empty when Hall's
        condition holds."""
        surplus, kept = [], 0
        for request_id in left:
            if kept + 1 > (due[request_id] - step) * self.n:
                surplus.append(request_id)
            else:
                kept += 1
        return surplus

    def apply(
        self, step: int, take: Iterable[str], drop: Iterable[str], solved: Mapping[str, tuple[int, int]] | None = None
    ) -> list[Request]:
        """Account for the ledger entry of `step`. Return the replacements of those it dropped, now released."""
        if self.weights is not None:
            self.weights.note(step, solved or {}, min(self.next_batch - self.ahead, step + 1))
        replacements = []
        self.extended = 0
        for request_id in take:
            del self.outstanding[request_id]
        for request_id in drop:
            old = self.outstanding.pop(request_id)
            name = replacement_id(request_id)
            new = replace(old, id=name, seed=request_seed(self.seed, name), min_version=step + 1, drops=old.drops + 1)
            self.outstanding[name] = new
            replacements.append(new)
        return replacements

    def state_dict(self) -> dict[str, Any]:
        return {
            "next_batch": self.next_batch,
            "extended": self.extended,
            "cursor": self.cursor.state_dict(),
            "outstanding": [request.to_json() for request in self.outstanding.values()],
            "weights": None if self.weights is None else self.weights.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next_batch, self.extended = state["next_batch"], state["extended"]
        self.cursor.load_state_dict(state["cursor"])
        if self.weights is not None:
            self.weights.load_state_dict(state["weights"])
        self.outstanding = {o["id"]: Request.from_json(o) for o in state["outstanding"]}
