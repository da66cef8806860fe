"""Make a model folder that stands in for Qwen3-0.6B on a machine without a GPU: `python tiny_qwen3.py ROWS.jsonl FOLDER`.

The architecture is Qwen3's, with 0.9 M random parameters; a tokenizer of 2,048 tokens is learned from the rows, with a chat template.
It knows nothing: it shows that a recipe, a data file and a reward work together.
"""

import json
import sys

import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def main(rows: str, folder: str) -> None:
    """Write config.json, model.safetensors and the tokenizer into `folder`."""
    with open(rows, encoding="utf-8") as lines:
        texts = [json.loads(line)["prompt"][0]["content"] for line in lines]
    learned = ByteLevelBPETokenizer()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    learned.train_from_iterator(texts, vocab_size=2048, special_tokens=special, show_progress=False)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=learned._tokenizer, pad_token="<|endoftext|>", eos_token="<|im_end|>"
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        initializer_range=0.09,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
