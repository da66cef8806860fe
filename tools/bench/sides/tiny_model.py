"""Write a randomly initialized Qwen3 model and its tokenizer of single characters: `python tiny_model.py FOLDER SIZE`.

The tokenizer names no end token, so every answer has exactly the length that is asked for. TRL cannot do without one: its side
takes `<end>`, which has an id for which the model has no row, so that it is never drawn either.
"""

from __future__ import annotations

import string
import sys
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

ROWS = 704
SIZES: dict[str, dict[str, Any]] = {
    "164k": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
    "2.2M": {"hidden_size": 256, "intermediate_size": 544, "num_hidden_layers": 3},
}


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a character; the rest of the vocabulary are letters of other alphabets. `<end>` lies behind the model's rows."""
    characters = list(string.printable) + [chr(c) for c in range(0x4E00, 0x4E00 + ROWS)]
    vocabulary = {"<pad>": 0, "<unk>": 1} | {c: i + 2 for i, c in enumerate(characters[: ROWS - 2])} | {"<end>": ROWS}
    made = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = Split(Regex("."), "isolated")
    made.decoder = Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", unk_token="<unk>")


def main() -> None:
    folder, size = Path(sys.argv[1]), sys.argv[2]
    torch.manual_seed(0)
    hidden = SIZES[size]["hidden_size"]
    config = Qwen3Config(
        vocab_size=ROWS, num_attention_heads=4, num_key_value_heads=2, head_dim=hidden // 4, max_position_embeddings=512,
        tie_word_embeddings=False, pad_token_id=0, bos_token_id=None, eos_token_id=None, **SIZES[size],
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).float()
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    print(sum(p.numel() for p in model.parameters()))


if __name__ == "__main__":
    main()
