"""Generate slurm/*.sbatch from recipes/slurm-*.toml: python tools/render_examples.py [--check].

With --check nothing is written; the exit status is 1 when a script is missing, not current, or not made from here.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from relax_hpc.slurm.submission.by_hand import by_hand

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "slurm"


def examples() -> dict[str, str]:
    """Name and text of every script."""
    os.chdir(ROOT)  # the scripts are to be sent from there
    found: dict[str, str] = {}
    for recipe in sorted(Path("recipes").glob("slurm-*.toml")):
        scripts = by_hand(recipe)
        # One elastic script shows what all of them look like.
        found |= {name: text for name, text in scripts.items() if "elastic" not in name or "split" in name}
    return found | by_hand(Path("recipes/slurm-single.toml"), seeds=4)


def main() -> int:
    texts = examples()
    if "--check" in sys.argv[1:]:
        return int({path.name: path.read_text() for path in FOLDER.glob("*")} != texts)
    FOLDER.mkdir(exist_ok=True)
    for name, text in texts.items():
        (FOLDER / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
