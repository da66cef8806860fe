"""DIR/cluster.json: what a cluster consists of and which processes hold it.

The file is there before anything is started and names every process before that process may go on, so `down` finds
everything also after an `up` that was killed half-way.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from . import processes
from .config import ClusterError, Node, Settings


@dataclasses.dataclass
class State:
    """What cluster.json holds."""

    folder: Path
    settings: Settings | None = None
    anchor: processes.Identity | None = None
    """The init of all namespaces."""
    inits: dict[str, processes.Identity] = dataclasses.field(default_factory=dict)
    """The init of each node."""

    @property
    def plan(self) -> Settings:
        if self.settings is None:
            raise ClusterError(f"the cluster in {self.folder} was never up: tools/slurm-cluster up {self.folder}")
        return self.settings

    def node(self, name: str) -> Node:
        for node in self.plan.nodes:
            if node.name == name:
                return node
        raise ClusterError(f"no node {name!r}; there are {', '.join(node.name for node in self.plan.nodes)}")

    def write(self) -> None:
        text = json.dumps(
            {
                "settings": self.settings and dataclasses.asdict(self.settings),
                "anchor": self.anchor,
                "inits": self.inits,
            }
        )
        path = self.folder / "cluster.json"
        temporary = path.with_suffix(".new")
        temporary.write_text(text)
        temporary.rename(path)

    @staticmethod
    def read(folder: Path) -> State | None:
        try:
            data: dict[str, Any] = json.loads((folder / "cluster.json").read_text() or "{}")
        except FileNotFoundError:
            return None
        settings = data.get("settings")
        if settings:
            settings = Settings(**{**settings, "nodes": tuple(Node(**node) for node in settings["nodes"])})
        identities = {name: (pid, start) for name, (pid, start) in data.get("inits", {}).items()}
        anchor = data.get("anchor")
        return State(folder, settings, anchor and (anchor[0], anchor[1]), identities)


def opened(folder: Path) -> State:
    state = State.read(folder)
    if state is None:
        raise ClusterError(f"no cluster in {folder}: start one with tools/slurm-cluster up {folder}")
    if state.plan.namespaces and not processes.alive(state.anchor):
        raise ClusterError(f"the cluster in {folder} has died: clear it away with tools/slurm-cluster down {folder}")
    return state
