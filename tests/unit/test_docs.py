"""The documentation: the site builds without a warning, links lead somewhere, commands and keys that pages show exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from relax_hpc.cli import app
from relax_hpc.recipe.describe import alias, tables
from relax_hpc.recipe.schema import Recipe
from relax_hpc.recipe.tables.table import Table

REPOSITORY = Path(__file__).resolve().parents[2]
LOADED = re.compile(
    r"""<(?:script|img|iframe|source)\b[^>]*\bsrc=["']?(?:https?:)?//|<link\b[^>]*\bhref=["']?(?:https?:)?//"""
)
PAGES = sorted(
    page
    for page in [REPOSITORY / "README.md", REPOSITORY / "examples/README.md", *(REPOSITORY / "docs").rglob("*.md")]
    if page.name not in ("changelog.md", "glossary.md")  # these name what is gone
)
COMMAND = re.compile(r"\brelax-hpc ((?:[^`|;#\n\\]|\\\n|\\.)*)")
OPTION = re.compile(r"(?<=\s)(--?[a-z][a-z-]*)")
SET = re.compile(r"(?:--set|-s)[ =]['\"]?([a-z_][a-z_0-9.]*)=")
KEY = re.compile(r"`([a-z_0-9]+(?:\.[a-z_0-9]+)+)(?: = [^`]*)?`")
FILE = re.compile(r"(?<![\w/.-])((?:[\w.-]+/)+[\w.-]+\.(?:py|sh)|test_\w+\.py)\b")
TEST = re.compile(r"(tests/[\w/]+\.py)(?:::(test_\w+))?")
TOML = re.compile(r"^```toml\n(.*?)^```", re.MULTILINE | re.DOTALL)
FREE = re.compile(
    r"(options|config|environment|args|router|learning_rates|parts)\.[\w.-]+$|^[a-z_]+$|\bsource\.media\."
)
"""Keys of tables whose names are the user's or another program's; a key alone, shown without its table."""
LINK = re.compile(r"\]\(([^)\s]+)\)")


def build(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(REPOSITORY / "tools" / "docs.sh"), str(folder)],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("generator", ["recipe_docs.py", "cli_docs.py"])
def test_generated_pages_are_current(generator: str) -> None:
    check = [sys.executable, str(REPOSITORY / "tools" / generator), "--check"]
    ended = subprocess.run(check, env={"PYTHONPATH": str(REPOSITORY)}, check=False)
    assert ended.returncode == 0, f"run: PYTHONPATH=. python tools/{generator}"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("docs") / "site"
    built = build(folder)
    assert built.returncode == 0, built.stderr
    assert "WARNING" not in built.stderr
    return folder


@pytest.mark.slow
def test_site_builds_without_a_warning_and_has_every_page(site: Path) -> None:
    pages = {path.relative_to(REPOSITORY / "docs").with_suffix(".html") for path in (REPOSITORY / "docs").rglob("*.md")}
    assert pages <= {path.relative_to(site) for path in site.rglob("*.html")}


@pytest.mark.slow
def test_site_loads_nothing_from_the_network(site: Path) -> None:
    assert [str(path) for path in site.rglob("*.html") if LOADED.search(path.read_text())] == []


