"""The prompt cursor: seeded, shuffled, epoch-counting, resumed exactly from two counters a source."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers_for_tests import char_tokenizer

from relax_hpc.data import PromptCursor, PromptRef, PromptSources
from relax_hpc.data.shuffle import order
from relax_hpc.files.errors import RunError
from relax_hpc.recipe.tables.source import FileSource

SIZES, WEIGHTS = (7, 30, 4), (1.0, 2.5, 0.5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("prompts")


def make(
    folder: Path, sizes: tuple[int, ...] = SIZES, weights: tuple[float, ...] = WEIGHTS, holdout: float = 0.0
) -> PromptSources:
    sources = []
    for number, (size, weight) in enumerate(zip(sizes, weights, strict=True)):
        path = folder / f"{number}-{size}.jsonl"
        path.write_text("".join(json.dumps({"prompt": f"{number}:{i}", "answer": ""}) + "\n" for i in range(size)))
        sources.append(FileSource(prompts=path, weight=weight))
    return PromptSources(sources, char_tokenizer(), 64, holdout)


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    takes=st.lists(st.integers(0, 40), min_size=1, max_size=6),
    seed=st.integers(0, 2**40),
    holdout=st.sampled_from([0.0, 0.3]),
)
def test_resuming_at_any_point_gives_the_same_stream(folder: Path, takes: list[int], seed: int, holdout: float) -> None:
    whole = PromptCursor(make(folder, holdout=holdout), seed).draw(sum(takes) + 5)
    pieces: list[PromptRef] = []
    state: str | None = None
    for count in [*takes, 5]:
        cursor = PromptCursor(make(folder, holdout=holdout), seed)
        if state is not None:
            cursor.load_state_dict(json.loads(state))
        assert cursor.position == len(pieces)
        pieces += cursor.draw(count)
        state = json.dumps(cursor.state_dict())
    assert pieces == whole


def test_taking_state_does_not_move_the_stream_and_steps_do_not_matter(folder: Path) -> None:
    plain, watched = PromptCursor(make(folder), 5), PromptCursor(make(folder), 5)
    refs = []
    for _ in range(50):
        watched.state_dict()
        refs += watched.draw(1)
    assert refs == plain.draw(50)


def test_a_state_does_not_follow_the_cursor_it_was_taken_from(folder: Path) -> None:
    cursor = PromptCursor(make(folder), 5)
    cursor.draw(3)
    state = cursor.state_dict()
    after = cursor.draw(10)
    cursor.load_state_dict(state)
    assert cursor.draw(10) == after


def test_resuming_far_into_the_stream_replays_nothing(folder: Path) -> None:
    cursor = PromptCursor(make(folder, (1000,), (1.0,)), 0)
    cursor.draw(1)
    state = json.loads(json.dumps(cursor.state_dict()).replace("[1]", "[50000000]"))
    cursor.load_state_dict(state)
    assert cursor.position == 50_000_000
    assert cursor.draw(2)[0].epoch == 50_000


@pytest.mark.parametrize("holdout", [0.0, 0.4])
def test_every_epoch_goes_once_through_what_is_not_held_out(folder: Path, holdout: float) -> None:
    sources = make(folder, (30,), (1.0,), holdout)
    allowed = [i for i in range(30) if not sources.is_held_out(0, i)]
    assert holdout == 0.0 or 5 < len(allowed) < 28
    refs = PromptCursor(sources, 1).draw(4 * len(allowed))
    requests = []
    for epoch in range(4):
        indices = [ref.index for ref in refs if ref.epoch == epoch]
        assert sorted(indices) == allowed
        requests.append(tuple(indices))
    assert len(set(requests)) == 4 and tuple(allowed) not in requests
    assert [ref.epoch for ref in refs] == sorted(ref.epoch for ref in refs)


def test_every_prefix_follows_the_weights(folder: Path) -> None:
    for holdout in (0.0, 0.4):
        refs = PromptCursor(make(folder, holdout=holdout), 3).draw(400)
        counts: Counter[int] = Counter()
        for n, ref in enumerate(refs, 1):
            counts[ref.source] += 1
            for source, weight in enumerate(WEIGHTS):
                assert abs(counts[source] - n * weight / sum(WEIGHTS)) <= 1.5


def test_the_stream_is_the_seeds_and_names(folder: Path) -> None:
    def first(seed: int, stream: str = "train") -> list[object]:
        return [*PromptCursor(make(folder), seed, stream).draw(40)]

    assert first(1) == first(1)
    assert len({str(s) for s in (first(1), first(2), first(1, "sft_warm_start"))}) == 3


def test_the_cursor_leaves_torchs_random_state_alone(folder: Path) -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    cursor = PromptCursor(make(folder), 0)
    cursor.draw(3)
    cursor.load_state_dict(cursor.state_dict())
    cursor.draw(3)
    assert torch.equal(before, torch.get_rng_state())


def test_the_state_of_another_run_is_refused(folder: Path) -> None:
    state = PromptCursor(make(folder), 1).state_dict()
    with pytest.raises(RunError, match="seed"):
        PromptCursor(make(folder), 2).load_state_dict(state)
    with pytest.raises(RunError, match=r"sizes = \[7, 30, 4\], now it is \[7, 30, 5\].*prompt files"):
        PromptCursor(make(folder, (7, 30, 5)), 1).load_state_dict(state)


def test_a_source_that_is_held_out_whole_is_an_error_not_a_hang(folder: Path) -> None:
    with pytest.raises(RunError, match="source 2 has 4 prompts, and all of them are held out"):
        PromptCursor(make(folder, (1, 1, 4), (1e-9, 1e-9, 1.0), 0.9999999), 0).draw(1)


def test_the_shuffle_is_pinned_and_uniform() -> None:
    """A resumed run may meet another numpy: the order must not change with it."""
    assert order(12, 0, "train", 0, 0).tolist() == [10, 2, 6, 9, 3, 7, 11, 0, 1, 4, 8, 5]
    firsts = Counter(int(order(10, "seed", i)[0]) for i in range(4000))
    assert all(abs(firsts[i] - 400) < 100 for i in range(10))
