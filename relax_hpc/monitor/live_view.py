"""The view of a run: one panel, live while it runs; plain lines where there is no terminal; printed once by `status`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from relax_hpc.files.run_dir import RunDir
from relax_hpc.monitor import cluster_view
from relax_hpc.monitor.status import Status
from relax_hpc.recipe.tables.source import left_out

REFRESH_S = 0.5
PLAIN_EVERY_S = 5.0
"""How often a line is printed where there is no terminal."""
STATE_COLORS = {"running": "green", "done": "green", "stopped": "yellow", "failed": "red", "interrupted": "red", "pending": "cyan", "waiting for a successor": "cyan", "starting": "cyan"}  # fmt: skip
_complained = set[str]()
REASONS_SHOWN = 4
"""How many reasons of failed groups to show: the most frequent ones."""
SPARKS = "▁▂▃▄▅▆▇█"


def render(status: Status) -> RenderableType:
    """Build the panel of a run's status."""
    color = STATE_COLORS.get(status.state, "white")
    title = Text.assemble((status.recipe.run.name, "bold"), " ", (status.state, color))
    parts: list[RenderableType] = [_progress(status), _numbers(status)]
    parts += [Text(line, style="dim") for line in left_out(status.rows)]
    if (scores := _sources(status)) is not None:
        parts.append(scores)
    warnings = (_nothing(status), _differs(status), _lineage(status), _damaged(status))
    parts += [Text(text, style="yellow") for text in warnings if text]
    parts += _failures(status)
    parts += _failed_evaluations(status)
    parts.append(_roles(status))
    if status.slurm is not None:
        parts += cluster_view.parts(status)
    if status.outcome and status.outcome.get("reason"):
        parts.append(Text(str(status.outcome["reason"]), style=color))
    return Panel(Group(*parts), title=title, subtitle=Text(str(status.run.root)), border_style=color, padding=(0, 1))


def line(status: Status) -> str:
    """The status of a run in one line."""
    if not status.heartbeats and status.slurm is not None and status.state != "running":
        return f"{status.state}: {cluster_view.one_line(status.slurm)}"
    if not status.steps:
        heartbeat = status.heartbeats.get("trainer-0", {})
        warm = (
            f" {heartbeat['warm_start_step']}/{heartbeat['warm_start_steps']} loss {heartbeat['warm_start_loss']:.3f}"
            if heartbeat.get("state") == "warming up"
            else ""
        )
        return f"{heartbeat.get('state', 'starting')}{warm}{': ' + heartbeat['error'] if 'error' in heartbeat else ''}"
    last = status.steps[-1]
    waits = status.waiting()
    score = f" held-out {_last_score(status)}" if status.evals else ""
    if status.recipe.supervised:
        return (
            f"step {status.step}/{status.recipe.run.steps} loss {_mean(status, 'loss'):.3f}{score} epoch {last['epoch']} "
            f"train {status.train_rate:.0f}/s lost {status.restarts}"
        )
    return (
        f"step {status.step}/{status.recipe.run.steps} reward {_mean(status, _reward(last)):.3f}{score} age {last['age_mean']:.2f} "
        f"train {status.train_rate:.0f}/s rollout {status.rollout_rate:.0f}/s waiting: trainer {waits[0]:.0%} rollout {waits[1]:.0%} "
        f"spool {last['spool_depth']} lost {status.restarts}{f'; {nothing}' if (nothing := _nothing(status)) else ''}"
        f"{f'; {failed} groups failed' if (failed := status.failed_groups().total()) else ''}"
    )


@contextmanager
def live(run: RunDir, console: Console, status: Status | None = None) -> Iterator[Callable[[], None]]:
    """Show a live view, and yield the function that refreshes it: call it often, it looks only as often as people can
    read.

    It never raises: a file that cannot be read, or a terminal that is gone, is no reason to end the run that is shown.
    """
    display = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
    every_s, last, said = REFRESH_S if display else PLAIN_EVERY_S, float("-inf"), ""

    def draw() -> None:
        nonlocal status, said
        status = status if status is not None else Status.of(run)
        status.refresh()
        if display is not None:
            display.start()
            display.update(render(status), refresh=True)
        elif (now := line(status)) != said:
            console.print(said := now, highlight=False, soft_wrap=True, markup=False)

    def look() -> None:
        nonlocal last
        if time.monotonic() - last > every_s:
            last = time.monotonic()
            in_any_case(draw)

    try:
        yield look
    finally:
        if display is not None:
            in_any_case(display.stop)


