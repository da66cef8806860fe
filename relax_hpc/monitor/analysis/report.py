"""A run as one HTML page: figures, numbers, samples with their text, the recipe; it asks the network for nothing.

RunView ──► figures (plots), facts, samples ──► report.html.j2 ──► page
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from relax_hpc.files.errors import RunError
from relax_hpc.files.publish import read_json
from relax_hpc.monitor.analysis import RunView, plots
from relax_hpc.monitor.analysis.counts import Counts, count
from relax_hpc.monitor.analysis.examples import best_and_worst

NEWEST_SHARDS = 256
"""Samples and counts come from this many of the newest shards: reading all of a long run would take hours."""
EXAMPLES = 4
"""Best samples, and as many worst ones."""
EVENTS_SHOWN = 50
WORKERS_SHOWN = 8
"""Up to this many workers have a bar each; more than that share one bar."""


class Figure(NamedTuple):
    title: str
    note: str
    svg: str


def render(view: RunView) -> str:
    """The page. Damaged shards are named on it, not raised."""
    from jinja2 import Environment

    template = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(
        files("relax_hpc.monitor.analysis").joinpath("report.html.j2").read_text()
    )
    paths = newest(view)
    counts = count(view, paths)
    events = [e for e in view.events() if e.get("kind") in ("lost", "restart", "outcome")]
    identity = read_json(view.run.identity) or {}
    return template.render(
        name=identity.get("name", view.run.root.name),
        root=str(view.run.root),
        written=time.strftime("%Y-%m-%d %H:%M"),
        outcome=view.outcome,
        tiles=tiles(view),
        sections=sections(view),
        statuses=list(status_rows(counts)),
        reasons=counts.reasons.most_common(12),
        broken=[str(e) for e in counts.broken],
        covered=(len(paths), len(view.shard_paths())),
        events=events[-EVENTS_SHOWN:],
        events_hidden=max(0, len(events) - EVENTS_SHOWN),
        dropped=dropped(view),
        scores=list(score_rows(view)),
        samples=best_and_worst(view, paths, EXAMPLES),
        recipe=view.recipe_text,
        when=lambda t: time.strftime("%m-%d %H:%M:%S", time.localtime(t)),
    )


def newest(view: RunView) -> list[Path]:
    """The newest shards by name, with all evaluations among the newest."""
    paths = view.shard_paths()
    training = [p for p in paths if p.parent.parent == view.run.shards]
    return training[-NEWEST_SHARDS:] + [p for p in paths if p.parent == view.run.evals][-NEWEST_SHARDS:]


def tiles(view: RunView) -> list[tuple[str, str, str]]:
    """(label, value, remark): the numbers that one wants to know first."""
    steps, evals = view.steps(), view.evals()
    found: list[tuple[str, str, str]] = []
    if len(steps):
        asked = view.recipe.get("run", {}).get("steps")
        found.append(("steps", str(int(steps["step"].max()) + 1), f"of {asked}" if asked else ""))
        few = max(1, len(steps) // 20)
        what = "reward" if "reward" in steps else "loss"  # supervised fine-tuning has a loss only
        values = steps[what].astype(float)  # null where it was not finite
        first, last = values[:few].mean(), values[-few:].mean()
        found.append((what, f"{last:.3f}", f"from {first:.3f}"))
    if len(evals):
        found.append(("held-out score", f"{evals['score'].iloc[-1]:.3f}", f"from {evals['score'].iloc[0]:.3f}"))
    if len(steps):
        span_s = steps["step_s"].sum() if "step_s" in steps else 0.0  # by the trainer's own clock, which nobody sets
        found.append(("tokens trained", human(steps["tokens"].sum()), f"{human(steps['samples'].sum())} samples"))
        if span_s > 0:
            found.append(("time of all steps", duration(span_s), f"{steps['tokens'].sum() / span_s:,.0f} tokens/s"))
        if "age_max" in steps:
            mean = f"versions; mean {steps['age_mean'].mean():.2f}"
            found.append(("oldest token", f"{steps['age_max'].max():.0f}", mean))
        if "wait_s" in steps:
            found.append(("trainer waits", f"{steps['wait_s'].sum() / max(span_s, 1e-9):.0%}", "of its time"))
    return [*found, ("restarts", str(restarts(view.events())), "of roles that were lost")]


def restarts(events: list[dict[str, Any]]) -> int:
    """Count the starts of roles that had been lost; the first start of a role, or after a planned end, is none."""
    lost: set[str] = set()
    found = 0
    for event in events:
        kind, role = event.get("kind"), event.get("role", "")
        if kind == "lost":
            lost.add(role)
        elif kind == "restart" and role in lost:
            lost.remove(role)
            found += 1
    return found


def sections(view: RunView) -> list[tuple[str, list[Figure]]]:
    """(title, figures); empty ones are left out."""
    steps = view.steps()
    trained, workers = view.metrics("trainer-0", "step"), view.workers()
    bound = view.recipe.get("async", {}).get("max_staleness")
    generated = [line for lines in workers.values() for line in lines]
    curves, share = partial(plots.curves, steps), partial(plots.share, steps)
    kls = {"kl": "from the sampler", "reference_kl": "to the reference", "teacher_kl": "to the teacher"}
    clips = {"clip_low": "from below", "clip_high": "from above", "clip_dual": "dual clip"}
    plan: list[tuple[str, list[tuple[str, str, str | None]]]] = [
        ("Learning", [
            ("Reward", "mean over a step's samples", plots.reward(steps)),
            ("Held-out score", "prompts that training never sees, with 95% intervals",
             plots.score(view.evals(), view.eval_sources())),
            ("Loss", "policy loss per token", curves({"loss": "loss"})),
            ("Gradient norm", "before clipping", curves({"grad_norm": "gradient norm"}, bottom=0)),
        ]),
        ("Policy", [
            ("Entropy", "of the policy's distributions, mean over tokens",
             curves({"entropy": "entropy"}, bottom=0, ylabel="nats")),
            ("KL", "estimates, mean over tokens", curves(kls, ylabel="nats")),
            ("Clipped tokens", "share whose clip is active", curves(clips, bottom=0, percent=True)),
            ("Importance ratios", "current to behavior probability of a token",
             curves({"importance": "mean", "importance_max": "greatest"}, log=True)),
            ("Engine and trainer", "distance of their logprobs of a token, with what was learnt since",
             curves({"logprob_diff": "mean", "logprob_diff_max": "greatest"}, ylabel="nats", log=True)),
        ]),
        ("Answers", [
            ("Length", "tokens after the prompt",
             curves({"length_mean": "mean", "length_max": "longest"}, bottom=0, ylabel="tokens")),
            ("Truncated", "answers cut at the length limit",
             curves({"truncated": "cut at the limit"}, bottom=0, percent=True)),
        ]),
        ("Age", [
            ("Age of trained tokens", "all steps together", plots.ages(view.ages())),
            ("Age over the steps", "in versions of the weights",
             curves({"age_mean": "mean", "age_max": "largest"}, bottom=0, ylabel="versions", bound=bound)),
        ]),
        ("Speed", [
            ("Throughput", "tokens a second, of both sides", plots.throughput(trained, generated)),
            ("Where time goes", "share of each role's time", plots.time_shares(role_times(trained, workers))),
            ("Trainer waiting for data", "share of each step", share("wait_s", "step_s", "of the step")),
            ("Spool depth", "complete shards that no step has taken yet",
             curves({"spool_depth": "complete shards"}, bottom=0)),
        ]),
        ("Kept out of training", [
            ("Failed, filtered, dropped", "in each step", plots.losses(steps)),
            ("Groups of one reward", "share of what was generated: they teach group-relative algorithms nothing",
             share("zero_std_groups", "generated_groups", "of the groups")),
        ]),
    ]  # fmt: skip
    drawn = ((title, [Figure(t, note, svg) for t, note, svg in figures if svg is not None]) for title, figures in plan)
    return [(title, figures) for title, figures in drawn if figures]


def role_times(trained: list[dict[str, Any]], workers: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, float]]:
    """role -> {activity: seconds} over the whole run."""

    def total(lines: list[dict[str, Any]], key: str) -> float:
        return float(sum(line.get(key, 0.0) for line in lines))

    trainer = {part: total(trained, f"{part}_s") for part in ("wait", "train", "publish")}
    trainer["other"] = max(0.0, total(trained, "step_s") - sum(trainer.values()))
    if len(workers) > WORKERS_SHOWN:
        workers = {f"{len(workers)} workers": [line for lines in workers.values() for line in lines]}
    parts = ("wait", "generate", "score", "publish")
    return {"trainer": trainer} | {w: {p: total(lines, f"{p}_s") for p in parts} for w, lines in workers.items()}


def status_rows(counts: Counts) -> Iterator[dict[str, Any]]:
    for status, tally in counts.statuses.items():
        row = {"status": status, "groups": tally.groups, "samples": tally.samples, "tokens": human(tally.tokens)}
        if tally.samples:
            reward, length = (tally.columns[name].mean() for name in ("reward", "length"))
            row |= {"reward": f"{reward:.3f}", "length": f"{length:.0f}", "truncated": f"{tally.truncated:.1%}"}
        yield row


def score_rows(view: RunView) -> Iterator[dict[str, Any]]:
    """The newest version's score on each source."""
    lines = sorted(view.metrics("trainer-0", "eval"), key=lambda line: int(line["version"]))
    for one in lines[-1]["sources"] if lines else []:
        passes = ", ".join(f"pass@{k} {share:.3f}" for k, share in one["pass_at"].items())
        yield one | {"version": lines[-1]["version"], "passes": passes, "how": one["interval"]}


def dropped(view: RunView) -> dict[str, float] | None:
    """Mean lengths of the answers that came too late and of those trained on: dropping favors short answers."""
    late, steps = view.metrics("trainer-0", "dropped"), view.steps()
    if not late or not len(steps):
        return None
    trained = np.average(steps["length_mean"].to_numpy(float), weights=steps["samples"].to_numpy(float))
    return {
        "requests": len(late),
        "dropped": float(np.mean([line["length_mean"] for line in late])),
        "trained": float(trained),
    }


def write(view: RunView, output: Path) -> None:
    """Render and write the page. Raises RunError for a folder that is not there."""
    if not output.parent.is_dir():
        raise RunError(f"no folder '{output.parent}' to write '{output.name}' into: make it first")
    output.write_text(render(view), encoding="utf-8")


def human(number: float) -> str:
    """12345678 -> '12.3 M'."""
    for size, unit in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return f"{number:.0f}"


def duration(seconds: float) -> str:
    """3725 -> '1 h 2 min'."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
