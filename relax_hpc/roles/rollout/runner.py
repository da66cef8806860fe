"""The rollout runner turns requests into groups: an engine with the recipe's prompts, environments and rewards.

request ──(source, index)──► prompts ──episodes──► groups; one that cannot be generated becomes failed groups, with the reason
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoConfig, AutoTokenizer

from relax_hpc.data import PromptSources
from relax_hpc.data.ahead import PromptLoader, Unusable
from relax_hpc.engines import EngineError, Sampling, Streams, make_engine
from relax_hpc.environments import Environments
from relax_hpc.environments.tools.schemas import with_tools
from relax_hpc.files.errors import RunError
from relax_hpc.media.families import family_of
from relax_hpc.media.process import Processor
from relax_hpc.recipe.schema import Recipe
from relax_hpc.records import Failure, Group, PartialRollout, Prompt, failed_group
from relax_hpc.rewards import RewardRunner
from relax_hpc.roles.common import gpus
from relax_hpc.roles.rollout.agents import Agents
from relax_hpc.roles.rollout.episodes import Asked, Episodes, RolloutAborted, RolloutSetup
from relax_hpc.roles.rollout.observations import Observations
from relax_hpc.spool.request import Request, request_seed


class RolloutRunner:
    """An engine, still without weights, with everything else that an episode needs."""

    def __init__(self, recipe: Recipe, model_dir: Path) -> None:
        recipe = with_tools(recipe)
        torch.set_num_threads(recipe.rollout.threads)
        gpus.computes_on_gpu(recipe.rollout.device, "rollout")
        tokenizer = AutoTokenizer.from_pretrained(model_dir)
        self.engine = make_engine(recipe, model_dir)
        self.sources = PromptSources.of(recipe, tokenizer, self.engine.context, model_dir)
        ahead = recipe.rollout.data_workers if self.sources.show else 0
        self.loader = PromptLoader(self.sources, ahead, recipe.rollout.groups_per_request)
        environments, rewards = Environments(recipe), RewardRunner(recipe)
        config = AutoConfig.from_pretrained(model_dir, local_files_only=True)
        placeholders = frozenset(family_of(config).placeholders(config).values())
        observations = Observations(tokenizer, Processor(model_dir, recipe.media), recipe)
        r, asked = recipe.rollout, recipe.evaluation
        lockstep = recipe.in_lockstep or not isinstance(self.engine, Streams)
        if lockstep and not recipe.in_lockstep:
            logging.getLogger("episodes").warning("the engine has no `stream`: episodes take their turns in lockstep")
        self._setup = RolloutSetup(
            self.engine, tokenizer, environments, rewards, r.max_turns, observations, placeholders, lockstep, r.max_episode_tokens,
            r.on_failed_sample,
        )  # fmt: skip
        self._agents = Agents(self._setup, recipe) if any(source.agent for source in recipe.sources) else None
        self._training = Sampling(r.temperature, r.top_p, r.top_k, r.max_new_tokens, tuple(r.stop))
        self._unusable: dict[int, Failure] = {}
        """Prompts of the request at hand, by their place in it, that have media which cannot be used."""
        self._evaluation = dataclasses.replace(self._training, temperature=asked.temperature if asked else 0.0)

    def prompts(self, request: Request, progress: Callable[[str], None] = lambda state: None) -> list[Prompt]:
        """Return the request's prompts, tokenized, their media decoded. One whose media cannot be used has its reason kept, and
        fails in `groups`."""
        self._unusable, found = {}, list[Prompt]()
        for prompt in self.loader.take(request.prompts):
            if isinstance(prompt, Unusable):
                logging.getLogger("episodes").warning("%s", prompt.failure.detail)
                self._unusable[len(found)] = prompt.failure
                found.append(prompt.prompt)
            else:
                found.append(prompt)
            progress("reading prompts")
        return found

    def groups(
        self,
        request: Request,
        prompts: list[Prompt],
        progress: Callable[[str], None],
        aborts: int = 0,
        partial: PartialRollout | None = None,
    ) -> list[Group]:
        """Generate the groups of a request; an evaluation has a temperature of its own. Raises EngineError, and
        RunError for faults that a person must mend.

        aborts: how often the request was given back partly generated; partial: the partial rollout from then. Raises
        RolloutAborted as Episodes.generate does.
        """
        # The rest of an answer must not be drawn from the same random numbers as its beginning.
        seed = request_seed(request.seed, f"part {aborts}") if aborts else request.seed
        sampling = self._evaluation if request.evaluates else self._training
        asked = Asked(prompts, request.samples_per_prompt, seed, sampling, self._unusable)
        try:
            if self._agents is not None:
                return self._agents.groups(asked, progress)
            return Episodes(self._setup, asked, progress).generate(partial)
        except (EngineError, RunError, RolloutAborted):
            raise
        except Exception as error:
            # A prompt that cannot be generated must not cost the run: its groups are kept, with the reason.
            logging.getLogger("episodes").exception("request %s failed", request.id)
            failure = Failure(f"the request raised {type(error).__name__}", str(error))
            return [failed_group(p, request.samples_per_prompt, self.engine.version, failure) for p in prompts]

    def warm_up(self, progress: Callable[[], None]) -> None:
        """Start the processes that score, before a request waits for them."""
        self._setup.rewards.warm_up(progress)

    @property
    def scored_s(self) -> float:
        """Seconds that scoring took so far."""
        return self._setup.rewards.seconds

    def close(self) -> None:
        """End the engine and the processes of rewards and environments."""
        self.loader.close()
        if self._agents is not None:
            self._agents.close()
        self._setup.rewards.close()
        self._setup.environments.close()
        self.engine.close()
