"""Check that the recipe's backend can train a model, before a run begins and without Megatron."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from relax_hpc.files.errors import RunError
from relax_hpc.huggingface import TURNED, language_config
from relax_hpc.media.families import family_of
from relax_hpc.recipe.schema import TEACHER_KEY, Recipe
from relax_hpc.recipe.tables.trainer import Parallel, Sizes, misfit

KNOWN = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
"""Types of language models that the backend can train."""
KNOWN_WITH_MEDIA = ("qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text", "qwen3_omni_moe_text")
"""Those of models with media."""
SHOWN_BY_SGLANG = ("qwen3_vl", "qwen3_omni")
"""Families whose media the engine hands over to SGLang."""
SHOWN_OUTSIDE = ("qwen3_vl",)
"""Those of which a server at an address makes the same tokens and tensors by itself."""
SGLANG_DEEP_LAYERS = 3
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The scaling of rotary frequencies that is built into Megatron-core."""


def check(recipe: Recipe, model_dir: Path) -> None:
    """Raise RunError where the trainer of this recipe could not be made."""
    check_family(recipe, model_dir)
    if recipe.trainer.backend != "megatron":
        return
    need_megatron()
    trainer, scorer = recipe.trainer, recipe.scorer
    held = {"": model_dir, **recipe.models_held}
    models = [(key, folder, "trainer", trainer.processes) for key, folder in held.items()]
    if scorer is not None and "teacher" in scorer.scores:
        models.append((TEACHER_KEY, recipe.models_beside[TEACHER_KEY], "scorer", scorer.processes))
    for key, folder, role, processes in models:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        about = f"{key} = '{folder}': " if key else ""
        try:
            refuse_foreign(config)
        except RunError as error:
            raise RunError(about + str(error)) from error
        wrong = misfit(trainer.parallel, processes, sizes(language_config(config)), role)
        wrong = wrong or media_misfit(trainer.parallel, config)
        if wrong:
            raise RunError(about + wrong)


def check_family(recipe: Recipe, model_dir: Path) -> None:
    """Raise RunError where the model sees media and a part of the recipe does not know of them, or where parts are named
    that it lacks."""
    config = AutoConfig.from_pretrained(model_dir, local_files_only=True)
    family = family_of(config)
    family.check(config)
    parts = {"language", *(part for _, part in family.parts)}
    if unknown := sorted({*recipe.trainer.freeze, *recipe.trainer.learning_rates} - parts):
        raise RunError(
            f"trainer.freeze and trainer.learning_rates name {unknown}, and the model ({family.name}) has {sorted(parts)}: "
            "leave them out"
        )
    if recipe.trainer.freeze and parts <= {*recipe.trainer.freeze}:
        raise RunError(
            f"trainer.freeze names all parts of the model, {sorted(parts)}: leave one out, or nothing learns"
        )
    if not family.modalities:
        return
    about = f"the model ({family.name}) sees {', '.join(family.modalities)}"
    if recipe.generates and recipe.rollout.engine == "sglang" and (wrong := _misfit_of_sglang(recipe, config)):
        raise RunError(f'{about}, and rollout.engine = "sglang" {wrong}')
    for key, folder in recipe.models_beside.items():
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        other = family_of(config)
        other.check(config)
        if other.name != family.name:
            raise RunError(
                f"{about}, and {key} = '{folder}' is of another family ({other.name}): give one that sees the same"
            )


def _misfit_of_sglang(recipe: Recipe, config: Any) -> str:
    """Say why SGLang cannot show media to a model of this config; "" where it can."""
    family, own = family_of(config), family_of(config).config(config)
    parts = {part for _, part in family.parts}
    if family.name not in SHOWN_BY_SGLANG:
        return f'shows media only to {", ".join(SHOWN_BY_SGLANG)}: use "torch"'
    if family.prefix and own is config:
        return f"serves {family.name} whole: give the folder of the whole model, not of a part of it"
    if recipe.trainer.lora and recipe.trainer.lora.sync == "adapter":
        return 'is sent whole models alone where they see: set trainer.lora.sync = "merge"'
    deep = family.deep_layers(config)
    if hasattr(own.get_text_config(), "num_experts") and deep != SGLANG_DEEP_LAYERS:
        return (
            f"knows a model with experts only with {SGLANG_DEEP_LAYERS} vision layers whose output goes deeper, and this has "
            f'{deep} (vision_config.deepstack_visual_indexes; in a tiny model the fewest of its layers, its vision\'s and 3): use "torch"'
        )
    return _misfit_of_outside(recipe, family.name, parts) if recipe.rollout.sglang.address else ""


