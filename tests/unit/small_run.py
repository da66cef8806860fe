"""A small run directory, written by hand around real shards: one request for each thing that can become of a group.

Batch 0 and 1 are trained at steps 0 and 1, two requests of two groups with two samples each:
    r000000-000  trained at 0    r000000-001  trained at 0, group 1 filtered (zero_std)
    r000001-000  trained at 1, group 1 failed    r000001-001  dropped (stale), replaced by r000001-001x1, trained at 1
    r000002-000  no step has taken it    e000000-000  evaluation    quarantine/r000000-000.rollout-1  lost the race for its name
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from relax_hpc.files.run_dir import RunDir
from relax_hpc.records import Finish, Group, Prompt, Sample
from relax_hpc.spool.ledger import checksum
from relax_hpc.spool.shard_writer import encode

ALPHABET = "0123456789+= <>&abcdefghijklmnopqrstuvwxyz"
END = 0
LAST_TRAINED = "r000001-001x1"


def build(root: Path) -> RunDir:
    run = RunDir(root)
    run.create()
    run.model.mkdir()
    tokenizer = _tokenizer()
    tokenizer.save(str(run.model / "tokenizer.json"))
    run.identity.write_text(json.dumps({"name": "small"}))
    run.recipe.write_text('[run]\nname = "small"\nsteps = 2\n[async]\nmax_staleness = 1\n')
    pair = lambda i, version, **k: [_group(tokenizer, i, version, **k), _group(tokenizer, i + 1, version, **k)]
    _shard(run, "r000000-000", pair(0, 0))
    _shard(run, "r000000-001", pair(2, 0))
    failed = Group(_prompt(tokenizer, 5), [], "TimeoutError: reward 'math' took longer than 30 s")
    _shard(run, "r000001-000", [_group(tokenizer, 4, 0, then=1), failed])
    _shard(run, "r000001-001", pair(6, 0, text="long answer"))
    _shard(run, LAST_TRAINED, pair(6, 1, extra={"format": 0.5}, text="script>alert"))
    _shard(run, "r000002-000", pair(8, 1))
    _shard(run, "e000000-000", [_group(tokenizer, 90, 0, count=1)])
    (run.quarantine / "r000000-000.rollout-1.h5").write_bytes(
        b"".join(encode("r000000-000", pair(0, 0), {"version": 0}))
    )
    (run.quarantine / "r000000-000.rollout-1.reason.json").write_text(
        '{"reason": "another attempt was published first"}'
    )
    _ledger(run, 0, {"r000000-000": 0, "r000000-001": 0}, filtered={"r000000-001/1": "zero_std"})
    dropped = [{"request": "r000001-001", "reason": "stale", "replacement": LAST_TRAINED}]
    _ledger(run, 1, {"r000001-000": 0, LAST_TRAINED: 1}, dropped=dropped)
    _metrics(run)
    run.outcome.write_text(json.dumps({"outcome": "done", "reason": "all steps are trained", "step": 2, "time": 100.0}))
    return run


def _tokenizer() -> Tokenizer:
    vocabulary = {"<eos>": END, "?": 1, **{c: i + 2 for i, c in enumerate(ALPHABET)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, "?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<eos>"])
    return tokenizer


def _prompt(tokenizer: Tokenizer, index: int) -> Prompt:
    text = f"{index}+1="
    return Prompt(
        0,
        index,
        text,
        np.array(tokenizer.encode(text).ids, np.int32),
        answer=str(index + 1),
        metadata={"level": index, "kind": "überschlagen" if index % 2 else None},
    )


def _group(
    tokenizer: Tokenizer,
    index: int,
    version: int,
    *,
    then: int | None = None,
    count: int = 2,
    text: str = "",
    extra: dict[str, float] | None = None,
) -> Group:
    """Sample 0 is right, sample 1 wrong and cut (worst: that of prompt 2); with `then`, weights change after the first token."""
    samples = []
    for k in range(count):
        answer = text + ("<b>" if k else "") + str(index + 1 + k)
        tokens = np.array([*tokenizer.encode(answer).ids, *([END] if k == 0 else [])], np.int32)
        samples.append(
            Sample(
                tokens, np.ones(len(tokens), np.uint8), np.full(len(tokens), -0.5, np.float32),
                [(0, version), *([(1, then)] if then is not None and len(tokens) > 1 else [])],
                Finish.LENGTH if k else Finish.STOP, reward=1.0 - k * (1.5 if index == 2 else 1.25), raw_reward=1.0 - k, extra=extra or {},
            )
        )  # fmt: skip
    return Group(_prompt(tokenizer, index), samples)


def _shard(run: RunDir, request: str, groups: list[Group]) -> None:
    path = run.shard(request)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"".join(encode(request, groups, {"version": 0, "worker": "rollout-0", "attempt": 0})))


def _ledger(
    run: RunDir, step: int, take: dict[str, int], filtered: dict[str, str] | None = None, dropped: Any = ()
) -> None:
    entry = {
        "step": step, "incarnation": 1, "lineage": 0, "time": 10.0 * step, "filtered": filtered or {}, "dropped": list(dropped), "learned": [],
        "take": [{"request": o, "first_version": v} for o, v in take.items()],
    }  # fmt: skip
    path = run.ledger_entry(step)
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({**entry, "checksum": checksum(entry)}))


def _metrics(run: RunDir) -> None:
    step = {
        "kind": "step", "raw_reward": 0.5, "loss": 0.1, "grad_norm": 1.0, "learning_rate": 1e-5, "samples": 8, "length_mean": 4.0,
        "length_max": 6, "truncated": 0.5, "wait_s": 1.0, "train_s": 2.0, "publish_s": 0.5, "step_s": 4.0, "spool_depth": 1,
        "failed_groups": 0, "groups": 4, "generated_reward": 0.5, "filtered_groups": 0, "dropped_requests": 0, "replayed": False, "read_s": 0.1, "settle_s": 0.2,
        "forward_backward_s": 1.5, "optimize_s": 0.25,
    }  # fmt: skip
    score = {"kind": "eval", "lineage": 0, "prompts": 1, "sources": [], "failures": {}}
    lines: dict[str, list[dict[str, Any]]] = {
        "trainer-0": [
            {**score, "time": 5.0, "version": 0, "score": 0.1},
            {**step, "time": 10, "step": 0, "version": 1, "reward": 0.2, "tokens": 30, "age_mean": 0, "age_max": 0, "age_histogram": [30]},
            {**step, "time": 15.0, "step": 1, "version": 2, "reward": -9.0, "tokens": 1, "age_mean": 0, "age_max": 0, "age_histogram": [1]},
            {"time": 18.0, "kind": "dropped", "request": "r000001-001", "length_mean": 14.0},
            {**step, "time": 20.0, "step": 1, "version": 2, "reward": 0.4, "tokens": 40, "age_mean": 0.25, "age_max": 1,
             "age_histogram": [30, 10], "replayed": True},
            {"time": 21.0, "kind": "checkpoint", "step": 2, "seconds": 0.1},
            {**score, "time": 22.0, "version": 2, "score": 0.3},
        ],
        "rollout-0": [
            {"time": 5.8 + 2.5 * i, "kind": "request", "request": o, "version": i // 4, "samples": 4, "tokens": 16, "began": 4.0 + 2.5 * i,
             "generate_s": 1.0, "score_s": 0.5, "publish_s": 0.1, "wait_s": 0.4, "sync_s": 0.0 if i % 4 else 0.1, "reward": 0.5}
            for i, o in enumerate(["r000000-000", "r000000-001", "r000001-000", "r000001-001", LAST_TRAINED, "r000002-000"])
        ],
        "supervisor": [
            {"time": 1.0, "kind": "start", "role": "trainer-0", "attempt": 0, "reason": ""},
            {"time": 12.0, "kind": "lost", "role": "trainer-0", "attempt": 0, "reason": "killed by signal 9"},
            {"time": 12.5, "kind": "restart", "role": "trainer-0", "attempt": 1, "reason": "killed by signal 9"},
        ],
    }  # fmt: skip
    for role, records in lines.items():
        (run.metrics / f"{role}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
