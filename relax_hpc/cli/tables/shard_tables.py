"""Tables of `relax-hpc shards` on a terminal: rows in, rich tables out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
from rich import box
from rich.console import Console, Group
from rich.filesize import decimal
from rich.markup import escape
from rich.panel import Panel
from rich.table import Column, Table
from rich.text import Text

from relax_hpc.cli.tables import wide_console

if TYPE_CHECKING:
    from relax_hpc.monitor.analysis import RunView
    from relax_hpc.monitor.analysis.counts import Counts
    from relax_hpc.monitor.analysis.statuses import RequestStatus
    from relax_hpc.spool.shard import Shard

STATUS_STYLE = {
    "trained": "green", "filtered": "yellow", "failed": "red", "dropped": "magenta", "unused": "blue", "evaluation": "cyan",
}  # fmt: skip
SAID = {
    "reference": "log p of the reference", "teacher": "log p of the teacher", "recomputed": "log p recomputed",
    "values": "value",
}  # fmt: skip
"""Column of a shard -> its label."""
SHORT_TEXT = 400
"""Characters of a text that are shown unless the full text is asked for."""
BARS = " ▁▂▃▄▅▆▇█"
BINS = 24


def show_requests(rows: Iterable[dict[str, Any]], hidden: int, broken: list[Any]) -> None:
    """Print the table of `shards ls`."""
    console, rows = wide_console(), list(rows)
    has_media = any(row["media_bytes"] for row in rows)
    cells = [_request_cells(row, has_media) for row in rows]
    numbers = ["step", "version", "age", "samples", "reward", "length", "size", *(["media"] if has_media else [])]
    table = _table(["request", "status"], numbers)
    if any(note for *_, note in cells):
        table.add_column("note", no_wrap=True, overflow="ellipsis", style="dim")
    else:
        cells = [values for *values, _ in cells]
    for values in cells:
        table.add_row(*values)
    console.print(table if rows else "no shards")
    if hidden:
        console.print(f"[dim]… and {hidden} older ones: --all[/dim]")
    for error in broken:
        console.print(f"[red]damaged:[/red] {escape(str(error))}")


def _request_cells(row: dict[str, Any], has_media: bool) -> list[Any]:
    name = row["shard"].removesuffix(".h5")
    first, last, of_groups = row["first_version"], row["last_version"], row["groups"]
    notes = [
        f"{row[kind]} of {of_groups} groups {kind.removesuffix('_groups')}"
        for kind in ("failed_groups", "filtered_groups")
        if row[kind]
    ]
    return [
        name if name.startswith("quarantine/") else row["request"],
        Text(row["status"], STATUS_STYLE[row["status"]]),
        _number(row["step"]),
        _number(first) if first == last else f"{first}–{last}",
        _number(row["age"]),
        _number(row["samples"]),
        _number(row["reward"], ".3f"),
        _number(row["length_mean"], ".0f"),
        decimal(row["bytes"]),
        *([decimal(row["media_bytes"])] if has_media else []),
        escape(", ".join(notes) or row["reason"]),
    ]


def show_request(
    view: RunView, shard: Shard, status: RequestStatus, group: int | None, sample: int | None, full: bool
) -> None:
    """Print `shards show`: one panel a group."""
    from relax_hpc.files.errors import RunError
    from relax_hpc.monitor.analysis.tables import SCORES, TEXT_TYPES, TYPES, sample_columns, verdicts

    console, judged = Console(), verdicts(shard, status)
    of_group = shard.samples["group"]
    for name, asked, have in (("group", group, len(judged)), ("sample", sample, len(of_group))):
        if asked is not None and not 0 <= asked < have:
            raise RunError(f"request {shard.request} has no {name} {asked}: they count from 0 to {have - 1}")
    extras = [c for c in shard.column_names() if c.startswith("extra/")]
    decoder = view.decoder if view.has_text else None
    tokens = ["tokens", "prompt_tokens", "loss_mask", *(f"columns/{name}" for name in SCORES)]
    columns = sample_columns(shard, status, [*TYPES, *TEXT_TYPES, *extras, *tokens], decoder)
    console.print(_request_header(shard, status))
    if decoder is None:
        console.print(
            f"[yellow]no {escape(str(view.run.model))}/tokenizer.json in this run: token ids are shown[/yellow]"
        )
    for g, verdict in enumerate(judged):
        mine = [int(i) for i in np.flatnonzero(of_group == g) if sample in (None, i)]
        if group not in (None, g) or (sample is not None and not mine):
            continue
        prompt = _prompt_of(shard, view, g)
        parts: list[Any] = [
            _text("prompt ", prompt, full, "bold"),
            *_media(shard, g),
            _text("answer ", shard.meta["prompts"][g]["answer"], full, "bold"),
        ]
        parts += [_sample(columns, i, extras, full) for i in mine]
        title = Text.assemble(
            f"group {g} ", (verdict.status, STATUS_STYLE[verdict.status]), f" {verdict.reason}".rstrip()
        )
        title.append(f" ({verdict.detail})" if verdict.detail else "")
        title.append(f" · source {shard.groups['source'][g]}, prompt {shard.groups['index'][g]}", "dim")
        console.print(Panel(Group(*parts), title=title, title_align="left", border_style="dim"))


def _prompt_of(shard: Shard, view: RunView, group: int) -> str:
    from relax_hpc.monitor.analysis.examples import shortened

    begin, end = shard.prompt_offsets[group : group + 2]
    tokens = shard.read("prompt_tokens", int(begin), int(end)).tolist()
    return (
        shortened(view.decoder.decode_batch([tokens], skip_special_tokens=False)[0]) if view.has_text else str(tokens)
    )


def _media(shard: Shard, group: int) -> list[Text]:
    """Say in a line what a group's prompt shows beside its text."""
    item = shard.media_index.item(group)
    if item is None:
        return []
    shapes = ", ".join(f"{name} {'×'.join(map(str, place.shape))}" for name, place in item.tensors.items())
    about = f"{shapes} · {decimal(item.bytes)}, the shard keeps its {item.kept} · digest {item.digest}"
    return [Text.assemble(("media ", "bold"), about)]


