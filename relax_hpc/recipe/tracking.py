"""[[tracking]]: where metrics are copied to, for those who look at many runs side by side."""

from __future__ import annotations

from typing import Annotated, Literal, Union

from pydantic import Tag

from relax_hpc.recipe.table import Key, Table, named


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
