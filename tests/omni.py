"""Tiny models with encoders, built from their configurations, and prompts with media in the shapes of their processors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as tf
from numpy.typing import NDArray
from torch.overrides import TorchFunctionMode

from relax_hpc.huggingface import from_config
from relax_hpc.recipe.schema import Recipe
from relax_hpc.records import Media
from relax_hpc.trainers.tiny_model import character_tokenizer
from tests.tiny import SPREAD

IMAGE, VIDEO, VISION, VISION_END, AUDIO, AUDIO_START, AUDIO_END = range(70, 77)
KINDS = ("qwen3_vl", "qwen3_vl_moe", "qwen2_5_vl", "qwen3_omni", "gemma4_unified")
EYES = {"qwen3_omni": ("visual", 16), "gemma4_unified": ("model.embed_vision", 1)}
"""Kind -> the module that sees, and how many rows it is given for the first prompt's image."""
VALUES = 3 * 2 * 8 * 8
"""Numbers of a patch: colors, frames, rows, columns."""
MEL, FRAMES_A_TOKEN = 16, 8
"""Bands of a sound's spectrum; its frames for which there is a token."""
MOST, FRAME = 6, 20
"""Tokens of a picture of Gemma4Unified, with those that only fill it up; samples of a token of sound."""


@dataclass(frozen=True, slots=True)
class Shown:
    """A prompt with what it shows."""

    tokens: NDArray[np.int32]
    media: Media | None


def config(kind: str, layers: int = 4, deep: Sequence[int] = (0, 1, 2)) -> Any:
    """The configuration of a tiny model; every layer takes part, and no two sizes are equal that could be confused. deep:
    layers of the vision encoder whose features go into the first layers of the language model."""
    if kind == "gemma4_unified":
        return _gemma()
    interleaved = {} if kind == "qwen2_5_vl" else {"mrope_interleaved": True}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1], **interleaved}
    text: dict[str, Any] = {
        "vocab_size": 80, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": layers, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "rope_parameters": rope,
        "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0,
    }  # fmt: skip
    if kind in ("qwen3_vl_moe", "qwen3_omni"):
        text |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "decoder_sparse_step": 1}
    vision: dict[str, Any] = {
        "depth": 3, "hidden_size": 24, "intermediate_size": 64, "num_heads": 2, "patch_size": 8, "out_hidden_size": 32,
        "spatial_merge_size": 2, "temporal_patch_size": 2,
    }  # fmt: skip
    ids = {
        "image_token_id": IMAGE,
        "video_token_id": VIDEO,
        "vision_start_token_id": VISION,
        "vision_end_token_id": VISION_END,
    }
    if kind == "qwen2_5_vl":
        vision |= {"fullatt_block_indexes": [1], "window_size": 32, "tokens_per_second": 2}
        return tf.Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, **ids)
    vision |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [*deep]}
    if kind == "qwen3_vl":
        return tf.Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, **ids)
    if kind == "qwen3_vl_moe":
        return tf.Qwen3VLMoeConfig(text_config=text, vision_config=vision, **ids)
    audio = {
        "num_mel_bins": MEL, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 64, "d_model": 24,
        "output_dim": 32, "downsample_hidden_size": 12, "n_window": 50, "max_source_positions": 200,
    }  # fmt: skip
    ids |= {"audio_token_id": AUDIO, "audio_start_token_id": AUDIO_START, "audio_end_token_id": AUDIO_END}
    return tf.Qwen3OmniMoeThinkerConfig(text_config=text, vision_config=vision, audio_config=audio, **ids)


