"""[[tracking]]: tools that metrics are copied to, to compare many runs. [notify]: messages about the run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Union

from pydantic import PositiveFloat, Tag

from relax_hpc.recipe.tables.table import Key, Table, named


class TensorBoard(Table):
    """Event files in RUN/tracking/tensorboard."""

    name: Literal["tensorboard"] = Key("tensorboard", "TensorBoard, without torch or TensorFlow.", resume=True)


class Wandb(Table):
    """A Weights & Biases run whose id is the run's own; in RUN/tracking/wandb while offline."""

    name: Literal["wandb"] = Key("wandb", "Weights & Biases; its key is taken from the environment.", resume=True)
    project: str = Key("relax-hpc", "The project.", resume=True)
    entity: str | None = Key(None, "The team or user; absent: that of the key.", resume=True)
    mode: Literal["offline", "online"] = Key(
        "offline",
        "`offline` writes files, which `wandb sync` uploads from a machine with internet; `online` needs it where the trainer is.",
        resume=True,
    )


class ClearML(Table):
    """An offline session in RUN/tracking/clearml, which `Task.import_offline_session` uploads."""

    name: Literal["clearml"] = Key("clearml", "ClearML, in its offline mode.", resume=True)
    project: str = Key("relax-hpc", "The project.", resume=True)


AnyTracking = Annotated[
    Union[
        Annotated[TensorBoard, Tag("tensorboard")], Annotated[Wandb, Tag("wandb")], Annotated[ClearML, Tag("clearml")]
    ],
    named(default=lambda v: "tensorboard"),
]

Event = Literal["outcome", "restart", "stall", "collapse"]


class Notify(Table):
    """Messages about the run by Apprise (mail, Slack, Matrix, webhooks, …). Addresses hold secrets, so they never stand here."""

    file: Path | None = Key(
        None,
        "A file with Apprise URLs, one a line, outside run.root; absent: they stand in $RELAX_HPC_NOTIFY, blanks between them.",
        resume=True,
    )
    events: list[Event] = Key(
        ["outcome", "restart", "stall", "collapse"],
        "Events to report: the run's end, roles that were lost, steps that do not come, rewards or entropy that collapse.",
        min_length=1,
        resume=True,
    )
    stall_s: PositiveFloat = Key(3600.0, "`stall`: seconds for which the trainer has reported nothing.", resume=True)
