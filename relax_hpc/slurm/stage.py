"""`python -m relax_hpc.slurm.stage TAR ARGUMENTS…`: starts Python from an environment unpacked on the node's own disk.

    TAR (on the shared file system)
      ──first process of a node unpacks, others wait──► NODE/environment-…/bin/python ARGUMENTS

Thousands of files are then opened on the node, and only one is read from the shared file system. A virtual environment
works where it was unpacked: Python looks for pyvenv.cfg beside itself. Imports the standard library only.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

from relax_hpc.files.errors import RunError
from relax_hpc.files.node_disk import fill_once, node_disk


def stage(packed: Path) -> Path:
    """Unpack the environment in `packed` on this node, once, and return its folder. Raises RunError."""
    try:
        about = packed.stat()
    except OSError as error:
        raise _wrong(packed, f"{error.strerror} on {os.uname().nodename}") from None
    known = f"{packed.absolute()} {about.st_size} {about.st_mtime_ns}"  # a file packed anew gets a new folder
    folder = node_disk() / f"environment-{hashlib.blake2b(known.encode(), digest_size=8).hexdigest()}"
    try:
        fill_once(folder, lambda draft: _unpack(packed, draft))
    except OSError as error:
        raise _wrong(packed, f"it cannot be unpacked into '{folder}' on {os.uname().nodename}: {error}") from error
    return folder


def _unpack(packed: Path, draft: Path) -> None:
    done = subprocess.run(["tar", "-xf", packed, "-C", draft], capture_output=True, text=True, check=False)
    if done.returncode:
        raise _wrong(packed, f"tar cannot unpack it on {os.uname().nodename}: {done.stderr.strip()[-500:]}")
    python = draft / "bin" / "python"
    if not python.exists():
        base = f", or its base, '{python.resolve()}', is not on this node" if python.is_symlink() else ""
        raise _wrong(packed, f"it has no bin/python at its top{base}: make it with `tar -cf ENV.tar -C ENVIRONMENT .`")


def _wrong(packed: Path, what: str) -> RunError:
    return RunError(f"slurm.stage_environment = '{packed}': {what}")


def main() -> None:
    try:
        folder = stage(Path(sys.argv[1]))
    except RunError as error:
        sys.exit(f"error: {error}")
    # Kernel compilers look for ninja on PATH.
    os.environ["PATH"] = os.pathsep.join([str(folder / "bin"), os.environ["PATH"]])
    python = str(folder / "bin" / "python")
    os.execv(python, [python, *sys.argv[2:]])


if __name__ == "__main__":
    main()