def in_any_case(show: Callable[[], object]) -> None:
    """Call `show`, and ignore any error of files or terminals: a picture must not end the process that runs the run."""
    try:
        show()
    except OSError:  # the next look comes in a moment, or nobody looks any more
        pass
    except Exception as error:
        if repr(error) not in _complained:
            logging.getLogger("view").warning("cannot be shown: %r", error)
        _complained.add(repr(error))


def _progress(status: Status) -> RenderableType:
    grid = Table.grid(padding=(0, 1), expand=True)
    grid.add_column(no_wrap=True)
    grid.add_column(ratio=1)
    grid.add_column(no_wrap=True, justify="right")
    heartbeat = status.heartbeats.get("trainer-0", {})
    if heartbeat.get("state") == "warming up":
        done, total = heartbeat["warm_start_step"], heartbeat["warm_start_steps"]
        grid.add_row(
            f"SFT warm start {done}/{total}", ProgressBar(total, done), f"loss {heartbeat['warm_start_loss']:.3f}"
        )
        return grid
    total = status.recipe.run.steps
    pace = [s["step_s"] for s in status.steps]
    each = sum(pace) / len(pace) if pace else 0.0
    left = (
        f"{each:.2f} s a step, {_duration(each * (total - status.step))} left"
        if each and status.state == "running"
        else ""
    )
    grid.add_row(f"step {status.step}/{total}", ProgressBar(total, status.step), left)
    return grid


def _numbers(status: Status) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    for _ in range(4):
        grid.add_column(no_wrap=True)
    last = status.steps[-1] if status.steps else {}
    trainer_waits, rollout_waits = status.waiting()

    def key(text: str) -> Text:
        return Text(text, style="dim")

    trained = f"{status.train_rate:.0f} samples/s"
    if status.recipe.supervised:
        grid.add_row(key("loss"), _lately(status, "loss"), key("held-out"), _last_score(status))
        grid.add_row(key("trained"), trained, key("epoch"), str(last.get("epoch", 0)))
        return _with_lost(grid, status)
    age = f"{last.get('age_mean', 0):.2f} (max {last.get('age_max', 0)}, bound {status.recipe.async_.max_staleness})"
    grid.add_row(key("reward"), _lately(status, _reward(last)), key("held-out"), _last_score(status))
    grid.add_row(key("age"), age, key("spool"), f"{last.get('spool_depth', 0)} requests ready")
    grid.add_row(key("trained"), trained, key("waits"), f"{trainer_waits:.0%} of its time")
    grid.add_row(
        key("generated"), f"{status.rollout_rate:.0f} samples/s", key("waits"), f"{rollout_waits:.0%} of its time"
    )
    return _with_lost(grid, status)


def _with_lost(grid: Table, status: Status) -> Table:
    if status.restarts:
        grid.add_row(Text("lost", style="dim"), f"{status.restarts} processes, started again")
    return grid


def _lineage(status: Status) -> str:
    """Say that weights were made again with other bits than before; empty where they were not."""
    if status.lineage is None:
        return ""
    return f"lineage {status.lineage['lineage']} began at version {status.lineage['version']}: other bits than before"


def _damaged(status: Status) -> str:
    """Name the checkpoint that was found damaged, and how; empty where none was."""
    if status.damaged is None:
        return ""
    return f"the checkpoint of step {status.damaged['step']} was damaged, an older one was taken: {status.damaged['reason']}"


def _roles(status: Status) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in ("role", "state", "heartbeat", "attempt", "pid", "doing"):
        table.add_column(column)
    for name in status.roles():
        heartbeat = status.heartbeats.get(name)
        if heartbeat is None:
            table.add_row(name, "not started", "", "", "", "")
            continue
        age = time.time() - heartbeat["time"]
        stale = status.state == "running" and age > status.recipe.supervision.hang_s / 2
        doing = _doing(status, name, heartbeat)
        table.add_row(
            name,
            heartbeat.get("state", ""),
            Text(f"{_duration(age)} ago", style="red" if stale else ""),
            str(heartbeat["attempt"]),
            str(heartbeat["pid"]),
            doing,
        )
    return table


