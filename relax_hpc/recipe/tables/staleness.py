"""[async]: how far generation may run ahead of training, and what happens to stale requests."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveFloat, model_validator

from relax_hpc.recipe.tables.table import Key, Table, conflict


class Partial(Table):
    """Partial rollouts, for `on_stale = "mask"`: a request may be given back partly generated, also when the run stops;
    any worker continues it, with newer weights. One that was given back three times is generated to its end; its tokens out
    of the bound stay out of the loss as ever."""

    abort_at_publish: bool = Key(
        True,
        "Give a request back when there are newer weights than it is generated with; with false, an engine that can swaps its "
        "weights in mid-generation.",
        resume=True,
    )
    abort_after_s: PositiveFloat | None = Key(
        None, "Give a request back after it was generated for this many seconds; absent: no limit.", resume=True
    )


class Async(Table):
    """Asynchronous training: how far generation may run ahead of it."""

    max_staleness: int = Key(
        1, "At step s no token in the loss is older than version s - max_staleness; 0 is on-policy.", ge=0
    )
    on_stale: Literal["wait", "drop", "mask"] = Key(
        "wait",
        "Treatment of a request that would miss its deadline: `wait` holds the trainer (no bias), `drop` requests the prompts again (favors short "
        "answers), `mask` takes new weights in mid-generation and keeps the tokens that are too old out of the loss.",
    )
    partial: Partial | None = Key(
        None, "When requests are given back partly generated; absent: each is generated to its end, or anew."
    )

    @model_validator(mode="after")
    def _masks(self) -> Async:
        if self.partial and self.on_stale != "mask":
            raise conflict(
                f"[async.partial] goes on with old answers under new weights, but async.on_stale = '{self.on_stale}' has no use for "
                "an answer that is older in parts: set async.on_stale = 'mask', or remove the table"
            )
        return self
