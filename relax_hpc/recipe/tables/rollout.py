"""[rollout] and [rollout.sglang]: the engine, its servers, the workers, and how they sample."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import PositiveFloat, PositiveInt, model_validator

from relax_hpc.recipe.tables.table import Key, Table, conflict, even_share

OURS = ("api-key", "host", "load-format", "model-path", "port")
"""Server arguments that the engine itself sets, since it depends on them."""
OURS_OF_SEVERAL = (
    "base-gpu-id", "data-parallel-size", "dp", "dp-size", "gpu-id-step", "pipeline-parallel-size", "pp-size", "tensor-parallel-size",
    "tp", "tp-size",
)  # fmt: skip
"""Server arguments that the engine also sets where there are several servers: they decide which GPUs are each one's."""
OURS_OF_ROUTER = ("api-key", "host", "port", "prometheus-host", "prometheus-port", "worker-urls")
"""Router arguments that the engine itself sets."""


class Sglang(Table):
    """SGLang's server, for `rollout.engine = "sglang"`: each worker has one of its own, or several, on the GPUs that it sees."""

    servers: PositiveInt = Key(
        1,
        "Servers of one worker, each on GPUs of its own, behind one address: sglang-router gives each request to one of them.",
        resume=True,
    )

    tensor_parallel: PositiveInt = Key(1, "GPUs that share one copy of the weights.", resume=True)
    data_parallel: PositiveInt = Key(
        1, "Copies of the weights behind one server, each on GPUs of its own.", resume=True
    )
    expert_parallel: PositiveInt = Key(
        1, "GPUs that share the experts of each layer; must divide tensor_parallel.", resume=True
    )
    mem_fraction: float | None = Key(
        None,
        "Share of a GPU's memory for weights and key/value cache; absent: SGLang chooses.",
        gt=0,
        lt=1,
        resume=True,
    )
    max_running: PositiveInt | None = Key(
        None, "Sequences that are generated at once; absent: SGLang chooses.", resume=True
    )
    address: str | None = Key(
        None,
        "Address of a server that runs already, such as http://node7:30000, for a run with one worker; its API key is taken from "
        "$RELAX_HPC_SGLANG_KEY. It must serve this model, and nobody else.",
        pattern="^https?://[^/]+/?$",
        resume=True,
    )
    folder: Path | None = Key(
        None,
        "With `address`: a folder that this worker and the server see, for new weights; absent: they are broadcast to the server, "
        "by gloo from the address by which the worker reaches it.",
        resume=True,
    )
    args: dict[str, Any] = Key(
        {},
        'Further arguments of the server itself, such as {attention-backend = "triton"}; they replace the values of the other keys.',
        resume=True,
    )
    router: dict[str, Any] = Key(
        {},
        'With `servers` above 1: arguments of sglang-router, such as {policy = "round_robin"}; they replace ours.',
        resume=True,
    )

    @property
    def devices(self) -> int:
        """GPUs of one worker."""
        return self.tensor_parallel * self.copies

    @property
    def copies(self) -> int:
        """Copies of the weights in one worker's servers."""
        return self.data_parallel * self.servers

    @model_validator(mode="after")
    def _fits(self) -> Sglang:
        if self.tensor_parallel % self.expert_parallel:
            raise conflict(
                f"rollout.sglang.expert_parallel = {self.expert_parallel} must divide tensor_parallel = "
                f"{self.tensor_parallel}: experts are shared among the GPUs of one copy"
            )
        if self.folder is not None and self.address is None:
            raise conflict(
                f"rollout.sglang.folder = '{self.folder}' is for a server that is there already: set rollout.sglang.address, or leave "
                "it out"
            )
        if self.address and self.servers > 1:
            raise conflict(
                f"rollout.sglang.address names one server that is there already, but rollout.sglang.servers = {self.servers}: use 1"
            )
        if self.router and self.servers == 1:
            raise conflict(
                f"rollout.sglang.router = {self.router} is for several servers behind one address, but rollout.sglang.servers = 1"
            )
        of_server = OURS + OURS_OF_SEVERAL if self.servers > 1 else OURS
        for key, given, ours in (("args", self.args, of_server), ("router", self.router, OURS_OF_ROUTER)):
            taken = sorted(name for name in given if name.replace("_", "-") in ours)
            if taken:
                raise conflict(f"rollout.sglang.{key} may not have {taken}: the engine gives {list(ours)} itself")
        return self


LEAST_PROCESSES = 2
"""Least number of processes for rewards, and for environments: one that hangs must not hold up all others."""


