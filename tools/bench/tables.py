"""Make the tables of docs/benchmarks.md from the results in tools/bench/results/, so that no figure is typed by hand.

    tables.py add NAME FILE    take in what a benchmark printed with --json (a log with progress lines will do), and write
    tables.py                  write all blocks
    tables.py --check          exit 1 where a block is not what its result says

A block begins with `<!-- results: NAME -->`, where NAME is the benchmark, or BENCHMARK-PART where it has several results.
It is replaced as a whole once results/NAME.json is there; until then it says that its figures were typed by hand, and when.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
RESULTS = FOLDER / "results"
PAGE = FOLDER.parents[1] / "docs" / "benchmarks.md"
BLOCK = re.compile(r"(<!-- results: ([\w-]+) -->\n)(.*?)(<!-- end of results -->)", re.DOTALL)


def last_result(text: str) -> dict[str, Any]:
    """The last line of `text` that is a JSON object. Raises ValueError where there is none."""
    for line in reversed(text.splitlines()):
        if line.startswith("{"):
            try:
                return dict(json.loads(line))
            except ValueError:
                continue
    raise ValueError("no line is a JSON object: was the benchmark run with --json, and to its end?")


def add(name: str, file: Path, given: argparse.Namespace) -> None:
    """Keep the result in `file` as results/NAME.json."""
    result = last_result(file.read_text())
    about = {
        "command": given.command or f"python tools/bench/{name.partition('-')[0]}.py --json",
        "date": given.date or f"{date.fromtimestamp(file.stat().st_mtime)}",
        **result.pop("about", {}),
    }
    if given.note:
        about["note"] = given.note
    RESULTS.mkdir(exist_ok=True)
    kept = json.dumps({"about": about, **result}, indent=1, ensure_ascii=False)
    (RESULTS / f"{name}.json").write_text(kept + "\n")


def block(result: Mapping[str, Any]) -> str:
    """The Markdown of a result: its command, date and machine, the tables that the benchmark printed, its figures."""
    about = result["about"]
    machine = [about["machine"]] if "machine" in about else []
    load = [f"load {about['load_before']} before it began"] if "load_before" in about else []
    note = [about["note"]] if "note" in about else []
    where = "; ".join([", ".join([about["date"], *machine, *load]), *note])
    rest = {key: value for key, value in result.items() if key not in ("about", "tables")}
    tables = [markdown(table["columns"], table["rows"]) for table in result.get("tables", [])]
    return "\n\n".join([f"```\n{about['command']}\n```\n{where}:", *(tables + figures(rest, with_grids=not tables))])


def figures(result: Mapping[str, Any], with_grids: bool) -> list[str]:
    """The single figures in one table; tables of figures that share their rows, where asked for."""
    grids: dict[tuple[str, ...], dict[str, Mapping[str, Any]]] = {}
    single: list[list[str]] = []
    for key, value in result.items():
        if isinstance(value, dict):
            grids.setdefault(tuple(value), {})[key] = value
        else:
            single.append([f"`{key}`", cell(value)])
    found = [grid(each) for each in grids.values()] if with_grids else []
    return found + ([markdown(["figure", "value"], single)] if single else [])


def grid(columns: Mapping[str, Mapping[str, Any]]) -> str:
    """A table of figures by name; names are rows where they are more than what each has."""
    rows = list(next(iter(columns.values())))
    if len(columns) > len(rows):
        return markdown(["", *rows], [[name, *map(cell, each.values())] for name, each in columns.items()])
    return markdown(["", *columns], [[row, *(cell(each[row]) for each in columns.values())] for row in rows])


def cell(value: Any) -> str:
    """A figure as text."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{key} {cell(each)}" for key, each in value.items())
    if isinstance(value, list):
        return " · ".join(map(cell, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    rows = [[text.replace("|", "\\|") for text in row] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in (columns, ["---"] * len(columns), *rows))


def page(text: str) -> str:
    """The page with every block whose result is there."""

    def filled(found: re.Match[str]) -> str:
        path = RESULTS / f"{found[2]}.json"
        return f"{found[1]}{block(json.loads(path.read_text()))}\n{found[4]}" if path.is_file() else found[0]

    return BLOCK.sub(filled, text)


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--check", action="store_true", help="change nothing")
    adding = arguments.add_subparsers(dest="action").add_parser("add", help="take in what a benchmark printed")
    adding.add_argument("name", help="of the block")
    adding.add_argument("file", type=Path)
    adding.add_argument("--command", help="the command, where the JSON does not say it")
    adding.add_argument("--date", help="the date, where the JSON does not say it (default: the file's)")
    adding.add_argument("--note", help="what a reader should know, such as what ran beside it")
    given = arguments.parse_args()
    text = PAGE.read_text()
    if given.action == "add":
        if given.name not in (names := [found[1] for found in BLOCK.findall(text)]):
            arguments.error(f"{PAGE.name} has no block {given.name!r}: it has {', '.join(names)}")
        add(given.name, given.file, given)
    if given.check:
        return int(page(text) != text)
    PAGE.write_text(page(text))
    return 0


if __name__ == "__main__":
    sys.exit(main())
