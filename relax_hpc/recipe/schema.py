"""The recipe: one TOML file that says all of a run, as strict pydantic models.

Every key has a sentence (it becomes docs/recipes.md), a default where one is sane, and says whether a resumed run may
change it (`resume=True`). What fits together is checked here, before anything starts.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

from pydantic import ConfigDict, Field, PositiveFloat, PositiveInt, model_validator

from relax_hpc.recipe.algorithm import DUAL_CLIP, AnyAlgorithm, Clipped, Grpo, PolicyGradient, Ppo, Ratio, Rloo, Sft
from relax_hpc.recipe.critic import CriticRole, refuse_critic
from relax_hpc.recipe.model import AnyModel, TinyModel
from relax_hpc.recipe.parallel import misfit
from relax_hpc.recipe.rollout import Rollout
from relax_hpc.recipe.scorer import Scorer, refuse_scorer
from relax_hpc.recipe.slurm import Slurm
from relax_hpc.recipe.source import AnyEvaluationSource, AnyPrompts, AnySource, Curriculum
from relax_hpc.recipe.staleness import Async
from relax_hpc.recipe.table import Key, Table, conflict
from relax_hpc.recipe.tracking import AnyTracking, Notify
from relax_hpc.recipe.trainer import Trainer
from relax_hpc.recipe.weights import AnyWeights, CollectiveWeights, FileWeights

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
CRITIC_KEY, TEACHER_KEY = "algorithm.critic.model", "algorithm.teacher"


class Run(Table):
    """What the run is called, where it lives, how long it lasts."""

    name: str = Key("run", "The run's name: its directory is ROOT/NAME.", pattern=NAME_PATTERN)
    root: Path = Key("runs", "The directory that holds runs; on a cluster, on the shared file system.")
    seed: int = Key(0, "Order ids, prompts and sampling seeds depend on this and the prompt cursor alone.", ge=0)
    steps: PositiveInt = Key(100, "Training steps until the run is done.", resume=True)
    checkpoint_every: PositiveInt = Key(50, "Steps between two checkpoints.", resume=True)
    async_checkpoints: bool = Key(
        False, "Train on while a checkpoint is being written; for the megatron backend.", resume=True
    )
    keep_checkpoints: PositiveInt = Key(
        2, "Checkpoints kept; the oldest one decides how far back a run can restart.", resume=True
    )
    placement: Literal["split", "colocate"] = Key(
        "split",
        "`split`: the rollout workers have devices of their own; reference, critic and teacher share the trainer's (what others call "
        "hybrid). `colocate`: trainer and workers take turns on the same devices; needs async.max_staleness = 0.",
        resume=True,
    )
    group_access: Literal["none", "read"] = Key(
        "none",
        "Who besides you may look into the run's directory, whatever your umask is: `none`, or your group may `read` it. Nobody else "
        "may ever write there: who can write a run's directory runs code in your name.",
        resume=True,
    )


class Warmup(Table):
    """A short supervised phase on the sources' own answers before step 0, for models that know nothing yet."""

    steps: PositiveInt = Key(400, "Supervised steps at most.")
    batch_size: PositiveInt = Key(128, "Examples a step, over all trainer processes.")
    learning_rate: PositiveFloat = Key(1e-3, "Peak learning rate; it rises linearly over the first 50 steps.")
    stop_at_loss: float = Key(
        0.0, "End when the loss a token (nats, smoothed over about 10 steps) is this low; 0 makes all steps.", ge=0
    )


