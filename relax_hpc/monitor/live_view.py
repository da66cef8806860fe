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
from relax_hpc.monitor.cluster_view import plain_table
from relax_hpc.monitor.status import Status
from relax_hpc.recipe.tables.source import left_out

REFRESH_S = 0.5
PLAIN_EVERY_S = 5.0
"""How often a line is printed where there is no terminal."""
STATE_COLORS = {
    **dict.fromkeys(("running", "done"), "green"), "stopped": "yellow", **dict.fromkeys(("failed", "interrupted"), "red"),
    **dict.fromkeys(("pending", "waiting for a successor", "starting"), "cyan"),
}  # fmt: skip
_complained = set[str]()
REWARD = "generated_reward"
"""The reward metric to show: that of all samples generated, since those trained on are chosen."""
REASONS_SHOWN = 4
"""How many reasons of failed groups to show: the most frequent ones."""
SPARKS = "▁▂▃▄▅▆▇█"


def render(status: Status) -> RenderableType:
    """Build the panel of a run's status."""
    color = STATE_COLORS.get(status.state, "white")
    title = Text.assemble((status.recipe.run.name, "bold"), " ", (status.state, color))
    parts = [
        _progress(status),
        _numbers(status),
        *(Text(line, style="dim") for line in left_out(status.rows)),
        *_sources(status),
        *(Text(line, style="yellow") for line in _warnings(status)),
        *(Text(line, style="red") for line in _failures(status)),
        _roles(status),
        *cluster_view.parts(status),
    ]
    if status.outcome and status.outcome.get("reason"):
        parts.append(Text(str(status.outcome["reason"]), style=color))
    return Panel(Group(*parts), title=title, subtitle=Text(str(status.run.root)), border_style=color, padding=(0, 1))


def line(status: Status) -> str:
    """The status of a run in one line."""
    if not status.heartbeats and status.slurm is not None and status.state != "running":
        return f"{status.state}: {cluster_view.one_line(status.slurm)}"
    heartbeat = status.heartbeats.get("trainer-0", {})
    if not status.steps:
        words = heartbeat.get("state", "starting")
        if words == "warming up":
            done, total, loss = (heartbeat[f"warm_start_{what}"] for what in ("step", "steps", "loss"))
            words += f" {done}/{total} loss {loss:.3f}"
        return f"{words}: {heartbeat['error']}" if "error" in heartbeat else str(words)
    last, step = status.steps[-1], f"step {status.step}/{status.recipe.run.steps}"
    score = f" held-out {_last_score(status)}" if status.evals else ""
    train = f"train {status.train_rate:.0f}/s"
    if status.recipe.supervised:
        return f"{step} loss {_mean(status, 'loss'):.3f}{score} epoch {last['epoch']} {train} lost {status.restarts}"
    waits, failed = status.waiting(), status.failed_groups().total()
    return "; ".join([
        f"{step} reward {_mean(status, REWARD):.3f}{score} age {last['age_mean']:.2f} {train} "
        f"rollout {status.rollout_rate:.0f}/s waiting: trainer {waits[0]:.0%} rollout {waits[1]:.0%} "
        f"spool {last['spool_depth']} lost {status.restarts}",
        *_nothing(status),
        *([f"{failed} groups failed"] if failed else []),
    ])  # fmt: skip


