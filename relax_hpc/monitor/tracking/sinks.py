"""Sinks: each takes points through its own library, and is made anew from the first line whenever the follower starts.

Files of other libraries cannot be committed together with an offset: they buffer in threads and processes of their own.
So a sink's files are a copy that is made again: however the follower before was killed, every step is in them once.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any, Protocol

from relax_hpc.files.run_dir import RunDir
from relax_hpc.monitor.tracking.points import Point
from relax_hpc.recipe.schema import Recipe
from relax_hpc.recipe.tables.tracking import AnyTracking, ClearML, TensorBoard, Wandb

QUEUED = 20_000
"""Numbers that ClearML may have in memory: a long run that is copied at once makes them faster than it writes."""


class Sink(Protocol):
    """The interface of a sink; implement it to add one. An error that it raises ends this sink and nothing else."""

    def add(self, point: Point) -> None: ...

    def flush(self) -> None:
        """Let readers see what was added."""

    def close(self) -> None: ...

    @property
    def where(self) -> str:
        """Say what a person does with it next: a command to run, or an address to open."""


def make_sink(config: AnyTracking, run: RunDir, recipe: Recipe) -> Sink:
    """The sink of a recipe's [[tracking]], empty."""
    folder = run.tracking / config.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(config, TensorBoard):
        return TensorBoardSink(folder)
    if isinstance(config, Wandb):
        return WandbSink(config, folder, run, recipe)
    return ClearMLSink(config, folder, recipe)


class TensorBoardSink:
    """Event files, with the time at which each step was made."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        self._folder, self._writer = folder, EventFileWriter(str(folder))

    def add(self, point: Point) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in point.values.items()]
        summary = self._summary(value=values)
        self._writer.add_event(self._event(wall_time=point.time, step=point.step, summary=summary))

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    @property
    def where(self) -> str:
        return f"tensorboard --logdir {self._folder}"


class WandbSink:
    """A W&B run; scores are plotted against versions, all else against steps."""

    def __init__(self, config: Wandb, folder: Path, run: RunDir, recipe: Recipe) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # where there is no internet it would only wait
        import wandb

        settings = wandb.Settings(
            console="off", silent=True, save_code=False, disable_git=True, x_disable_stats=True, x_disable_meta=True
        )
        self._run = wandb.init(
            project=config.project, entity=config.entity, name=recipe.run.name, id=run.read_id(), dir=str(folder.parent), mode=config.mode,
            config=plain(recipe), resume="allow" if config.mode == "online" else None, settings=settings,
        )  # fmt: skip
        self._run.define_metric("eval/*", step_metric="eval/version")
        self._known = self._run.step
        """The last step that the server has already, where the run is online."""
        self._step, self._folder = 0, folder

    def add(self, point: Point) -> None:
        score = "eval/version" in point.values
        self._step = self._step if score else point.step
        if self._step >= self._known:
            self._run.log(dict(point.values), step=self._step)

    def flush(self) -> None: ...  # W&B's own process writes as points come

    def close(self) -> None:
        self._run.finish()

    @property
    def where(self) -> str:
        return f"wandb sync {self._folder}/offline-run-*" if self._run.offline else str(self._run.url)


class ClearMLSink:
    """An offline ClearML session: needs no server and no key."""

    def __init__(self, config: ClearML, folder: Path, recipe: Recipe) -> None:
        settings = folder / "clearml.conf"
        # ClearML's processes outlive a kill of ours.
        settings.write_text("sdk { development { report_use_subprocess: false } }\n")
        os.environ |= {"CLEARML_CONFIG_FILE": str(settings), "CLEARML_CACHE_DIR": str(folder)}
        from clearml import Task

        Task.set_offline(True)
        self._task: Any = Task.init(
            project_name=config.project, task_name=recipe.run.name, reuse_last_task_id=False, auto_connect_frameworks=False,
            auto_connect_arg_parser=False, auto_connect_streams=False, auto_resource_monitoring=False,
        )  # fmt: skip
        self._task.connect_configuration(plain(recipe), name="recipe")
        self._log: Any = self._task.get_logger()
        self._queued = 0

    def add(self, point: Point) -> None:
        for name, value in point.values.items():
            group, _, series = name.partition("/")
            self._log.report_scalar(group, series, value, point.step)
        self._queued += len(point.values)
        if self._queued > QUEUED:
            self._task.flush(wait_for_uploads=True)
            self._queued = 0

    def flush(self) -> None:
        self._log.flush()

    def close(self) -> None:
        self._task.flush(wait_for_uploads=True)
        self._task.close()

    @property
    def where(self) -> str:
        folder = self._task.get_offline_mode_folder()
        return f"python -c 'from clearml import Task; Task.import_offline_session(\"{folder}.zip\")'"


def plain(recipe: Recipe) -> dict[str, Any]:
    """The recipe as tables; it holds no secrets."""
    return recipe.model_dump(mode="json", by_alias=True, exclude_none=True)