def _doing(status: Status, name: str, heartbeat: dict[str, Any]) -> str:
    if name.startswith("rollout"):
        return f"{status.worker_rate(name):.0f} samples/s, {heartbeat.get('requests', 0)} requests"
    if name.startswith(("scorer", "critic")):
        lines = status.columns.get(name)
        behind = f", {lines[-1]['lag_s']:.1f} s after the shard" if lines else ""
        learned = f"{heartbeat.get('step', 0)} steps learned, " if name.startswith("critic") else ""
        return f"{learned}{status.column_rate(name):.0f} tokens/s, {heartbeat.get('requests', 0)} requests{behind}"
    return f"step {heartbeat.get('step', 0)}"


def _last_score(status: Status) -> str:
    if not status.evals:
        return "–"
    versions = sorted(status.evals)
    first, last = status.evals[versions[0]], status.evals[versions[-1]]
    begun = f"{first['score']:.3f} → " if len(versions) > 1 else ""
    failed = f", {last['failed']} prompts failed" if last.get("failed") else ""
    return f"{begun}{last['score']:.3f} (v{versions[-1]}{failed})"


def _sources(status: Status) -> RenderableType | None:
    """The newest scores by source."""
    scores = status.evals[max(status.evals)].get("sources", []) if status.evals else []
    if not scores:
        return None
    grid = Table.grid(padding=(0, 2))
    for s in scores:
        passes = (
            "  ".join(f"pass@{k} {share:.3f}" for k, share in s["pass_at"].items()) if len(s["pass_at"]) > 1 else ""
        )
        grid.add_row(
            Text(s["name"], style="dim"),
            f"{s['score']:.3f} [{s['low']:.3f}, {s['high']:.3f}]",
            passes,
        )
    return grid


def _reward(step: dict[str, Any]) -> str:
    """Name of the reward metric to show: that of all samples generated, since those trained on are chosen.

    Older runs have only the latter.
    """
    return "generated_reward" if "generated_reward" in step else "raw_reward"


def _nothing(status: Status) -> str:
    """Say that the recent steps trained on nothing; empty where they did."""
    empty = bool(status.steps) and not any(s["samples"] for s in status.steps)
    return f"nothing is trained: all groups of the last {len(status.steps)} steps were kept out" if empty else ""


def _differs(status: Status) -> str:
    """Say that engine and trainer do not compute the same logprobs; empty where they do."""
    found = status.engine_differs
    if found is None:
        return ""
    return (
        f"engine and trainer differ by {found['engine_diff']:.3f} nats a token with the same weights, at step {found['step']} "
        f"(rollout.logprob_diff_warning = {found['limit']:g})"
    )


def _lately(status: Status, name: str) -> str:
    """The mean of a metric over the recent steps, with their curve."""
    return f"{_mean(status, name):.3f} {_spark(_numbers_of(status, name))}"


def _failures(status: Status) -> list[Text]:
    """How many groups failed, and why."""
    counts = status.failed_groups().most_common()
    more = (
        [f"… and {len(counts) - REASONS_SHOWN} other reasons: relax-hpc report"] if len(counts) > REASONS_SHOWN else []
    )
    shown = [f"{count} groups failed: {reason}" for reason, count in counts[:REASONS_SHOWN]]
    return [Text(text, style="red") for text in [*shown, *more]]


def _failed_evaluations(status: Status) -> list[Text]:
    """Why prompts of the newest evaluation failed, and which evaluations were given up."""
    newest = max(status.evals, default=None)
    why = status.evals[newest].get("failures", {}) if newest is not None else {}  # older runs do not tell
    shown = [
        f"evaluation of version {newest}: {count} prompts failed: {reason}"
        for reason, count in [*why.items()][:REASONS_SHOWN]
    ]
    last = sorted(status.given_up.items())[-REASONS_SHOWN:]
    shown += [f"the evaluation of version {version} was given up: {reason}" for version, reason in last]
    return [Text(text, style="red") for text in shown]


def _mean(status: Status, name: str) -> float:
    values = _numbers_of(status, name)
    return float(sum(values) / max(len(values), 1))


def _numbers_of(status: Status, name: str) -> list[float]:
    """A metric's values at the recent steps, without those that were not finite."""
    return [s[name] for s in status.steps if s[name] is not None]


def _spark(values: list[float]) -> str:
    if len(values) < 2:
        return ""
    low, high = min(values), max(values)
    return "".join(SPARKS[int((v - low) / ((high - low) or 1) * (len(SPARKS) - 1))] for v in values)


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
