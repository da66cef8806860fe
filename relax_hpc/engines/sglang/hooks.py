"""What is changed in SGLang's own processes, by its registry of hooks, so that it is shown the media of a prompt as they are.

    request: expanded tokens, the name of a file (media_files.py) ──tokenizer process──► items, positions on three axes
    sounds of several requests ──scheduler──► filled up to the longest: SGLang encodes them together, and ends where they differ
    an adapter ──scheduler──► read from its files, though the server itself began with weights of no meaning
    a version was taken ──scheduler──► embeddings of the old encoders are thrown away, as the prefix cache is

SGLang would process pictures by itself, with limits of its own, and from sounds and videos it knows less than we do.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from relax_hpc.engines.sglang.media_files import read
from relax_hpc.files.errors import Damaged
from relax_hpc.media.families import family_of
from relax_hpc.records import Media


def register() -> None:
    """Register the hooks; SGLang sets them in each of its processes as it begins."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    shown = "sglang.srt.multimodal.processors.qwen_vl.QwenVLImageProcessor.process_mm_data_async"
    HookRegistry.register(shown, _process, HookType.AROUND)
    heard = "sglang.srt.models.qwen3_omni_moe.Qwen3OmniMoeThinkerForConditionalGeneration.get_audio_feature"
    HookRegistry.register(heard, _fill_up, HookType.BEFORE)
    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.flush_cache", _forget, HookType.AFTER)
    HookRegistry.register("sglang.srt.lora.lora.LoRAAdapter.initialize_weights", _from_files, HookType.BEFORE)


async def _process(
    original: Callable[..., Awaitable[Any]], processor: Any, image_data: Any, input_text: Any, request_obj: Any,
    *args: Any, **how: Any,
) -> Any:  # fmt: skip
    """Take the media of the request from their file, in a thread: the server goes on answering. A ValueError is answered
    with its words."""
    name = image_data[0] if image_data else None
    try:
        media = await asyncio.to_thread(read, name) if isinstance(name, str) else None
    except Damaged as error:
        raise ValueError(str(error)) from error
    if media is None:
        return await original(processor, image_data, input_text, request_obj, *args, **how)
    return await asyncio.to_thread(_output, processor, list(input_text), media)


def _output(processor: Any, tokens: list[int], media: Media) -> Any:
    """Make what SGLang's processor would return of these tokens and media."""
    import torch
    from sglang.srt.managers.schedule_batch import MultimodalProcessorOutput

    family = family_of(processor.hf_config)
    positions = family.positions_onward(processor.hf_config, np.array(tokens), media)
    placed = torch.from_numpy(positions).long()
    items, known = _items(processor, torch.tensor(tokens), media), processor.mm_tokens
    return MultimodalProcessorOutput(
        input_ids=tokens,
        padded_input_ids=MultimodalProcessorOutput.build_padded_input_ids(tokens, items),
        mm_items=items,
        im_token_id=known.image_token_id,
        video_token_id=known.video_token_id,
        audio_token_id=known.audio_token_id,
        mrope_positions=placed[:, :-1],
        mrope_position_delta=(placed[:1, -1:] - len(tokens)),
    )


def _items(processor: Any, tokens: Any, media: Media) -> list[Any]:
    """Cut the media into SGLang's items. Each has an identity of its own, by which SGLang's caches know it: prompts of
    equal tokens and other media share nothing."""
    import torch
    from sglang.srt.managers.mm_utils import get_new_expanded_mm_items
    from sglang.srt.managers.schedule_batch import MultimodalInputFormat

    tensors = {name: torch.from_numpy(array) for name, array in media.tensors.items()}
    together = processor.collect_mm_items_from_processor_output(tensors)
    for item in together:
        item.offsets = processor.get_mm_item_offsets(tokens, processor.mm_tokens, item.modality)
    items = get_new_expanded_mm_items(together)
    for number, item in enumerate(items):
        item.format = MultimodalInputFormat.PROCESSOR_OUTPUT
        item.set_identity(hashlib.sha256(f"{media.digest}/{number}".encode()).digest())
    finished: list[Any] = processor._finalize_mm_items(items, images=None)
    processor._mark_cuda_ipc_features_for_deferred_reconstruction(finished)
    return finished


def _fill_up(model: Any, items: list[Any]) -> None:
    """Fill sounds up with silence to the longest; their masks leave it out again."""
    from torch.nn.functional import pad

    longest = max(item.feature.shape[-1] for item in items)
    for item in items:
        more = (0, longest - item.feature.shape[-1])
        item.feature, item.feature_attention_mask = pad(item.feature, more), pad(item.feature_attention_mask, more)


def _forget(*args: Any, **how: Any) -> None:
    """Throw away what the encoders made, with the prefix cache: new weights may be the encoders' too."""
    from sglang.srt.managers import mm_schedule

    if mm_schedule.embedding_cache is not None:
        mm_schedule.embedding_cache.clear()


def _from_files(adapter: Any) -> None:
    """Read an adapter from safetensors files. SGLang would read it as it read the model, which was not read at all."""
    from sglang.srt.configs.load_config import LoadConfig

    adapter.load_config = LoadConfig(load_format="safetensors")
