"""Checks the Python that processes will use: where it lies and what it can import. Imports run in child processes, so
that ours stays small.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import relax_hpc
from relax_hpc.planning.doctor.checks import Check, failed, note, ok, warning
from relax_hpc.planning.doctor.files import kind_of
from relax_hpc.recipe.schema import Recipe

AREA = "python"
IMPORT_S = 180.0
"""How long imports may take: a cold parallel file system needs minutes."""
LIBRARIES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "h5py", "hdf5plugin", "pydantic", "xxhash")
_IMPORT = """
import importlib, json, sys
from importlib.metadata import version
found, broken = {}, {}
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
        found[name] = version(name)
    except BaseException as error:
        broken[name] = f"{type(error).__name__}: {error}"
print(json.dumps({"python": sys.version.split()[0], "found": found, "broken": broken}))
"""
_MPI = """
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
print(mpi4py.__version__, "with", MPI.Get_library_version().splitlines()[0].strip(chr(0)))
"""


def environment(recipe: Recipe) -> list[Check]:
    """Check where Python lies, what it can import, and which MPI there is."""
    slurm = recipe.slurm
    if slurm is not None and slurm.container is not None:
        return [
            note(
                AREA,
                "libraries",
                f"those of the image '{slurm.container.image}', which only nodes can open: --on-nodes",
            )
        ]
    python = slurm.python if slurm is not None and slurm.python else sys.executable
    seen = [*(_shared(python) if slurm is not None else []), *libraries(python)]
    return [*seen, mpi(python)]


def libraries(python: str, names: tuple[str, ...] = LIBRARIES, limit_s: float = IMPORT_S) -> list[Check]:
    """Check which libraries `python` can import, and their versions."""
    try:
        done = subprocess.run(
            [python, "-P", "-c", _IMPORT, *names], capture_output=True, text=True, check=False, timeout=limit_s
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return [failed(AREA, "libraries", str(error), f"a Python with {', '.join(names)}", "slurm.python, or pip install relax-hpc there")]  # fmt: skip
    try:
        said = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        words = done.stderr.strip().splitlines()[-1:] or [f"it ended with code {done.returncode}"]
        return [failed(AREA, "libraries", f"'{python}' died while importing: {words[0]}", f"a Python with {', '.join(names)}", "pip install --force-reinstall relax-hpc there")]  # fmt: skip
    versions = ", ".join(f"{name} {version}" for name, version in said["found"].items())
    checks = [failed(AREA, name, words, "to be importable", f"'{python}' -m pip install {name}; modules that it needs go to slurm.setup") for name, words in said["broken"].items()]  # fmt: skip
    return checks or [ok(AREA, "libraries", f"Python {said['python']}: {versions}")]


def mpi(python: str) -> Check:
    """Check which MPI mpi4py was built for, in a child process: loading a broken MPI can end it."""
    try:
        done = subprocess.run([python, "-P", "-c", _MPI], capture_output=True, text=True, check=False, timeout=IMPORT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return note(AREA, "MPI", str(error))
    if done.returncode == 0:
        return ok(AREA, "MPI", f"mpi4py {done.stdout.strip()}")
    if "No module named 'mpi4py'" in done.stderr:
        return note(AREA, "MPI", "mpi4py is not installed; only transports over MPI need it")
    return note(AREA, "MPI", f"mpi4py does not load: {(done.stderr.strip().splitlines() or ['it died'])[-1]}")


def _shared(python: str) -> list[Check]:
    """Check if nodes are likely to see this Python; only a node can be certain (--on-nodes)."""
    prefix = Path(python).parent.parent  # a virtual environment's own folder: resolved, it would be its base's
    places = {"Python": prefix, "the package": Path(relax_hpc.__file__).parent}
    checks = []
    for what, place in places.items():
        if not place.exists():
            checks.append(
                failed(AREA, f"{what} on nodes", f"'{place}' is not there", "a path that nodes see", "slurm.python")
            )
            continue
        kind, networked = kind_of(place)
        if networked:
            checks.append(ok(AREA, f"{what} on nodes", f"'{place}' lies on {kind}"))
        elif what == "Python":
            checks.append(
                warning(
                    AREA,
                    f"{what} on nodes",
                    f"'{place}' lies on {kind}, which looks local to this machine",
                    "a shared file system",
                    "make the environment there, or slurm.python; --on-nodes shows whether nodes see it",
                )  # fmt: skip
            )
    return checks
