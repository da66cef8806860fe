"""[rollout.sglang]: SGLang's servers, as a recipe describes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import PositiveInt, model_validator

from relax_hpc.recipe.tables.table import Key, Table, conflict

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
