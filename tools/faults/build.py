"""Compiles the C sources of this folder, once for each state of them."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

WARNINGS = ("-O2", "-Wall", "-Wextra")


class Unavailable(RuntimeError):
    """This machine cannot build it, or cannot mount it; the text names what is missing."""


def compiler() -> str | None:
    """The path of the C compiler; None where there is none."""
    return next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)


def compiled(sources: Sequence[Path], *options: str, libraries: Sequence[str] = ()) -> Path:
    """Compile sources, and headers that they include, into the user's cache; return the file. Raises Unavailable."""
    if (program := compiler()) is None:
        raise Unavailable("it needs a C compiler (Debian: gcc libc6-dev)")
    words = [*WARNINGS, *options, *libraries]
    digest = hashlib.sha256(repr(words).encode() + b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "relax-hpc"
    final = cache / f"{sources[0].stem}-{digest}"
    if final.exists():
        return final
    cache.mkdir(parents=True, exist_ok=True)
    inputs = [str(path) for path in sources if path.suffix == ".c"]
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        command = [program, *WARNINGS, *options, "-o", f"{folder}/made", *inputs, *libraries]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Unavailable(f"{final.name} cannot be compiled:\n{done.stderr}")
        os.replace(f"{folder}/made", final)
    return final


def compiles(text: str, *options: str, libraries: Sequence[str] = ()) -> bool:
    """Return True if a program of this text can be made here."""
    with tempfile.TemporaryDirectory() as folder:
        command = [str(compiler()), *options, "-o", f"{folder}/made", "-xc", "-", "-xnone", *libraries]
        return subprocess.run(command, input=text, capture_output=True, text=True, check=False).returncode == 0