class Evaluation(Table):
    """Scores on prompts that are never trained on, played by the rollout workers between orders."""

    every: PositiveInt = Key(
        50, "Steps between two evaluations; the first and the last version are always scored.", resume=True
    )
    prompts: PositiveInt = Key(256, "Prompts of the held-out share that are played, over all training sources.")
    holdout: float = Key(
        0.1,
        "Share of each training source's distinct prompts that neither warm-up nor training ever sees; 0 evaluates "
        "[[evaluation.source]] alone.",
        ge=0,
        lt=1,
    )
    samples: PositiveInt = Key(1, "Answers to each prompt; pass@k is told for k = 1, 2, 4, … up to this.")
    temperature: float = Key(
        0.0, "Of these answers: 0 is greedy; above it, rollout.top_p and rollout.top_k hold too.", ge=0
    )
    solved_at: float = Key(1.0, "Reward from which an answer counts as solved, for pass@k.")
    source: list[AnyEvaluationSource] = Key(
        [], "Sets of prompts that are evaluated besides; what has the same text in a training source is not trained on."
    )

    @model_validator(mode="after")
    def _says_something(self) -> Evaluation:
        if not self.holdout and not self.source:
            raise conflict(
                "evaluation.holdout = 0 leaves nothing to evaluate: raise it, or add an [[evaluation.source]] table"
            )
        if self.samples > 1 and not self.temperature:
            raise conflict(
                f"evaluation.samples = {self.samples} greedy answers would all be the same: set evaluation.temperature "
                "above 0, such as 0.6, or samples to 1"
            )
        return self


class Spool(Table):
    """Where shards live, how they are stored, how long they stay."""

    front: Path | None = Key(
        None, "A directory in memory (such as /dev/shm) that holds a second copy for readers on the same node."
    )
    compression: Literal["none", "lz4", "zstd"] = Key(
        "none", "Blosc2 over token columns; `none` stores them contiguous, to be mapped."
    )
    keep: Literal["all", "needed"] = Key(
        "all",
        "`all` keeps every shard for analysis; `needed` those that the oldest checkpoint replays (or a critic's; where room is short, the newest).",
        resume=True,
    )
    quota_gb: PositiveFloat | None = Key(
        None, "Most gigabytes of shards; reserved when an order is released.", resume=True
    )
    full_disk_wait_s: float = Key(
        300.0, "How long a role waits for room on a full disk before it stops the run.", ge=0, resume=True
    )


class Supervision(Table):
    """When a role counts as lost, and how often it is started again."""

    hang_s: PositiveFloat = Key(
        120.0, "A role without a heartbeat for this long is killed and started again.", resume=True
    )
    start_s: PositiveFloat = Key(
        600.0,
        "The same, before a role's first progress (loading, warm-up; on a cluster, a node on which srun starts nothing).",
        resume=True,
    )
    agent_silent_s: PositiveFloat = Key(
        15.0,
        "On a cluster: a rollout node that is not heard of for this long counts as lost, and others play its orders.",
        resume=True,
    )
    leader_silent_s: PositiveFloat = Key(
        60.0,
        "On a cluster: rollout nodes end the job of a leader whose lease is silent for this long, so that its successor begins.",
        resume=True,
    )
    leader_wait_s: PositiveFloat = Key(
        3600.0, "On a cluster: rollout nodes that wait this long for a leader leave.", resume=True
    )
    io_wait_s: PositiveFloat = Key(
        600.0,
        "Supervisor, agents and leaders outlive errors of the file system (input/output error, stale handle, no room, no permission) that "
        "last no longer than this: they try again every few seconds.",
        resume=True,
    )
    max_restarts: int = Key(
        10, "Restarts of one role without progress in between before the run fails.", ge=0, resume=True
    )
    backoff_s: PositiveFloat = Key(
        0.5, "Wait before a restart; doubles with each one that made no progress, to 60 s.", resume=True
    )


