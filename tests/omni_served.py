"""The tiny models with encoders as SGLang's server takes them: whole, with a processor beside the tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers as tf

from relax_hpc.trainers.tiny_model import character_tokenizer
from tests import omni
from tests.tiny import SPREAD

PATCHES: dict[str, Any] = {"patch_size": 8, "merge_size": 2, "temporal_patch_size": 2}
PROCESSORS: dict[str, tuple[Any, Any]] = {
    "qwen3_vl": (tf.Qwen3VLProcessor, tf.Qwen3VLVideoProcessor),
    "qwen3_vl_moe": (tf.Qwen3VLProcessor, tf.Qwen3VLVideoProcessor),
}


def folder(kind: str, where: Path, seed: int = 0) -> Path:
    """Like omni.folder, for all kinds that SGLang is shown."""
    omni.folder(kind, where, seed)
    tokenizer = character_tokenizer("".join(chr(33 + i) for i in range(45)), kind)
    images = tf.Qwen2VLImageProcessor(**PATCHES)
    if kind != "qwen3_omni":
        processor, videos = PROCESSORS[kind]
        processor(images, tokenizer, videos(**PATCHES)).save_pretrained(where)
        return where
    thinker = omni.config(kind)
    model = tf.Qwen3OmniMoeForConditionalGeneration(
        tf.Qwen3OmniMoeConfig(thinker_config=thinker.to_dict(), enable_audio_output=False, dtype="float32")
    )
    torch.manual_seed(seed)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, 0, SPREAD)
    model.save_pretrained(where)
    ears = tf.WhisperFeatureExtractor(
        feature_size=omni.MEL, sampling_rate=16000, hop_length=160, chunk_length=300, n_fft=400
    )
    videos = tf.Qwen2VLVideoProcessor(**PATCHES)
    tf.Qwen3OmniMoeProcessor(images, videos, ears, tokenizer).save_pretrained(where)
    return where
