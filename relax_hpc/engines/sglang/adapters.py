"""Versions of an adapter on SGLang's server: each has a name that no other one had, and the base stays as it is.

base ──as any version, once──► server        version ──files in memory, PEFT's config──► /load_lora_adapter ► requests name it
the version before ──once no request is under way──► /unload_lora_adapter
"""

from __future__ import annotations

import itertools
from pathlib import Path

from transformers import PreTrainedModel

from relax_hpc.engines.base import Weights
from relax_hpc.engines.model_folder import check_whole
from relax_hpc.engines.sglang.client import Client
from relax_hpc.engines.sglang.weights_files import WeightsFiles
from relax_hpc.files.publish import to_json
from relax_hpc.files.tensor_files import shapes
from relax_hpc.huggingface.lora import CONFIG_FILE, adapt, adapter_of, peft_config
from relax_hpc.recipe.tables.trainer import Lora

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The linear layers of the language models that SGLang knows adapters of, as their files name them."""


class Adapters:
    """The versions that a server has; requests are for the newest."""

    def __init__(self, model: PreTrainedModel, lora: Lora, model_dir: Path) -> None:
        """model: one on the meta device, which is given an adapter."""
        adapt(model, lora)
        self._expected = shapes(adapter_of(model).items())
        self._config = to_json(peft_config(model, lora, model_dir))
        self._count = itertools.count()
        self.name, self.version = "", -1

    def load(self, client: Client, version: int, tensors: Weights) -> None:
        """Make a version the newest, and take the one before from the server; no request is under way. Raises ValueError
        for names or shapes that differ, EngineError."""
        given = dict(tensors)
        check_whole(f"version {version}", shapes(given.items()), self._expected, set())
        # A name that was unloaded would be loaded again, silently, where a request asks for it: none is used twice.
        name, before = f"v{version}.{next(self._count)}", self.name
        with WeightsFiles() as served:
            served.write(given.items(), leave_out=set())
            (served.folder / CONFIG_FILE).write_bytes(self._config)
            client.load_adapter(name, str(served.folder))
        self.name, self.version = name, version
        if before:
            client.unload_adapter(before)

    def forget(self) -> None:
        """The server has none any more: it was started again."""
        self.name, self.version = "", -1


def server_arguments(lora: Lora, on_gpu: bool) -> dict[str, object]:
    """SGLang's arguments for adapters of this kind."""
    names = sorted({target.rpartition(".")[2] for target in lora.targets}) or list(LINEAR)
    arguments: dict[str, object] = {
        "enable-lora": True, "max-lora-rank": lora.rank, "lora-target-modules": names, "max-loras-per-batch": 2,
    }  # fmt: skip
    return arguments if on_gpu else {**arguments, "lora-backend": "torch_native"}