class Recipe(Table):
    """All of a run."""

    model_config = ConfigDict(populate_by_name=True)

    run: Run = Run()
    model: AnyModel
    warmup: Warmup | None = None
    algorithm: AnyAlgorithm = Grpo()
    async_: Async = Field(Async(), alias="async")
    trainer: Trainer = Trainer()
    rollout: Rollout = Rollout()
    scorer: Scorer | None = None
    critic: CriticRole | None = None
    weights: AnyWeights = FileWeights()
    source: list[AnySource] = Key(help="Where prompts come from: one table or more.", min_length=1)
    curriculum: Curriculum | None = Key(None, "How the sources' weights follow what is solved.")
    evaluation: Evaluation | None = None
    spool: Spool = Spool()
    supervision: Supervision = Supervision()
    tracking: list[AnyTracking] = Key([], "Tools that metrics are copied to: any number of tables.", resume=True)
    notify: Notify | None = Key(None, "Who is told what happens to the run.", resume=True)
    slurm: Slurm | None = Key(None, "How the run is sent to a Slurm cluster.", resume=True)

    @property
    def sources(self) -> list[AnyPrompts]:
        """All sources by their number: those of training, then those of evaluation."""
        return [*self.source, *(self.evaluation.source if self.evaluation else ())]

    @property
    def supervised(self) -> bool:
        """Whether the sources' own answers are learned, and none of the policy's."""
        return isinstance(self.algorithm, Sft)

    @property
    def plays(self) -> bool:
        """Whether there is anything for rollout workers to play."""
        return not self.supervised or self.evaluation is not None

    @property
    def orders_per_step(self) -> int:
        """Orders that one training step consumes."""
        return 0 if self.supervised else self.trainer.prompts_per_step // self.rollout.groups_per_order

    @property
    def most_orders_per_step(self) -> int:
        """Orders that a training step may release at most: those, and what dynamic sampling asks for besides."""
        n, ahead = self.orders_per_step, self.async_.max_staleness + 1
        return n * (1 + self.algorithm.refill) + math.ceil((self.algorithm.oversample - 1) * n * ahead)

    @property
    def scored(self) -> tuple[str, ...]:
        """What the scorer says of the tokens, and the trainer does not: names of columns."""
        return tuple(sorted(self.scorer.scores)) if self.scorer else ()

    @property
    def scores_together(self) -> bool:
        """Whether the scorer's processes are one group; else each works on its own."""
        return self.scorer is not None and self.trainer.backend == "megatron"

    @property
    def columns(self) -> tuple[str, ...]:
        """What other roles say of the tokens, each a file beside an order's shard: the scorer's columns and the critic's values."""
        return (*self.scored, "values") if self.critic else self.scored

    @property
    def trains_critic(self) -> bool:
        """Whether the trainer's processes hold the critic and train it."""
        return isinstance(self.algorithm, Ppo) and self.critic is None

    @property
    def models_beside(self) -> dict[str, Path]:
        """Model directories that are needed beside the policy's, by their keys."""
        critic = self.algorithm.critic.model if isinstance(self.algorithm, Ppo) else None
        teacher = self.algorithm.teacher if isinstance(self.algorithm, PolicyGradient) else None
        return {key: path for key, path in ((CRITIC_KEY, critic), (TEACHER_KEY, teacher)) if path}

    @property
    def models_held(self) -> dict[str, Path]:
        """Those that the trainer's processes hold."""
        elsewhere = {TEACHER_KEY: "teacher" in self.scored, CRITIC_KEY: self.critic is not None}
        return {key: path for key, path in self.models_beside.items() if not elsewhere[key]}

    @model_validator(mode="after")
    def _fits(self) -> Recipe:
        self._batches_fit()
        self._algorithm_fits()
        self._trainer_fits()
        self._sources_fit()
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
        """With the defaults that other tables decide."""
        if not isinstance(self.algorithm, Clipped) or self.algorithm.dual_clip is not None:
            return self
        bound = DUAL_CLIP if self.async_.max_staleness else 0.0
        return self.model_copy(update={"algorithm": self.algorithm.model_copy(update={"dual_clip": bound})})

    @property
    def warnings(self) -> list[str]:
        """What is likely to be meant otherwise, for whoever starts a run."""
        found, algorithm = [], self.algorithm
        decoupled = (
            isinstance(algorithm, Ratio) and algorithm.behaviour == "recomputed" and algorithm.correction is None
        )
        own = self.trainer.updates_per_step == 1 and "recomputed" not in self.scored
        if decoupled and own and self.async_.max_staleness:
            found.append(
                "algorithm.behaviour = 'recomputed' with trainer.updates_per_step = 1 and no correction: every importance ratio is 1 by "
                f"construction, so nothing accounts for tokens that are up to async.max_staleness = {self.async_.max_staleness} versions "
                "old; add algorithm.correction = { name = \"tis\" }, or set behaviour = 'engine'"
            )
        return found

    def _batches_fit(self) -> None:
        groups, prompts = self.rollout.groups_per_order, self.trainer.prompts_per_step
        if prompts % groups and not self.supervised:
            divisors = [d for d in range(1, prompts + 1) if prompts % d == 0]
            raise conflict(
                f"rollout.groups_per_order = {groups} must divide trainer.prompts_per_step = {prompts}: use one of {divisors}"
            )
        if isinstance(self.model, TinyModel) and self.plays and self.rollout.max_new_tokens >= self.model.context:
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
        if self.algorithm.replay and not self.async_.max_staleness:
            raise conflict(
                f"algorithm.replay = {self.algorithm.replay} trains on groups of the steps before, all of which are out of the bound "
                "where async.max_staleness = 0: raise that, or leave replay out"
            )
        if isinstance(self.algorithm, Ppo) and self.algorithm.critic.warmup_steps >= self.run.steps:
            raise conflict(
                f"algorithm.critic.warmup_steps = {self.algorithm.critic.warmup_steps} leaves the policy none of run.steps = "
                f"{self.run.steps}: lower the one or raise the other"
            )

    def _trainer_fits(self) -> None:
        if self.run.async_checkpoints and self.trainer.backend == "torch":
            raise conflict(
                'run.async_checkpoints = true is for trainer.backend = "megatron": set that, or leave it out'
            )
        wrong = misfit(self.trainer.parallel, self.trainer.processes, getattr(self.model, "sizes", None))
        if wrong:
            raise conflict(wrong)

    def _sources_fit(self) -> None:
        parallel, sizes = self.trainer.parallel, getattr(self.model, "sizes", None)
        if self.scorer is not None:
            refuse_scorer(self.scorer, self.algorithm, self.trainer.backend, parallel, sizes)
        if self.critic is not None:
            refuse_critic(self.critic, self.algorithm, self.scored, parallel, sizes)
        if self.warmup and self.supervised:
            raise conflict(
                "[warmup] learns the sources' answers before training, which algorithm.name = 'sft' is itself: leave the table "
                "out (trainer.lr_warmup_steps is how the learning rate rises)"
            )
        if self.curriculum and self.supervised:
            raise conflict(
                "[curriculum] follows what is solved, and algorithm.name = 'sft' plays nothing: remove the table, or give the "
                "sources weights"
            )
        if self.curriculum and len(self.source) == 1:
            raise conflict(
                "[curriculum] shifts prompts between sources, but there is one [[source]]: split it by difficulty into "
                "several, or remove the table"
            )

    def _roles_fit(self) -> None:
        partial = self.async_.partial
        if self.async_.late == "mask" and self.rollout.engine == "torch" and not (partial and partial.abort_at_publish):
            raise conflict(
                "async.late = 'mask' swaps weights in mid-generation, which rollout.engine = 'torch' cannot: "
                "use rollout.engine = 'sglang', or give back half-played orders (an [async.partial] table with "
                "abort_at_publish = true), or async.late = 'wait' or 'drop'"
            )
        single = self.slurm is not None and self.slurm.shape == "single" and self.plays
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
        """Raises a conflict where trainer and workers cannot take turns on the same devices."""
        said = "run.placement = 'colocate' has trainer and workers take turns on the same devices"
        if self.async_.max_staleness:
            raise conflict(
                f"{said}: neither runs ahead of the other, but async.max_staleness = {self.async_.max_staleness}; set it to 0, or "
                "run.placement to 'split'"
            )
        if not isinstance(self.weights, FileWeights):
            raise conflict(
                f"{said}: who sends weights and who receives them are not there at the same time, but weights.transport = "
                f"'{self.weights.transport}'; use 'file' (weights.front = '/dev/shm' keeps them in memory)"
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
