"""What turns orders into groups, for whoever plays them: an engine with the recipe's prompts, environments and rewards.

order ──(source, index)──► prompts ──episodes──► groups; one that cannot be played becomes failed groups, with the reason
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoTokenizer

from relax_hpc.data import PromptSources
from relax_hpc.engines import EngineError, Sampling, make_engine
from relax_hpc.environments import Environments
from relax_hpc.recipe.schema import Recipe
from relax_hpc.records import Failure, Group, Part, Prompt, failed_group
from relax_hpc.rewards import Judge
from relax_hpc.roles import gpus
from relax_hpc.roles.episodes import HalfPlayed, play
from relax_hpc.run_dir import RunError
from relax_hpc.spool.orders import Order, order_seed


class Player:
    """An engine, still without weights, and all that an episode needs besides."""

    def __init__(self, recipe: Recipe, model_dir: Path) -> None:
        torch.set_num_threads(recipe.rollout.threads)
        gpus.computes_on_gpu(recipe.rollout.device, "rollout")
        self._max_turns = recipe.rollout.max_turns
        self._tokenizer = AutoTokenizer.from_pretrained(model_dir)
        self.engine = make_engine(recipe, model_dir)
        self.sources = PromptSources.of(recipe, self._tokenizer, self.engine.context)
        self._environments = Environments(recipe)
        self._judge = Judge(recipe)
        r, asked = recipe.rollout, recipe.evaluation
        self._training = Sampling(r.temperature, r.top_p, r.top_k, r.max_new_tokens, tuple(r.stop))
        self._evaluation = dataclasses.replace(self._training, temperature=asked.temperature if asked else 0.0)

    def prompts(self, order: Order) -> list[Prompt]:
        """The order's prompts, tokenized."""
        return [self.sources.prompt(source, index) for source, index in order.prompts]

    def groups(
        self,
        order: Order,
        prompts: list[Prompt],
        progress: Callable[[str], None],
        parts: int = 0,
        part: Part | None = None,
    ) -> list[Group]:
        """The groups of an order; an evaluation has a temperature of its own. Raises EngineError, and RunError for what a person must mend.

        parts: how often it was given back half-played; part: what there is of it since. Raises HalfPlayed as `play` does.
        """
        # What is left of an answer is not drawn by the numbers that its beginning was drawn by.
        seed = order_seed(order.seed, f"part {parts}") if parts else order.seed
        try:
            return play(
                prompts, order.copies, seed, self._evaluation if order.evaluates else self._training, self._max_turns,
                self.engine, self._tokenizer, self._environments, self._judge, progress, part,
            )  # fmt: skip
        except (EngineError, RunError, HalfPlayed):
            raise
        except Exception as error:
            # A prompt that cannot be played must not cost the run: its groups are kept, with the reason.
            logging.getLogger("episodes").exception("order %s failed", order.id)
            failure = Failure(f"the order raised {type(error).__name__}", str(error))
            return [failed_group(p, order.copies, self.engine.version, failure) for p in prompts]

    @property
    def scored_s(self) -> float:
        """Seconds that scoring took so far."""
        return self._judge.seconds

    def close(self) -> None:
        """End the engine and the processes of rewards and environments."""
        self._judge.close()
        self._environments.close()
        self.engine.close()