@pytest.mark.slow
@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_links_of_the_pages_outside_the_site(site: Path, page: str) -> None:
    for link in LINK.findall((REPOSITORY / page).read_text()):
        if link.startswith(("http:", "https:")):
            continue
        path, _, anchor = link.partition("#")
        assert (REPOSITORY / path).exists(), f"{page}: {link}"
        if anchor:
            html = (site / path.removeprefix("docs/")).with_suffix(".html").read_text()
            assert f'id="{anchor}"' in html, f"{page}: {link}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_commands_and_keys_that_a_page_shows_exist(page: Path) -> None:
    """Each `relax-hpc` command with its options, each key that --set sets, and each dotted key of a recipe in the text."""
    text, wrong = page.read_text(), list[str]()
    for shown in COMMAND.findall(text):
        wrong += unknown(shown)
    known = {"a.b", "run.outcome", "run.recipe", *key_names(Recipe)}  # the index's own word; properties of open_run
    for key in SET.findall(text):
        if re.sub(r"\.\d+\b", "", key) not in known:
            wrong.append(f"--set {key}")
    known |= {".".join(key.split(".")[-2:]) for key in known}  # `critic.clip` on a page about algorithms
    first = {key for key in known if "." not in key}
    for key in KEY.findall(text):
        is_file = re.search(r"\.(json|jsonl|py|toml|md|html|h5|sbatch|safetensors)$", key)
        if key.split(".")[0] in first and not is_file and re.sub(r"\.\d+\b", "", key) not in known:
            wrong.append(key)
    for block in TOML.findall(text):
        wrong += [key for key in dotted(tomllib.loads(block)) if key not in known and not FREE.search(key)]
    assert not wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_python_and_shell_files_that_a_page_names_exist(page: Path) -> None:
    folders = [REPOSITORY / name for name in ("relax_hpc", "tools", "tests", "examples")]
    there = [path.as_posix() for folder in folders for path in folder.rglob("*.*")]
    named = set(FILE.findall(page.read_text())) - {"tools/bench/NAME.py"}
    assert not [name for name in sorted(named) if not any(path.endswith(f"/{name}") for path in there)]


def test_each_promise_names_tests_that_exist_and_what_they_leave_out() -> None:
    sections = (REPOSITORY / "docs" / "promises.md").read_text().split("\n### ")[1:]
    wrong = [section.partition("\n")[0] for section in sections if "- **Not covered:** " not in section]
    for section in sections:
        tested = section.partition("- **Tested:** ")[2].partition("- **Not covered:** ")[0]
        named = TEST.findall(tested)
        wrong += [section.partition("\n")[0]] if not named else []
        for file, name in named:
            path = REPOSITORY / file
            if not path.is_file() or (name and f"\ndef {name}(" not in path.read_text()):
                wrong.append(f"{file}::{name}")
    assert len(sections) > 15 and not wrong


def test_a_wrong_option_is_found() -> None:
    assert unknown("run recipe.toml --set run.steps=5 --frok x") == ["relax-hpc run --frok"]
    assert unknown("rum recipe.toml") == ["relax-hpc rum"] and unknown("shards lss RUN") == ["relax-hpc shards lss"]
    assert not unknown("shards ls RUN -n 5") and not unknown("COMMAND --help") and not unknown("--version")


def unknown(shown: str) -> list[str]:
    """The command, or the options of it, in `relax-hpc SHOWN` that do not exist."""
    command: Any = typer.main.get_command(app)
    words, name = shown.replace("\\\n", " ").split(), "relax-hpc"
    if words and (words[0].isupper() or not words[0][0].isalpha()):  # a placeholder, an option of relax-hpc's own, "…"
        return []
    while words and (inner_commands := getattr(command, "commands", None)):
        name, inner = f"{name} {words[0]}", inner_commands.get(words.pop(0).rstrip(",.:)"))
        if inner is None:
            return [name]
        command = inner
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    return [f"{name} {option}" for option in OPTION.findall(f" {' '.join(words)}") if option not in {*known, "--help"}]


def dotted(value: Any, before: str = "") -> Iterator[str]:
    """Dotted names of all keys in parsed TOML."""
    for one in value if isinstance(value, list) else [value]:
        for name, inner in one.items() if isinstance(one, dict) else []:
            yield before + name
            yield from dotted(inner, f"{before}{name}.")


def key_names(table: type[Table], before: str = "") -> Iterator[str]:
    """Dotted names of all keys and tables below `table`."""
    for field_name, field in table.model_fields.items():
        name = before + alias(field_name, field)
        yield name
        for inner in tables(field.annotation):
            yield from key_names(inner, f"{name}.")
