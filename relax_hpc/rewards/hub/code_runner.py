"""Runs a program against its tests, inside a sandbox: JSON on stdin, one line of JSON on stdout. It imports nothing of ours.

    stdin: {"code", "name", "cases": [[input, expected], …] or [snippet, …], "limit_s", "all"} ──► stdout: {"passed": [true, false, …]}

Each test is a process of its own, which knows its input alone: what is expected stays here, and here nobody may look. A
snippet (`assert f(2) == 4`) is run behind the program, and must come to its end.
"""

from __future__ import annotations

import ctypes
import json
import os
import secrets
import subprocess
import sys
import tempfile
from decimal import Decimal, InvalidOperation
from typing import Any

LARGEST = 1 << 22
"""Bytes of a program's output that are read; one that writes more fails."""
PR_SET_DUMPABLE = 4
CALL = """
import json as _json, sys as _sys
with open({program!r}) as _file:
    _code = compile(_file.read(), "answer.py", "exec")
_out, _sys.stdout = _sys.stdout, _sys.stderr
_names = {{"__name__": "answer"}}
exec(_code, _names)
_found = _names[{name!r}] if {name!r} in _names else getattr(_names["Solution"](), {name!r})
_out.write(_json.dumps(_found(*_json.loads(_sys.stdin.read()))))
_out.flush()
"""
BEHIND = "{code}\n\n{snippet}\nimport os as _os\n_os.write(1, {mark!r})\n"


def run(command: list[str], given: str, limit_s: float) -> bytes | None:
    """What a command writes; None where it fails, lasts too long, or writes too much."""
    with tempfile.TemporaryFile() as output:
        try:
            done = subprocess.run(
                command, input=given.encode(), stdout=output, stderr=subprocess.DEVNULL, timeout=limit_s, check=False
            )
        except (subprocess.TimeoutExpired, OSError):
            return None
        if done.returncode != 0 or output.tell() > LARGEST:
            return None
        output.seek(0)
        return output.read()


def same_text(found: str, expected: str) -> bool:
    """Compare outputs word by word, line by line: numbers by value, spaces and empty lines at the end left out."""
    lines = [[line.split() for line in text.rstrip().splitlines()] for text in (found, expected)]
    if [len(line) for line in lines[0]] != [len(line) for line in lines[1]]:
        return False
    return all(same_word(*pair) for one, other in zip(*lines, strict=True) for pair in zip(one, other, strict=True))


def same_word(found: str, expected: str) -> bool:
    try:
        return found == expected or Decimal(found) == Decimal(expected)
    except InvalidOperation:
        return False


def same_value(found: Any, expected: Any) -> bool:
    """Compare values of JSON: floats to nine digits, True apart from 1."""
    if isinstance(found, float) or isinstance(expected, float):
        both = all(isinstance(v, int | float) and not isinstance(v, bool) for v in (found, expected))
        return both and abs(found - expected) <= 1e-9 * max(1.0, abs(expected))
    if isinstance(found, list) and isinstance(expected, list):
        return len(found) == len(expected) and all(map(same_value, found, expected))
    if isinstance(found, dict) and isinstance(expected, dict):
        return found.keys() == expected.keys() and all(same_value(found[key], expected[key]) for key in expected)
    return type(found) is type(expected) and bool(found == expected)


def passes(order: dict[str, Any], program: str, case: Any) -> bool:
    python, limit_s, name = [sys.executable, "-I"], float(order["limit_s"]), order["name"]
    if isinstance(case, str):
        mark = secrets.token_bytes(16)  # a program that leaves early does not know it
        text = BEHIND.format(code=order["code"], snippet=case, mark=mark)
        found = run([*python, "-"], text, limit_s)
        return found is not None and found.endswith(mark)
    given, expected = case
    if not name:
        found = run([*python, program], given, limit_s)
        return found is not None and same_text(found.decode(errors="replace"), expected)
    found = run([*python, "-c", CALL.format(program=program, name=name)], json.dumps(given), limit_s)
    try:
        return found is not None and same_value(json.loads(found), expected)
    except ValueError:
        return False


def main() -> None:
    # Programs of the same user could else read in this one's memory what is expected.
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    order = json.load(sys.stdin)
    with tempfile.NamedTemporaryFile("w", suffix=".py", delete=False) as file:
        file.write(order["code"])
    passed: list[bool] = []
    for case in order["cases"]:
        passed.append(passes(order, file.name, case))
        if order["all"] and not passed[-1]:
            break
    os.write(1, json.dumps({"passed": passed}).encode() + b"\n")


if __name__ == "__main__":
    main()