def _gemma() -> Any:
    """Two kinds of layers with heads of two sizes, and a cap on the logits, as the real ones have."""
    text: dict[str, Any] = {
        "vocab_size": 80, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 16, "max_position_embeddings": 256,
        "sliding_window": 256, "layer_types": ["sliding_attention", "full_attention"] * 2, "final_logit_softcapping": 30.0,
        "attention_k_eq_v": True, "num_global_key_value_heads": 1, "use_bidirectional_attention": None,
        "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0,
    }  # fmt: skip
    vision = {
        "patch_size": 4,
        "pooling_kernel_size": 2,
        "mm_embed_dim": 24,
        "mm_posemb_size": 16,
        "output_proj_dims": 24,
    }
    ids = {
        "boi_token_id": VISION,
        "eoi_token_id": VISION_END,
        "boa_token_id": AUDIO_START,
        "eoa_token_index": AUDIO_END,
    }
    return tf.Gemma4UnifiedConfig(
        text_config=text, vision_config=vision, audio_config={"audio_embed_dim": FRAME},
        image_token_id=IMAGE, video_token_id=VIDEO, audio_token_id=AUDIO, **ids,
    )  # fmt: skip


def whole() -> Any:
    """The configuration of a whole Qwen3-Omni: thinker, talker and the part that makes sounds of its codes."""
    text = {
        "vocab_size": 1100, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 16, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16, "rope_parameters": {"rope_type": "default", "mrope_section": [4, 2, 2]},
    }  # fmt: skip
    codes = {
        "vocab_size": 32, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 16, "num_code_groups": 3,
    }  # fmt: skip
    talker = {
        "text_config": text, "code_predictor_config": codes, "num_code_groups": 3, "thinker_hidden_size": 32,
        "accept_hidden_layer": 1, "speaker_id": {"ethan": 46}, "codec_eos_token_id": 40, "codec_nothink_id": 41,
        "codec_think_bos_id": 42, "codec_think_eos_id": 43, "codec_pad_id": 44, "codec_bos_id": 45, "audio_token_id": AUDIO,
        "image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": VISION, "spatial_merge_size": 2,
        "audio_start_token_id": AUDIO_START,
    }  # fmt: skip
    wave = {
        "codebook_size": 32, "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 32,
        "num_hidden_layers": 1, "num_quantizers": 3, "upsample_rates": [2, 2], "upsampling_ratios": [2], "decoder_dim": 16,
    }  # fmt: skip
    return tf.Qwen3OmniMoeConfig(
        thinker_config=config("qwen3_omni").to_dict(), talker_config=talker, code2wav_config=wave, enable_audio_output=True,
        im_start_token_id=61, user_token_id=62, assistant_token_id=63, system_token_id=64, tts_pad_token_id=65,
        tts_bos_token_id=66, tts_eos_token_id=67,
    )  # fmt: skip


def folder(kind: str, where: Path, seed: int = 0, **shape: Any) -> Path:
    """A model of this kind in `where`, with weights wide enough for distributions with a shape, and its tokenizer."""
    torch.manual_seed(seed)
    model = from_config(config(kind, **shape))
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, 0, SPREAD)
    model.save_pretrained(where)
    character_tokenizer("".join(chr(33 + i) for i in range(77))).save_pretrained(where)
    return where


def recipe(where: Path, **tables: Any) -> Recipe:
    """A recipe of the model in `where`."""
    tables["rollout"] = {"max_new_tokens": 8, "device": "cpu"} | tables.get("rollout", {})
    tables["trainer"] = {"learning_rate": 1e-3, "device": "cpu"} | tables.get("trainer", {})
    return Recipe.model_validate({"model": {"path": str(where)}, "source": [{"task": "chain_sum"}], **tables})


def prompt(kind: str, shown: Sequence[str], seed: int) -> Shown:
    """A prompt that shows these, of "image", "wide" (an image), "video", "audio" and "long" (a sound), in this order."""
    rng = np.random.default_rng(seed)
    tokens: list[int] = rng.integers(3, 60, rng.integers(1, 6)).tolist()
    tensors: dict[str, list[NDArray[Any]]] = {}
    for one in shown:
        tokens += _add(kind, one, tensors, rng) + rng.integers(3, 60, rng.integers(1, 4)).tolist()
    media = {name: _joined(arrays) for name, arrays in tensors.items()}
    return Shown(np.array(tokens, np.int32), Media.of(media) if media else None)


