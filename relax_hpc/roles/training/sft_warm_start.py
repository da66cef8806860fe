"""The SFT warm start: a short supervised phase on the sources' own answers, for models that know nothing yet."""

from __future__ import annotations

from relax_hpc.data import PromptCursor, PromptSources
from relax_hpc.recipe.schema import Recipe
from relax_hpc.roles.common.process import RoleProcess, Stop
from relax_hpc.trainers import Trainer

RAMP_STEPS = 50
"""The learning rate rises over this many steps: Adam's first steps at full rate spoil a fresh model."""
SMOOTHING = 0.1
"""Weight of a step in the running loss that ends the phase."""
LINE_EVERY = 20
"""Steps between two lines of metrics."""
SEED_OFFSET = 0x5EED
"""Warm-up draws the training prompts in an order of its own."""


def warm_up(recipe: Recipe, trainer: Trainer, sources: PromptSources, process: RoleProcess) -> None:
    """Make `recipe.sft_warm_start.steps` supervised steps; every rank draws the same batches. Raises Stop when asked to stop."""
    sft_warm_start = recipe.sft_warm_start
    assert sft_warm_start is not None
    cursor = PromptCursor(sources, recipe.run.seed + SEED_OFFSET)
    smooth: float | None = None
    for step in range(sft_warm_start.steps):
        if process.stopping or process.run.stop.exists():
            raise Stop
        examples = [sources.example(ref.source, ref.index) for ref in cursor.take(sft_warm_start.batch_size)]
        rate = sft_warm_start.learning_rate * min(1.0, (step + 1) / RAMP_STEPS)
        loss = trainer.supervised_step([p.tokens for p, _ in examples], [a for _, a in examples], rate)
        smooth = loss if smooth is None else (1 - SMOOTHING) * smooth + SMOOTHING * loss
        process.telemetry.heartbeat(
            "warming up", warm_start_step=step + 1, warm_start_steps=sft_warm_start.steps, warm_start_loss=loss
        )
        ended = smooth < sft_warm_start.stop_at_loss or step + 1 == sft_warm_start.steps
        if (ended or (step + 1) % LINE_EVERY == 0) and process.arguments.rank == 0:
            process.telemetry.metrics(kind="sft_warm_start", step=step + 1, loss=loss, smooth_loss=smooth)
        if ended:
            break