@contextmanager
def live(run: RunDir, console: Console, status: Status | None = None) -> Iterator[Callable[[], None]]:
    """Show a live view, and yield the function that refreshes it: call it often, it looks as often as people can read.

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
    heartbeat = status.heartbeats.get("trainer-0", {})
    what, done, total, right = "step", status.step, status.recipe.run.steps, ""
    if heartbeat.get("state") == "warming up":
        what, done, total = "SFT warm start", heartbeat["warm_start_step"], heartbeat["warm_start_steps"]
        right = f"loss {heartbeat['warm_start_loss']:.3f}"
    elif status.steps and status.state == "running":
        each = sum(s["step_s"] for s in status.steps) / len(status.steps)
        right = f"{each:.2f} s a step, {_duration(each * (total - done))} left"
    grid = Table.grid(padding=(0, 1), expand=True)
    grid.add_column(no_wrap=True)
    grid.add_column(ratio=1)
    grid.add_column(no_wrap=True, justify="right")
    grid.add_row(f"{what} {done}/{total}", ProgressBar(total, done), right)
    return grid


def _numbers(status: Status) -> RenderableType:
    last = status.steps[-1] if status.steps else {}
    waits = [f"{share:.0%} of its time" for share in status.waiting()]
    trained = f"{status.train_rate:.0f} samples/s"
    if status.recipe.supervised:
        rows = [
            ("loss", _lately(status, "loss"), "held-out", _last_score(status)),
            ("trained", trained, "epoch", str(last.get("epoch", 0))),
        ]
    else:
        age, bound = last.get("age_mean", 0), status.recipe.async_.max_staleness
        ages = f"{age:.2f} (max {last.get('age_max', 0)}, bound {bound})"
        rows = [
            ("reward", _lately(status, REWARD), "held-out", _last_score(status)),
            ("age", ages, "spool", f"{last.get('spool_depth', 0)} requests ready"),
            ("trained", trained, "waits", waits[0]),
            ("generated", f"{status.rollout_rate:.0f} samples/s", "waits", waits[1]),
        ]
    if status.restarts:
        rows.append(("lost", f"{status.restarts} processes, started again", "", ""))
    grid = Table.grid(padding=(0, 2))
    for style in ("dim", "", "dim", ""):
        grid.add_column(no_wrap=True, style=style)
    for row in rows:
        grid.add_row(*row)
    return grid


def _warnings(status: Status) -> Iterator[str]:
    yield from _nothing(status)
    if found := status.latest.get("engine_differs"):
        yield (
            f"engine and trainer differ by {found['engine_diff']:.3f} nats a token with the same weights, at step {found['step']} "
            f"(rollout.logprob_diff_warning = {found['limit']:g})"
        )
    if found := status.latest.get("lineage"):
        yield f"lineage {found['lineage']} began at version {found['version']}: other bits than before"
    if found := status.latest.get("damaged_checkpoint"):
        yield f"the checkpoint of step {found['step']} was damaged, an older one was taken: {found['reason']}"


def _nothing(status: Status) -> list[str]:
    """Say that the recent steps trained on nothing; empty where they did."""
    empty = bool(status.steps) and not any(s["samples"] for s in status.steps)
    return [f"nothing is trained: all groups of the last {len(status.steps)} steps were kept out"] if empty else []


def _roles(status: Status) -> RenderableType:
    table = plain_table("role", "state", "heartbeat", "attempt", "pid", "doing")
    for name in status.roles():
        heartbeat = status.heartbeats.get(name)
        if heartbeat is None:
            table.add_row(name, "not started")
            continue
        age = time.time() - heartbeat["time"]
        stale = status.state == "running" and age > status.recipe.supervision.hang_s / 2
        ago = Text(f"{_duration(age)} ago", style="red" if stale else "")
        about = (str(heartbeat[key]) for key in ("attempt", "pid"))
        table.add_row(name, heartbeat.get("state", ""), ago, *about, _doing(status, name, heartbeat))
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


def _sources(status: Status) -> list[RenderableType]:
    """The newest scores by source."""
    grid = Table.grid(padding=(0, 2))
    for s in status.evals[max(status.evals)]["sources"] if status.evals else ():
        passes = [f"pass@{k} {share:.3f}" for k, share in s["pass_at"].items()] if len(s["pass_at"]) > 1 else []
        interval = f"{s['score']:.3f} [{s['low']:.3f}, {s['high']:.3f}]"
        grid.add_row(Text(s["name"], style="dim"), interval, "  ".join(passes))
    return [grid] if grid.row_count else []


def _failures(status: Status) -> Iterator[str]:
    """Why groups failed, why prompts of the newest evaluation failed, and which evaluations were given up."""
    reasons = status.failed_groups().most_common()
    for reason, count in reasons[:REASONS_SHOWN]:
        yield f"{count} groups failed: {reason}"
    if len(reasons) > REASONS_SHOWN:
        yield f"… and {len(reasons) - REASONS_SHOWN} other reasons: relax-hpc report"
    if status.evals:
        newest = max(status.evals)
        for reason, count in [*status.evals[newest]["failures"].items()][:REASONS_SHOWN]:
            yield f"evaluation of version {newest}: {count} prompts failed: {reason}"
    for version, reason in sorted(status.given_up.items())[-REASONS_SHOWN:]:
        yield f"the evaluation of version {version} was given up: {reason}"


def _lately(status: Status, name: str) -> str:
    """The mean of a metric over the recent steps, with their curve."""
    return f"{_mean(status, name):.3f} {_spark(_values(status, name))}"


def _mean(status: Status, name: str) -> float:
    values = _values(status, name)
    return float(sum(values) / max(len(values), 1))


def _values(status: Status, name: str) -> list[float]:
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
