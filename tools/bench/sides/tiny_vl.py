"""Write a randomly initialized Qwen3-VL with its processor, and prompts with pictures: `python tiny_vl.py FOLDER PROMPTS`.

Every answer has exactly the length that is asked for, as in tiny_model.py: special tokens, placeholders among them, are as good as
never drawn. All hidden states share a large first value, which the output's rows of these tokens point away from.
"""

from __future__ import annotations

import json
import string
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image

from relax_hpc.recipe.tables.model import TinyModel
from relax_hpc.trainers.tiny_model import make_tiny

SIDE_PX = 96
"""Of a picture: 36 tokens."""
SHARED, AWAY = 1.0, -10.0
MODEL = {
    "hidden_size": 128, "intermediate_size": 384, "layers": 3, "context": 512, "alphabet": string.printable,
    "vision": {"hidden_size": 64, "intermediate_size": 192, "layers": 3, "heads": 4},
}  # fmt: skip


def make(folder: Path) -> int:
    """Write the model; its parameters."""
    make_tiny(TinyModel.model_validate(MODEL), folder, 0)
    processor = transformers.AutoProcessor.from_pretrained(folder)
    model: Any = transformers.Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    embedded = model.get_input_embeddings().weight
    model.config.tie_word_embeddings = model.config.text_config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(embedded.detach().clone())
    with torch.no_grad():
        embedded[:, 0] = SHARED
        model.lm_head.weight[:, 0] = 0
        special = [i for token, i in processor.tokenizer.get_vocab().items() if len(token) > 1]
        model.lm_head.weight[special] = 0
        model.lm_head.weight[special, 0] = AWAY
    model.save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())


def main() -> None:
    folder, count = Path(sys.argv[1]), int(sys.argv[2])
    print(make(folder / "model"))
    rng, rows = np.random.default_rng(0), []
    for i in range(count):
        Image.fromarray(rng.integers(0, 255, (SIDE_PX, SIDE_PX, 3), np.uint8)).save(folder / f"{i}.png")
        content = [{"type": "image"}, {"type": "text", "text": f"what is picture {i % 10}"}]
        rows.append({"prompt": [{"role": "user", "content": content}], "image": f"{i}.png", "answer": ""})
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
