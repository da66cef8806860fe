"""Decoding of the experts that the server says each token was routed to."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedConfig

from relax_hpc.files.errors import RunError


@dataclass(frozen=True, slots=True)
class Experts:
    """Shape and type of one model's routed experts."""

    layers: int
    k: int
    dtype: np.dtype[np.unsignedinteger[Any]]

    @classmethod
    def of(cls, config: PreTrainedConfig, model_dir: Path) -> Experts:
        """Read them from a model's config. Raises RunError for a model without experts."""
        text = config.get_text_config()
        experts = getattr(text, "num_experts", None) or getattr(text, "n_routed_experts", None)
        if not experts:
            raise RunError(
                f"rollout.routed_experts = true, but '{model_dir}' is a {text.model_type} without experts: leave it out"
            )
        return cls(text.num_hidden_layers, text.num_experts_per_tok, np.min_scalar_type(experts - 1))

    def decode(self, text: str) -> NDArray[np.unsignedinteger[Any]]:
        """Decode base64 of int32 as [P + T - 1, layers, k]."""
        flat = np.frombuffer(base64.b64decode(text), np.int32)
        return flat.reshape(-1, self.layers, self.k).astype(self.dtype)
