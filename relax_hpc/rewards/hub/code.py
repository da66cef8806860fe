"""Reward `code`: the program in an answer is run against the row's tests, in a sandbox.

answer ──last block of code──► program ─┐
row's tests ────────────────────────────┴─► sandbox: code_runner.py, a process each ──► share that passes
"""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from relax_hpc.files.errors import RunError
from relax_hpc.recipe.sandbox import Sandbox
from relax_hpc.records import Prompt
from relax_hpc.rewards.hub import code_runner
from relax_hpc.sandbox.wrap import end, start

RUNNER = Path(code_runner.__file__)
_BLOCK = re.compile(r"```[ \t]*([\w+-]*)[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)
PYTHON = ("", "python", "python3", "py")


def code(
    prompt: Prompt,
    answer: str,
    *,
    column: str = "answer",
    credit: str = "all",
    time_limit_s: float = 5.0,
    max_tests: int = 0,
    sandbox: str | dict[str, Any] = "bwrap",
) -> dict[str, float]:
    """1 where the Python program in the answer's last block of code passes all tests; with credit = "part" the share
    that it passes. Without a block the whole answer is the program.

    column: the row's tests, in any of the shapes of `cases`, as JSON or not; time_limit_s: of each test; max_tests: only
    the first ones are run; 0: all. sandbox: as a source's. Columns: `tests`, how many there are, and `passed`, the share;
    with credit = "all" tests after the first failure are not run. Raises RuntimeError, which names the shapes, for tests of another one.
    """
    if credit not in ("all", "part"):
        raise RuntimeError(f"credit = '{credit}' of reward 'code': expected \"all\" or \"part\"")
    given = prompt.answer if column == "answer" else prompt.metadata.get(column)
    name, every = cases(given, column)
    every = every[:max_tests] if max_tests else every
    order: dict[str, Any] = {
        "code": program(answer),
        "name": name,
        "cases": every,
        "limit_s": time_limit_s,
        "all": credit == "all",
    }
    passed = sum(_run(_sandbox(json.dumps(sandbox)), order)) if order["code"].strip() else 0
    share = passed / len(every)
    return {"reward": share if credit == "part" else float(passed == len(every)), "passed": share, "tests": len(every)}


def program(answer: str) -> str:
    """The last block of Python in an answer; the whole answer where it has none of any language."""
    blocks = [(language.lower(), text) for language, text in _BLOCK.findall(answer)]
    return next((text for language, text in reversed(blocks) if language in PYTHON), "") if blocks else answer


def cases(given: Any, column: str) -> tuple[str, list[Any]]:
    """(function's name or "", tests) of a row.

    {"inputs": [...], "outputs": [...]}: what is written to the program's stdin and expected on its stdout; with
    "fn_name" the arguments and the result of a function, or of a method of `Solution` (APPS, TACO). [{"input", "output",
    "testtype"}, ...]: the same one by one, arguments as a line of JSON each (LiveCodeBench). ["assert ...", ...] or a text:
    what is run behind the program (MBPP, HumanEval). Raises RuntimeError.
    """
    tests = given
    if isinstance(given, str):
        try:
            tests = json.loads(given)
        except ValueError:
            tests = [given]
    try:
        if isinstance(tests, dict):
            name, pairs = str(tests.get("fn_name") or ""), [*zip(tests["inputs"], tests["outputs"], strict=True)]
            return name, _filled([[_text(a), _text(b)] for a, b in pairs] if not name else [[a, b] for a, b in pairs])
        if isinstance(tests, list) and tests and isinstance(tests[0], dict):
            names = {_called(test) for test in tests}
            if len(names) == 1:
                [name] = names
                return name, [_one(test, bool(name)) for test in tests]
        if isinstance(tests, list) and all(isinstance(test, str) for test in tests):
            return "", _filled(tests)
    except (KeyError, TypeError, ValueError):
        pass
    raise RuntimeError(
        f"column '{column}' holds no tests for reward 'code': {str(given)[:200]!r}; expected "
        '{"inputs": […], "outputs": […]}, with "fn_name" for a function, or [{"input", "output", "testtype"}, …], or ["assert …", …]'
    )


def _filled(tests: list[Any]) -> list[Any]:
    if not tests:
        raise ValueError("no tests")
    return tests


def _one(test: dict[str, Any], of_function: bool) -> list[Any]:
    if not of_function:
        return [test["input"], test["output"]]
    return [[json.loads(line) for line in test["input"].splitlines()], json.loads(test["output"])]


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _called(test: dict[str, Any]) -> str:
    if test.get("testtype", "stdin") == "stdin":
        return ""
    about = test.get("metadata") or {}
    return str(test.get("fn_name") or (json.loads(about) if isinstance(about, str) else about)["func_name"])


@functools.cache
def _sandbox(sandbox: str) -> Sandbox:
    asked = json.loads(sandbox)
    return Sandbox.model_validate({"kind": asked} if isinstance(asked, str) else asked)


def _run(sandbox: Sandbox, order: dict[str, Any]) -> list[bool]:
    """Run all tests; one that was not run has not passed. Raises RunError where the sandbox ends without a result."""
    with tempfile.TemporaryDirectory(prefix="relax-hpc-code-") as folder:
        python = "python3" if sandbox.kind in ("apptainer", "enroot") else sys.executable
        process = start(
            sandbox, [python, "-I", str(RUNNER)], folder=Path(folder), readable=[RUNNER],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        try:
            most_s = order["limit_s"] * len(order["cases"]) + 10
            said, errors = process.communicate(json.dumps(order).encode(), timeout=most_s)
        except subprocess.TimeoutExpired:
            return []
        finally:
            end(process)
    try:
        return [bool(one) for one in json.loads(said)["passed"]]
    except ValueError:
        if process.returncode == 124:  # the program used more than the sandbox allows
            return []
        raise RunError(
            f"the sandbox of reward 'code' ended with {process.returncode}: {errors.decode(errors='replace').strip()[-300:]}"
        ) from None
