"""Tiny models, built in code: models of Qwen and Gemma4 in small, each with its real processor; nothing is downloaded."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedConfig, PreTrainedTokenizerFast

from relax_hpc.media.families.gemma4_unified import Gemma4Unified
from relax_hpc.media.families.qwen3_omni import Qwen3Omni
from relax_hpc.recipe.tables.model import TinyAudio, TinyModel, TinyVision

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
BEGIN, END = "<|im_start|>", "<|im_end|>"
MARKS = {
    "image_token": "<|image_pad|>", "video_token": "<|video_pad|>", "audio_token": "<|audio_pad|>",
    "vision_bos_token": "<|vision_start|>", "vision_eos_token": "<|vision_end|>",
    "audio_bos_token": "<|audio_start|>", "audio_eos_token": "<|audio_end|>",
}  # fmt: skip
"""Tokens of media by the names under which processors look for them."""
GEMMA_MARKS = {
    "image_token": "<|image|>", "audio_token": "<|audio|>", "video_token": "<|video|>",
    "boi_token": "<|image>", "eoi_token": "<image|>", "boa_token": "<|audio>", "eoa_token": "<audio|>",
}  # fmt: skip
CHAT_TEMPLATE = """\
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}
{%- if part.type == 'image' %}IMAGE
{%- elif part.type == 'video' %}VIDEO
{%- elif part.type == 'audio' %}AUDIO
{%- else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
TOOL_TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool.function.name }}({{ tool.function.parameters.properties | join(', ') }})
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response>
{%- else %}<|im_start|>{{ message.role }}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}
{%- if message.content or not loop.first %}{{ '\\n' }}{% endif %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""Chat messages with tools as Qwen3 has them; a tool is declared by its name and arguments, since every character is a token."""
TOOL_WORDS = (
    "system\n", "user\n", "assistant\n", "<tool_call>\n", "\n</tool_call>", "<tool_response>\n", "\n</tool_response>",
)  # fmt: skip
"""Texts of the template that are one token each."""
TIMES = {"qwen": "<0123456789. seconds>", "gemma4_unified": "0123456789: "}
"""Characters that processors write between the frames of a video."""
MERGE, FRAMES_A_PATCH = 2, 2
DEEP_LAYERS = 3
"""Vision layers whose output reaches the language model's first layers; SGLang knows three of them only."""
TABLE_SIDE = 16
"""Side of the table of positions in a picture, which is stretched to the picture's size."""
GEMMA_TOKENS, WINDOW_TOKENS = 70, 4
"""The fewest tokens that Gemma4's processor makes of a picture; tokens of the side of a window of Qwen2.5-VL."""
GEMMA_IDS = {
    "image_token_id": "image_token", "video_token_id": "video_token", "audio_token_id": "audio_token",
    "boi_token_id": "boi_token", "eoi_token_id": "eoi_token", "boa_token_id": "boa_token", "eoa_token_index": "eoa_token",
}  # fmt: skip
RATE_HZ, HOP, WINDOW, CHUNK_S = 16000, 160, 400, 300


def character_tokenizer(
    alphabet: str, family: str | None = None, words: Sequence[str] = (), chat: bool = False
) -> PreTrainedTokenizerFast:
    """Make a tokenizer with one token a character of `alphabet` and a word of `words`, <unk> for all others. Decoding is
    the exact inverse.

    family: with this family's tokens for media, those of chat messages, and the characters that its processor writes.
    chat: with a chat template that knows tools.
    """
    gemma = family == "gemma4_unified"
    marks = {**(GEMMA_MARKS if gemma else MARKS), "begin_token": BEGIN, "end_token": END} if family else {}
    if family:
        alphabet += "".join(sorted({*TIMES["gemma4_unified" if gemma else "qwen"]} - {*alphabet}))
    if chat:
        marks, words = {"begin_token": BEGIN}, [*words, *TOOL_WORDS]
    end = END if chat else EOS
    vocabulary = {token: i for i, token in enumerate([PAD, end, UNK, *marks.values(), *words, *alphabet])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    pieces = [*map(re.escape, sorted(words, key=len, reverse=True)), r"[\s\S]"]  # "." would leave newlines out
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("|".join(pieces)), "isolated")
    tokenizer.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=end, unk_token=UNK, clean_up_tokenization_spaces=False,
        **({"extra_special_tokens": marks} if marks else {}),
    )  # fmt: skip
    if chat:
        made.chat_template = TOOL_TEMPLATE
    if family:
        made.chat_template = _chat_template(Gemma4Unified.marks if gemma else Qwen3Omni.marks)
    return made


