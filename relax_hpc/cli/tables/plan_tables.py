"""Tables of `relax-hpc plan` on a terminal."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from relax_hpc.cli.tables import show_table
from relax_hpc.planning.sizing.engine import EngineMemory
from relax_hpc.planning.sizing.estimate import Estimate, gib


def show(made: Estimate, where: str, rows: list[str], console: Console) -> None:
    """Print all tables, then rows of prompts that are left out, then what does not fit."""
    _model(made, where, console)
    _groups(made, console)
    _trainer(made, console)
    if made.engine is not None:
        _engine(made.engine, console)
    _traffic(made, console)
    for line in rows:
        console.print(escape(line), soft_wrap=True, highlight=False)
    console.print("[dim]assumed: " + escape("; ".join(made.assumed)) + "[/dim]")
    for problem in made.problems:
        console.print(f"[bold red]does not fit:[/bold red] {escape(problem.what)}", soft_wrap=True)
        for remedy in problem.remedies:
            console.print(f"  would fit: [bold]{escape(remedy)}[/bold]", soft_wrap=True)
        if not problem.remedies:
            console.print("  no few changes of the split mend it: more devices, larger ones, or a smaller model")
    if not made.problems:
        console.print(f"[green]fits[/green] devices of {gib(made.device_bytes)}")


def _table(title: str, *columns: str) -> Table:
    headers = (Column(column, justify="right" if index else "left") for index, column in enumerate(columns))
    return Table(*headers, title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)


def _model(made: Estimate, where: str, console: Console) -> None:
    shape = made.model
    experts = f", {shape.experts} experts of which a token takes {shape.chosen}" if shape.experts else ""
    active = f" ({_count(made.active)} for a token)" if shape.experts else ""
    console.print(
        f"[bold]{_count(made.whole.all)}[/bold] parameters{active}: {shape.type}, {shape.layers} layers{experts}, "
        f"context {shape.context}; from {escape(where)}",
        highlight=False,
        soft_wrap=True,
    )


def _groups(made: Estimate, console: Console) -> None:
    table = _table("Groups", "", "nodes", "processes", "GPUs each", "GPUs", "given by [slurm]".replace("[", r"\["))
    for group in made.groups:
        numbers = (group.nodes, group.processes, group.devices_each, group.devices, group.given or "-")
        table.add_row(group.role, *map(str, numbers))
    show_table(table, console)
    if made.jobs:
        console.print(f"jobs: {', '.join(made.jobs)}")


def _trainer(made: Estimate, console: Console) -> None:
    table = _table(
        "A trainer process", "stage", "parameters", "weights", "gradients", "optimizer", "frozen", "activations", "head", "sum"
    )  # fmt: skip
    for stage in made.trainer:
        state = (stage.weights, stage.gradients, stage.optimizer, stage.frozen)
        sizes = map(gib, (*state, stage.activations, stage.head, stage.total))
        table.add_row(str(stage.stage), _count(stage.parameters), *sizes)
    show_table(table, console)
    console.print(f"{made.replicas} data-parallel, {made.micro_batches} micro-batches a step on each")


def _engine(engine: EngineMemory, console: Console) -> None:
    table = _table(
        "An engine", "GPUs", "weights, each", "cache, each", "tokens it holds", "a request's, at most", "host memory"
    )
    numbers = (f"{engine.room:,}", f"{engine.wanted:,}", gib(engine.host))
    table.add_row(str(engine.devices), gib(engine.weights), gib(max(engine.cache, 0)), *numbers)
    show_table(table, console)


def _traffic(made: Estimate, console: Console) -> None:
    moved = made.traffic
    table = _table("A step", "", "")
    extended = moved.most_spool_bytes > moved.spool_bytes
    table.add_row("samples in the loss", f"{moved.samples:,}")
    table.add_row("their tokens", f"{moved.trained_tokens:,}")
    if moved.spool_bytes:
        generated = (
            f"{moved.samples:,} to {moved.most_samples:,} (algorithm.dynamic_sampling)"
            if extended
            else f"{moved.samples:,}"
        )
        table.add_row("samples generated", generated)
        routed = f", {gib(moved.routed_bytes)} of it routed experts" if moved.routed_bytes else ""
        media = f", {gib(moved.media_bytes)} of it images, video and audio at most" if moved.media_bytes else ""
        to = f" to {gib(moved.most_spool_bytes)}" if extended else ""
        table.add_row("shards", gib(moved.spool_bytes) + to + routed + media)
        table.add_row("shards that are kept, at most", gib(moved.run_spool_bytes))
    if made.engine is not None:
        weights = f"{gib(moved.weights_bytes)}, {moved.copies} times: {moved.sync_s:.1f} s"
        table.add_row("a version of the weights", weights)
    table.add_row("a checkpoint", gib(made.checkpoint_bytes))
    show_table(table, console)


def _count(number: int) -> str:
    return f"{number / 1e9:.2f} B" if number >= 1e8 else f"{number / 1e6:.2f} M"
