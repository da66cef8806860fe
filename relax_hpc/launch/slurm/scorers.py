"""The scorers of a run on Slurm: one srun each on the trainer's nodes, beside its step, started again on its own."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from relax_hpc.launch.members import Patience, Quiet, next_attempt, silence_limit
from relax_hpc.launch.slurm.steps import TRAINER_COMPONENT, with_options
from relax_hpc.launch.slurm.trainers import RANKS_EVERY_S, Step, node_of_task
from relax_hpc.launch.workers import scorers_wanted
from relax_hpc.recipe.schema import Recipe
from relax_hpc.run_dir import RunDir
from relax_hpc.telemetry import read_beat


@dataclass(slots=True)
class One:
    """A scorer, over all its attempts."""

    name: str
    rank: int
    step: Step
    patience: Patience
    attempt: int = 0


class StepScorers:
    """See relax_hpc.launch.workers.Workers."""

    def __init__(self, run: RunDir, recipe: Recipe, python: list[str], say: Callable[..., None]) -> None:
        """python: `srun … python`, with everything that comes before the module."""
        self._run, self._recipe, self._python, self._say = run, recipe, python, say
        self._scorers = [
            One(f"scorer-{i}", i, Step(run, f"srun-scorer-{i}"), Patience(recipe.supervision))
            for i in range(scorers_wanted(run, recipe))
        ]
        self.failure, self.suspect, self.fatal = "", "", False
        self._quiet, self._beats_read, self._asked = Quiet(), 0.0, False

    def look_after(self) -> None:
        if self._asked:
            return
        for scorer in self._scorers:
            if scorer.step.process is not None and not scorer.step.running:
                self._ended(scorer)
            if scorer.step.process is None and time.time() >= scorer.patience.not_before and not self.failure:
                self._start(scorer)

    def _start(self, scorer: One) -> None:
        scorer.attempt = next_attempt(self._run, scorer.name)
        command = [
            "-P", "-m", "relax_hpc.roles", "scorer", str(self._run.root), "--name", scorer.name, "--attempt", str(scorer.attempt),
            "--rank", str(scorer.rank),
        ]  # fmt: skip
        host = node_of_task(TRAINER_COMPONENT, scorer.rank % self._recipe.trainer.nodes)
        where = [f"--nodelist={host}"] if host else []
        number = f"{scorer.attempt:04d}"
        scorer.step.start(
            with_options(where, self._python),
            command,
            f"{scorer.name}.{number}.log",
            f"{scorer.step.name}.{number}.log",
        )
        self._say("restart", role=scorer.name, attempt=scorer.attempt)

    def _ended(self, scorer: One) -> None:
        beat = self._beat(scorer) or {}
        scorer.step.process = None
        if beat.get("state") == "failed":
            self.failure, self.fatal = f"{scorer.name} on {beat['host']}: {beat.get('error', '')}", True
            return
        reason, orders = scorer.step.words() or "its step ended", beat.get("orders")
        self._say("lost", role=scorer.name, reason=reason)
        if not scorer.patience.failed(reason, (scorer.attempt, orders) if orders else None):
            said, self.suspect = str(beat.get("error", "")), str(beat.get("host", ""))
            self.failure = scorer.patience.exhausted(scorer.name, reason, said, scorer.step.log)

    def look_for_silence(self) -> None:
        if time.time() - self._beats_read < RANKS_EVERY_S:
            return
        self._beats_read = time.time()
        beats = {s.rank: self._beat(s) for s in self._scorers if s.step.running}
        silent = self._quiet.look({rank: beat["time"] if beat else None for rank, beat in beats.items()})
        for scorer in self._scorers:
            silent_s = silent.get(scorer.rank, 0.0)
            if silent_s > silence_limit(beats.get(scorer.rank), self._recipe.supervision) and scorer.step.process:
                self._say("silent", role=scorer.name, reason=f"no heartbeat for {silent_s:.0f} s: killed")
                scorer.step.process.send_signal(
                    signal.SIGTERM
                )  # srun kills its task; that is noticed like any other end

    def ask_to_stop(self) -> None:
        self._asked = True
        for scorer in self._scorers:
            scorer.step.ask_to_stop()

    def end(self, grace_s: float) -> None:
        self.ask_to_stop()
        for scorer in self._scorers:
            scorer.step.end(grace_s)

    def _beat(self, scorer: One) -> dict[str, Any] | None:
        """The heartbeat of this attempt; None before its first."""
        beat = read_beat(self._run, scorer.name)
        return beat if beat is not None and beat["attempt"] == scorer.attempt else None