class Rollout(Table):
    """The rollout role: its workers, and how they generate."""

    engine: Literal["torch", "sglang"] = Key(
        "torch",
        "`torch`: batched generation with transformers in the worker's process. `sglang`: SGLang's server, each worker's own.",
    )
    sglang: Sglang = Sglang()
    workers: PositiveInt = Key(
        1, "Worker processes, over all nodes; each generates one request at a time.", resume=True
    )
    nodes: PositiveInt = Key(1, "Nodes that share the workers evenly (on a cluster).", resume=True)
    threads: PositiveInt = Key(1, "CPU threads of each worker.", resume=True)
    data_workers: int = Key(
        1,
        "Processes with which each worker decodes and processes the images, video and sound of its next request while it generates one; "
        "0: when it begins a request.",
        ge=0,
        resume=True,
    )
    device: Literal["auto", "cpu", "cuda"] = Key("auto", "Device of the engine; `auto` takes a GPU where there is one.")
    groups_per_request: PositiveInt = Key(
        8, "Groups in one rollout request, generated as one batch; must divide trainer.prompts_per_step."
    )
    temperature: PositiveFloat = Key(1.0, "Sampling temperature; logprobs are of the tempered distribution.")
    top_p: float = Key(1.0, "Nucleus: smallest set of tokens with this probability.", gt=0, le=1)
    top_k: int = Key(0, "Sample among the k likeliest tokens; 0 is all.", ge=0)
    max_new_tokens: PositiveInt = Key(256, "The most tokens that are generated in a turn.")
    max_turns: PositiveInt = Key(1, "Turns an environment may take.")
    max_episode_tokens: PositiveInt | None = Key(
        None,
        "Tokens of a sample, observations included, after which its model has no further turn; absent: as many as its context has.",
    )
    long_observation: Literal["end", "cut"] = Key(
        "end",
        "Treatment of an observation that leaves no room for another answer: it `end`s the sample as one of full length, or its longest text is "
        "`cut` to what fits.",
    )
    rewritten_history: Literal["refuse", "keep"] = Key(
        "refuse",
        "Treatment of chat messages behind which the chat template shows the model's words otherwise than they were said (some leave out old "
        "thinking): the sample fails, or the words are kept as the model saw them.",
    )
    lockstep: Literal["auto"] | bool = Key(
        "auto",
        "`true`: all episodes of a request take their turns together, as one batch, which gives the same bits again. `false`: each goes on as soon "
        "as its own turn or its environment's answer is there. `auto`: together where async.max_staleness = 0 or max_turns = 1.",
    )
    on_failed_sample: Literal["sample", "group"] = Key(
        "sample",
        "What is left out where an environment raises, hangs, dies or answers nonsense: the `sample`, and its group where fewer than two are left; "
        "or its `group`. A reset that fails fails the group.",
        resume=True,
    )
    stop: list[str] = Key([], "Strings that end an answer, besides the end-of-sequence token.")
    routed_experts: bool = Key(
        False,
        "Record the experts that each token was routed to (mixture-of-experts models, engine `sglang`): a column of the shard, "
        "by which the trainer `megatron` routes again (rollout routing replay); the trainer `torch` does not read it.",
    )
    logprob_diff_warning: float = Key(
        0.01,
        "Mean distance in nats between the engine's and the trainer's logprob of a token that this step's own weights made, above which the "
        "run warns: both should compute the same.",
        ge=0,
        resume=True,
    )
    reward_time_limit_s: PositiveFloat = Key(
        30.0, "A reward that takes longer is stopped and its group kept as failed.", resume=True
    )
    code_processes: PositiveInt | None = Key(
        None,
        "Processes in which a worker's rewards run side by side (except quick built-in ones), and as many for its environments of your own; "
        "by default rollout.threads, at least 2.",
        resume=True,
    )
    step_time_limit_s: PositiveFloat = Key(
        60.0,
        "An environment of your own that takes longer for one reset, step or close is killed, and its group kept as failed.",
        resume=True,
    )
    max_failed_fraction: float = Key(
        0.5,
        "The run stops when more than this share of a step's groups failed (reward or environment raised or timed out, request poisoned).",
        ge=0,
        le=1,
        resume=True,
    )
    max_attempts: PositiveInt = Key(
        8, "Workers that may die on one request before its groups are kept as failed.", resume=True
    )

    @property
    def processes(self) -> int:
        """Processes of a worker for its rewards, and as many for its environments."""
        return self.code_processes or max(LEAST_PROCESSES, self.threads)

    @property
    def devices_each(self) -> int:
        """Devices of one worker: the GPUs of its server, or the one that it computes on itself."""
        return self.sglang.devices if self.engine == "sglang" else 1

    @model_validator(mode="after")
    def _spreads(self) -> Rollout:
        even_share("rollout.workers", self.workers, "rollout.nodes", self.nodes)
        if self.engine != "sglang" and self.sglang != Sglang():
            raise conflict(f"[rollout.sglang] is for rollout.engine = 'sglang', but the engine is '{self.engine}'")
        if self.engine != "sglang" and self.routed_experts:
            raise conflict(
                f"rollout.routed_experts = true is for rollout.engine = 'sglang'; the engine '{self.engine}' does not tell them"
            )
        if self.routed_experts and self.sglang.servers > 1:
            raise conflict(
                f"rollout.routed_experts = true, but rollout.sglang.servers = {self.sglang.servers}: sglang-router does not pass on "
                "which experts a token was routed to; use rollout.sglang.servers = 1 and more rollout.workers"
            )
        if self.sglang.address and self.workers > 1:
            raise conflict(
                f"rollout.sglang.address names one server, which holds one version at a time, but rollout.workers = "
                f"{self.workers}: use 1"
            )
        return self
