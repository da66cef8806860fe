"""Facts that every engine reads from the run's model folder: the context, the end tokens, the weights there must be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from relax_hpc.engines.base import Ask
from relax_hpc.files.tensor_files import differences
from relax_hpc.huggingface import named_as_in_files
from relax_hpc.huggingface.lora import of_base


def context_of(config: PreTrainedConfig) -> int:
    """The most tokens that a sequence may have. Beyond the window of sliding attention, packing would be wrong."""
    text = config.get_text_config()
    longest = int(text.max_position_embeddings)
    return min(longest, getattr(text, "sliding_window", None) or longest)


def room_for(
    prompts: Sequence[NDArray[np.int32]], context: int, max_new_tokens: int, begun: Sequence[NDArray[np.int32]] = ()
) -> list[int]:
    """The tokens by which each prompt may be continued, after those begun. Raises ValueError where there is no room."""
    started = [len(answer) for answer in begun] or [0] * len(prompts)
    return [
        room_after(len(prompt), before, context, max_new_tokens, f"prompt {i}", f"answer {i}")
        for i, (prompt, before) in enumerate(zip(prompts, started, strict=True))
    ]


def room_after(length: int, begun: int, context: int, max_new_tokens: int, prompt: str, answer: str) -> int:
    """The tokens by which an answer of `begun` tokens to `length` ones may go on. Raises ValueError where there is none,
    with these names of the two."""
    if not 0 < length < context:
        raise ValueError(
            f"{prompt} has {length} tokens: the model's context of {context} asks for 1 to {context - 1}, "
            f"so that one of {max_new_tokens} new tokens fits; shorten the prompt"
        )
    room = min(max_new_tokens, context - length) - begun
    if room < 1:
        raise ValueError(f"{answer} has all of its {max_new_tokens} tokens: it has ended")
    return room


def room_of(ask: Ask, context: int) -> int:
    """The tokens that an ask's completion may have. Raises ValueError, which names the ask, where there is no room."""
    who, most = f"ask {ask.key}", ask.sampling.max_new_tokens
    return room_after(len(ask.context), len(ask.begun), context, most, who, f"the answer of {who}")


def check_new(asks: Sequence[Ask], busy: Container[int]) -> None:
    """Raise ValueError for a key that is under way, or is given twice."""
    for key, count in Counter(ask.key for ask in asks).items():
        if count > 1 or key in busy:
            raise ValueError(
                f"ask {key} is under way already: give each ask a key of its own until it has its completion"
            )


def end_tokens(model_dir: Path, config: object, tokenizer: object) -> list[int]:
    """Every token that ends an answer: of the tokenizer, the model, and its generation settings."""
    places = [tokenizer, config]
    if (model_dir / "generation_config.json").is_file():
        places.append(GenerationConfig.from_pretrained(model_dir, local_files_only=True))
    ends: set[int] = set()
    for place in places:
        value = getattr(place, "eos_token_id", None)
        ends.update([value] if isinstance(value, int) else value or [])
    return sorted(ends)


def weights_of(model: PreTrainedModel) -> dict[str, Tensor]:
    """The model's tensors by the names that its files use, without adapters; changing one changes the model."""
    return named_as_in_files(of_base(model.state_dict()), model.config)


def aliases(model: PreTrainedModel) -> set[str]:
    """Names in the state that stand for another tensor, such as a tied output layer's: a version may hold them, or not."""
    real = dict(model.named_parameters()) | dict(model.named_buffers())
    return weights_of(model).keys() - named_as_in_files(of_base(real), model.config).keys()


def check_whole(
    what: str, given: Mapping[str, Sequence[int]], expected: Mapping[str, Sequence[int]], optional: set[str]
) -> None:
    """Raise ValueError unless `given` has the names and shapes of `expected`; `optional` names may be missing."""
    if wrong := differences(given, expected, optional):
        raise ValueError(f"{what} is of another model: {wrong}")
