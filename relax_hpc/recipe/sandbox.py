"""The `sandbox` of environments, agents and rewards: how far what they run is kept apart, and how much it may use."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, PositiveFloat, PositiveInt, model_validator

from relax_hpc.recipe.tables.table import Key, Table, conflict

Kind = Literal["none", "bwrap", "landlock", "apptainer", "enroot"]
KINDS: tuple[Kind, ...] = ("none", "bwrap", "landlock", "apptainer", "enroot")


class Sandbox(Table):
    """Keeps what runs in it apart from the run, from the home folder, from other sandboxes and from the network. A text
    is its kind: `sandbox = "bwrap"`."""

    kind: Kind = Key(
        "none",
        "`none`; `bwrap`: bubblewrap, namespaces of its own; `landlock`: the kernel's rules alone, where there are no user "
        "namespaces; `apptainer` and `enroot`: in an image.",
    )
    image: Path | None = Key(None, "Image for `apptainer` and `enroot`: a .sif, or a .sqsh.", looked_up=True)
    memory_gb: PositiveFloat = Key(4.0, "Memory of all its processes together, and of each of them.")
    processes: PositiveInt = Key(256, "Most processes and threads at once.")
    cpu_s: PositiveInt | None = Key(None, "Seconds of CPU that each process may use.")
    time_limit_s: PositiveFloat | None = Key(None, "Seconds after which all of it is ended.")
    files: PositiveInt = Key(1024, "Most open files of each process.")
    disk_gb: PositiveFloat = Key(1.0, "Room of its own /tmp, and of what it writes elsewhere; no file may be larger.")
    readable: list[Path] = Key(
        [], "Further files and folders that it may read. The system's and Python's folders it may read anyway."
    )
    writable: list[Path] = Key([], "Further folders that it may write.")
    network: bool = Key(False, "Whether it may use the network. Without it only the Unix socket that it is given.")

    @model_validator(mode="after")
    def _fits(self) -> Sandbox:
        in_image = self.kind in ("apptainer", "enroot")
        if in_image and self.image is None:
            raise conflict(
                f'sandbox.kind = "{self.kind}" needs an image: sandbox = {{kind = "{self.kind}", image = …}}'
            )
        if self.image is not None and not in_image:
            raise conflict(f"sandbox.image = '{self.image}' is for apptainer and enroot, but kind = \"{self.kind}\"")
        if self.kind == "enroot" and not self.network:
            raise conflict('sandbox.kind = "enroot" has the node\'s network: say network = true, or use another kind')
        for path in (*self.readable, *self.writable):
            if not path.is_absolute():
                raise conflict(f"sandbox: '{path}' must be an absolute path: it means the same on every node")
        return self


def _table(value: Any) -> Any:
    return {"kind": value} if isinstance(value, str) else value


AnySandbox = Annotated[Sandbox, BeforeValidator(_table)]
"""A sandbox, or the name of its kind."""
