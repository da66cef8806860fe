"""Every recipe that ships loads, the README's too, and says in its first lines what it needs and reaches."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from relax_hpc.recipe import load_recipe

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.toml")), ids=lambda p: p.name)
def test_recipe_loads_and_says_what_it_needs_and_reaches(path: Path) -> None:
    load_recipe(path)
    head = path.read_text().split("[", 1)[0]
    assert "Needs:" in head and "Reaches" in head


def test_the_readme_recipe_loads(tmp_path: Path) -> None:
    blocks = re.findall(r"```toml\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        path = tmp_path / "readme.toml"
        path.write_text(block)
        assert load_recipe(path).run.name == "gsm"
