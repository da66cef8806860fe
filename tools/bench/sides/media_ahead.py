"""A rollout worker's requests with pictures: `python media_ahead.py RUN REQUESTS PROMPTS SIDE TOKENS DATA_WORKERS`.

The real worker, engine and processor on a tiny Qwen3-VL: it claims each request, reads its prompts (JPEG files of SIDE pixels a
side, noise), generates TOKENS tokens for two samples a prompt and publishes the shard. Prints {"read_s": …, "generate_s": …,
"ahead": …, "request": …}: seconds of all requests but the first, for which nothing could be read ahead; how far resident memory of
the processes that read ahead rose at most, and the media of one request, in bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import torch
from PIL import Image
from safetensors.torch import load_file

from relax_hpc.files.publish import to_json
from relax_hpc.files.run_dir import RunDir
from relax_hpc.recipe import dump_recipe, load_recipe
from relax_hpc.recipe.schema import Recipe
from relax_hpc.roles.common.process import RoleProcess
from relax_hpc.roles.rollout.worker import RolloutWorker
from relax_hpc.spool.queue import RequestQueue
from relax_hpc.spool.request import Request
from relax_hpc.spool.shard import Shard
from relax_hpc.telemetry import read_metrics
from relax_hpc.trainers.build import materialise
from relax_hpc.weights import FilePublisher


def pictures(folder: Path, count: int, side: int) -> Path:
    """A file of prompts, each with a picture of its own."""
    random = np.random.default_rng(0)
    rows = []
    for i in range(count):
        Image.fromarray(random.integers(0, 255, (side, side, 3), np.uint8)).save(folder / f"{i}.jpg", quality=90)
        rows.append({"prompt": "<image>what is it?", "image": f"{i}.jpg", "answer": "x"})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "rows.jsonl"


def prepare(run: RunDir, requests: int, prompts: int, side: int, tokens: int, data_workers: int) -> None:
    run.create()
    rows = pictures(run.root, requests * prompts, side)
    rollout = {"max_new_tokens": tokens, "device": "cpu", "data_workers": data_workers, "groups_per_request": prompts}
    made = Recipe.model_validate({
        "model": {"context": 1024, "layers": 3, "hidden_size": 128, "vision": {}, "alphabet": "abcdefghijklmnopqrstuvwxyz ?"},
        "source": [{"prompts": str(rows), "media": {"image": "image"}}], "rollout": rollout,
        "trainer": {"learning_rate": 1e-3, "device": "cpu", "prompts_per_step": prompts}, "media": {"image_tokens": [4, 64]},
    })  # fmt: skip
    run.recipe.write_text(dump_recipe(made))
    run.identity.write_bytes(to_json({"id": "bench"}))
    materialise(made.model, run.model, 0)
    (commit_dir := run.lease / "000001").mkdir()
    weights = load_file(run.model / "model.safetensors")
    FilePublisher(run, commit_dir, 1).publish(0, lambda: list(weights.items()))
    names = [tuple((0, i * prompts + j) for j in range(prompts)) for i in range(requests)]
    RequestQueue(run).put([Request(f"r{i:06d}-000", asked, 2, i, 0) for i, asked in enumerate(names)])


class Peak(threading.Thread):
    """The most private memory that this process's children have together, looked at all the time."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.least, self.most = float("inf"), 0

    def run(self) -> None:
        while True:
            now = sum(child.memory_info().rss - child.memory_info().shared for child in psutil.Process().children())
            self.least, self.most = min(self.least, now or self.least), max(self.most, now)
            time.sleep(0.01)


def main() -> None:
    run, numbers = RunDir(sys.argv[1]), [int(n) for n in sys.argv[2:]]
    prepare(run, *numbers)
    about = argparse.Namespace(
        run=run.root, name="rollout-0", attempt=0, supervisor=None, role="rollout", claim_dir="w"
    )
    worker = RolloutWorker(RoleProcess(about, run, load_recipe(run.recipe)), "w")
    peak: Peak | None = None
    for number in range(numbers[0]):
        worker.generate(*worker.wait_for_claim())
        if number == 0:  # the processes have all their modules now
            peak = Peak()
            peak.start()
    worker.publisher.close()
    worker.report_published()
    lines = [line for line in read_metrics(run.metrics / "rollout-0.jsonl")[0] if line.get("kind") == "request"][1:]
    with Shard(run.shard("r000000-000")) as shard:
        request = shard.media_index.bytes
    read_s = sum(line["read_s"] for line in lines)
    generate_s = sum(line["generate_s"] for line in lines) - read_s
    ahead = max(0, peak.most - peak.least) if peak and peak.most else 0
    print(json.dumps({"read_s": read_s, "generate_s": generate_s, "ahead": ahead, "request": request}), flush=True)
    worker.runner.close()
    os._exit(0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
