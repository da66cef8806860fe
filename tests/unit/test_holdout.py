"""Held-out prompts: disjoint from training by text, the same everywhere, the share that was asked for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers_for_tests import char_tokenizer

from relax_hpc.data import PromptCursor, PromptSources
from relax_hpc.data.holdout import falls_in
from relax_hpc.files.errors import RunError
from relax_hpc.recipe.tables.source import EvaluationFile, FileSource, ReasoningGymSource

ADDITION = ReasoningGymSource(
    task="basic_arithmetic",
    size=6000,
    config={
        "operators": ["+"], "min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2, "allow_parentheses": False,
    },
    template="{metadata[expression]}=",
)  # fmt: skip


def prompts_file(path: Path, texts: list[str], *, weight: float = 1.0) -> FileSource:
    path.write_text("".join(json.dumps({"prompt": text, "answer": "x"}) + "\n" for text in texts))
    return FileSource(prompts=path, weight=weight)


def test_the_share_is_what_was_asked_for() -> None:
    for share in (0.01, 0.1, 0.5):
        held = sum(falls_in(f"text {i}", share) for i in range(20000))
        deviation = (share * (1 - share) / 20000) ** 0.5
        assert abs(held / 20000 - share) < 5 * deviation


def test_raising_the_share_only_adds() -> None:
    assert all(falls_in(str(i), 0.2) for i in range(5000) if falls_in(str(i), 0.1))


def test_the_split_is_the_same_in_another_process_with_another_hash_seed() -> None:
    code = "from relax_hpc.data.holdout import falls_in; print([i for i in range(200) if falls_in(str(i), .1)])"
    root = str(Path(__file__).resolve().parents[2])
    runs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": root},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert runs == {f"{[i for i in range(200) if falls_in(str(i), 0.1)]}\n"}


@pytest.mark.parametrize("stream", ["train", "sft_warm_start"])
def test_the_quickstart_task_never_trains_on_a_held_out_text(stream: str) -> None:
    """Items of a procedural task repeat under many indices; the split is by text."""
    sources = PromptSources([ADDITION], char_tokenizer(), 64, 0.1)
    held_out = [sources.prompt(*ref) for ref in sources.held_out(256)]
    trained = {sources.text(r.source, r.index) for r in PromptCursor(sources, 0, stream).draw(12000)}
    texts = {prompt.text for prompt in held_out}
    assert len(texts) == len(held_out) == 256
    assert len(trained) > 3000 and not texts & trained
    everything = {sources.text(0, i) for i in range(6000)}
    assert trained | {t for t in everything if falls_in(t, 0.1)} == everything


def test_held_out_prompts_do_not_depend_on_the_run_and_come_from_all_of_a_file(tmp_path: Path) -> None:
    source = prompts_file(tmp_path / "a.jsonl", [f"p{i}" for i in range(2000)])
    first = PromptSources([source], char_tokenizer(), 64, 0.1).held_out(20)
    assert first == PromptSources([source], char_tokenizer(), 64, 0.1).held_out(40)[:20]
    assert max(index for _, index in first) > 1000


def test_held_out_prompts_follow_the_weights_and_are_distinct_across_sources(tmp_path: Path) -> None:
    same = [f"p{i}" for i in range(400)]
    sources = PromptSources(
        [
            prompts_file(tmp_path / "a.jsonl", same),
            prompts_file(tmp_path / "b.jsonl", [*same, *(f"q{i}" for i in range(2000))], weight=3.0),
        ],
        char_tokenizer(), 64, 0.2,
    )  # fmt: skip
    found = sources.held_out(80)
    assert [sum(s == n for s, _ in found) for n in (0, 1)] == [20, 60]
    assert len({sources.text(*ref) for ref in found}) == 80
    everything = sources.held_out(10**6)
    assert {sources.text(*ref) for ref in everything} == {
        t for t in [*same, *(f"q{i}" for i in range(2000))] if falls_in(t, 0.2)
    }


def test_what_an_evaluation_source_asks_is_never_trained_on(tmp_path: Path) -> None:
    """Nor what it would ask beyond its limit; and the held-out share does not ask it again."""
    trained = [f"p{i}" for i in range(300)]
    source = prompts_file(tmp_path / "a.jsonl", trained)
    asked = [f"p{i}" for i in range(0, 300, 3)] + ["p0", "new"]
    own = EvaluationFile(prompts=prompts_file(tmp_path / "e.jsonl", asked).prompts, limit=20)
    sources = PromptSources([source], char_tokenizer(), 64, 0.2, [own])
    texts = {sources.text(ref.source, ref.index) for ref in PromptCursor(sources, 0).draw(600)}
    assert texts == {t for t in trained if not falls_in(t, 0.2)} - set(asked)
    generated = sources.evaluated(10**6)
    share, rest = ({sources.text(*ref) for ref in generated if ref[0] == n} for n in (0, 1))
    assert share == {t for t in trained if falls_in(t, 0.2)}
    assert len(rest) == sum(n == 1 for n, _ in generated) == 20 and rest < set(asked)
    everything = PromptSources([source], char_tokenizer(), 64, 0.0, [own.model_copy(update={"limit": None})])
    assert {everything.text(*ref) for ref in everything.evaluated(5)} == set(asked)
    assert len(everything.evaluated(5)) == len(set(asked))


def test_nothing_held_out_is_an_error_and_zero_holds_nothing_out(tmp_path: Path) -> None:
    kept = next(str(i) for i in range(100) if not falls_in(str(i), 0.1))
    source = prompts_file(tmp_path / "a.jsonl", [kept])
    with pytest.raises(RunError, match=r"evaluation.holdout = 0.1 of 1 prompts holds none out"):
        PromptSources([source], char_tokenizer(), 64, 0.1).held_out(5)
    assert not PromptSources([source], char_tokenizer(), 64, 0.0).is_held_out(0, 0)
