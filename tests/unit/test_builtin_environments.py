"""Built-in environments: what they answer to a model's turns, right and wrong ones."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from relax_hpc.environments import Environment, ToolError, Turn
from relax_hpc.environments.builtin.calculator import calculate
from relax_hpc.environments.channel import Reply, from_child, to_worker
from relax_hpc.environments.load import make_environments
from relax_hpc.recipe.tables.source import FileSource
from relax_hpc.records import Prompt
from relax_hpc.registry import WrongValue


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def prompt(answer: str = "42", **metadata: Any) -> Prompt:
    return Prompt(0, 0, "?", np.zeros(1, np.int32), answer, metadata)


@pytest.fixture
def begin(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Make an environment by its name in a recipe, and begin with a prompt."""
    made: list[Environment] = []

    def begin(name: str, asked: Prompt | None = None, **options: Any) -> Environment:
        source = FileSource(prompts=Path("x.jsonl"), environment=name, environment_options=options)
        made.append(make_environments([source])[0]())
        made[-1].reset(asked or prompt())
        return made[-1]

    yield begin
    for one in made:
        one.close()


def checked(turn: Turn) -> Turn:
    """The turn as it reaches the worker."""
    sent = from_child(to_worker(Reply(7, (turn,))))
    assert sent.seat == 7 and len(sent.turns) == 1, sent
    return sent.turns[0]


def said(turn: Turn) -> str:
    """What one tool answered."""
    assert not checked(turn).done
    (message,) = turn.observation
    assert isinstance(message, dict) and message["role"] == "tool"
    return str(message["content"])


@pytest.mark.parametrize(
    ("expression", "value"),
    [("12*(3+4)", 84), ("-2**2", -4), ("7//2 + 7%4", 6), ("1/4", 0.25), ("+3 - -3", 6), (" 999 + 1 ", 1000)],
)
def test_the_calculator_calculates(expression: str, value: float) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    ("expression", "why"),
    [
        ("__import__('os').system('true')", "found Call"), ("a+1", "found Name"), ("(1).real", "found Attribute"), ("1 if 1 else 2", "IfExp"),
        ("True+1", "found Constant"), ("'a'*9", "found Constant"), ("1+", "not an expression"), ("1/0", "zero"), ("10**9**9", "too large"),
        ("9**999*9**999*9**999*9**999", "too large"), ("1+" * 600 + "1", "characters"), ("(-1)**0.5", "found BinOp"), ("1e308**2", "."),
    ],
)  # fmt: skip
def test_the_calculator_refuses_what_is_no_expression_of_numbers(expression: str, why: str) -> None:
    began = time.monotonic()
    with pytest.raises(ToolError, match=why):
        calculate(expression)
    assert time.monotonic() - began < 1


def test_a_turn_without_a_call_is_the_final_answer_and_wrong_calls_are_read_by_the_model(begin: Any) -> None:
    one = begin("calculator", operations=1)
    assert said(one.step(call("calculator", expression="12+30"))) == "42"
    assert (
        said(one.step(call("calculator", expression="1+2+3"))) == "error: 2 operations at once, at most 1 are allowed"
    )
    assert said(one.step(call("calcluator", expression="1"))) == "error: there is no tool 'calcluator', only calculator"
    assert "takes expression, found sum" in said(one.step(call("calculator", sum="1")))
    assert "'expression' is a string, found 1" in said(one.step(call("calculator", expression=1)))
    assert "not JSON" in said(one.step("<tool_call>1+1</tool_call>"))
    turn = checked(one.step("42"))
    assert turn == Turn(True, "", None, {"tool_calls": 5.0, "tool_errors": 5.0}, "42")
    assert [tool["function"]["name"] for tool in one.tools()] == ["calculator"]


