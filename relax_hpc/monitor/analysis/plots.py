"""The figures of a report: tables in, inline SVG out, colored by the page's CSS variables (so that dark mode is free).

Every function returns None when there is nothing to draw.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

POINTS = 400
"""A curve of more points is averaged down to this many: a page stays small, a pixel shows no more."""
SIZE = (4.8, 2.5)
"""Inches; 346 points wide, so that fonts have their true size on a phone."""
INK, MUTED, GRID = "#010101", "#020202", "#030303"
SERIES = ("#040401", "#040402", "#040403", "#040404", "#040405", "#040406")
"""Stand-ins that become CSS variables: no real color is this one."""
OF_TIME = dict(zip(("generate", "train", "wait", "score", "publish", "other"), SERIES, strict=True))
VARIABLES = {INK: "--ink", MUTED: "--muted", GRID: "--line", **{c: f"--series-{i}" for i, c in enumerate(SERIES)}}
STYLE: dict[str, Any] = {
    "svg.fonttype": "none", "svg.hashsalt": "relax_hpc", "font.size": 9.5, "font.family": "sans-serif", "text.color": INK,
    "axes.edgecolor": GRID, "axes.labelcolor": MUTED, "xtick.color": MUTED, "ytick.color": MUTED, "axes.spines.top": False,
    "axes.spines.right": False, "axes.grid": True, "axes.axisbelow": True, "grid.color": GRID, "grid.linewidth": 0.6,
    "lines.linewidth": 1.6, "lines.solid_capstyle": "round", "legend.frameon": False, "legend.fontsize": 9, "xtick.major.size": 0,
    "ytick.major.size": 0, "ytick.minor.size": 0, "axes.labelsize": 9, "legend.handlelength": 1.0, "legend.handletextpad": 0.5, "legend.borderaxespad": 0.1,
}  # fmt: skip


def reward(steps: pd.DataFrame) -> str | None:
    """Mean reward of each step, what the verifier said where shaping changed it, and what `overlong` and the KL leave of it."""
    before = {} if _same(steps, "reward", "raw_reward") else {"raw_reward": "before shaping"}
    return curves(steps, {"reward": "reward", **before, "shaped_reward": "less overlong, KL"})


def score(evals: pd.DataFrame, sources: pd.DataFrame) -> str | None:
    """The score of each evaluated version with its interval; of each source, where there are several."""
    if not len(evals):
        return None
    several = len(sources) and sources["name"].nunique() > 1
    parts = list(sources.groupby("name", sort=False)) if several else [("", evals)]
    with _figure() as (figure, axes):
        for (name, part), color in zip(parts, (SERIES[1:] + SERIES[:1]) * len(parts), strict=False):
            axes.plot(part["version"], part["score"], color=color, marker="o", markersize=4, label=str(name))
            if "low" in part:
                low, high = part["low"].to_numpy(float), part["high"].to_numpy(float)
                axes.fill_between(part["version"].to_numpy(float), low, high, color=color, alpha=0.15, linewidth=0)
        if several:
            axes.legend()
        axes.set_xlabel("version")
        axes.set_ylim(min(0, evals["score"].min()), max(1, evals["score"].max()) * 1.03)
        return svg(figure)


def share(steps: pd.DataFrame, part: str, whole: str, label: str) -> str | None:
    """The metric `part` as a share of `whole`, over the steps."""
    if not {part, whole} <= set(steps):
        return None
    shares = steps[part].astype(float) / steps[whole].astype(float).clip(lower=1e-9)
    return curves(steps.assign(share=shares), {"share": label}, bottom=0, percent=True)


def ages(table: pd.DataFrame) -> str | None:
    """Share of trained tokens by age."""
    if not len(table):
        return None
    shares = table.groupby("age")["tokens"].sum() / table["tokens"].sum()
    with _figure() as (figure, axes):
        axes.bar(shares.index, shares, width=0.7, color=SERIES[0])
        for age, share in shares.items():
            axes.annotate(f"{share:.0%}", (age, share), (0, 3), textcoords="offset points", ha="center", color=INK)
        axes.set_xticks(range(int(shares.index.max()) + 1))
        axes.set_xlabel("versions between making a token and training on it")
        axes.set_ylim(0, shares.max() * 1.15)
        _percent(axes)
        return svg(figure)


def throughput(trained: list[dict[str, Any]], generated: list[dict[str, Any]]) -> str | None:
    """Tokens a second of both sides over wall-clock time: what workers delivered, and what the trainer consumed."""
    lines = [line for line in [*trained, *generated] if "time" in line and "tokens" in line]
    times = np.array([line["time"] for line in lines])
    if len(times) < 2 or times.max() - times.min() < 1:
        return None
    edges = np.linspace(times.min(), times.max(), int(np.clip(len(trained) // 6, 4, 60)) + 1)
    width_s = edges[1] - edges[0]
    unit_s, unit = (3600.0, "hours") if times.max() - times.min() > 3 * 3600 else (60.0, "minutes")
    with _figure() as (figure, axes):
        for side, name, color in ((generated, "generated", SERIES[0]), (trained, "trained", SERIES[1])):
            made, _ = np.histogram([x["time"] for x in side], edges, weights=[x["tokens"] for x in side])
            axes.stairs(
                made / width_s, (edges - edges[0]) / unit_s, color=color, label=name, linewidth=1.6, baseline=None
            )
        axes.set_xlabel(f"{unit} since the first metric")
        axes.set_ylabel("tokens/s")
        axes.set_ylim(bottom=0)
        _legend(axes)
        return svg(figure)


def time_shares(roles: dict[str, dict[str, float]]) -> str | None:
    """One bar a role: role -> {what (a key of OF_TIME): seconds}, as shares of its whole time."""
    roles = {name: parts for name, parts in roles.items() if sum(parts.values()) > 0}
    if not roles:
        return None
    kinds = [kind for kind in OF_TIME if any(parts.get(kind) for parts in roles.values())]
    with _figure(height=0.9 + 0.32 * len(roles)) as (figure, axes):
        left = np.zeros(len(roles))
        totals = np.array([sum(parts.values()) for parts in roles.values()])
        for kind in kinds:
            share = np.array([parts.get(kind, 0.0) for parts in roles.values()]) / totals
            axes.barh(list(roles), share, left=left, height=0.6, color=OF_TIME[kind], label=kind)
            left += share
        axes.invert_yaxis()
        axes.set_xlim(0, 1)
        axes.xaxis.set_major_formatter(lambda v, _: f"{v:.0%}")
        axes.grid(axis="y", visible=False)
        _legend(axes)
        return svg(figure)


def losses(steps: pd.DataFrame) -> str | None:
    """Groups that failed or were filtered, and requests dropped, each step."""
    names = ("failed_groups", "filtered_groups", "dropped_requests")
    return curves(steps, {c: c.replace("_", " ") for c in names if c in steps and steps[c].sum()}, bottom=0)


def curves(
    steps: pd.DataFrame,
    columns: dict[str, str],
    bottom: float | None = None,
    percent: bool = False,
    ylabel: str = "",
    bound: int | None = None,
    log: bool = False,
) -> str | None:
    """Curves over steps, the first on top: faint, with their running mean; largest values as they are. `log`: what is above 0 alone."""
    shown = {c: steps[c].notna() & (not log or steps[c] > 0) for c in columns if c in steps}
    columns = {c: label for c, label in columns.items() if c in shown and shown[c].any()}
    if not columns:
        return None
    window = max(1, len(steps) // 25)
    with _figure() as (figure, axes):
        for i, (column, label) in enumerate(columns.items()):
            there = steps.loc[shown[column], ["step", column]].astype(float)
            x, y = there["step"].to_numpy(), there[column]
            look: dict[str, Any] = {"color": SERIES[i], "zorder": 3 - i / 10}
            if column.endswith("_max") or window == 1:
                axes.plot(*thin(x, y.to_numpy()), label=label, linewidth=1.1, **look)
            else:
                axes.plot(*thin(x, y.to_numpy()), alpha=0.3, linewidth=1, **look)
                mean = y.rolling(window, min_periods=1).mean().to_numpy()
                axes.plot(*thin(x, mean), label=label, **look)
        if bound is not None:
            axes.axhline(bound, color=MUTED, linewidth=1, linestyle="--", label="bound")
            axes.margins(y=0.1)
        smooth = window > 1 and any(not c.endswith("_max") for c in columns)
        axes.set_xlabel(f"step (bold: mean of {window})" if smooth else "step")
        axes.set_ylabel(ylabel)
        if log:
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(lambda v, _: f"{v:g}")
            axes.yaxis.set_minor_formatter(lambda v, _: "")
        if bottom is not None:
            axes.set_ylim(bottom, axes.get_ylim()[1])
        if percent:
            _percent(axes)
        if len(columns) > 1 or bound is not None:
            _legend(axes)
        return svg(figure)


def thin(x: NDArray[Any], y: NDArray[Any], points: int = POINTS) -> tuple[NDArray[Any], NDArray[Any]]:
    """At most `points` points: means over stretches of equal length."""
    if len(x) <= points:
        return x, y
    parts = np.array_split(np.arange(len(x)), points)
    return np.array([x[p].mean() for p in parts]), np.array([y[p].mean() for p in parts])


@contextmanager
def _figure(height: float = SIZE[1]) -> Iterator[tuple[Figure, Axes]]:
    """Make a figure in the report's style; matplotlib's own settings stay as they are."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(cast(Any, STYLE)):
        figure = Figure((SIZE[0], height), layout="constrained")
        yield figure, figure.add_subplot()


def svg(figure: Figure) -> str:
    """The figure as an <svg> element to put into a page."""
    buffer = io.StringIO()
    figure.savefig(
        buffer, format="svg", transparent=True, metadata={"Creator": None, "Date": None, "Format": None, "Type": None}
    )
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    for color, variable in VARIABLES.items():
        text = text.replace(color, f"var({variable})")
    text = re.sub(r'<g id="[^"]*">', "<g>", text)
    # The page's own font and width; ids of clip paths differ from figure to figure by what they cut.
    text = re.sub(r"font: ([0-9.]+px) [^;\"]*", r"font-size: \1", text)
    return re.sub(r'<svg [^>]*viewBox="([^"]*)"[^>]*>', r'<svg viewBox="\1" role="img">', text, count=1)


def _percent(axes: Axes) -> None:
    axes.yaxis.set_major_formatter(lambda v, _: f"{100 * v:.3g}%")


def _legend(axes: Axes) -> None:
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.01), ncols=6, columnspacing=1.0)


def _same(table: pd.DataFrame, a: str, b: str) -> bool:
    return not {a, b} <= set(table) or bool(
        np.allclose(table[a].to_numpy(float), table[b].to_numpy(float), equal_nan=True)
    )
