"""Prompt sources: JSONL, Parquet, reasoning-gym; what is wrong in a file is said with the line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers_for_tests import char_tokenizer

from relax_hpc.data import PromptCursor, PromptSources
from relax_hpc.files.errors import RunError
from relax_hpc.recipe.tables.source import EvaluationFile, FileSource, ReasoningGymSource, left_out

ROWS = [{"prompt": f"{i}+{i}=", "answer": str(2 * i), "level": i} for i in range(5)]


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def file_sources(path: Path, *, context: int = 64, chat: bool = False, **keys: Any) -> PromptSources:
    return PromptSources([FileSource(prompts=path, **keys)], char_tokenizer(chat=chat), context)


def fault(sources: PromptSources) -> str:
    with pytest.raises(RunError) as caught:
        sources.check()
    return str(caught.value)


def test_jsonl_rows_become_prompts(tmp_path: Path) -> None:
    sources = file_sources(write_jsonl(tmp_path / "p.jsonl", ROWS))
    sources.check()
    assert sources.sizes == [5]
    prompt = sources.prompt(0, 3)
    assert (prompt.source, prompt.index, prompt.text, prompt.answer, prompt.metadata) == (
        0,
        3,
        "3+3=",
        "6",
        {"level": 3},
    )
    assert str(char_tokenizer().decode(prompt.tokens.tolist())).replace(" ", "") == "3+3="
    assert prompt.tokens.dtype == "int32"


def test_parquet_rows_are_the_same_prompts_across_row_groups(tmp_path: Path) -> None:
    pq.write_table(
        pa.Table.from_pylist([r | {"image": b"\x00\x01"} for r in ROWS]), tmp_path / "p.parquet", row_group_size=2
    )
    parquet = file_sources(tmp_path / "p.parquet")
    jsonl = file_sources(write_jsonl(tmp_path / "p.jsonl", ROWS))
    parquet.check()
    assert parquet.sizes == [5]
    for i in (4, 0, 3, 1, 2):
        ours, theirs = parquet.prompt(0, i), jsonl.prompt(0, i)
        assert (ours.text, ours.answer, ours.metadata) == (theirs.text, theirs.answer, theirs.metadata)


def test_jsonl_is_read_by_line_not_held(tmp_path: Path) -> None:
    """Blank lines, CRLF, characters of many bytes and a last line without its end do not shift the rows."""
    path = tmp_path / "p.jsonl"
    path.write_bytes(
        '{"prompt": "ä€😀", "answer": 1}\r\n\n   \n{"prompt": "b", "answer": 2}\n\n{"prompt": "c", "answer": 3}'.encode()
    )
    sources = file_sources(path)
    assert [sources.text(0, i) for i in range(sources.sizes[0])] == ["ä€😀", "b", "c"]
    assert sources.prompt(0, 1).answer == "2"


def test_keys_are_mapped_also_nested_ones(tmp_path: Path) -> None:
    rows = [{"q": {"text": "1="}, "reward_model": {"ground_truth": 7}, "a.b": "x"}]
    path = write_jsonl(tmp_path / "p.jsonl", rows)
    prompt = file_sources(path, prompt_key="q.text", answer_key="reward_model.ground_truth").prompt(0, 0)
    assert (prompt.text, prompt.answer) == ("1=", "7")
    assert file_sources(path, prompt_key="a.b", answer_key="").prompt(0, 0).answer is None


def test_a_row_whose_roles_the_chat_template_refuses_is_named(tmp_path: Path) -> None:
    rows = [
        {"prompt": [{"role": role, "content": "1"}, {"role": "user", "content": "1"}]} for role in ("user", "system")
    ]
    sources = file_sources(write_jsonl(tmp_path / "p.jsonl", rows), chat=True, answer_key="")
    sources._sources[
        0
    ]._tokenizer.chat_template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}x"
    )
    said = fault(sources)
    assert "p.jsonl:2" in said and "refuses messages of the roles ['system', 'user']: no system role" in said


def test_broken_rows_are_said_at_once_up_to_twenty(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"prompt": "1", "answer": "1"} for _ in range(400)]
    for k in (3, 7, 300):
        rows[k]["prompt"] = 5
    said = fault(file_sources(write_jsonl(tmp_path / "p.jsonl", rows))).splitlines()
    assert [line for line in said if "p.jsonl:4:" in line or "p.jsonl:8" in line or "p.jsonl:301" in line] and len(
        said
    ) == 4
    assert said[0].startswith("3 prompts cannot be used")
    for row in rows:
        row["prompt"] = 5
    said = fault(file_sources(write_jsonl(tmp_path / "q.jsonl", rows))).splitlines()
    assert len(said) == 21 and said[0].startswith("at least 20 prompts cannot be used")


def test_chat_messages_go_through_the_chat_template(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    path = write_jsonl(tmp_path / "p.jsonl", [{"prompt": messages, "answer": ""}])
    assert file_sources(path, chat=True).prompt(0, 0).text == "<system>s\n<user>hi\n<assistant>"
    assert "no chat template" in fault(file_sources(path, chat=False))
    tools = [{"type": "function", "function": {"name": "add"}}]
    assert "does not show the tools add" in fault(file_sources(path, chat=True, tools=tools))
    table = pa.Table.from_pylist([{"prompt": [{"role": "user", "content": "hi"}], "answer": "x"}])
    pq.write_table(table, tmp_path / "p.parquet")
    assert file_sources(tmp_path / "p.parquet", chat=True).prompt(0, 0).text == "<user>hi\n<assistant>"


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ('{"prompt": "x", "answer"', [":4", "not JSON"]),
        ("\xff", [":4", "not JSON"]),
        ("[1, 2]", [":4", "expected a JSON object", "list"]),
        ('{"question": "x", "answer": "y"}', [":4", "no column 'prompt' (prompt_key)", "['answer', 'question']"]),
        ('{"prompt": "x", "solution": "y"}', [":4", "no column 'answer' (answer_key)", "['prompt', 'solution']"]),
        ('{"prompt": "x", "answer": null}', [":4", "'answer'", "null"]),
        ('{"prompt": 3, "answer": "y"}', [":4", "text or a list of chat messages", "3"]),
        ('{"prompt": "", "answer": "y"}', [":4", "prompt 2", "0 tokens"]),
        ('{"prompt": [{"role": "user"}], "answer": "y"}', [":4", "'role' and 'content'"]),
        (
            '{"prompt": [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}], "answer": "y"}',
            [":4", "only text", "shows image"],
        ),
    ],
)
def test_a_broken_row_names_file_and_line(tmp_path: Path, line: str, parts: list[str]) -> None:
    path = tmp_path / "p.jsonl"
    good = json.dumps(ROWS[0])
    path.write_bytes(f"{good}\n\n{good}\n".encode() + line.encode("latin-1") + f"\n{good}\n".encode())
    message = fault(file_sources(path, chat=True))
    assert str(path) in message and not [part for part in parts if part not in message], message


def test_a_prompt_longer_than_the_context_is_found_before_the_run(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [*ROWS, {"prompt": "7" * 16, "answer": "x"}, {"prompt": "7" * 15, "answer": "x"}]
    sources = file_sources(write_jsonl(tmp_path / "p.jsonl", rows), context=16)
    message = fault(sources)
    assert "source 0, prompt 5" in message and "16 tokens" in message and "at most 15" in message and ":6" in message
    assert len(sources.prompt(0, 6).tokens) == 15
    with pytest.raises(RunError, match="prompt 5"):
        sources.prompt(0, 5)


ENDS_MESSAGES = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}~{% endif %}{{ m.content }}|{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_an_example_is_a_prompt_and_its_answer_ended_as_the_model_ends_it(tmp_path: Path) -> None:
    user, bot = {"role": "user", "content": "a"}, {"role": "assistant", "content": [{"type": "text", "text": "b"}]}
    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": [user], "answer": "42"}]
    sources = file_sources(write_jsonl(tmp_path / "p.jsonl", rows), chat=True)
    talk = write_jsonl(tmp_path / "talk.jsonl", [{"prompt": [user, bot, user, bot], "answer": "?"}])
    said = file_sources(talk, chat=True, answer_key="")
    for each in (sources, said):
        each._sources[0]._tokenizer.add_special_tokens({"eos_token": "@"})

    def example(of: PromptSources, index: int) -> tuple[str, str]:
        prompt, answer = of.example(0, index)
        return prompt.text, of._sources[0]._tokenizer.decode(answer.tolist()).replace(" ", "")

    assert example(sources, 0) == ("1+1=", "2@")
    assert example(sources, 1) == ("<user>a\n<assistant>", "42@"), "a template that does not say how a message ends"
    assert example(said, 0) == ("<user>a\n<assistant>b\n<user>a\n<assistant>", "b@")
    sources._sources[0]._tokenizer.chat_template = ENDS_MESSAGES
    assert example(sources, 1) == ("<user>a|<assistant>", "~42|"), "what it puts before an answer is learned too"
    sources._sources[0]._tokenizer.chat_template = ENDS_MESSAGES.replace("<assistant>{% endif %}", "<think>{% endif %}")
    assert example(sources, 1) == ("<user>a|<think>", "42@"), "it does not go on with its own generation prompt"


def test_answers_that_cannot_be_learned_are_found_before_the_run(tmp_path: Path) -> None:
    for rows, keys, wrong in (
        ([*ROWS, {"prompt": "1", "answer": " "}], {}, [":6", "prompt 5", "no answer to learn", "source.0.answer_key"]),
        (ROWS, {"answer_key": ""}, [":1", "no answer to learn"]),
        ([*ROWS, {"prompt": "12345678", "answer": "12345678"}], {}, [":6", "8 tokens", "answer 9", "context of 16"]),
    ):
        sources = file_sources(write_jsonl(tmp_path / "p.jsonl", rows), context=16, **keys)
        sources._sources[0]._tokenizer.add_special_tokens({"eos_token": "@"})
        sources.check()
        with pytest.raises(RunError) as caught:
            sources.check(answers=True)
        assert not [part for part in wrong if part not in str(caught.value)], caught.value


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "text.parquet").write_text("not parquet")
    (tmp_path / "a.csv").touch()
    for name, part in [
        ("none.jsonl", "no such file"),
        ("empty.jsonl", "no rows"),
        ("text.parquet", "not a Parquet file"),
        ("a.csv", ".jsonl or .parquet"),
    ]:
        with pytest.raises(RunError, match=part) as caught:
            file_sources(tmp_path / name)
        assert name in str(caught.value)


def task(name: str = "basic_arithmetic", **keys: Any) -> PromptSources:
    return PromptSources([ReasoningGymSource(task=name, size=50, **keys)], char_tokenizer(), 64)


def test_reasoning_gym_items_are_the_tasks_own(tmp_path: Path) -> None:
    import reasoning_gym

    config = {"operators": ["+"], "min_terms": 2, "max_terms": 2, "allow_parentheses": False}
    sources = task(config=config, seed=3, template="{metadata[expression]}=")
    oracle = reasoning_gym.create_dataset("basic_arithmetic", size=50, seed=3, **config)
    for i in (0, 49):
        prompt = sources.prompt(0, i)
        left, right = prompt.text.removesuffix("=").split(" + ")
        assert prompt.answer == str(int(left) + int(right)) == oracle[i]["answer"]
        assert prompt.metadata == oracle[i]
    assert task().prompt(0, 1).text == reasoning_gym.create_dataset("basic_arithmetic", size=50, seed=0)[1]["question"]


def test_reasoning_gym_mistakes_say_what_there_is() -> None:
    with pytest.raises(RunError, match=r"'chain_summ'.*'chain_sum'"):
        task("chain_summ")
    with pytest.raises(RunError, match=r"no option \['terms'\].*max_terms \(6\)"):
        task(config={"terms": 2})
    with pytest.raises(RunError, match="refuses it.*max_terms must be >= min_terms"):
        task(config={"min_terms": 9})
    with pytest.raises(RunError, match=r"template.*expression"):
        task(template="{metadata[expr]}").check()
    with pytest.raises(RunError, match="source 0, prompt 2 .*tokens"):
        task(template="{question}" * 9).prompt(0, 2)


LONG = {"prompt": "123456789", "answer": "7", "level": 0}
UNANSWERED: list[dict[str, Any]] = [
    {"prompt": "6+6="},
    {"prompt": "7+7=", "answer": None},
    {"prompt": "8+8=", "answer": " "},
]


def drawn(sources: PromptSources, count: int, state: dict[str, Any] | None = None) -> list[int]:
    cursor = PromptCursor(sources, seed=1)
    if state is not None:
        cursor.load_state_dict(state)
    return [ref.index for ref in cursor.draw(count)]


def test_rows_that_are_too_long_or_unanswered_are_left_out_where_the_recipe_says_so(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "p.jsonl", [ROWS[0], LONG, *UNANSWERED, *ROWS[1:]])
    assert "9 tokens" in fault(file_sources(write_jsonl(tmp_path / "long.jsonl", [LONG]), context=9))
    assert 'missing_answer = "drop"' in fault(file_sources(write_jsonl(tmp_path / "none.jsonl", UNANSWERED[:1])))
    keys = {"too_long": "drop", "missing_answer": "drop"}
    for limit in ({"context": 9}, {"max_prompt_tokens": 8}):
        sources = file_sources(path, **keys, **limit)
        counts = sources.check()
        assert counts == {"source.0": {"rows": 9, "too_long": 1, "no_answer": 3, "cut": 0}}
        assert left_out(counts) == ["source.0: of 9 rows 1 left out as too long, 3 left out without an answer"]
        assert sorted(drawn(sources, 5)) == [0, 5, 6, 7, 8]
    whole = drawn(file_sources(path, **keys, **limit), 15)
    cursor = PromptCursor(file_sources(path, **keys, **limit), seed=1)
    assert [ref.index for ref in cursor.draw(7)] == whole[:7]
    assert (
        drawn(file_sources(path, **keys, **limit), 8, cursor.state_dict()) == whole[7:]
    )  # nothing was looked at before


def test_an_answer_that_does_not_fit_is_left_out_with_its_prompt(tmp_path: Path) -> None:
    rows = [*ROWS, {"prompt": "12345678", "answer": "12345678"}]
    path = write_jsonl(tmp_path / "p.jsonl", rows)
    tokenizer = char_tokenizer()
    tokenizer.add_special_tokens({"eos_token": "@"})
    sources = PromptSources([FileSource(prompts=path, too_long="drop")], tokenizer, 16, learns=True)
    assert sources.check(answers=True)["source.0"]["too_long"] == 1
    assert sorted(drawn(sources, 5)) == [0, 1, 2, 3, 4]
    assert not PromptSources([FileSource(prompts=path, too_long="drop")], tokenizer, 16).is_dropped(0, 5)


def test_a_prompt_is_cut_at_its_beginning(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "p.jsonl", [ROWS[0], LONG])
    sources = file_sources(path, too_long="truncate", max_prompt_tokens=4)
    assert sources.check() == {"source.0": {"rows": 2, "too_long": 0, "no_answer": 0, "cut": 1}}
    tokens, whole = sources.prompt(0, 1).tokens.tolist(), file_sources(path).prompt(0, 1).tokens.tolist()
    assert tokens == whole[-4:] and len(sources.prompt(0, 0).tokens) == 4
    with pytest.raises(ValueError, match="needs max_prompt_tokens"):
        FileSource(prompts=path, too_long="truncate")


def test_a_source_of_which_nothing_is_left_is_refused(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "p.jsonl", UNANSWERED)
    assert "all 3 rows are left out (0 too long, 3 without" in fault(file_sources(path, missing_answer="drop"))


def test_what_is_evaluated_is_never_a_dropped_row(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "p.jsonl", [*ROWS, LONG])
    asked = EvaluationFile(prompts=path, too_long="drop", max_prompt_tokens=8)
    sources = PromptSources([ReasoningGymSource(task="chain_sum")], char_tokenizer(), 640, 0, [asked])
    assert sorted(index for _, index in sources.evaluated(0)) == [0, 1, 2, 3, 4]
    shared = PromptSources(
        [FileSource(prompts=path, too_long="drop", max_prompt_tokens=8)], char_tokenizer(), 64, 0.999
    )
    assert 5 not in [index for _, index in shared.held_out(9)]
