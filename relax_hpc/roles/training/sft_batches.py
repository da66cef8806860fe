"""Supervised fine-tuning as the trainer's role sees it: a step's ledger entry names prompts, and every rank looks them up.

cursor ──► ledger entry s: (source, index, epoch) of each prompt ──► prompts and answers, tokenized ──► one optimizer step

Nothing is ordered, generated or waited for; what a step learns depends on the recipe's seed and the cursor's position alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from relax_hpc.data import PromptCursor, PromptSources
from relax_hpc.records import Rollouts
from relax_hpc.roles.training.batch_scheduler import WithoutRequests
from relax_hpc.spool.ledger import Entry, Ledger
from relax_hpc.trainers.token_loss import as_rollouts


class SftBatches(WithoutRequests):
    """What stands in for the batch scheduler: the prompts of each step, by the cursor."""

    def __init__(self, cursor: PromptCursor, prompts_per_step: int, ledger: Ledger, incarnation: int) -> None:
        self._cursor, self._count, self._ledger, self._incarnation = cursor, prompts_per_step, ledger, incarnation
        self._entry: Entry | None = None
        """That of the step that is next: drawn once, however often it is asked for (while the disk is full, again and again)."""
        self._committed = False
        self.live = False
        """Whether the ledger's end is reached: before it, steps are replayed."""

    def begin(self, state: dict[str, Any] | None) -> None:
        """Go on from a checkpoint's state, or from nothing."""
        if state is not None:
            self._cursor.load_state_dict(state["cursor"])

    def next_entry(self, step: int, version: int, lineage: int) -> Entry:
        """The ledger entry of `step`: the one that is there, or a new one."""
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
        """For the checkpoint: where the prompt cursor is."""
        return {"cursor": self._cursor.state_dict()}


def read(entry: Entry, sources: PromptSources) -> Rollouts:
    """What `entry` learns, as samples whose every token is in the loss. Raises RunError for an answer that cannot be learned."""
    examples = [sources.example(source, index) for source, index, _ in entry.learned]
    rollouts = as_rollouts([prompt.tokens for prompt, _ in examples], [answer for _, answer in examples])
    return replace(rollouts, ids=entry.sft_examples)
