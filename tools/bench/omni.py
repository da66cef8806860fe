"""The omni quickstart: text, pictures, sound and video in one run of one model; accuracy on held-out rows, by source.

before, accuracy: of version 0, after the warm start, and of the last version (goals: 0.6 at most ──► 0.8 at least; mixed: 0.45 ──► 0.6).
control: the last version, asked with the media of other rows (goal: chance, 1/10; video 1/4).
seconds: wall clock of the whole command, warm start included; data_seconds: of making its data before that.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rich.table import Table

from tools.bench.common import BENCH, ROOT, doing, finish, our_environment, parse, parser, show
from tools.bench.runs import read_lines, run

RECIPE = ROOT / "recipes" / "quickstart-omni.toml"
FOLDER = BENCH / "omni"
SHOWN = ("image", "audio", "video", "mixed")
"""Sources whose answer depends on what they show."""


def make_data() -> None:
    """Make the data of all sources below FOLDER."""
    with doing("making the data"):
        command = [sys.executable, str(ROOT / "examples" / "omni_rows.py"), str(FOLDER / "data" / "omni")]
        subprocess.run(command, check=True, stdout=sys.stderr)


def scores(about: dict[str, Any]) -> dict[str, float]:
    """Kind of source -> its score, from a line of metrics or from what `relax-hpc eval --json` prints."""
    return {one["name"].partition("-")[0]: round(one["score"], 3) for one in about["sources"]}


def control(folder: Path, root: Path) -> dict[str, float]:
    """Score the newest checkpoint of a run on the rows whose media are those of other rows."""
    recipe, text = folder / "control.toml", RECIPE.read_text()
    for kind in SHOWN:
        text = text.replace(f"{kind}-test.jsonl", f"{kind}-shuffled.jsonl")
    recipe.write_text(text)
    command = [
        sys.executable,
        "-m",
        "relax_hpc",
        "eval",
        str(root),
        str(recipe),
        "--output",
        str(folder / "control"),
        "--json",
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, env=our_environment(), cwd=folder, text=True, check=True)
    found = scores(json.loads(done.stdout))
    return {kind: found[kind] for kind in SHOWN}


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--seed", type=int, default=0, help="run.seed")
    given = parse(arguments)
    recipe = FOLDER / RECIPE.name
    begin = time.monotonic()
    make_data()
    recipe.write_text(RECIPE.read_text())  # files of prompts are looked up beside it
    data_seconds = time.monotonic() - begin
    with doing("training (minutes)"):
        done = run(recipe, f"omni-{given.seed}", {"run.seed": given.seed})
    lines = [line for line in read_lines(done.root / "metrics" / "trainer-0.jsonl") if line.get("kind") == "eval"]
    by_version = {line["version"]: scores(line) for line in lines}
    before, after = by_version[min(by_version)], by_version[max(by_version)]
    shuffled = control(FOLDER, done.root)
    table = Table("source", "before", "after", "with media of other rows")
    for kind in before:
        table.add_row(
            kind, f"{before[kind]:.3f}", f"{after[kind]:.3f}", f"{shuffled[kind]:.3f}" if kind in shuffled else "–"
        )
    show(table)
    finish(
        {
            "before": before, "accuracy": after, "control": shuffled,
            "seconds": round(done.seconds, 1), "data_seconds": round(data_seconds, 1),
        },
        given.json,
    )  # fmt: skip


if __name__ == "__main__":
    main()
