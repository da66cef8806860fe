"""`relax-hpc environments try`: an episode without a model."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from relax_hpc.cli import app

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "environment.toml"
CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "12*7"}}</tool_call>'


def played(*words: str, answers: str = "", ends: int = 0) -> str:
    result = CliRunner().invoke(app, ["environments", "try", *words], input=answers)
    assert result.exit_code == ends, result.output
    return " ".join(result.output.split())


def test_tools_turns_and_columns_are_shown(tmp_path: Path) -> None:
    script = tmp_path / "answers.txt"
    script.write_text(f"{CALL}\nIt is 84.\n")
    said = played("calculator", "--prompt", "What is 12*7?", "--script", str(script))
    assert "What is 12*7?" in said and "'name': 'calculator'" in said
    assert "environment 84 model It is 84." in said and "done after 2 turns" in said and "extra/tool_calls 1" in said


def test_a_row_of_a_recipe_is_played_with_its_reward(tmp_path: Path) -> None:
    first = played(str(EXAMPLE), "--row", "3")
    assert "not done: no answer is left after 0 turns" in first
    left, right = first.split("│")[1].strip().rstrip("=").split(" + ")
    said = played(str(EXAMPLE), "--row", "3", answers=f"wrong\n{int(left) + int(right)}\n")
    assert "done after 2 turns, reward 0.5" in said
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        '[model]\nname = "tiny"\n[[source]]\ntask = "chain_sum"\nreward = "length"\nreward_options = {most = 3}\n'
    )
    assert "done after 1 turns, reward" in played(str(recipe), answers="12\n")


def test_what_fails_a_sample_is_told(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "class Broken:\n"
        "    def reset(self, prompt): pass\n"
        "    def step(self, answer): raise KeyError('shelf')\n"
        "    def close(self): pass\n"
    )
    said = played(f"{tmp_path / 'mine.py'}:Broken", answers="1\n", ends=2)
    assert "raised KeyError" in said and "shelf" in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nothing"], "unknown environment 'nothing'"),
        (["calculator", "--metadata", "[1]"], "--metadata '[1]': expected an object"),
        (["calculator", "--options", "{"], "--options '{' is no JSON"),
        ([str(EXAMPLE), "--source", "4"], "--source 4: the recipe has sources 0 to 0"),
        ([str(EXAMPLE), "--row", "99999999"], "--row 99999999: source 0 has rows 0 to"),
    ],
)
def test_what_does_not_exist_is_named(words: list[str], message: str) -> None:
    assert message in played(*words, ends=2)
