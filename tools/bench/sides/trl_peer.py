"""TRL's side: GRPOTrainer on the CPU, `python trl_peer.py MODEL PROMPTS.jsonl NEW_TOKENS STEPS`; one JSON object on stdout.

Runs in the environment of locks/trl.txt, in fp32, with transformers' own generation. TRL's defaults stay, but for what makes
both sides the same: batch, group, clip range, learning rate, temperature, no KL term, one global token denominator ("dapo").
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import reward
import torch
from datasets import Dataset, Image, load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoProcessor,
    AutoTokenizer,
    Qwen3VLForConditionalGeneration,
    TrainerCallback,
)
from trl import GRPOConfig, GRPOTrainer

BATCH, GROUP, LEARNING_RATE = 32, 8, 1e-4


class Clock(TrainerCallback):
    """The time at the end of every step, and the seconds that named methods took in all of them."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.spent: list[dict[str, float]] = []
        self.now: dict[str, float] = defaultdict(float)

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ends.append(time.monotonic())
        self.spent.append(dict(self.now))
        self.now.clear()

    def time(self, owner: Any, method: str, name: str) -> None:
        """Count what `owner.method` takes under `name`."""
        inner: Callable[..., Any] = getattr(owner, method)

        @functools.wraps(inner)
        def timed(*args: Any, **options: Any) -> Any:
            begin = time.monotonic()
            try:
                return inner(*args, **options)
            finally:
                self.now[name] += time.monotonic() - begin

        setattr(owner, method, timed)


def vowels(completions: list[Any], **_: Any) -> list[float]:
    texts = [
        each if isinstance(each, str) else each[0]["content"] for each in completions
    ]  # chat messages, with pictures
    return [reward.vowels(None, text) for text in texts]


def main() -> None:
    folder, prompts, new_tokens, steps = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    config = GRPOConfig(
        output_dir=os.path.join(folder, "trl"), use_cpu=True, bf16=False, gradient_checkpointing=False, report_to=[], disable_tqdm=True,
        per_device_train_batch_size=BATCH, num_generations=GROUP, max_completion_length=new_tokens, max_steps=steps,
        learning_rate=LEARNING_RATE, lr_scheduler_type="constant", beta=0.0, epsilon=0.2, epsilon_high=0.28, loss_type="dapo",
        temperature=1.0, save_strategy="no", logging_steps=1,
    )  # fmt: skip
    rows = load_dataset("json", data_files=prompts, split="train")
    clock = Clock()
    model: Any
    if "image" in rows.column_names:
        model = Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
        tokenizer = AutoProcessor.from_pretrained(folder)
        shown = [str(Path(prompts).with_name(name)) for name in rows["image"]]
        said = [[{**turn, "content": turn["content"][-1]["text"]} for turn in prompt] for prompt in rows["prompt"]]
        rows = Dataset.from_dict({"prompt": said, "image": shown}).cast_column("image", Image())
    else:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        rows = rows.select_columns(["prompt"])
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.eos_token = "<end>"
    trainer = GRPOTrainer(
        model, reward_funcs=vowels, args=config, train_dataset=rows, processing_class=tokenizer, callbacks=[clock]
    )
    clock.time(trainer, "_generate_and_score_completions", "generate, reward, advantages")
    clock.time(trainer.model, "generate", "of which model.generate")
    clock.time(trainer, "compute_loss", "loss forward")
    clock.time(trainer.accelerator, "backward", "backward")
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "reward" in entry]
    print(json.dumps({
        "ends": clock.ends, "spent": clock.spent, "lengths": [e["completions/mean_length"] for e in logged],
        "rewards": [e["reward"] for e in logged],
    }))  # fmt: skip


if __name__ == "__main__":
    main()