def _chat_template(marks: Mapping[str, str]) -> str:
    template = CHAT_TEMPLATE
    for modality, mark in marks.items():
        template = template.replace(modality.upper(), mark)
    return template


def make_tiny(model: TinyModel, folder: Path, seed: int) -> None:
    """Save a tiny model, its weights drawn from `seed`, with its tokenizer, and its processor if it sees or hears."""
    tokenizer = _tokenizer(model)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        policy = _kind(model)._from_config(_config(model, tokenizer))
    transformers.utils.logging.disable_progress_bar()
    policy.save_pretrained(folder)
    (_processor(model, tokenizer) if model.shows else tokenizer).save_pretrained(folder)


def config_of(model: TinyModel) -> PreTrainedConfig:
    """The configuration of a tiny model, with nothing built."""
    return _config(model, _tokenizer(model))


def _tokenizer(model: TinyModel) -> PreTrainedTokenizerFast:
    return character_tokenizer(model.alphabet, model.family if model.shows else None, model.words, model.chat)


def _kind(model: TinyModel) -> Any:
    if model.family == "gemma4_unified":
        return transformers.Gemma4UnifiedForConditionalGeneration
    if model.family == "qwen2_5_vl":
        return transformers.Qwen2_5_VLForConditionalGeneration
    if model.audio:
        return transformers.Qwen3OmniMoeForConditionalGeneration
    if model.vision:
        see = transformers.Qwen3VLMoeForConditionalGeneration, transformers.Qwen3VLForConditionalGeneration
        return see[0] if model.experts else see[1]
    return transformers.Qwen3MoeForCausalLM if model.experts else transformers.Qwen3ForCausalLM


def _config(model: TinyModel, tokenizer: Any) -> PreTrainedConfig:
    text = _language(model, tokenizer)
    if not model.vision and not model.audio:
        return transformers.Qwen3MoeConfig(**text) if model.experts else transformers.Qwen3Config(**text)
    if model.family == "gemma4_unified":
        return _gemma(model, text, tokenizer.convert_tokens_to_ids)
    half = model.hidden_size // model.heads // 2
    side = half * 5 // 16
    text["rope_parameters"] = {
        "rope_type": "default", "rope_theta": 1e4, "mrope_section": [half - 2 * side, side, side], "mrope_interleaved": True,
    }  # fmt: skip
    vision = _vision(model.vision or TinyVision(), model)
    if model.family == "qwen2_5_vl":
        del text["rope_parameters"]["mrope_interleaved"]
    token = tokenizer.convert_tokens_to_ids
    ids = {
        "image_token_id": token(MARKS["image_token"]), "video_token_id": token(MARKS["video_token"]),
        "vision_start_token_id": token(MARKS["vision_bos_token"]), "vision_end_token_id": token(MARKS["vision_eos_token"]),
        "tie_word_embeddings": True,
    }  # fmt: skip
    if model.family == "qwen2_5_vl":
        return transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision, dtype="float32", **ids)
    if model.audio is None:
        kind = transformers.Qwen3VLMoeConfig if model.experts else transformers.Qwen3VLConfig
        return kind(text_config=text, vision_config=vision, dtype="float32", **ids)
    ids |= {
        "audio_token_id": token(MARKS["audio_token"]), "audio_start_token_id": token(MARKS["audio_bos_token"]),
        "audio_end_token_id": token(MARKS["audio_eos_token"]),
    }  # fmt: skip
    thinker = transformers.Qwen3OmniMoeThinkerConfig(
        text_config=text, vision_config=vision, audio_config=_audio(model.audio, model), **ids
    )
    return transformers.Qwen3OmniMoeConfig(thinker_config=thinker.to_dict(), enable_audio_output=False, dtype="float32")


def _language(model: TinyModel, tokenizer: Any) -> dict[str, Any]:
    shape: dict[str, Any] = {
        "vocab_size": len(tokenizer), "hidden_size": model.hidden_size, "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.layers, "head_dim": model.hidden_size // model.heads,
        "num_attention_heads": model.heads, "num_key_value_heads": model.kv_heads,
        "max_position_embeddings": model.context, "tie_word_embeddings": True, "dtype": "float32",
        # the customary 0.02 suits wide models; narrow ones learn several times slower
        "initializer_range": model.hidden_size ** -0.5,
        "bos_token_id": None, "pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id,
    }  # fmt: skip
    experts: dict[str, Any] = {
        "num_experts": model.experts, "num_experts_per_tok": model.experts_per_token, "decoder_sparse_step": 1,
        "moe_intermediate_size": model.moe_intermediate_size, "norm_topk_prob": True,
    }  # fmt: skip
    return shape | experts if model.experts else shape


