"""Make the data of recipes/quickstart-agent.toml: `python examples/agent_rows.py data/agent`. Nothing is downloaded.

tasks.jsonl: sums of two to four numbers, each with its result: whoever learns these alone learns to guess.
begun.jsonl: conversations that use a calculator, up to a turn of the assistant's, which is the answer to learn.
test.jsonl:  tasks with sums that are in neither.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Row = dict[str, Any]
TASKS, BEGUN, TEST = 4000, 4000, 300
FEWEST, MOST = 2, 4
"""Numbers of a sum: the calculator adds two at a time, so that it is called once to three times."""
FIRST_TURNS = 0.25
"""Share of the begun conversations whose first turn is learned: few, so that a model begins by guessing."""


def call(expression: str) -> str:
    """A call of the calculator as the model is to write it."""
    asked = {"name": "calculator", "arguments": {"expression": expression}}
    return f"<tool_call>\n{json.dumps(asked)}\n</tool_call>"


def conversation(numbers: tuple[int, ...]) -> list[Row]:
    """A whole conversation, from the question to the answer."""
    messages = [{"role": "user", "content": "+".join(map(str, numbers))}]
    total = numbers[0]
    for number in numbers[1:]:
        messages.append({"role": "assistant", "content": call(f"{total}+{number}")})
        total += number
        messages.append({"role": "tool", "content": f"{total}"})
    return [*messages, {"role": "assistant", "content": f"{total}"}]


def sums(rng: random.Random) -> Iterator[tuple[int, ...]]:
    """Draw sums of three-digit numbers, none twice."""
    seen = set()
    while True:
        numbers = tuple(rng.randrange(100, 1000) for _ in range(rng.randint(FEWEST, MOST)))
        if numbers not in seen:
            seen.add(numbers)
            yield numbers


def task(numbers: tuple[int, ...]) -> Row:
    return {"prompt": conversation(numbers)[:1], "answer": f"{sum(numbers)}"}


def begun(numbers: tuple[int, ...], rng: random.Random) -> Row:
    messages = conversation(numbers)
    turns = range(1, len(messages), 2)
    last = turns[0] if rng.random() < FIRST_TURNS else rng.choice(turns[1:])
    return {"prompt": messages[:last], "answer": messages[last]["content"], "result": f"{sum(numbers)}"}


def make(folder: Path, seed: int = 0) -> None:
    """Write all files."""
    rng = random.Random(seed)
    drawn = sums(rng)
    files = {
        "tasks": [task(next(drawn)) for _ in range(TASKS)],
        "begun": [begun(next(drawn), rng) for _ in range(BEGUN)],
        "test": [task(next(drawn)) for _ in range(TEST)],
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        print(f"{name}: {len(rows)} rows")


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("folder", type=Path)
    arguments.add_argument("--seed", type=int, default=0)
    given = arguments.parse_args()
    make(given.folder, given.seed)
