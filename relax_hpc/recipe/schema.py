"""The recipe: one TOML file that says all of a run, as strict pydantic models.

Every key has a sentence (docs/reference/recipe/ is made of them), a default where one is sane, and says whether a resumed run may
change it (`resume=True`). Keys that must fit together are checked here, before anything starts.
"""

from __future__ import annotations

import math
from pathlib import Path

from pydantic import ConfigDict, Field, model_validator

from relax_hpc.recipe.tables.algorithm import AnyAlgorithm, Gdpo, Grpo, OwnAlgorithm, Ppo, Rloo, Sft
from relax_hpc.recipe.tables.algorithm_keys import DUAL_CLIP, Clipped, PolicyGradient, Ratio
from relax_hpc.recipe.tables.evaluation import Evaluation, SftWarmStart
from relax_hpc.recipe.tables.model import AnyModel, TinyModel
from relax_hpc.recipe.tables.rollout import Rollout
from relax_hpc.recipe.tables.run import Run, Spool, Supervision
from relax_hpc.recipe.tables.scoring import CriticRole, Scorer, refuse_critic, refuse_scorer
from relax_hpc.recipe.tables.slurm import Slurm
from relax_hpc.recipe.tables.source import AnyPrompts, AnySource, Curriculum, Media
from relax_hpc.recipe.tables.staleness import Async
from relax_hpc.recipe.tables.table import Key, Table, conflict
from relax_hpc.recipe.tables.tracking import AnyTracking, Notify
from relax_hpc.recipe.tables.trainer import Lora, Trainer, misfit
from relax_hpc.recipe.tables.weights import AnyWeights, CollectiveWeights, FileWeights

CRITIC_KEY, TEACHER_KEY = "algorithm.critic.model", "algorithm.teacher"


