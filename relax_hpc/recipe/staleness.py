"""[async]: how far generation may run ahead of training, and what becomes of what is late."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveFloat, PositiveInt, model_validator

from relax_hpc.recipe.table import Key, Table, conflict


class Partial(Table):
    """Partial rollouts, for `late = "mask"`: an order that is given back half-played, at a stop too, goes on with newer weights on any worker."""

    abort_at_publish: bool = Key(
        True,
        "Give back an order when there are newer weights than it is played with; false leaves them to an engine that swaps "
        "weights in mid-generation.",
        resume=True,
    )
    abort_after_s: PositiveFloat | None = Key(
        None, "Give back an order that was played for this many seconds; absent sets no limit.", resume=True
    )
    max_aborts: PositiveInt = Key(
        3,
        "An order that was given back this often is played to its end; what is out of the bound then stays out of the loss too.",
        resume=True,
    )


class Async(Table):
    """How far generation may run ahead of training."""

    max_staleness: int = Key(
        1, "At step s no token in the loss is older than version s - max_staleness; 0 is on-policy.", ge=0
    )
    late: Literal["wait", "drop", "mask"] = Key(
        "wait",
        "What would miss its deadline: `wait` holds the trainer (no bias), `drop` orders the prompts again (favours short "
        "answers), `mask` takes new weights in mid-generation and keeps the tokens that are too old out of the loss.",
    )
    partial: Partial | None = Key(
        None, "When orders are given back half-played; absent plays each to its end, or anew."
    )

    @model_validator(mode="after")
    def _masks(self) -> Async:
        if self.partial and self.late != "mask":
            raise conflict(
                f"[async.partial] goes on with old answers under new weights, but async.late = '{self.late}' has no use for "
                "an answer that is older in parts: set async.late = 'mask', or remove the table"
            )
        return self
