"""The documentation site: it builds without a warning, loads nothing from the network, and links lead somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
LOADED = re.compile(
    r"""<(?:script|img|iframe|source)\b[^>]*\bsrc=["']?(?:https?:)?//|<link\b[^>]*\bhref=["']?(?:https?:)?//"""
)
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
