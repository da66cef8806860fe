"""Supervised fine-tuning on the sources' own answers: as an algorithm of its own, and as a warm start before step 0.

ExampleLoader ──► prompts and answers, tokenized ──► ledger entry s: their (source, index, epoch) ──► one optimizer step

Nothing is requested, generated or waited for: every rank loads the same examples, and the entry names them, so what a
step learns depends on the recipe's seed and the loader's position alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from relax_hpc.data import PromptSources
from relax_hpc.data.examples import Example, ExampleLoader
from relax_hpc.files.errors import RunError
from relax_hpc.recipe.schema import Recipe
from relax_hpc.records import Rollouts
from relax_hpc.roles.common.process import RoleProcess, Stop
from relax_hpc.roles.training.ledger_replay import WithoutRequests
from relax_hpc.spool.ledger import Entry, Ledger
from relax_hpc.trainers import Trainer
from relax_hpc.trainers.token_loss import as_rollouts

RAMP_STEPS = 50
"""The learning rate rises over this many steps: Adam's first steps at full rate spoil a fresh model."""
SMOOTHING = 0.1
"""Weight of a step in the running loss that ends the phase."""
LINE_EVERY = 20
"""Steps between two lines of metrics."""
SEED_OFFSET = 0x5EED
"""The SFT warm start draws the training prompts in an order of its own."""


class SftBatches(WithoutRequests):
    """Stands in for the batch scheduler in supervised fine-tuning: the examples of each step come from the loader."""

    def __init__(self, examples: ExampleLoader, prompts_per_step: int, ledger: Ledger) -> None:
        self._examples, self._count, self._ledger = examples, prompts_per_step, ledger
        self._committed: Entry | None = None
        self.live = False
        """True from the ledger's end on; before it, steps are replayed."""

    def begin(self, state: dict[str, Any] | None) -> None:
        """Nothing to do: every rank goes on with the examples from a checkpoint's state, this one too."""

    def next_entry(self, step: int, version: int, lineage: int) -> Entry:
        """Return the ledger entry of `step`: the one that is there, or a new one."""
        if self._committed is None or self._committed.step != step:
            learned = tuple(map(_name, self._examples.of(step, self._count)))
            found = None if self.live else self._ledger.find(step)
            entry = Entry(step, self._ledger.incarnation, lineage, take=(), learned=learned)
            self._committed, self.live = found or self._ledger.commit(entry), found is None
        return self._committed

    def state_dict(self) -> dict[str, Any]:
        """Return the state for the checkpoint: the loader's."""
        return {"examples": self._examples.state_dict()}


def read(entry: Entry, examples: ExampleLoader) -> Rollouts:
    """Return the examples that `entry` names, as samples whose every token is in the loss."""
    found = examples.of(entry.step, len(entry.learned))
    if (names := tuple(map(_name, found))) != entry.learned:
        raise RunError(
            f"step {entry.step}: the ledger names the prompts {entry.learned[:3]} …, and those that come next are {names[:3]} …: "
            "the prompt files were changed since; give the run the ones it began with"
        )
    learned = as_rollouts([e.prompt for e in found], [e.answer for e in found], [e.media for e in found])
    return replace(learned, ids=entry.sft_examples)


def _name(example: Example) -> tuple[int, int, int]:
    return example.ref.source, example.ref.index, example.ref.epoch


def warm_up(recipe: Recipe, trainer: Trainer, sources: PromptSources, process: RoleProcess) -> None:
    """Make `recipe.sft_warm_start.steps` supervised steps; every rank draws the same batches. Raises Stop when asked to stop."""
    phase = recipe.sft_warm_start
    assert phase is not None
    loader = ExampleLoader(sources, recipe.run.seed + SEED_OFFSET, recipe.trainer.data_workers)
    smooth: float | None = None
    for step in range(phase.steps):
        if process.stopping or process.run.stop.exists():
            raise Stop
        examples = loader.draw(phase.batch_size)
        rate = phase.learning_rate * min(1.0, (step + 1) / RAMP_STEPS)
        prompts, answers, media = zip(*((e.prompt, e.answer, e.media) for e in examples), strict=True)
        loss = trainer.supervised_step([*prompts], [*answers], rate, media)
        smooth = loss if smooth is None else (1 - SMOOTHING) * smooth + SMOOTHING * loss
        process.telemetry.heartbeat(
            "warming up", warm_start_step=step + 1, warm_start_steps=phase.steps, warm_start_loss=loss
        )
        ended = smooth < phase.stop_at_loss or step + 1 == phase.steps
        if (ended or (step + 1) % LINE_EVERY == 0) and process.arguments.rank == 0:
            process.telemetry.metrics(kind="sft_warm_start", step=step + 1, loss=loss, smooth_loss=smooth)
        if ended:
            break
