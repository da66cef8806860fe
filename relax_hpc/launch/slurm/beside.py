"""Scorers and critic of a run on Slurm: an srun for each scorer, and one for a group of them or the critic's, on the trainer's nodes beside its
step, each started again on its own."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from relax_hpc.launch.members import Patience, next_attempt, silence_limit
from relax_hpc.launch.silence import Quiet
from relax_hpc.launch.slurm.plan import BesideName
from relax_hpc.launch.slurm.steps import TRAINER_COMPONENT, with_options
from relax_hpc.launch.slurm.trainers import RANKS_EVERY_S, Step, node_of_task
from relax_hpc.launch.workers import names_beside
from relax_hpc.recipe.schema import Recipe
from relax_hpc.run_dir import RunDir
from relax_hpc.telemetry import read_beat


@dataclass(slots=True)
class One:
    """A scorer, or a group, over all its attempts."""

    name: str
    options: list[str]
    """Of relax_hpc.roles, beside the name and the attempt."""
    processes: list[str]
    """As heartbeats call them."""
    node: int
    """Of the trainer's, by index."""
    step: Step
    patience: Patience
    log: str
    """What its log is called before the attempt's number."""
    attempt: int = 0
    quiet: Quiet = field(default_factory=Quiet)


class StepBeside:
    """See relax_hpc.launch.workers.Workers."""

    def __init__(
        self, run: RunDir, recipe: Recipe, role: BesideName, python: list[str], say: Callable[..., None]
    ) -> None:
        """python: `srun … python`, with everything that comes before the module."""
        self._run, self._recipe, self._role, self._python, self._say = run, recipe, role, python, say
        self.ones = self._group() if role == "critic" or recipe.scores_together else self._each()
        self.failure, self.suspect, self.fatal = "", "", False
        self._beats_read, self._asked = float("-inf"), False

    def _each(self) -> list[One]:
        names = names_beside(self._run, self._recipe, self._role)
        nodes = self._recipe.trainer.nodes
        return [
            One(name, ["--rank", str(i)], [name], i % nodes, self._step(name), self._patience(), name)
            for i, name in enumerate(names)
        ]

    def _group(self) -> list[One]:
        ranks, role = names_beside(self._run, self._recipe, self._role), self._role
        options = ["--slurm-task", "--world", str(len(ranks))]
        node = self._recipe.trainer.nodes - 1 if role == "critic" else 0
        return [One(role, options, ranks, node, self._step(role), self._patience(), f"{role}-%t")] if ranks else []

    def _step(self, name: str) -> Step:
        return Step(self._run, f"srun-{name}")

    def _patience(self) -> Patience:
        return Patience(self._recipe.supervision)

    def look_after(self) -> None:
        if self._asked:
            return
        for one in self.ones:
            if one.step.process is not None and not one.step.running:
                self._ended(one)
            if one.step.process is None and time.monotonic() >= one.patience.not_before and not self.failure:
                self._start(one)

    def _start(self, one: One) -> None:
        one.attempt, one.quiet = next_attempt(self._run, one.processes[0]), Quiet()
        command = [
            "-P", "-m", "relax_hpc.roles", self._role, str(self._run.root), "--name", one.name, "--attempt", str(one.attempt),
            *one.options,
        ]  # fmt: skip
        host = node_of_task(TRAINER_COMPONENT, one.node)
        where = [f"--nodelist={host}"] if host else []
        number = f"{one.attempt:04d}"
        one.step.start(
            with_options(where, self._python), command, f"{one.log}.{number}.log", f"{one.step.name}.{number}.log"
        )
        self._say("restart", role=one.name, attempt=one.attempt)

    def _ended(self, one: One) -> None:
        beats = {name: beat for name, beat in zip(one.processes, self._beats(one), strict=True) if beat is not None}
        one.step.process = None
        for name, beat in beats.items():
            if beat.get("state") == "failed":
                self.failure, self.fatal = f"{name} on {beat['host']}: {beat.get('error', '')}", True
                return
        said = next((beat for beat in beats.values() if beat.get("error")), next(iter(beats.values()), {}))
        reason, done = one.step.words() or "its step ended", said.get("orders", 0) + said.get("learned", 0)
        self._say("lost", role=one.name, reason=reason)
        if not one.patience.failed(reason, (one.attempt, done) if done else None, *beats.values()):
            self.fatal = bool(one.patience.again)
            self.suspect = str(said.get("host", ""))
            self.failure = one.patience.exhausted(one.name, reason, str(said.get("error", "")), one.step.log)

    def look_for_silence(self) -> None:
        if time.monotonic() - self._beats_read < RANKS_EVERY_S:
            return
        self._beats_read = time.monotonic()
        for one in self.ones:
            if not one.step.running:
                continue
            beats = self._beats(one)
            silent = one.quiet.look({i: beat["time"] if beat else None for i, beat in enumerate(beats)})
            for i, silent_s in silent.items():
                if silent_s > silence_limit(beats[i], self._recipe.supervision) and one.step.process:
                    name = one.processes[i]
                    self._say("silent", role=name, reason=f"no heartbeat for {silent_s:.0f} s: killed")
                    # srun kills its tasks; that is noticed like any other end
                    one.step.process.send_signal(signal.SIGTERM)
                    break

    def ask_to_stop(self) -> None:
        self._asked = True
        for one in self.ones:
            one.step.ask_to_stop()

    def end(self, grace_s: float) -> None:
        self.ask_to_stop()
        for one in self.ones:
            one.step.end(grace_s)

    def _beats(self, one: One) -> list[dict[str, Any] | None]:
        """The heartbeats of this attempt's processes; None before the first."""
        beats = [read_beat(self._run, name) for name in one.processes]
        return [beat if beat is not None and beat["attempt"] == one.attempt else None for beat in beats]
