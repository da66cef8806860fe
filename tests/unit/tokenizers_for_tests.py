"""A tokenizer of single characters, made here: what the data tests need of a model."""

from __future__ import annotations

import string

from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHAT_TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"


def char_tokenizer(*, chat: bool = False) -> PreTrainedTokenizerFast:
    """One token a character, and no special tokens around a text."""
    vocabulary = {"<unk>": 0} | {c: i + 1 for i, c in enumerate(string.printable)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
    wrapped.chat_template = CHAT_TEMPLATE if chat else None
    return wrapped