def _misfit_of_outside(recipe: Recipe, name: str, encoders: set[str]) -> str:
    """Say why a server at rollout.sglang.address cannot show media to a model; "" where it can."""
    own = "leave rollout.sglang.address out, and the worker starts a server of its own"
    if name not in SHOWN_OUTSIDE:
        return f"shows media by a server at an address only to {', '.join(SHOWN_OUTSIDE)}: {own}"
    more = {modality for source in recipe.sources for modality in getattr(source, "media", None) or {}} - {"image"}
    if more:
        return f"is sent pictures alone where its server has an address, and sources show {sorted(more)}: {own}"
    if learning := sorted(encoders - {*recipe.trainer.freeze}):
        return (
            f"keeps what the encoders of a server at an address made, though their weights change: trainer.freeze must name {learning}; "
            f"or {own}"
        )
    return ""


def need_megatron() -> None:
    """Raise RunError where Megatron-core is not installed."""
    if importlib.util.find_spec("megatron") is None:
        raise RunError(
            'Megatron-core is not installed: pip install "relax-hpc[megatron]", or train with trainer.backend = "torch"'
        )


def sparse_layers(hf: Any) -> list[int]:
    """For each layer, 1 if it has experts, 0 if it is dense."""
    step, dense = getattr(hf, "decoder_sparse_step", 1), getattr(hf, "mlp_only_layers", None) or []
    return [int(i not in dense and (i + 1) % step == 0) for i in range(hf.num_hidden_layers)]


def sizes(hf: Any) -> Sizes:
    experts = getattr(hf, "num_experts", 0)
    dense = not experts or not all(sparse_layers(hf))
    return Sizes(
        heads=hf.num_attention_heads,
        kv_heads=hf.num_key_value_heads,
        layers=hf.num_hidden_layers,
        intermediate=hf.intermediate_size if dense else 0,
        experts=experts,
        expert_intermediate=hf.moe_intermediate_size if experts else 0,
    )


def media_misfit(plan: Parallel, config: Any) -> str | None:
    """Explain why `plan` does not fit the model's encoders; None where it fits."""
    if plan.spread_encoders and not family_of(config).modalities:
        return "[trainer.parallel] spread_encoders = true: the model has no encoders, leave it out"
    deep = family_of(config).deep_layers(config)
    stages = plan.pipeline * plan.virtual_pipeline
    held = language_config(config).num_hidden_layers // stages
    if held >= deep:
        return None
    return (
        f"[trainer.parallel] pipeline x virtual_pipeline = {stages} leaves {held} layers on the first stage, and the vision "
        f"encoder's features go into the model's first {deep} (deepstack): use fewer stages"
    )


def refuse_foreign(config: Any) -> None:
    """Raise RunError for a model that Megatron-core would compute differently."""
    wrong, hf = None, language_config(config)
    rope = getattr(hf, "rope_parameters", None) or {}
    scaling = {key: rope.get(key) for key in LLAMA3_ROPE}
    if hf.model_type not in KNOWN + KNOWN_WITH_MEDIA:
        wrong = f"model_type '{hf.model_type}': {', '.join(KNOWN + KNOWN_WITH_MEDIA)} are known"
    elif rope.get("rope_type") not in ("default", "llama3") or (
        rope["rope_type"] == "llama3" and scaling != LLAMA3_ROPE
    ):
        wrong = f"rope_parameters {rope}: the default ones, or llama3's with {LLAMA3_ROPE}, are known"
    elif float(rope["rope_theta"]) != int(rope["rope_theta"]):
        wrong = f"rope_theta {rope['rope_theta']}: a whole number is expected"
    elif hf.model_type == "mistral" and hf.sliding_window is not None:
        wrong = f"sliding_window {hf.sliding_window}: none is expected"
    elif set(getattr(hf, "layer_types", None) or []) - {"full_attention"}:
        wrong = "layers without full attention"
    elif hf.hidden_act != "silu":
        wrong = f"hidden_act '{hf.hidden_act}': silu is known"
    elif getattr(hf, "mlp_bias", False) or (hf.model_type != "qwen2" and getattr(hf, "attention_bias", False)):
        wrong = "biases in attention or MLP"
    elif hf.model_type in TURNED and hf.hidden_size in (hf.moe_intermediate_size, 2 * hf.moe_intermediate_size):
        wrong = f"experts as wide as the model, or half ({hf.moe_intermediate_size}, {hf.hidden_size}), so that files cannot say which way their matrices lie"
    if wrong:
        raise RunError(f'trainer.backend = "megatron" cannot train this model: it has {wrong}; use the torch backend')
