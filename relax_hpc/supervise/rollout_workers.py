"""Rollout workers, scorers and critic of one machine: children of a supervisor or node agent, restarted apart from the
trainer.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Protocol

from relax_hpc.files.node_cache import NodeCache
from relax_hpc.files.publish import read_json
from relax_hpc.files.run_dir import RunDir
from relax_hpc.recipe.schema import Recipe
from relax_hpc.recipe.tables.weights import FileWeights
from relax_hpc.roles.common import gpus
from relax_hpc.roles.common.device_lock import lock_of
from relax_hpc.roles.common.process import Exit
from relax_hpc.roles.rollout import poll_leader
from relax_hpc.slurm.plan import SidecarName
from relax_hpc.supervise.fork_server import ForkServer
from relax_hpc.supervise.processes import LOOKS_SHARE, ProcessHandle, RestartPolicy, how_it_ended, next_attempt
from relax_hpc.telemetry import read_heartbeat

GRACE_S = 5.0
"""How long a worker may take to leave when asked to; what it was generating is generated again."""


def clear_node(run: RunDir, recipe: Recipe) -> None:
    """Remove what the run keeps on this node."""
    kept = [recipe.spool.node_cache, recipe.weights.node_cache if isinstance(recipe.weights, FileWeights) else None]
    for folder in filter(None, kept):
        NodeCache(run, folder).clear()
    poll_leader.clear(run)
    if recipe.run.placement == "colocate":
        lock_of(run).unlink(missing_ok=True)


def sidecar_names(run: RunDir, recipe: Recipe, role: SidecarName) -> list[str]:
    """Names of a role's processes on the trainer's nodes, beside trainer and workers; none where nothing is trained."""
    config = recipe.scorer if role == "scorer" else recipe.critic
    trains = read_json(run.identity)["debug"] != "rollout-only"
    return [f"{role}-{i}" for i in range(config.processes)] if config and trains else []


class Workers(Protocol):
    """All that works beside the trainer, as its supervisor sees it: rollout side, scorers, critic, or several as one."""

    @property
    def failure(self) -> str:
        """Why the run cannot go on; empty while it can."""

    @property
    def suspect(self) -> str:
        """The host on which the failure happened, when it is known and may be the cause; else empty."""

    @property
    def fatal(self) -> bool:
        """True if a person must do something first: a start elsewhere would fail the same way."""

    def look_after(self) -> None:
        """Start what is missing and give back what dead workers had claimed; to be called often."""

    def look_for_silence(self) -> None:
        """End processes whose heartbeat has been silent for too long."""

    def ask_to_stop(self) -> None: ...

    def end(self, grace_s: float) -> None: ...


class LocalWorkers:
    """Worker processes on this machine.

    gone: called when a worker ended, with its claim directory and True if it was lost (it died on its requests);
    returns the requests that it gave back. say: writes an event down.
    """

    role: str = "rollout"

    def __init__(
        self,
        run: RunDir,
        recipe: Recipe,
        fork_server: ForkServer,
        names: list[str],
        tag: str,
        gone: Callable[[str, bool], list[str]],
        say: Callable[..., None],
    ) -> None:
        self.recipe, self._tag, self._gone, self._say = recipe, tag, gone, say
        self._looked_at = float("-inf")
        self.run, self.failure, self.suspect, self.fatal, self._asked = run, "", "", False, False
        self.handles = [
            ProcessHandle(run, fork_server, self.role, name, attempt=next_attempt(run, name)) for name in names
        ]
        self._restart_policy = {m: RestartPolicy(recipe.supervision) for m in self.handles}

    def look_after(self) -> None:
        for handle in self.handles:
            if handle.process is None:
                if not self._asked and time.monotonic() >= self._restart_policy[handle].not_before:
                    self._start(handle)
            elif (code := handle.process.poll()) is not None:
                self._ended(handle, code)

    def _start(self, worker: ProcessHandle) -> None:
        index = self.handles.index(worker)
        worker.claim_dir = f"{worker.name}-{self._tag}-{worker.attempt:04d}"
        worker.start(self._arguments(index), self._gpus(index))
        self._say("restart", role=worker.name, attempt=worker.attempt)

    def _arguments(self, index: int) -> list[str]:
        return ["--claim-dir", self.handles[index].claim_dir]

    def _gpus(self, index: int) -> dict[str, str]:
        """The worker's share of the GPUs that we see, as environment variables; with fewer GPUs than workers, some
        share one.
        """
        visible = gpus.visible()
        if not visible:
            return {}
        share = max(len(visible) // len(self.handles), 1)
        begin = index * share % len(visible)
        return {gpus.VARIABLE: ",".join(visible[begin : begin + share])}

    def _ended(self, worker: ProcessHandle, code: int) -> None:
        heartbeat = read_heartbeat(self.run, worker.name) or {}
        given = self._gone(worker.claim_dir, code != Exit.STOPPED)
        worker.process = None  # last: if the file system refuses anything above, the end is noticed again
        if code == Exit.FATAL:
            self.failure, self.fatal = self.failure or f"{worker.name}: {worker.error()}", True
        if self._asked or code == Exit.FATAL:
            return
        reason, restart_policy = how_it_ended(code), self._restart_policy[worker]
        done = heartbeat.get("requests", 0) + heartbeat.get("learned", 0)
        self._say("lost", role=worker.name, reason=reason, requests_given_back=given)
        ours = heartbeat if heartbeat.get("attempt") == worker.attempt else {}
        if restart_policy.failed(reason, (worker.attempt, done) if done else None, ours):
            worker.attempt += 1
        else:
            self.fatal = bool(restart_policy.again)
            self.failure = restart_policy.exhausted(worker.name, reason, worker.error(), worker.log)

    def look_for_silence(self) -> None:
        if time.monotonic() - self._looked_at < self.recipe.supervision.hang_s / LOOKS_SHARE:
            return
        self._looked_at = time.monotonic()
        for worker in self.handles:
            silent_s = worker.silent_for(self.recipe.supervision)
            if silent_s is not None and worker.process is not None:
                self._say("silent", role=worker.name, reason=f"no heartbeat for {silent_s:.0f} s: killed")
                worker.process.kill()  # its end is noticed like any other

    def ask_to_stop(self) -> None:
        self._asked = True
        for worker in self.handles:
            worker.signal(signal.SIGTERM)

    def end(self, grace_s: float) -> None:
        self.ask_to_stop()
        for worker in self.handles:
            worker.end(grace_s)
            if worker.process is not None:
                self._gone(worker.claim_dir, False)
                worker.process = None

    def in_use(self) -> dict[str, str]:
        """Claim directory -> worker name, for the directories in use."""
        return {m.claim_dir: m.name for m in self.handles if m.process is not None}


class LocalSidecars(LocalWorkers):
    """Sidecar processes that claim nothing and choose their GPU themselves: scorers that each work alone."""

    def __init__(
        self,
        run: RunDir,
        recipe: Recipe,
        fork_server: ForkServer,
        say: Callable[..., None],
        role: SidecarName = "scorer",
    ) -> None:
        self.role = role
        names = sidecar_names(run, recipe, role)
        super().__init__(run, recipe, fork_server, names, "", lambda claim_dir, lost: [], say)

    def _arguments(self, index: int) -> list[str]:
        return ["--rank", str(index), "--world", str(len(self.handles))]

    def _gpus(self, index: int) -> dict[str, str]:
        return {}


class LocalGroup(LocalSidecars):
    """Sidecar processes of one group, restarted together: the critic, and scorers that work as one."""

    def __init__(
        self, run: RunDir, recipe: Recipe, fork_server: ForkServer, say: Callable[..., None], role: SidecarName
    ) -> None:
        super().__init__(run, recipe, fork_server, say, role)
        self._even()

    def look_after(self) -> None:
        if not self.failure:
            super().look_after()

    def _ended(self, worker: ProcessHandle, code: int) -> None:
        if not self._asked:
            codes = {m: m.process.poll() for m in self.handles if m.process is not None}
            # one end ends all: the process that gives a reason is the one to report
            worker = next((m for m, ended in codes.items() if ended == Exit.FATAL), worker)
            code = codes.get(worker) or code
        super()._ended(worker, code)
        if not self._asked:
            for other in self.handles:
                other.end(grace_s=0)
                other.process = None
        self._even()

    def _even(self) -> None:
        """Bring all processes to the same attempt number: they find each other by it."""
        for handle in self.handles:
            handle.attempt = max(m.attempt for m in self.handles)


def sidecars_here(
    run: RunDir, recipe: Recipe, fork_server: ForkServer, say: Callable[..., None]
) -> list[LocalSidecars]:
    """Make the scorers and the critic of this machine."""
    scorers = LocalGroup if recipe.scores_together else LocalSidecars
    return [scorers(run, recipe, fork_server, say, "scorer"), LocalGroup(run, recipe, fork_server, say, "critic")]


class Together:
    """Several kinds of workers behind the interface of one."""

    def __init__(self, *parts: Workers) -> None:
        self._parts = parts

    @property
    def _failed(self) -> Workers:
        """The first that cannot go on; an arbitrary one where all can."""
        return next((part for part in self._parts if part.failure), self._parts[0])

    @property
    def failure(self) -> str:
        return self._failed.failure

    @property
    def suspect(self) -> str:
        return self._failed.suspect

    @property
    def fatal(self) -> bool:
        return self._failed.fatal

    def look_after(self) -> None:
        for part in self._parts:
            part.look_after()

    def look_for_silence(self) -> None:
        for part in self._parts:
            part.look_for_silence()

    def ask_to_stop(self) -> None:
        for part in self._parts:
            part.ask_to_stop()

    def end(self, grace_s: float) -> None:
        self.ask_to_stop()
        for part in self._parts:
            part.end(grace_s)
