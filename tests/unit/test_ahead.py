"""Prompts read ahead: the same ones in the same order, wherever one stops, however the guess was, whoever dies."""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers import AutoTokenizer

from relax_hpc.data import PromptCursor, PromptSources
from relax_hpc.data.ahead import PromptLoader, Unusable
from relax_hpc.data.examples import ExampleLoader
from relax_hpc.files.errors import RunError
from relax_hpc.files.run_dir import RunDir
from relax_hpc.media.process import Processor
from relax_hpc.recipe.tables.model import TinyModel
from relax_hpc.recipe.tables.source import FileSource
from relax_hpc.recipe.tables.source import Media as Limits
from relax_hpc.records import Prompt
from relax_hpc.roles.rollout.ahead import NextRequest
from relax_hpc.spool.queue import RequestQueue
from relax_hpc.spool.request import Request
from relax_hpc.trainers.build import materialise

PICTURES = 10
CUT, DEADLY = 4, 7
"""Rows of a picture that is cut off, and of one whose reader kills its process where a test says so."""


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> PromptSources:
    folder = tmp_path_factory.mktemp("ahead")
    materialise(TinyModel(vision={}, alphabet="abcdefghij ?"), folder / "model", 0)
    rng, rows = np.random.default_rng(0), []
    for i in range(PICTURES):
        memory = io.BytesIO()
        Image.fromarray(rng.integers(0, 255, (32, 32, 3), dtype=np.uint8)).save(memory, "PNG")
        (folder / f"{i}.png").write_bytes(memory.getvalue()[: 200 if i == CUT else None])
        rows.append({"prompt": f"<image>{'abcdefghij'[i]}?", "image": f"{i}.png", "answer": "a"})
    (folder / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = FileSource(prompts=folder / "p.jsonl", media={"image": "image"})
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    return PromptSources([source], tokenizer, 64, processor=Processor(folder / "model", Limits()))


@pytest.fixture
def loaders(sources: PromptSources) -> Iterator[Any]:
    made: list[PromptLoader] = []

    def make(workers: int = 1) -> PromptLoader:
        made.append(PromptLoader(sources, workers, 3))
        return made[-1]

    yield make
    for loader in made:
        loader.close()
    assert not multiprocessing.active_children()


def said(found: Prompt | Unusable) -> tuple[int, str]:
    if isinstance(found, Unusable):
        return found.prompt.index, found.failure.reason
    assert found.media is not None
    found.media.check("the reader")
    return found.index, found.media.digest


def requests(cursor: PromptCursor, count: int) -> list[list[tuple[int, int]]]:
    return [[(ref.source, ref.index) for ref in cursor.draw(3)] for _ in range(count)]


@pytest.mark.parametrize("workers", [1, 2])
def test_whoever_stops_anywhere_goes_on_with_the_very_next_prompt(
    sources: PromptSources, loaders: Any, workers: int
) -> None:
    """The trainer keeps the cursor, and a request's file its names: a worker reads a request again from its beginning."""
    whole = [[said(p) for p in loaders(0).take(names)] for names in requests(PromptCursor(sources, 5), 7)]
    assert {index for request in whole for index, _ in request} == {*range(PICTURES)}
    for stop, within in ((0, 2), (3, 1), (6, 3)):
        cursor, loader, found = PromptCursor(sources, 5), loaders(workers), []
        names = requests(cursor, stop)
        for i, asked in enumerate(names):
            loader.expect(asked)
            found.append([said(p) for p in loader.take(asked)])
            if i + 1 < stop:
                loader.expect(names[i + 1])
        state = json.loads(json.dumps(cursor.state_dict()))
        (given_up,) = requests(cursor, 1)
        half = loader.take(given_up)
        assert [said(next(half)) for _ in range(within)] == whole[stop][:within]
        del half
        loader.close()
        again = PromptCursor(sources, 5)
        again.load_state_dict(state)
        second = loaders(workers)
        found += [[said(p) for p in second.take(asked)] for asked in requests(again, 7 - stop)]
        assert found == whole, (stop, within)


def test_examples_with_media_go_on_at_any_one(sources: PromptSources) -> None:
    digests = lambda examples: [(e.ref.index, e.media.digest if e.media else "") for e in examples]
    whole = digests(ExampleLoader(sources, 2).draw(14))
    for stop in (4, 9):
        first = ExampleLoader(sources, 2, 1)
        assert digests(first.draw(stop)) == whole[:stop]
        second = ExampleLoader(sources, 2, 1)
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert digests(second.draw(14 - stop)) == whole[stop:]


def test_a_wrong_guess_changes_nothing(sources: PromptSources, loaders: Any) -> None:
    loader, plain = loaders(), loaders(0)
    for guess, asked in ([0, 1, 2], [5, 6]), ([3, 5], [3, 5]), ([8], []), ([9, 9], [0, 1, 2, 3, 5, 6, 8]):
        loader.expect([(0, i) for i in guess])
        names = [(0, i) for i in asked]
        assert [said(p) for p in loader.take(names)] == [said(p) for p in plain.take(names)]


def test_a_broken_file_is_an_error_of_its_row_alone(loaders: Any) -> None:
    found = [said(p) for p in loaders().take([(0, 3), (0, CUT), (0, 5)])]
    assert [index for index, _ in found] == [3, CUT, 5]
    assert found[1][1] == "the prompt's media cannot be used"


def test_a_process_that_dies_costs_the_prompt_on_which_it_died(
    sources: PromptSources, loaders: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, parent = sources.prompt, os.getpid()

    def deadly(source: int, index: int) -> Prompt:
        if index == DEADLY and os.getpid() != parent:
            os.kill(os.getpid(), signal.SIGSEGV)
        return prompt(source, index)

    monkeypatch.setattr(sources, "prompt", deadly)
    before, loader = signal.getsignal(signal.SIGCHLD), loaders()
    names = [(0, i) for i in (6, DEADLY, 8)]
    loader.expect(names)
    found = [*loader.take(names)]
    assert [isinstance(p, Unusable) for p in found] == [False, True, False]
    assert found[1].failure.reason == "a process died that decoded the prompt's media"
    assert found[1].failure.detail.endswith(f"prompt {DEADLY}: a process that reads prompts ahead ended with code -11")
    assert found[1].prompt.index == DEADLY and len(found[1].prompt.tokens)
    assert [said(p)[0] for p in loader.take([(0, 1)])] == [1], "and it goes on"
    assert signal.getsignal(signal.SIGCHLD) is before, "torch's handler would raise out of anything"


def test_a_process_that_is_killed_from_outside_costs_nothing(loaders: Any) -> None:
    loader = loaders()
    assert len([*loader.take([(0, 1), (0, 2)])]) == 2
    (child,) = multiprocessing.active_children()
    child.kill()
    child.join()
    assert [said(p)[0] for p in loader.take([(0, 3), (0, 5)])] == [3, 5]


def test_errors_that_a_person_must_mend_are_raised(sources: PromptSources, loaders: Any) -> None:
    text = sources._sources[0]._items._rows  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(type(text), "__getitem__", lambda self, index: {"answer": "a"})
        with pytest.raises(RunError, match="no column 'prompt'"):
            [*loaders().take([(0, 0)])]


def test_a_worker_guesses_the_request_behind_those_of_the_others(tmp_path: Path, loaders: Any) -> None:
    run = RunDir(tmp_path / "run")
    run.create()
    queue, loader = RequestQueue(run), loaders()
    queue.open_claim_dir("w")
    names = ["r000001-000", "r000001-001", "r000001-002", "r000002-000"]
    queue.put([Request(name, ((0, i),), 1, 1, 0) for i, name in enumerate(names)])
    guess = NextRequest(queue, loader, workers=2)
    guess.read_ahead()
    assert guess.id == "r000001-001"
    claim = queue.claim("w", 0, guess.id)
    assert claim is not None and claim.request.id == "r000001-001", "of one batch, the one that is read already"
    guess.begun()
    queue.withdraw(names[:1])
    later = RequestQueue(run)
    guess = NextRequest(later, loader, workers=2)
    guess.read_ahead()
    assert guess.id == "r000002-000"
    claim = later.claim("w", 0, guess.id)
    assert claim is not None and claim.request.id == "r000001-002", "an older batch comes first"
