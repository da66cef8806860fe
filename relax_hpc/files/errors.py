"""Errors about a run that a person must know of."""

from __future__ import annotations

import errno
import os
import re
import shutil


class RunError(Exception):
    """A problem that a person must know of: the message names the thing, the value, what was expected, the fix."""


class Damaged(RunError):
    """A file is not as it was published: torn, changed since, or another's under its name."""


class DamagedFile(RunError, ValueError):
    """A published JSON file that no longer is valid JSON."""


_NO_ACCESS = "this user may not do that there: ask its owner for access, or choose a directory of your own"
_FIXES = {
    errno.EACCES: _NO_ACCESS,
    errno.EPERM: _NO_ACCESS,
    errno.EROFS: "it lies on a file system that is mounted read-only: choose another directory",
    errno.ENOSPC: "the disk is full: make room, or choose another directory",
    errno.EDQUOT: "the quota is used up: make room, or choose another directory",
}

_HIDDEN = re.compile(r"(?:^|(?<=/))\.(?P<final>[^/]+?)\.(?:[0-9a-f]{32}|[0-9a-f]{8}\.new)(?=/|$)")
"""Matches the hidden names that files and runs have until they are published; no user has seen them."""

_ERRNO = re.compile(r"\[Errno (\d+)\]")


def explain_os(error: OSError) -> str:
    """Explain an error of the file system: which file, what the system says, what a person can do."""
    error = _first_of(error) if isinstance(error, shutil.Error) else error
    where = f"'{_HIDDEN.sub(lambda name: name['final'], str(error.filename))}': " if error.filename is not None else ""
    fix = _FIXES.get(error.errno or 0)
    return f"{where}{error.strerror or error}" + (f"; {fix}" if fix else "")


def _first_of(error: shutil.Error) -> OSError:
    """The first error of a copied folder. shutil.Error has an entry (source, target, error as text) for each file."""
    source, target, said = error.args[0][0]
    number = _ERRNO.match(said)
    if number is None:
        return OSError(said)
    code = int(number[1])
    # The system names the source, whichever of the two it could not do with.
    return OSError(code, os.strerror(code), target if code in (errno.ENOSPC, errno.EDQUOT) else source)
