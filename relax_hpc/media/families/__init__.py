"""The families of models, one file each; `family_of` finds a model's."""

from __future__ import annotations

from typing import Any

from relax_hpc.files.errors import RunError
from relax_hpc.media.families.base import Family
from relax_hpc.media.families.gemma4_unified import Gemma4Unified
from relax_hpc.media.families.qwen3_omni import Qwen3Omni
from relax_hpc.media.families.qwen_vl import Qwen3VL, Qwen25VL

TEXT = Family()
FAMILIES: tuple[Family, ...] = (Qwen3VL(), Qwen25VL(), Qwen3Omni(), Gemma4Unified())


def family_of(config: Any) -> Family:
    """Find the family of a transformers config. Raises RunError for a model with media that is of none of them."""
    for family in FAMILIES:
        if config.model_type in family.model_types:
            return family
    towers = sorted(name for name in config.sub_configs if name.split("_")[0] in ("vision", "audio", "thinker"))
    if towers:
        known = sorted(kind for family in FAMILIES for kind in family.model_types)
        raise RunError(
            f"the model is a '{config.model_type}', which has {towers}: of models with media, {known} are known; "
            "give one of these, or a text model"
        )
    return TEXT


__all__ = ["FAMILIES", "TEXT", "Family", "family_of"]
