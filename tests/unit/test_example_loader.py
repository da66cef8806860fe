"""The loader of examples to learn: the cursor's order, whoever prepares them, and exact resumption at any example."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from relax_hpc.data import PromptCursor, PromptSources
from relax_hpc.data.examples import Example, ExampleLoader
from relax_hpc.files.errors import RunError
from relax_hpc.recipe.tables.source import FileSource
from tests.unit.tokenizers_for_tests import char_tokenizer


def make(folder: Path, *, broken: bool = False) -> PromptSources:
    every = []
    for name, size in (("a", 7), ("b", 4)):
        rows = [{"prompt": f"{name}{i}+", "answer": f"={i}"} for i in range(size)]
        if broken and name == "b":
            rows[2]["answer"] = " "
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        every.append(FileSource(prompts=folder / f"{name}.jsonl", weight=1.0 if name == "a" else 0.25))
    tokenizer = char_tokenizer()
    tokenizer.add_special_tokens({"eos_token": "@"})
    return PromptSources(every, tokenizer, 64)


@pytest.fixture
def sources(tmp_path: Path) -> PromptSources:
    return make(tmp_path)


def said(examples: list[Example]) -> list[tuple[object, list[int], list[int]]]:
    return [(e.ref, e.prompt.tolist(), e.answer.tolist()) for e in examples]


@pytest.mark.parametrize("workers", [0, 2])
def test_examples_come_in_the_cursors_order_and_go_on_where_a_state_was_taken(
    sources: PromptSources, workers: int
) -> None:
    refs = PromptCursor(sources, 3).draw(12)
    whole = ExampleLoader(sources, 3).draw(12)
    assert [e.ref for e in whole] == refs
    for e in whole:
        prompt, answer = sources.example(e.ref.source, e.ref.index)
        assert (prompt.tokens.tolist(), answer.tolist()) == (e.prompt.tolist(), e.answer.tolist())
    for at in (0, 1, 5):
        first = ExampleLoader(sources, 3, workers)
        assert said(first.draw(at)) == said(whole[:at])
        state = json.loads(json.dumps(first.state_dict()))
        assert said(first.draw(3)) == said(whole[at : at + 3]), "asking for the state changes nothing"
        second = ExampleLoader(sources, 3, workers)
        second.load_state_dict(state)
        assert said(second.draw(12 - at)) == said(whole[at:])
        assert second.state_dict() != state


@pytest.mark.parametrize("workers", [0, 1])
def test_what_is_wrong_with_a_row_is_one_line_from_a_worker_too(tmp_path: Path, workers: int) -> None:
    with pytest.raises(
        RunError, match=r"^source 1, prompt 2 \(.*b\.jsonl:3\): there is no answer to learn: "
    ) as caught:
        ExampleLoader(make(tmp_path, broken=True), 3, workers).draw(60)
    assert "\n" not in str(caught.value)


def test_the_state_of_another_seed_is_refused(sources: PromptSources) -> None:
    state = ExampleLoader(sources, 3).state_dict()
    with pytest.raises(RunError, match="the run's seed"):
        ExampleLoader(sources, 4).load_state_dict(state)


def test_a_step_is_loaded_once(sources: PromptSources) -> None:
    steps = ExampleLoader(sources, 3)
    assert said(steps.of(0, 4)) == said(steps.of(0, 4)) == said(ExampleLoader(sources, 3).draw(4))
    assert said(steps.of(1, 4)) == said(ExampleLoader(sources, 3).draw(8))[4:]