def test_each_sample_has_a_folder_of_its_own_that_goes_with_it(begin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_KEY", "s3cret")
    one, other = begin("bash"), begin("bash")
    assert said(one.step(call("bash", command="echo hello > a; pwd"))).startswith(str(one.folder))
    assert said(one.step(call("bash", command="cat a; echo $SECRET_KEY; false"))) == "hello\nexit status 1"
    assert "No such file" in said(other.step(call("bash", command="cat a")))
    one.close()
    assert not one.folder.parent.exists() and other.folder.exists()


def test_a_command_that_hangs_is_ended_with_all_that_it_started(begin: Any) -> None:
    one, began = begin("bash", time_limit_s=0.5), time.monotonic()
    left = "(sleep 1.5; touch later) & echo begun; sleep 60"
    assert "took longer than 0.5 s; said until then: begun" in said(one.step(call("bash", command=left)))
    assert said(one.step(call("bash", command="(sleep 1; touch later) & echo done"))) == "done"
    assert time.monotonic() - began < 5
    time.sleep(1.6)
    assert not (one.folder / "later").exists()


def test_python_prints_and_raises_and_long_output_loses_its_middle(begin: Any) -> None:
    one = begin("python", longest=100)
    assert said(one.step(call("python", code="open('n', 'w').write('41'); print(6 * 7)"))) == "42"
    assert said(one.step(call("python", code="print(int(open('n').read()) + 1)"))) == "42"
    assert "ZeroDivisionError" in said(one.step(call("python", code="1 / 0")))
    long = said(one.step(call("python", code="print('a' * 10**6 + 'b' * 10**6)")))
    assert long == f"{'a' * 50}\n…\n{'b' * 49}\n" or long == f"{'a' * 50}\n…\n{'b' * 50}"


def test_search_finds_the_passage_and_names_its_corpus_when_it_cannot(begin: Any, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    texts = ["Paris is the capital of France.", "Berlin is the capital of Germany.", "A cat sleeps."]
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    one = begin("search", corpus=str(corpus), passages=2)
    assert said(one.step(call("search", query="capital of Germany"))).splitlines()[0] == f"[1] {texts[1]}"
    assert said(one.step(call("search", query="zebra"))) == "nothing was found"
    assert "no words" in said(one.step(call("search", query="??")))
    with pytest.raises(Exception, match=r"nowhere\.jsonl"):
        begin("search", corpus="nowhere.jsonl").step(call("search", query="x"))


def test_image_tools_show_parts_and_reward_answers_that_looked(begin: Any, tmp_path: Path) -> None:
    picture = Image.new("RGB", (40, 20), "white")
    picture.paste("red", (0, 0, 20, 20))
    picture.save(tmp_path / "p.png")
    asked = prompt("red", image_file=str(tmp_path / "p.png"))

    def seen(turn: Turn) -> Image.Image:
        return Image.open(io.BytesIO(checked(turn).observation[0]["content"][0]["image"]))  # type: ignore[call-overload]

    one = begin("image_tools", asked)
    part = seen(one.step(call("zoom", box=[0, 0, 20, 10])))
    assert part.size == (40, 20) and part.getpixel((39, 19)) == (255, 0, 0)
    assert seen(one.step(call("rotate", degrees=90))).size == (20, 40)
    assert "smaller than 8 pixels" in said(one.step(call("zoom", box=[50, 0, 60, 10])))
    assert one.step("<answer>Red</answer>").reward == pytest.approx(2.0)
    assert begin("image_tools", asked).step("<answer>red</answer>").reward == pytest.approx(0.8)
    assert begin("image_tools", asked).step("red").reward == pytest.approx(-0.2)
    looked = begin("image_tools", asked)
    looked.step(call("rotate", degrees=5))
    assert looked.step("<answer>blue</answer>").reward == 0
    with pytest.raises(WrongValue, match="no column 'image_file'"):
        begin("image_tools", prompt())


def test_a_game_is_played_by_what_the_model_says(begin: Any) -> None:
    still = {"is_slippery": False}
    one = begin("gymnasium:FrozenLake-v1", show="ansi", moves=["left", "down", "right", "up"], options=still)
    refused = checked(one.step("I think about it")).observation[0]["content"]  # type: ignore[index, call-overload]
    assert refused == "That is no move: say left, down, right, up."
    shown = [checked(one.step(f"not up: {move}")) for move in ("down", "down", "right", "down", "right", "right")]
    assert "(Down)" in str(shown[0].observation) and not any(turn.done for turn in shown[:-1])
    assert shown[-1].done and shown[-1].reward == 1.0 and shown[-1].extra == {"moves": 6.0, "refused_moves": 1.0}
    pole = begin("gymnasium:CartPole-v1", prompt(seed=3))
    again = begin("gymnasium:CartPole-v1", prompt(seed=3))
    assert pole.step("1") == again.step("move 1") != pole.step("0")
    with pytest.raises(Exception, match="only Discrete ones can be said"):
        begin("gymnasium:Pendulum-v1")
