"""The reward `code`: answers, tests and results of the shapes that the field's data sets have, and programs that cheat."""

from __future__ import annotations

import json
import re
import socket
import threading
from typing import Any

import numpy as np
import pytest

from relax_hpc.recipe import Recipe
from relax_hpc.records import Prompt
from relax_hpc.rewards import make_rewards
from relax_hpc.rewards.hub.code import cases, code, program
from relax_hpc.rewards.hub.code_runner import same_text, same_value
from relax_hpc.sandbox.wrap import missing


def prompt(tests: Any) -> Prompt:
    return Prompt(0, 7, "?", np.zeros(1, np.int32), tests if isinstance(tests, str) else json.dumps(tests), {})


PROGRAMS = [
    ("```python\na\n```", "a\n"), ("```\na\n```", "a\n"), ("```py\na\n```\nso:\n```Python3\nb\n```\nDone.", "b\n"), ("print(1)", "print(1)"),
    ("```python\na", "a"), ("```python\na\n```\noutput:\n```text\n3\n```", "a\n"), ("```cpp\na\n```", ""), ("", ""), ("``` python\na\n```", "a\n"),
    ("```python title=x\na\n```", "a\n"),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "expected"), PROGRAMS)
def test_the_program_is_the_last_block_of_python(answer: str, expected: str) -> None:
    assert program(answer) == expected


TEXTS = [
    ("3\n", "3", 1), ("3", "3\n\n", 1), ("3 4", "3  4", 1), ("3\n4", "3 4", 0), ("3.0", "3", 1), ("0.30", "0.3", 1), ("1e3", "1000", 1), ("YES", "yes", 0),
    ("3 ", "3", 1), ("", "3", 0), ("3", "", 0), ("", "", 1), ("a\n\nb", "a\nb", 0), ("3\n4\n5", "3\n4", 0), ("NaN", "NaN", 1), ("003", "3", 1), ("1,2", "1 2", 0),
    ("abc", "abd", 0),
]  # fmt: skip


@pytest.mark.parametrize(("found", "expected", "same"), TEXTS)
def test_outputs_are_compared_word_by_word(found: str, expected: str, same: int) -> None:
    assert same_text(found, expected) == bool(same)


VALUES = [
    (3, 3, 1), (3.0, 3, 1), (3, 4, 0), (True, 1, 0), (1, True, 0), (None, None, 1), (None, 0, 0), ([1, 2], [1, 2], 1), ([1, 2], [2, 1], 0), ([1], [1, 2], 0),
    (0.1 + 0.2, 0.3, 1), (0.3, 0.31, 0), ("a", "a", 1), ("3", 3, 0), ({"a": [1.0]}, {"a": [1]}, 1), ({"a": 1}, {"b": 1}, 0), (False, 0.0, 0), (1e300, 1e300, 1),
]  # fmt: skip


@pytest.mark.parametrize(("found", "expected", "same"), VALUES)
def test_values_are_compared_as_json_has_them(found: Any, expected: Any, same: int) -> None:
    assert same_value(found, expected) == bool(same)


APPS = {"inputs": ["1 2\n", ["3", "4"]], "outputs": ["3\n", ["7"]]}
TACO = {"inputs": [[[1, 2], 3]], "outputs": [[1, 2, 3]], "fn_name": "f"}
LIVE = [
    {"input": "[1, 2]\n3", "output": "6", "testtype": "functional", "metadata": '{"func_name": "f"}'},
    {"input": "[]\n3", "output": "3", "testtype": "functional", "metadata": {"func_name": "f"}},
]
SHAPES = [
    (APPS, ("", [["1 2\n", "3\n"], ["3\n4", "7"]])), (TACO, ("f", [[[[1, 2], 3], [1, 2, 3]]])), (LIVE, ("f", [[[[1, 2], 3], 6], [[[], 3], 3]])),
    ([{"input": "1", "output": "2", "testtype": "stdin"}], ("", [["1", "2"]])), (["assert f(1)"], ("", ["assert f(1)"])), ("assert f(1)", ("", ["assert f(1)"])),
]  # fmt: skip


@pytest.mark.parametrize(("given", "expected"), SHAPES)
def test_tests_come_in_the_shapes_of_the_fields_data_sets(given: Any, expected: Any) -> None:
    assert cases(given, "answer") == expected
    assert cases(given if isinstance(given, str) else json.dumps(given), "answer") == expected


@pytest.mark.parametrize(
    "given", [None, 3, {"inputs": ["1"]}, {"inputs": ["1"], "outputs": []}, {"inputs": [], "outputs": []}, [], [3], [{"input": "1"}], [*LIVE, {"input": "", "output": ""}]]
)  # fmt: skip
def test_tests_of_another_shape_are_named(given: Any) -> None:
    with pytest.raises(RuntimeError, match="column 'cases' holds no tests for reward 'code': .*expected"):
        cases(given, "cases")


