"""The curriculum: weights that follow what is solved, the same after every restart and however late a request is released."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from relax_hpc.data import PromptCursor
from relax_hpc.data.curriculum import SourceWeights
from relax_hpc.spool.planner import RequestPlanner
from relax_hpc.spool.request import Request
from tests.unit.test_cursor import make

SIZES, OWN, STEPS = (50, 50, 50), (1.0, 1.0, 2.0), 90
Solved = dict[str, tuple[int, int]]


def planner(folder: Path) -> RequestPlanner:
    """A batch is 2 requests of 5 prompts; one batch may be asked for ahead."""
    made = RequestPlanner(2, 5, 4, 1, "wait", 0, PromptCursor(make(folder, SIZES, OWN), 0), 1, batches=10**6)
    made.weights = SourceWeights(OWN)
    return made


def solved(requests: list[Request]) -> Solved:
    """Source 0 is always solved, source 1 half of the time, source 2 never."""
    counts = [sum(s == source for o in requests for s, _ in o.prompts) * 4 for source in range(3)]
    return {str(s): (n * (2 - s) // 2, n) for s, n in enumerate(counts) if n}


class Trainer:
    """Makes steps; what it took of each is its ledger."""

    def __init__(self, planner: RequestPlanner, held_back: int = 0) -> None:
        """held_back: steps by which a quota holds releases back."""
        self.planner, self.held_back, self.batches = planner, held_back, dict[int, list[Request]]()

    def release(self, step: int) -> None:
        for request in self.planner.release(upto=max(step + 1 - self.held_back, step)):
            self.batches.setdefault(request.batch, []).append(request)

    def make(self, step: int, entry: Solved | None = None) -> Solved:
        self.release(step)
        batch = self.batches.get(step) or [o for o in self.planner.outstanding.values() if o.batch == step]
        entry = entry or solved(batch)
        self.planner.apply(step, [o.id for o in batch], [], entry)
        return entry


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("prompts")


@pytest.fixture(scope="module")
def whole(folder: Path) -> tuple[Trainer, list[Solved], dict[int, str]]:
    """A run: its trainer, ledger and checkpoints."""
    trainer, ledger, states = Trainer(planner(folder)), list[Solved](), dict[int, str]()
    for step in range(STEPS):
        states[step] = json.dumps(trainer.planner.state_dict())
        ledger.append(json.loads(json.dumps(trainer.make(step))))
    return trainer, ledger, states


def test_what_is_solved_half_of_the_time_comes_most(whole: tuple[Trainer, list[Solved], dict[int, str]]) -> None:
    trainer, _, _ = whole
    counts = lambda steps: [
        sum(s == source for step in steps for o in trainer.batches[step] for s, _ in o.prompts) for source in range(3)
    ]
    first, last = counts(range(2)), counts(range(STEPS - 10, STEPS))
    assert first == [5, 5, 10], "what is solved is not known yet: the recipe's own weights"
    shares = [0.1 / 1.3, 1 / 1.3, 0.2 / 1.3]
    assert all(abs(n - 100 * share) < 3 for n, share in zip(last, shares, strict=True)), last


@pytest.mark.parametrize("step", [0, 1, 7, STEPS - 1])
def test_a_restart_asks_for_the_same_prompts(
    folder: Path, whole: tuple[Trainer, list[Solved], dict[int, str]], step: int
) -> None:
    trainer, ledger, states = whole
    again = Trainer(planner(folder))
    again.planner.load_state_dict(json.loads(states[step]))
    for s in range(step, STEPS):
        again.make(s, {k: (a, b) for k, (a, b) in ledger[s].items()})
    assert again.batches == {b: requests for b, requests in trainer.batches.items() if b in again.batches}
    assert STEPS - 1 in again.batches or step == STEPS - 1
    assert again.planner.outstanding == trainer.planner.outstanding


def test_what_is_held_back_asks_for_the_same_prompts_later(
    folder: Path, whole: tuple[Trainer, list[Solved], dict[int, str]]
) -> None:
    late = Trainer(planner(folder), held_back=1)
    for step in range(STEPS):
        late.make(step)
    assert late.batches == {b: requests for b, requests in whole[0].batches.items() if b < STEPS}
