"""A worker's memory while it generates and publishes requests with media: `python media_worker.py RUN REQUESTS PROMPTS BYTES SAMPLES`.

It does what a rollout worker does between its engine and the disk: the media of a request's prompts come into memory, as a
processor's tensors; each prompt gets its samples; the shard is encoded and published in the background while the next
request begins. Prints {"peak": …, "request": …, "distinct": …, "stored": …} in bytes: how far resident memory rose at most, media of
one request and of all, and the files of all.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

import numpy as np
from shard_memory import resident

from relax_hpc.files.node_cache import NodeCache
from relax_hpc.files.run_dir import RunDir
from relax_hpc.records import Finish, Group, Media, Prompt, Sample
from relax_hpc.spool.publisher import ShardPublisher
from relax_hpc.spool.queue import Claim, RequestFile
from relax_hpc.spool.request import Request
from relax_hpc.spool.shard_writer import encode

PATCH_VALUES = 1536
ANSWER = 256
WORKER = "rollout-0"


def media(random: np.random.Generator, size: int) -> Media:
    """A picture whose pixels have `size` bytes."""
    patches = size // (4 * PATCH_VALUES)
    pixels = random.standard_normal((patches, PATCH_VALUES), np.float32)
    return Media.of({"pixel_values": pixels, "image_grid_thw": np.array([[1, 2, patches // 2]])})


def groups_of(random: np.random.Generator, prompts: int, size: int, samples: int) -> list[Group]:
    """A request's groups, each with a picture of its own."""
    tokens = random.integers(0, 1000, ANSWER).astype(np.int32)
    sample = Sample(tokens, np.ones(ANSWER, np.uint8), np.zeros(ANSWER, np.float32), [(0, 0)], Finish.STOP)
    asked = [Prompt(0, i, "", tokens, "1", media=media(random, size)) for i in range(prompts)]
    return [Group(prompt, [sample] * samples) for prompt in asked]


def claim_of(run: RunDir, number: int) -> Claim:
    """A claimed request, as the worker holds it."""
    request_file = RequestFile(f"r{number:06d}-000", 0, 0)
    path = run.claimed_requests / WORKER / request_file.name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"{}")
    return Claim(Request(request_file.request_id, (), 1, 0, 0), request_file, path)


def work(run: RunDir, requests: int, prompts: int, size: int, samples: int) -> int:
    """Generate and publish; return the bytes of the distinct media."""
    random, publisher, distinct = np.random.default_rng(0), ShardPublisher(run, WORKER, NodeCache(run, None)), 0
    for number in range(requests):
        distinct += generate(publisher, claim_of(run, number), groups_of(random, prompts, size, samples))
    publisher.close()
    report(publisher)
    return distinct


def generate(publisher: ShardPublisher, claim: Claim, groups: list[Group]) -> int:
    """Publish a request; return the bytes of its media."""
    publisher.put(claim, encode(claim.request.id, groups, {"version": 0}), {})
    report(publisher)
    return sum(a.nbytes for g in groups if g.prompt.media for a in g.prompt.media.tensors.values())


def report(publisher: ShardPublisher) -> None:
    for publication in publisher.ended():
        publisher.finish(publication)


def main() -> None:
    run = RunDir(sys.argv[1])
    requests, prompts, size, samples = map(int, sys.argv[2:])
    run.create()
    run.identity.write_text('{"id": "bench"}')
    work(run, 1, 1, size, samples)  # modules and threads are there
    run.shard("r000000-000").unlink()
    gc.collect()
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    distinct = work(run, requests, prompts, size, samples)
    peak = resident("VmHWM") - before
    stored = sum(path.stat().st_size for path in run.shards.rglob("*.h5"))
    print(json.dumps({"peak": peak, "request": distinct // requests, "distinct": distinct, "stored": stored}))


if __name__ == "__main__":
    main()
