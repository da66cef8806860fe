"""A clock that jumps, for a program and all that it starts: clock.c, preloaded, driven by a file.

    clock = Clock(folder)
    process = subprocess.Popen(command, env=clock.environment())
    clock.move(-3600)       # an hour back, at once, in every process of it

Times of files stay the kernel's, as those of a file server do. Waits until a time of day, which Python does not use where
the C library has others (glibc 2.30), would see the real clock.
"""

from __future__ import annotations

import os
from pathlib import Path

from tools.faults.build import compiled

SOURCE = Path(__file__).with_name("clock.c")


class Clock:
    """The time of day of a program, seconds away from the real one."""

    def __init__(self, folder: Path) -> None:
        """Compile the library and start without a difference. Raises Unavailable where there is no C compiler."""
        self._library, self._file = compiled([SOURCE], "-shared", "-fPIC"), folder / "clock"
        self.move(0)

    def move(self, seconds: int) -> None:
        """Set the clock to the real time and `seconds`."""
        handle = os.open(self._file, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            os.pwrite(handle, seconds.to_bytes(8, "little", signed=True), 0)
        finally:
            os.close(handle)

    def environment(self) -> dict[str, str]:
        """The environment of a program that has this clock."""
        return {**os.environ, "LD_PRELOAD": str(self._library), "RELAX_HPC_CLOCK": str(self._file)}