def _add(kind: str, one: str, tensors: dict[str, list[NDArray[Any]]], rng: np.random.Generator) -> list[int]:
    """Add what is shown to `tensors`; returns its tokens."""
    keep = lambda name, array: tensors.setdefault(name, []).append(array)
    if kind == "gemma4_unified":
        return _add_plain(one, keep, rng)
    if one in ("audio", "long"):
        frames = {"audio": 40, "long": 104}[one]
        keep("input_features", rng.normal(size=(1, MEL, frames)).astype(np.float32))
        keep("feature_attention_mask", np.ones((1, frames), np.int64))
        from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import _get_feat_extract_output_lengths

        heard = int(_get_feat_extract_output_lengths(torch.tensor(frames), 50))
        return [AUDIO_START, *[AUDIO] * heard, AUDIO_END]
    grid = {"image": (1, 4, 4), "wide": (1, 2, 6), "video": (2, 4, 2)}[one]
    patches = rng.normal(size=(int(np.prod(grid)), VALUES)).astype(np.float32)
    if one != "video":
        keep("pixel_values", patches)
        keep("image_grid_thw", np.array([grid]))
        return [VISION, *[IMAGE] * (len(patches) // 4), VISION_END]
    keep("pixel_values_videos", patches)
    keep("video_grid_thw", np.array([grid]))
    if kind.startswith("qwen3_vl"):  # a frame each, behind its time
        return [t for _ in range(grid[0]) for t in (9, VISION, *[VIDEO] * (grid[1] * grid[2] // 4), VISION_END)]
    seconds = {"qwen2_5_vl": "second_per_grid_ts", "qwen3_omni": "video_second_per_grid"}[kind]
    keep(seconds, np.array([4.0], np.float32))
    return [VISION, *[VIDEO] * (len(patches) // 4), VISION_END]


def _add_plain(one: str, keep: Any, rng: np.random.Generator) -> list[int]:
    """Add patches and frames of sound as they are."""
    if one in ("audio", "long"):
        heard = {"audio": 3, "long": 7}[one]
        keep("input_features", rng.normal(size=(1, heard, FRAME)).astype(np.float32))
        keep("input_features_mask", np.ones((1, heard), np.bool_))
        return [AUDIO_START, *[AUDIO] * heard, AUDIO_END]
    width, height, frames = {"image": (2, 2, 1), "wide": (3, 1, 1), "video": (1, 2, 2)}[one]
    places = [(x, y) for y in range(height) for x in range(width)] + [(-1, -1)] * (MOST - width * height)
    patches = rng.normal(size=(frames, MOST, VALUES // 2)).astype(np.float32)
    patches[:, width * height :] = 0
    placed = np.tile(np.array(places), (frames, 1, 1))
    token, name, about = (IMAGE, "pixel_values", "image") if one != "video" else (VIDEO, "pixel_values_videos", one)
    keep(name, patches)
    keep(f"{about}_position_ids", placed)
    if one == "video":
        keep("num_frames_per_video", np.array([frames]))
    seen = [VISION, *[token] * (width * height), VISION_END]
    return seen if one != "video" else [t for _ in range(frames) for t in (9, *seen)]


def _joined(arrays: list[NDArray[Any]]) -> NDArray[Any]:
    """Join on the first axis; sounds are filled up with zeros to the longest."""
    if arrays[0].ndim == 1:
        return np.concatenate(arrays)
    longest = np.max([a.shape[1:] for a in arrays], axis=0)
    return np.concatenate([np.pad(a, [(0, 0), *((0, n) for n in longest - a.shape[1:])]) for a in arrays])


SHOWN: dict[str, list[tuple[str, ...]]] = {
    **dict.fromkeys(
        ("qwen3_vl", "qwen3_vl_moe", "qwen2_5_vl"),
        [("image",), (), ("image", "wide"), ("video",), ("video", "image", "video")],
    ),
    **dict.fromkeys(
        ("qwen3_omni", "gemma4_unified"),
        [
            ("image",), (), ("audio",), ("audio", "long"), ("video",), ("audio", "image"), ("image", "audio", "video"),
            ("long", "image", "wide"),
        ],
    ),
}  # fmt: skip


def prompts(kind: str) -> list[Shown]:
    """Prompts of every modality and mixture, one of text; the last has the first one's tokens and another image."""
    made = [prompt(kind, shown, seed) for seed, shown in enumerate(SHOWN[kind])]
    assert made[0].media is not None
    other = {**made[0].media.tensors, "pixel_values": -made[0].media.tensors["pixel_values"]}
    return [*made, Shown(made[0].tokens, Media.of(other))]


class InFloat64(TorchFunctionMode):
    """Computes in float64 what models ask to be computed in float32: norms, rotations, routers."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()
        wide = lambda value: torch.float64 if value is torch.float32 else value
        return func(*map(wide, args), **{name: wide(value) for name, value in (kwargs or {}).items()})


def plain_logits(model: Any, shown: Shown, answer: NDArray[np.int32]) -> torch.Tensor:
    """[answer, V] logits before each token of an answer, as transformers computes all by itself."""
    tokens = torch.tensor(np.concatenate([shown.tokens, answer[:-1]]).astype(np.int64))[None]
    arguments = {n: torch.from_numpy(a) for n, a in (shown.media.tensors if shown.media else {}).items()}
    arguments = {n: a.to(model.dtype) if n == "input_features" else a for n, a in arguments.items()}
    if "pixel_values_videos" in arguments and "num_frames_per_video" in arguments:
        tokens, arguments = _frames_as_images(tokens, arguments)
    if not hasattr(model, "audio_tower"):
        arguments["mm_token_type_ids"] = (tokens == IMAGE).long() + 2 * (tokens == VIDEO).long()
    else:
        arguments["attention_mask"] = torch.ones_like(tokens)
        arguments["position_ids"] = _positions(model, tokens, len(shown.tokens), arguments)
    model.base_model.rope_deltas = None
    found: torch.Tensor = model(input_ids=tokens, use_cache=False, **arguments).logits[0, len(shown.tokens) - 1 :]
    return found


def _frames_as_images(tokens: torch.Tensor, shown: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, Any]]:
    """Frames of Gemma4Unified are pictures like others, and the forward of transformers 5.19 takes no video."""
    kinds = {IMAGE: ("pixel_values", "image_position_ids"), VIDEO: ("pixel_values_videos", "video_position_ids")}
    rows = {token: zip(*(shown.get(name, []) for name in names), strict=True) for token, names in kinds.items()}
    before = torch.nn.functional.pad(tokens, (1, 0))[0]
    begun = [next(rows[t]) for t, b in zip(tokens[0].tolist(), before.tolist(), strict=False) if t in rows and t != b]
    others = {name: tensor for name, tensor in shown.items() if name.startswith("input_features")}
    pixels, places = (torch.stack(parts) for parts in zip(*begun, strict=True))
    return tokens.where(tokens != VIDEO, IMAGE), {**others, "pixel_values": pixels, "image_position_ids": places}


def _positions(model: Any, tokens: torch.Tensor, prompt: int, shown: dict[str, torch.Tensor]) -> torch.Tensor:
    """The thinker's own positions, for a text of other tokens: it takes an answer's for images that lack."""
    plain = tokens.clone()
    plain[:, prompt:] = 9
    heard = shown.get("feature_attention_mask")
    found: torch.Tensor = model.get_rope_index(
        plain, shown.get("image_grid_thw"), shown.get("video_grid_thw"), shown["attention_mask"],
        audio_seqlens=None if heard is None else heard.sum(1), second_per_grids=shown.get("video_second_per_grid"),
    )[0]  # fmt: skip
    return found
