"""Supervised fine-tuning on the sources' own answers: as an algorithm of its own, and as a warm start before step 0.

cursor ──► ledger entry s: (source, index, epoch) of each prompt ──► prompts and answers, tokenized ──► one optimizer step

Nothing is requested, generated or waited for: the entry names prompts and every rank looks them up, so what a step
learns depends on the recipe's seed and the cursor's position alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from relax_hpc.data import PromptCursor, PromptSources
from relax_hpc.recipe.schema import Recipe
from relax_hpc.records import Rollouts
from relax_hpc.roles.common.process import RoleProcess, Stop
from relax_hpc.roles.training.batch_scheduler import WithoutRequests
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
    """Stands in for the batch scheduler in supervised fine-tuning: the prompts of each step come from the cursor."""

    def __init__(self, cursor: PromptCursor, prompts_per_step: int, ledger: Ledger, incarnation: int) -> None:
        self._cursor, self._count, self._ledger, self._incarnation = cursor, prompts_per_step, ledger, incarnation
        self._entry: Entry | None = None
        """The next step's entry: drawn once, however often it is asked for (while the disk is full, again and
        again)."""
        self._committed = False
        self.live = False
        """True from the ledger's end on; before it, steps are replayed."""

    def begin(self, state: dict[str, Any] | None) -> None:
        """Go on from a checkpoint's state, or from nothing."""
        if state is not None:
            self._cursor.load_state_dict(state["cursor"])

    def next_entry(self, step: int, version: int, lineage: int) -> Entry:
        """Return the ledger entry of `step`: the one that is there, or a new one."""
        if self._entry is None or self._entry.step != step:
            learned = tuple((ref.source, ref.index, ref.epoch) for ref in self._cursor.take(self._count))
            self._entry = Entry(step, self._incarnation, lineage, take=(), learned=learned)
            self._committed = False
        if not self._committed:
            found = None if self.live else self._ledger.find(step)
            self._entry = found or self._ledger.commit(self._entry)
            self.live, self._committed = found is None, True
        return self._entry

    def state_dict(self) -> dict[str, Any]:
        """Return the state for the checkpoint: the prompt cursor."""
        return {"cursor": self._cursor.state_dict()}


def read(entry: Entry, sources: PromptSources) -> Rollouts:
    """Read the examples that `entry` learns, as samples whose every token is in the loss. Raises RunError for an answer
    that cannot be learned."""
    examples = [sources.example(source, index) for source, index, _ in entry.learned]
    rollouts = as_rollouts([prompt.tokens for prompt, _ in examples], [answer for _, answer in examples])
    return replace(rollouts, ids=entry.sft_examples)


def warm_up(recipe: Recipe, trainer: Trainer, sources: PromptSources, process: RoleProcess) -> None:
    """Make `recipe.sft_warm_start.steps` supervised steps; every rank draws the same batches. Raises Stop when asked to stop."""
    phase = recipe.sft_warm_start
    assert phase is not None
    cursor = PromptCursor(sources, recipe.run.seed + SEED_OFFSET)
    smooth: float | None = None
    for step in range(phase.steps):
        if process.stopping or process.run.stop.exists():
            raise Stop
        examples = [sources.example(ref.source, ref.index) for ref in cursor.take(phase.batch_size)]
        rate = phase.learning_rate * min(1.0, (step + 1) / RAMP_STEPS)
        loss = trainer.supervised_step([p.tokens for p, _ in examples], [a for _, a in examples], rate)
        smooth = loss if smooth is None else (1 - SMOOTHING) * smooth + SMOOTHING * loss
        process.telemetry.heartbeat(
            "warming up", warm_start_step=step + 1, warm_start_steps=phase.steps, warm_start_loss=loss
        )
        ended = smooth < phase.stop_at_loss or step + 1 == phase.steps
        if (ended or (step + 1) % LINE_EVERY == 0) and process.arguments.rank == 0:
            process.telemetry.metrics(kind="sft_warm_start", step=step + 1, loss=loss, smooth_loss=smooth)
        if ended:
            break
