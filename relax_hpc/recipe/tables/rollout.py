"""[rollout]: the engine, the workers, and how they sample."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveFloat, PositiveInt, model_validator

from relax_hpc.recipe.tables.sglang import Sglang
from relax_hpc.recipe.tables.table import Key, Table, conflict, even_share

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
    device: Literal["auto", "cpu", "cuda"] = Key("auto", "Device of the engine; `auto` takes a GPU where there is one.")
    groups_per_request: PositiveInt = Key(
        8, "Groups in one rollout request, generated as one batch; must divide trainer.prompts_per_step."
    )
    temperature: PositiveFloat = Key(1.0, "Sampling temperature; logprobs are of the tempered distribution.")
    top_p: float = Key(1.0, "Nucleus: smallest set of tokens with this probability.", gt=0, le=1)
    top_k: int = Key(0, "Sample among the k likeliest tokens; 0 is all.", ge=0)
    max_new_tokens: PositiveInt = Key(256, "The most tokens that are generated in a turn.")
    max_turns: PositiveInt = Key(1, "Turns an environment may take.")
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