def _vision(vision: TinyVision, model: TinyModel) -> dict[str, Any]:
    deep = min(DEEP_LAYERS, vision.layers, model.layers)
    windows = {
        "fullatt_block_indexes": [vision.layers - 1], "window_size": WINDOW_TOKENS * MERGE * vision.patch_size,
        "tokens_per_second": 2,
    }  # fmt: skip
    positions = {"num_position_embeddings": TABLE_SIDE**2, "deepstack_visual_indexes": [*range(deep)]}
    return {
        "depth": vision.layers, "hidden_size": vision.hidden_size, "intermediate_size": vision.intermediate_size,
        "num_heads": vision.heads, "patch_size": vision.patch_size, "spatial_merge_size": MERGE,
        "temporal_patch_size": FRAMES_A_PATCH, "out_hidden_size": model.hidden_size,
        "initializer_range": vision.hidden_size**-0.5, **(windows if model.family == "qwen2_5_vl" else positions),
    }  # fmt: skip


def _gemma(model: TinyModel, text: dict[str, Any], token: Any) -> PreTrainedConfig:
    """Gemma4Unified: every second layer attends to its window, which is all of the context; the last one to everything."""
    head = model.hidden_size // model.heads
    kinds = ["full_attention" if (model.layers - i) % 2 else "sliding_attention" for i in range(model.layers)]
    text |= {
        "sliding_window": model.context, "layer_types": kinds, "global_head_dim": head, "use_bidirectional_attention": None,
    }  # fmt: skip
    vision = model.vision or TinyVision()
    width = {"mm_embed_dim": vision.hidden_size, "output_proj_dims": vision.hidden_size}
    seen = {"patch_size": vision.patch_size, "pooling_kernel_size": MERGE, "mm_posemb_size": GEMMA_TOKENS, **width}
    ids = {key: token(GEMMA_MARKS[name]) for key, name in GEMMA_IDS.items()}
    return transformers.Gemma4UnifiedConfig(
        text_config=text, vision_config=seen, audio_config={}, tie_word_embeddings=True, dtype="float32", **ids
    )


def _audio(audio: TinyAudio, model: TinyModel) -> dict[str, Any]:
    return {
        "num_mel_bins": audio.bands, "encoder_layers": audio.layers, "encoder_attention_heads": audio.heads,
        "encoder_ffn_dim": audio.intermediate_size, "d_model": audio.hidden_size, "output_dim": model.hidden_size,
        "downsample_hidden_size": audio.hidden_size, "initializer_range": audio.hidden_size**-0.5,
    }  # fmt: skip


def _processor(model: TinyModel, tokenizer: Any) -> Any:
    patch = (model.vision or TinyVision()).patch_size
    patches: dict[str, Any] = {
        "patch_size": patch, "merge_size": MERGE, "temporal_patch_size": FRAMES_A_PATCH,
        "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
    }  # fmt: skip
    if model.family == "gemma4_unified":
        pools = {"patch_size": patch, "pooling_kernel_size": MERGE, "max_soft_tokens": GEMMA_TOKENS}
        return transformers.Gemma4UnifiedProcessor(
            transformers.Gemma4UnifiedAudioFeatureExtractor(), transformers.Gemma4UnifiedImageProcessor(**pools), tokenizer,
            transformers.Gemma4UnifiedVideoProcessor(**pools), chat_template=tokenizer.chat_template,
        )  # fmt: skip
    images = transformers.Qwen2VLImageProcessor(**patches)
    if model.family == "qwen2_5_vl":
        films = transformers.Qwen2VLVideoProcessor(**patches)
        return transformers.Qwen2_5_VLProcessor(images, tokenizer, films, chat_template=tokenizer.chat_template)
    if model.audio is None:
        videos = transformers.Qwen3VLVideoProcessor(**patches)
        return transformers.Qwen3VLProcessor(images, tokenizer, videos, chat_template=tokenizer.chat_template)
    return transformers.Qwen3OmniMoeProcessor(
        images, transformers.Qwen2VLVideoProcessor(**patches),
        transformers.WhisperFeatureExtractor(
            feature_size=model.audio.bands, sampling_rate=RATE_HZ, hop_length=HOP, chunk_length=CHUNK_S, n_fft=WINDOW
        ),
        tokenizer, chat_template=tokenizer.chat_template,
    )  # fmt: skip
