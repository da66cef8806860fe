"""A whole run whose samples are played by an agent, a program with OpenAI's client: what is trained is what was sampled."""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path

import numpy as np
import tomli_w
from transformers import AutoTokenizer

from relax_hpc.files.run_dir import RunDir
from relax_hpc.records import Finish
from relax_hpc.spool.shard import Shard
from tests import tiny
from tests.runs import SMALL, audited, relax_hpc, steps_of
from tests.unit.test_gateway import ALPHABET, TEMPLATE

AGENT = """
import json, os, sys, zlib
import openai

task = json.load(open(os.environ["RELAX_HPC_TASK"]))
if task["metadata"]["number"] == 0 and os.urandom(1)[0] < 128:
    sys.exit("no such luck")
client = openai.OpenAI(max_retries=0)
messages, heard = [{"role": "user", "content": task["prompt"]}], []
for question in ("sure?", None):
    reply = client.chat.completions.create(model=os.environ["OPENAI_MODEL"], messages=messages, logprobs=True)
    [choice] = reply.choices
    heard.append([[c.token, c.logprob] for c in choice.logprobs.content])
    messages += [choice.message.model_dump(), {"role": "user", "content": question}]
ticket = zlib.crc32(os.environ["OPENAI_API_KEY"].encode()) % 2**24
with open(f"{sys.argv[1]}/{ticket}.json", "x") as file:
    json.dump(heard, file)
with open(os.environ["RELAX_HPC_RESULT"], "w") as file:
    json.dump({"reward": len({token for turn in heard for token, _ in turn}), "metadata": {"ticket": ticket}}, file)
"""
STEPS, CONTEXT = 2, 128


def test_an_agent_is_trained_on_exactly_what_it_was_told(tmp_path: Path) -> None:
    model, heard = tmp_path / "model", tmp_path / "heard"
    heard.mkdir()
    tiny.folder(tiny.recipe(model={"context": CONTEXT, "alphabet": ALPHABET}), model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(model)
    (tmp_path / "agent.py").write_text(AGENT)
    rows = [{"prompt": f"{i}+1=", "answer": str(i + 1), "number": i} for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = tomllib.loads(SMALL.format(root=tmp_path / "runs"))
    recipe["run"] |= {"steps": STEPS}
    recipe["model"] = {"path": str(model)}
    recipe["trainer"] |= {"prompts_per_step": 4}
    command = [sys.executable, str(tmp_path / "agent.py"), str(heard)]
    recipe["source"] = [{"prompts": str(tmp_path / "rows.jsonl"), "agent": {"command": command, "at_once": 4}}]
    path = tmp_path / "recipe.toml"
    path.write_text(tomli_w.dumps(recipe))

    relax_hpc("run", path, timeout=200)

    run = RunDir(tmp_path / "runs" / "small")
    audited(run)
    steps = steps_of(run)
    assert len(steps) == STEPS and all(s["grad_norm"] > 0 for s in steps)
    assert steps[0]["engine_diff"] < 1e-5, "the trainer finds other logprobs"
    played = failed = 0
    for file in sorted(run.shards.rglob("*.h5")):
        with Shard(file) as shard:
            groups = [shard.group(i) for i in range(len(shard.groups))]
        for group in groups:
            begin = f"user: {group.prompt.metadata['number']}+1=<eos>assistant: "
            for sample in group.samples:
                if sample.finish is Finish.FAILED:
                    failed += 1
                    assert group.prompt.metadata["number"] == 0
                    assert "the agent failed" in group.reason + group.detail and "no such luck" in group.detail
                    continue
                played += 1
                turns = json.loads((heard / f"{int(sample.extra['ticket'])}.json").read_text())
                own = sample.loss_mask == 1
                trained = zip(sample.tokens[own].tolist(), sample.logprobs[own].tolist(), strict=True)
                said = [(tokenizer.convert_tokens_to_ids(token), p) for turn in turns for token, p in turn]
                assert [*trained] == said, "drift"
                first = "".join(token for token, _ in turns[0])
                end = "" if first.endswith("<eos>") else "<eos>"
                whole = f"{begin}{first}{end}user: sure?<eos>assistant: {''.join(token for token, _ in turns[1])}"
                shown = np.concatenate([group.prompt.tokens, sample.tokens])
                assert tokenizer.decode(shown.tolist()) == whole
    assert played >= STEPS * 12
