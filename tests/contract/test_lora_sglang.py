"""Versions that hold an adapter alone, on the real SGLang server."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from relax_hpc.algorithms import make_algorithm
from relax_hpc.engines import Ask, Completion, Sampling, Streams, TakesAdapters, make_engine
from relax_hpc.trainers.torch import TorchTrainer
from tests import tiny
from tests.contract.test_lora import made

PROMPTS, EACH = tiny.prompts([4, 7]), 2


def worst(trainer: TorchTrainer, found: list[Completion], name: str) -> float:
    """The greatest difference of the answers' logprobs to those of the trainer's column `name`."""
    asked = [prompt for prompt in PROMPTS for _ in range(EACH)]
    said = trainer._column(name, tiny.rollouts(asked, [one.tokens for one in found], EACH), 1.0, lambda: None)
    return float(np.abs(said - np.concatenate([one.logprobs for one in found])).max())


def test_each_version_is_generated_with_and_the_one_before_is_gone(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    recipe, trainer = made(
        tmp_path, {}, trainer={"learning_rate": 0.05, "lora": {"rank": 4}}, rollout={"engine": "sglang"}
    )
    engine = make_engine(recipe, tmp_path)
    try:
        assert isinstance(engine, TakesAdapters) and isinstance(engine, Streams) and not engine.swaps
        engine.load_base(trainer.export_base())
        before = {}
        for version in range(3):
            given = dict(trainer.export())
            with pytest.raises(ValueError, match=f"version {version} is of another model"):
                engine.load(version, [*given.items()][1:])
            engine.load(version, given.items())
            found = engine.generate(PROMPTS, EACH, Sampling(max_new_tokens=8), seed=version)
            assert all(one.spans == [(0, version)] for one in found)
            assert worst(trainer, found, "recomputed") < 1e-5
            assert (worst(trainer, found, "reference") > 0.1) == (version > 0)
            stream = engine.stream()
            stream.ask([Ask(1, PROMPTS[0], Sampling(max_new_tokens=5, temperature=0.0), 0)])
            while stream.busy:
                before[version] = [done for _, done in stream.advance(1.0)]
            assert before[version][0].spans == [(0, version)]
            trainer.step(tiny.random_rollouts(8, seed=version), make_algorithm(recipe.algorithm), version)
        assert before[0][0].tokens.tolist() != before[2][0].tokens.tolist()
        names = engine.client._request("GET", "/v1/models", None, 60.0)["data"]  # type: ignore[attr-defined]
        assert [one["id"] for one in names if one["id"].startswith("v")] == ["v2.2"]
    finally:
        engine.close()