class Recipe(Table):
    """All tables of a run."""

    model_config = ConfigDict(populate_by_name=True)

    run: Run = Run()
    model: AnyModel
    sft_warm_start: SftWarmStart | None = None
    algorithm: AnyAlgorithm = Grpo()
    async_: Async = Field(Async(), alias="async")
    trainer: Trainer = Trainer()
    rollout: Rollout = Rollout()
    scorer: Scorer | None = None
    critic: CriticRole | None = None
    weights: AnyWeights = FileWeights()
    source: list[AnySource] = Key(help="Where prompts come from: one table or more.", min_length=1)
    media: Media = Media()
    curriculum: Curriculum | None = Key(None, "How the sources' weights follow their pass rates.")
    evaluation: Evaluation | None = None
    spool: Spool = Spool()
    supervision: Supervision = Supervision()
    tracking: list[AnyTracking] = Key([], "Tools that metrics are copied to: any number of tables.", resume=True)
    notify: Notify | None = Key(None, "Messages about what happens to the run.", resume=True)
    slurm: Slurm | None = Key(None, "How the run is submitted to a Slurm cluster.", resume=True)

    @property
    def sources(self) -> list[AnyPrompts]:
        """All sources by their number: those of training, then those of evaluation."""
        return [*self.source, *(self.evaluation.source if self.evaluation else ())]

    @property
    def supervised(self) -> bool:
        """True where the sources' own answers are trained on, not the policy's."""
        return isinstance(self.algorithm, Sft)

    @property
    def generates(self) -> bool:
        """True where there is anything for rollout workers to generate."""
        return not self.supervised or self.evaluation is not None

    @property
    def in_lockstep(self) -> bool:
        """True where all episodes of a request take their turns together."""
        asked = self.rollout.lockstep
        return (self.async_.max_staleness == 0 or self.rollout.max_turns == 1) if asked == "auto" else asked

    @property
    def requests_per_step(self) -> int:
        """Requests that one training step consumes."""
        return 0 if self.supervised else self.trainer.prompts_per_step // self.rollout.groups_per_request

    @property
    def most_requests_per_step(self) -> int:
        """The most requests that a training step may release: those that it consumes, and further ones of dynamic
        sampling."""
        n, ahead, sampling = self.requests_per_step, self.async_.max_staleness + 1, self.algorithm.dynamic_sampling
        return n * (1 + sampling.max_extra_batches) + math.ceil((sampling.oversample - 1) * n * ahead)

    @property
    def scored(self) -> tuple[str, ...]:
        """Names of the columns that the scorer makes, in place of the trainer."""
        return tuple(sorted(self.scorer.scores)) if self.scorer else ()

    def holds_reference(self, needs: frozenset[str]) -> bool:
        """Return True if the trainer holds the reference: the algorithm needs it, and no scorer has it.

        needs: `algorithm.needs`, or those of the algorithm that was made, where it may be a user's own.
        """
        return "reference" in needs and "reference" not in self.scored

    @property
    def scores_together(self) -> bool:
        """True where the scorer's processes are one group; else each works on its own."""
        return self.scorer is not None and self.trainer.backend == "megatron"

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns that other roles make, each a file beside a request's shard: the scorer's columns and
        the critic's values."""
        return (*self.scored, "values") if self.critic else self.scored

    @property
    def trains_critic(self) -> bool:
        """True where the trainer's processes hold the critic and train it."""
        return isinstance(self.algorithm, Ppo) and self.critic is None

    @property
    def models_beside(self) -> dict[str, Path]:
        """Model directories that are needed beside the policy's, by the keys that name them."""
        critic = self.algorithm.critic.model if isinstance(self.algorithm, Ppo) else None
        teacher = self.algorithm.teacher if isinstance(self.algorithm, (PolicyGradient, OwnAlgorithm)) else None
        return {key: path for key, path in ((CRITIC_KEY, critic), (TEACHER_KEY, teacher)) if path}

    @property
    def models_held(self) -> dict[str, Path]:
        """Model directories beside the policy's that the trainer's processes hold, by the keys that name them."""
        elsewhere = {TEACHER_KEY: "teacher" in self.scored, CRITIC_KEY: self.critic is not None}
        return {key: path for key, path in self.models_beside.items() if not elsewhere[key]}

    @model_validator(mode="after")
    def _fits(self) -> Recipe:
        self._batches_fit()
        self._algorithm_fits()
        self._trainer_fits()
        self._sources_fit()
        self._agents_fit()
        self._roles_fit()
        names = [tracking.name for tracking in self.tracking]
        if len(set(names)) < len(names):
            raise conflict(
                f"[[tracking]] names one tool twice: {names}; each takes all metrics, so one table a tool is enough"
            )
        if self.slurm and self.trainer.device != "cpu":
            self.slurm.refuse_too_few_gpus(self.trainer.processes // self.trainer.nodes)
        return self

    @model_validator(mode="after")
    def _filled_in(self) -> Recipe:
        """Fill in defaults that depend on other tables."""
        if not isinstance(self.algorithm, Clipped) or self.algorithm.dual_clip is not None:
            return self
        bound = DUAL_CLIP if self.async_.max_staleness else 0.0
        return self.model_copy(update={"algorithm": self.algorithm.model_copy(update={"dual_clip": bound})})

    @property
    def warnings(self) -> list[str]:
        """Warnings for the person who starts a run: combinations that are probably meant otherwise."""
        found, algorithm = [], self.algorithm
        decoupled = (
            isinstance(algorithm, Ratio) and algorithm.old_logprobs == "recomputed" and algorithm.correction is None
        )
        own = self.trainer.updates_per_step == 1 and "recomputed" not in self.scored
        if decoupled and own and self.async_.max_staleness:
            found.append(
                "algorithm.old_logprobs = 'recomputed' with trainer.updates_per_step = 1 and no correction: every importance ratio is 1 by "
                f"construction, so nothing accounts for tokens that are up to async.max_staleness = {self.async_.max_staleness} versions "
                "old; add algorithm.correction = { name = \"tis\" }, or set old_logprobs = 'engine'"
            )
        cut = {"top_p": self.rollout.top_p < 1, "top_k": self.rollout.top_k > 0}
        for key in (key for key, on in cut.items() if on and not self.supervised):
            found.append(
                f"rollout.{key} = {getattr(self.rollout, key)}: tokens are drawn from the truncated distribution, but logprobs, in shards as in "
                "training, are those of the whole one, so that importance ratios, KL and entropy are not of the policy that sampled; leave "
                f"{key} out"
            )
        return found

    def _batches_fit(self) -> None:
        groups, prompts = self.rollout.groups_per_request, self.trainer.prompts_per_step
        if prompts % groups and not self.supervised:
            divisors = [d for d in range(1, prompts + 1) if prompts % d == 0]
            raise conflict(
                f"rollout.groups_per_request = {groups} must divide trainer.prompts_per_step = {prompts}: use one of {divisors}"
            )
        if isinstance(self.model, TinyModel) and self.generates and self.rollout.max_new_tokens >= self.model.context:
            raise conflict(
                f"rollout.max_new_tokens = {self.rollout.max_new_tokens} leaves no room for a prompt in "
                f"model.context = {self.model.context}: lower the one or raise the other"
            )
        updates = self.trainer.updates_per_step
        if updates > prompts:
            raise conflict(
                f"trainer.updates_per_step = {updates} share the groups of trainer.prompts_per_step = {prompts}: use at most that"
            )

    def _algorithm_fits(self) -> None:
        updates = self.trainer.updates_per_step
        if isinstance(self.algorithm, Rloo) and (self.async_.max_staleness or updates > 1):
            raise conflict(
                f"algorithm.name = 'rloo' is on-policy only, but async.max_staleness = {self.async_.max_staleness} and "
                f"trainer.updates_per_step = {updates}: set them to 0 and 1, or use an algorithm with a ratio, such as 'grpo'"
            )
        if self.algorithm.sample_reuse and not self.async_.max_staleness:
            raise conflict(
                f"algorithm.sample_reuse = {self.algorithm.sample_reuse} trains on groups of the steps before, all of which are out of the bound "
                "where async.max_staleness = 0: raise that, or leave sample_reuse out"
            )
        if isinstance(self.algorithm, Ppo) and self.algorithm.critic.warmup_steps >= self.run.steps:
            raise conflict(
                f"algorithm.critic.warmup_steps = {self.algorithm.critic.warmup_steps} leaves the policy none of run.steps = "
                f"{self.run.steps}: lower the one or raise the other"
            )

        if isinstance(self.algorithm, Gdpo):
            self._parts_fit(self.algorithm)

    def _parts_fit(self, algorithm: Gdpo) -> None:
        """Raise a conflict for a part that no source has, where all say theirs."""
        known = {part.name or part.reward for source in self.source for part in source.rewards}
        for name in algorithm.parts:
            own = "." in name or any(
                not source.rewards or source.environment != "single_turn" for source in self.source
            )
            if name not in known and not own:
                raise conflict(
                    f"algorithm.parts has '{name}', but the `rewards` of the sources have {sorted(known)}: name one of those, or give a source "
                    "such a part"
                )

    def _trainer_fits(self) -> None:
        if self.run.async_checkpoints and self.trainer.backend == "torch":
            raise conflict(
                'run.async_checkpoints = true is for trainer.backend = "megatron": set that, or leave it out'
            )
        if wrong := misfit(self.trainer.parallel, self.trainer.processes, getattr(self.model, "sizes", None)):
            raise conflict(wrong)
        if self.trainer.lora:
            self._adapter_fits(self.trainer.lora)

    def _adapter_fits(self, lora: Lora) -> None:
        if every := getattr(self.algorithm, "reference_refresh_steps", None):
            raise conflict(
                f"algorithm.reference_refresh_steps = {every}, but with [trainer.lora] the reference is the base, which stays as it is: "
                "leave one of them out"
            )
        if lora.sync == "merge":
            return
        whole = 'which takes whole models: set trainer.lora.sync = "merge"'
        taker = f"rollout.engine = '{self.rollout.engine}'"
        sglang = self.rollout.sglang
        if sglang.address or sglang.data_parallel > 1:
            taker += f" with rollout.sglang.{'address' if sglang.address else 'data_parallel'}"
        elif self.rollout.engine in ("torch", "sglang"):
            taker = ""
        if taker and self.generates:
            raise conflict(f"trainer.lora.sync = 'adapter' sends an adapter to {taker}, {whole}")
        if "recomputed" in self.scored:
            raise conflict(
                f"trainer.lora.sync = 'adapter' sends an adapter to the [scorer] that scores 'recomputed', {whole}"
            )

    def _sources_fit(self) -> None:
        parallel, sizes = self.trainer.parallel, getattr(self.model, "sizes", None)
        if self.scorer is not None:
            refuse_scorer(self.scorer, self.algorithm, self.trainer.backend, parallel, sizes)
        if self.critic is not None:
            refuse_critic(self.critic, self.algorithm, self.scored, parallel, sizes)
        if self.sft_warm_start and self.supervised:
            raise conflict(
                "[sft_warm_start] learns the sources' answers before training, which algorithm.name = 'sft' is itself: leave the table "
                "out (trainer.lr_warmup_steps is how the learning rate rises)"
            )
        if self.curriculum and self.supervised:
            raise conflict(
                "[curriculum] follows what is solved, and algorithm.name = 'sft' generates nothing: remove the table, or give the "
                "sources weights"
            )
        if self.curriculum and len(self.source) == 1:
            raise conflict(
                "[curriculum] shifts prompts between sources, but there is one [[source]]: split it by difficulty into "
                "several, or remove the table"
            )

    def _agents_fit(self) -> None:
        played = [source.agent is not None for source in self.sources]
        if any(played) and not all(played):
            number = played.index(False)
            raise conflict(
                f"source {number} has no `agent`, but others do: give one to all sources, those of evaluation too, or to none"
            )
        if any(played) and self.async_.partial:
            raise conflict(
                "[async.partial] gives requests back partly generated, but a running `agent` cannot go to another worker: leave the table out"
            )

    def _roles_fit(self) -> None:
        partial, lora = self.async_.partial, self.trainer.lora
        keeps, instead = "", ""
        if self.rollout.engine == "torch":
            keeps, instead = "rollout.engine = 'torch'", "rollout.engine = 'sglang'"
        elif lora and lora.sync == "adapter":
            keeps, instead = "trainer.lora.sync = 'adapter'", "trainer.lora.sync = 'merge'"
        if self.async_.on_stale == "mask" and keeps and not (partial and partial.abort_at_publish):
            raise conflict(
                f"async.on_stale = 'mask' swaps weights in mid-generation, which {keeps} cannot: "
                f"use {instead}, or give back partial rollouts (an [async.partial] table with "
                "abort_at_publish = true), or async.on_stale = 'wait' or 'drop'"
            )
        single = self.slurm is not None and self.slurm.shape == "single" and self.generates
        if single and self.trainer.nodes != self.rollout.nodes:
            raise conflict(
                f"slurm.shape = 'single' puts both groups on the same nodes, but trainer.nodes = {self.trainer.nodes} "
                f"and rollout.nodes = {self.rollout.nodes}: make them equal, or use slurm.shape = 'split'"
            )
        if isinstance(self.weights, CollectiveWeights) and self.weights.backend == "nccl":
            for key, device in (("trainer.device", self.trainer.device), ("rollout.device", self.rollout.device)):
                if device == "cpu":
                    raise conflict(
                        f"weights.backend = 'nccl' goes from GPU to GPU, but {key} = 'cpu': use weights.backend = 'gloo'"
                    )
        if self.run.placement == "colocate":
            self._colocates()

    def _colocates(self) -> None:
        """Raise a conflict where trainer and workers cannot take turns on the same devices."""
        said = "run.placement = 'colocate' has trainer and workers take turns on the same devices"
        if self.async_.max_staleness:
            raise conflict(
                f"{said}: neither runs ahead of the other, but async.max_staleness = {self.async_.max_staleness}; set it to 0, or "
                "run.placement to 'split'"
            )
        if not isinstance(self.weights, FileWeights):
            raise conflict(
                f"{said}: who sends weights and who receives them are not there at the same time, but weights.transport = "
                f"'{self.weights.transport}'; use 'file' (weights.node_cache = '/dev/shm' keeps them in memory)"
            )
        if self.rollout.sglang.address:
            raise conflict(
                f"{said}, but rollout.sglang.address = '{self.rollout.sglang.address}' is elsewhere: leave it out, or use 'split'"
            )
        if self.slurm and (self.slurm.shape != "single" or self.slurm.own_gpus):
            own = f"slurm.shape = '{self.slurm.shape}'" if self.slurm.shape != "single" else self.slurm.own_gpus
            raise conflict(
                f"{said}, but {own} gives each its own: use slurm.shape = 'single' and a GPU key in [slurm] alone, such as "
                "slurm.gpus_per_node"
            )
