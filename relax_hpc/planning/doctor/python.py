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
from relax_hpc.recipe.sandbox import KINDS
from relax_hpc.recipe.schema import Recipe
from relax_hpc.sandbox.wrap import missing

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
        image = f"those of the image '{slurm.container.image}', which only nodes can open: --on-nodes"
        return [note("libraries", image)]
    python = slurm.python if slurm is not None and slurm.python else sys.executable
    return [*(_shared(python) if slurm is not None else []), *libraries(python), mpi(python), *sandboxes(recipe)]


def sandboxes(recipe: Recipe) -> list[Check]:
    """Check which kinds of sandboxes this machine has, where a source asks for one."""
    wanted = sorted({source.sandbox.kind for source in recipe.sources} - {"none"})
    if not wanted:
        return []
    if recipe.slurm is not None:
        return [note("sandboxes", f"only a node can tell if it has {', '.join(wanted)}: workers look when they start")]
    have, lack = ", ".join(kind for kind in KINDS if not missing(kind)), [kind for kind in wanted if missing(kind)]
    fix = f"install it, or source.sandbox = one of {have}"
    return [failed("sandboxes", f"{kind}: {missing(kind)}", kind, fix) for kind in lack] or [ok("sandboxes", have)]


def libraries(python: str, names: tuple[str, ...] = LIBRARIES, limit_s: float = IMPORT_S) -> list[Check]:
    """Check which libraries `python` can import, and their versions."""
    expected = f"a Python with {', '.join(names)}"
    try:
        done = _run(python, _IMPORT, *names, limit_s=limit_s)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [failed("libraries", str(error), expected, "slurm.python, or pip install relax-hpc there")]
    try:
        said = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        words = done.stderr.strip().splitlines()[-1:] or [f"it ended with code {done.returncode}"]
        died = f"'{python}' died while importing: {words[0]}"
        return [failed("libraries", died, expected, "pip install --force-reinstall relax-hpc there")]
    versions = ", ".join(f"{name} {version}" for name, version in said["found"].items())
    fix = "'{}' -m pip install {}; modules that it needs go to slurm.setup"
    broken = said["broken"].items()
    checks = [failed(name, words, "to be importable", fix.format(python, name)) for name, words in broken]
    return checks or [ok("libraries", f"Python {said['python']}: {versions}")]


def mpi(python: str) -> Check:
    """Check which MPI mpi4py was built for, in a child process: loading a broken MPI can end it."""
    try:
        done = _run(python, _MPI)
    except (OSError, subprocess.TimeoutExpired) as error:
        return note("MPI", str(error))
    if done.returncode == 0:
        return ok("MPI", f"mpi4py {done.stdout.strip()}")
    if "No module named 'mpi4py'" in done.stderr:
        return note("MPI", "mpi4py is not installed; only transports over MPI need it")
    return note("MPI", f"mpi4py does not load: {(done.stderr.strip().splitlines() or ['it died'])[-1]}")


def _run(python: str, code: str, *arguments: str, limit_s: float = IMPORT_S) -> subprocess.CompletedProcess[str]:
    command = [python, "-P", "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=limit_s)


def _shared(python: str) -> list[Check]:
    """Check if nodes are likely to see this Python; only a node can be certain (--on-nodes)."""
    prefix = Path(python).parent.parent  # a virtual environment's own folder: resolved, it would be its base's
    checks = []
    for name, place in (("Python", prefix), ("the package", Path(relax_hpc.__file__).parent)):
        what, (kind, networked) = f"{name} on nodes", kind_of(place)
        if not place.exists():
            checks.append(failed(what, f"'{place}' is not there", "a path that nodes see", "slurm.python"))
        elif networked:
            checks.append(ok(what, f"'{place}' lies on {kind}"))
        elif name == "Python":
            found = f"'{place}' lies on {kind}, which looks local to this machine"
            fix = "make the environment there, or slurm.python; --on-nodes shows whether nodes see it"
            checks.append(warning(what, found, "a shared file system", fix))
    return checks
