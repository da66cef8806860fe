"""Engines generate: prompts in, tokens with logprobs out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from relax_hpc.engines.base import (
    Abort,
    Ask,
    Completion,
    Engine,
    EngineError,
    EngineRestarted,
    Sampling,
    Stream,
    Streams,
    TakesAdapters,
)
from relax_hpc.engines.sglang import SglangEngine
from relax_hpc.engines.torch import TorchEngine
from relax_hpc.recipe.schema import Recipe

__all__ = [
    "ENGINES", "Abort", "Ask", "Completion", "Engine", "EngineError", "EngineRestarted", "Sampling", "Stream", "Streams",
    "TakesAdapters", "make_engine",
]  # fmt: skip

ENGINES: dict[str, Callable[[Recipe, Path], Engine]] = {"sglang": SglangEngine, "torch": TorchEngine}


def make_engine(recipe: Recipe, model_dir: Path) -> Engine:
    """Make the recipe's engine, still without weights: `load` brings them."""
    return ENGINES[recipe.rollout.engine](recipe, model_dir)