def _request_header(shard: Shard, status: RequestStatus) -> Text:
    line = Text.assemble((shard.request, "bold"), "  ", (status.status, STATUS_STYLE[status.status]))
    line.append("" if status.step is None else f" at step {status.step}")
    line.append(f" ({status.reason})" if status.reason else "")
    about = {
        k: v
        for k, v in shard.meta.items()
        if k not in ("request", "reasons", "details", "prompts", "checksums", "media")
    }
    line.append(
        "\n" + " · ".join(f"{k} {v:.2f}" if isinstance(v, float) else f"{k} {v}" for k, v in about.items()), "dim"
    )
    return line


def _sample(columns: dict[str, Any], i: int, extras: list[str], full: bool) -> Group:
    text = columns["completion"][i]
    first, last = columns["first_version"][i], columns["last_version"][i]
    facts = [f"reward {columns['reward'][i]:g}"]
    if columns["raw_reward"][i] != columns["reward"][i]:
        facts.append(f"raw {columns['raw_reward'][i]:g}")
    facts += [f"{columns['length'][i]} tokens", str(columns["finish"][i])]
    facts += [f"{columns['turns'][i]} turns"] if columns["turns"][i] > 1 else []
    facts += [] if first is np.ma.masked else [f"version {first}" if first == last else f"versions {first}–{last}"]
    facts += [] if columns["age"][i] is np.ma.masked else [f"age {columns['age'][i]}"]
    facts += [f"{e.removeprefix('extra/')} {columns[e][i]:g}" for e in extras]
    for name in (c for c in columns if c.startswith("columns/") and columns[c][i] is not None):
        own = max(int(columns["loss_mask"][i].sum()), 1)
        what = SAID[name.removeprefix("columns/")]
        facts.append(f"{what} {columns[name][i].sum() / own:.3f} a token")
    head = Text.assemble((f"\n{columns['sample'][i]} ", "bold"), (" · ".join(facts), "dim"))
    return Group(head, _text("", text if text is not None else str(columns["tokens"][i].tolist()), full, ""))


def _text(label: str, text: str | None, full: bool, style: str) -> Text:
    from relax_hpc.monitor.analysis.examples import visible

    if text is None:
        return Text.assemble((label, style), ("none", "dim"))
    cut = len(text) - SHORT_TEXT
    shown = text if full or cut <= 0 else text[:SHORT_TEXT]
    more = f" … {cut} more characters: --full" if len(shown) < len(text) else ""
    return Text.assemble((label, style), visible(shown), (more, "dim"))


def show_stats(counts: Counts) -> None:
    """Print the tables of `shards stats`."""
    console = wide_console()
    if not counts.statuses and not counts.broken:
        console.print("no shards")
        return
    numbers = ["groups", "samples", "tokens", "reward", "length", "p50/p90/max", "cut", "age/max"]
    table = _table(["status"], numbers)
    for status, t in counts.statuses.items():
        lengths, ages = t.columns["length"], t.columns["age"]
        spread = "/".join(f"{v:.0f}" for v in np.percentile(lengths, [50, 90, 100])) if t.samples else "–"
        reward, length = (f"{t.columns['reward'].mean():.3f}", f"{lengths.mean():.1f}") if t.samples else ("–", "–")
        age = f"{ages.mean():.2f}/{ages.max()}" if len(ages) else "–"
        cut = f"{t.truncated:.0%}" if t.samples else "–"
        name, counted = Text(status, STATUS_STYLE[status]), (str(t.groups), str(t.samples), f"{t.tokens:,}")
        table.add_row(name, *counted, reward, length, spread, cut, age)
    console.print(table)
    for column in ("reward", "length"):
        console.print(_histogram(column, counts.all(column)))
    for folder, size in counts.bytes.items():
        console.print(f"{folder:>8}  {counts.shards[folder]:,} files, {decimal(size)}")
    for (status, reason), groups in counts.reasons.most_common(20):
        console.print(Text.assemble(f"{groups:>8}  groups ", (status, STATUS_STYLE[status]), f": {reason}"))
    for error in counts.broken:
        console.print(f"[red]damaged:[/red] {escape(str(error))}")


def _table(words: list[str], numbers: list[str]) -> Table:
    columns = [Column(name, justify="right" if name in numbers else "left", no_wrap=True) for name in words + numbers]
    return Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))


def _histogram(name: str, values: Any) -> Text:
    if not len(values):
        return Text()
    counts, edges = np.histogram(values, BINS)
    bars = "".join(BARS[0 if not n else 1 + round((len(BARS) - 2) * float(n / counts.max()))] for n in counts)
    return Text.assemble((f"{name:>8}  ", "bold"), f"{edges[0]:g} ", (bars, "cyan"), f" {edges[-1]:g}")


def _number(value: Any, form: str = ",") -> str:
    return "–" if value is None else format(value, form)
