"""TRL's side of trl_accuracy.py: `python trl_accuracy_peer.py SETTINGS.json`; one JSON object on stdout.

Keeps the weights of every few steps; the clock stands still meanwhile. Everything that the settings do not name is TRL's default.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Keeper(TrainerCallback):
    """The time at the end of every step, and the weights after every `every` of them."""

    def __init__(self, model: torch.nn.Module, folder: Path, every: int) -> None:
        self.model, self.folder, self.every = model, folder, every
        self.ends: list[float] = []
        self.saving_s = 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.ends.append(time.time() - self.saving_s)
        if state.global_step % self.every == 0:
            weights = {name: p.detach().contiguous() for name, p in self.model.named_parameters()}  # tied ones once
            save_file(weights, self.folder / f"{state.global_step}.safetensors")
            self.saving_s += time.time() - self.saving_s - self.ends[-1]


def exact(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    return [float(said.strip() == right.strip()) for said, right in zip(completions, answer, strict=True)]


def main() -> None:
    given = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    config = GRPOConfig(
        output_dir=given["output"], use_cpu=True, bf16=False, gradient_checkpointing=False, report_to=[], disable_tqdm=True,
        per_device_train_batch_size=given["samples"], num_generations=given["group"], max_completion_length=given["new_tokens"],
        max_steps=given["steps"], learning_rate=given["learning_rate"], adam_beta1=given["betas"][0], adam_beta2=given["betas"][1],
        lr_scheduler_type="constant_with_warmup", warmup_steps=given["lr_warmup_steps"], beta=0.0, epsilon=given["clip"][0],
        epsilon_high=given["clip"][1], loss_type="dapo", temperature=1.0, save_strategy="no", seed=given["seed"],
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(given["model"], dtype=torch.float32)
    rows = load_dataset("json", data_files=given["prompts"], split="train")
    keeper = Keeper(model, Path(given["output"]), given["every"])
    trainer = GRPOTrainer(
        model,
        reward_funcs=exact,
        args=config,
        train_dataset=rows,
        processing_class=AutoTokenizer.from_pretrained(given["model"]),
        callbacks=[keeper],
    )
    began = time.time()
    trainer.train()
    print(json.dumps({"began": began, "ends": keeper.ends}))


if __name__ == "__main__":
    main()
