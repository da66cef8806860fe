"""Body of a test, inside a mount namespace: a run is to be made on file systems that are too small for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import relax_hpc as package
from tests.runs import SMALL, relax_hpc, write_recipe

WIDE = SMALL.replace("hidden_size = 32", "hidden_size = 256")
"""Weights of a megabyte and more."""


def main(folder: Path) -> None:
    recipe, disk = write_recipe(folder, WIDE), folder / "disk"
    disk.mkdir()
    code = sum(-(-path.stat().st_size // 4096) * 4096 for path in Path(package.__file__).parent.rglob("*.py"))
    for size in (code // 2, code + (512 << 10)):
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)], check=True)
        said = relax_hpc("run", recipe, "--set", f"run.root={disk}", code=2).stderr
        error = said[said.index("error: ") :]
        assert "Traceback" not in said and len(error) < 1000, said
        assert str(disk) in error and ("No space left" in error or "no room" in error) and "make room" in error, said
        assert not list(disk.iterdir()), said
        subprocess.run(["umount", "--lazy", str(disk)], check=True)  # a process that ends may hold it for a moment


if __name__ == "__main__":
    main(Path(sys.argv[1]))