ADD = "a, b = map(int, input().split())\nprint(a + b)"
SQUARE = ["assert f(2) == 4", "assert f(3) == 9", "assert f(4) == 16"]
RUNS: list[tuple[Any, str, dict[str, Any], float, float]] = [
    ({"inputs": ["1 2\n", "3 4\n"], "outputs": ["3", "7"]}, f"```python\n{ADD}\n```", {}, 1, 1),
    (TACO, "class Solution:\n  def f(self, a, b):\n    print('so')\n    return (*a, b)", {}, 1, 1),
    (SQUARE, "def f(x): return 4 if x == 2 else 16", {"credit": "part"}, 2 / 3, 2 / 3),
    (SQUARE, "def f(x): return 4 if x == 2 else 16", {}, 0, 1 / 3),
    (SQUARE, "def f(x): return 4", {"max_tests": 1}, 1, 1),
    (SQUARE, "import sys\nsys.exit(0)", {}, 0, 0),
    (SQUARE, "def f(x):", {}, 0, 0),
    ({"inputs": [""], "outputs": ["1"]}, "while True: pass", {"time_limit_s": 0.5}, 0, 0),
    ({"inputs": [""], "outputs": ["1"]}, "print('1' * 10**7)", {}, 0, 0),
]


@pytest.mark.parametrize(("tests", "answer", "options", "reward", "passed"), RUNS)
def test_programs_are_run(tests: Any, answer: str, options: dict[str, Any], reward: float, passed: float) -> None:
    found = code(prompt(tests), answer, sandbox="none", **options)
    assert found["reward"] == pytest.approx(reward) and found["passed"] == pytest.approx(passed)


SECRET = "42-or-so-17"
IN_MEMORY = """
import os, re
who = os.getppid()
with open(f"/proc/{who}/maps") as maps, open(f"/proc/{who}/mem", "rb") as memory:
    for line in maps:
        if " rw" not in line:
            continue
        begin, end = (int(part, 16) for part in line.split()[0].split("-"))
        memory.seek(begin)
        if found := re.search(rb"42-or-so-[0-9]+", memory.read(end - begin)):
            print(found[0].decode())
            break
"""
IN_FILES = """
import os, re, sys
for folder, _, names in [*os.walk("/tmp"), *os.walk(os.environ["HOME"])]:
    for name in names:
        path = os.path.join(folder, name)
        if os.path.isfile(path) and path != sys.argv[0]:
            if found := re.search(rb"42-or-so-[0-9]+", open(path, "rb").read()):
                print(found[0].decode())
"""
CHEATS = {
    "reads what is expected from the runner": IN_MEMORY,
    "looks for it in files": IN_FILES,
    "asks somebody": "import socket\nprint(socket.create_connection(('127.0.0.1', PORT), 1).recv(99).decode())",
    "takes more memory than it may": "import mmap\nx = mmap.mmap(-1, 10**10, mmap.MAP_PRIVATE)\nprint('42-or-so-' + str(17))",
}


@pytest.mark.skipif(bool(missing("bwrap")), reason=f"bwrap: {missing('bwrap')}")
@pytest.mark.parametrize("answer", CHEATS.values(), ids=CHEATS)
def test_a_program_that_cheats_gets_nothing_in_a_sandbox(answer: str) -> None:
    """Each but the second would be told right without one; the first where the runner lets itself be read."""
    with socket.create_server(("127.0.0.1", 0)) as friend:
        tell = threading.Thread(target=lambda: friend.accept()[0].sendall(SECRET.encode()), daemon=True)
        tell.start()
        tests = {"inputs": [""], "outputs": [SECRET]}
        assert (
            code(prompt(tests), answer.replace("PORT", str(friend.getsockname()[1])), time_limit_s=3.0)["reward"] == 0
        )


@pytest.mark.skipif(bool(missing("bwrap")), reason=f"bwrap: {missing('bwrap')}")
def test_a_right_program_gets_its_reward_there_and_a_recipe_names_it() -> None:
    source = {
        "prompts": "x.jsonl",
        "reward": "code",
        "reward_options": {"column": "cases", "sandbox": {"kind": "bwrap"}},
    }
    recipe = Recipe.model_validate({"model": {"name": "tiny"}, "source": [source]})
    [reward] = make_rewards(recipe.sources)
    row = Prompt(0, 7, "?", np.zeros(1, np.int32), None, {"cases": SQUARE[:1]})
    assert reward(row, ["def f(x): return x * x"]) == [(1.0, {"passed": 1.0, "tests": 1.0})]


def test_a_wrong_option_is_named() -> None:
    with pytest.raises(RuntimeError, match=re.escape("credit = 'some' of reward 'code': expected \"all\" or \"part\"")):
        code(prompt(SQUARE), "", credit="some")
