"""The agent quickstart's task played by examples/calculator_agent.py, a program with OpenAI's client, through the gateway.

trained with the environment ──eval──► its success as the agent ──fork──► some steps of training on what the agent did
                                       drift: tokens in the loss other than those that the agent's client heard
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rich.table import Table
from transformers import AutoTokenizer

from relax_hpc.files.run_dir import RunDir
from relax_hpc.records import Finish
from relax_hpc.spool.shard import Shard
from tools.bench.common import BENCH, ROOT, SIDES, doing, our_environment, show
from tools.bench.runs import run

RECIPE, FOLDER = ROOT / "recipes" / "quickstart-agent.toml", BENCH / "agents"
HEARD = FOLDER / "heard"
"""What the agents' clients heard."""
STEPS, PROMPTS = 3, 4
"""Steps of the training through the gateway, and prompts of a step."""


def played_by_agent(asked: int) -> dict[str, Any]:
    """Write the recipe's rows as plain text; returns keys by which the agent plays them in place of the environment."""
    files = {name: FOLDER / f"plain-{name}.jsonl" for name in ("tasks", "begun", "test")}
    for name, file in files.items():
        rows = [json.loads(line) for line in (FOLDER / "data" / "agent" / f"{name}.jsonl").read_text().splitlines()]
        answers = [row.get("result", row["answer"]) for row in rows]
        plain = [{"prompt": row["prompt"][0]["content"], "answer": a} for row, a in zip(rows, answers, strict=True)]
        file.write_text("".join(json.dumps(row) + "\n" for row in plain))
    shutil.rmtree(HEARD, ignore_errors=True)
    HEARD.mkdir()
    command = [sys.executable, str(SIDES / "heard.py"), str(HEARD), str(ROOT / "examples" / "calculator_agent.py")]
    agent = f"agent={{command={json.dumps(command)}, timeout_s=300}}"
    return {
        "source": f'[{{prompts="{files["tasks"]}", {agent}}}, {{prompts="{files["begun"]}", weight=2, {agent}}}]',
        "evaluation.source": f'[{{prompts="{files["test"]}", limit={asked}, {agent}}}]',
    }


def score(root: Path, sets: Mapping[str, Any]) -> float:
    """Score a run's newest checkpoint with these keys."""
    output = FOLDER / "evaluated"
    shutil.rmtree(output, ignore_errors=True)
    options = [word for key, value in sets.items() for word in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "relax_hpc", "eval", str(root), *options, "--output", str(output), "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, env=our_environment(), text=True, check=True)
    return float(json.loads(done.stdout)["score"])


def drift(root: Path) -> tuple[int, int]:
    """Count the tokens in the loss of a run, and those that are others than the agents' clients heard."""
    run_dir = RunDir(root)
    tokenizer = AutoTokenizer.from_pretrained(next(path.parent for path in root.rglob("tokenizer.json")))
    trained = other = 0
    for path in sorted(run_dir.shards.rglob("*.h5")):
        with Shard(path) as shard:
            samples = [sample for i in range(len(shard.groups)) for sample in shard.group(i).samples]
        for sample in samples:
            if sample.finish is Finish.FAILED:
                continue
            own = sample.loss_mask == 1
            kept = [*zip(sample.tokens[own].tolist(), sample.logprobs[own].tolist(), strict=True)]
            said = json.loads((HEARD / f"{int(sample.extra['ticket'])}.json").read_text())
            told = [(tokenizer.convert_tokens_to_ids(token), logprob) for token, logprob in said]
            trained += len(kept)
            other += sum(a != b for a, b in zip(kept, told, strict=False)) + abs(len(kept) - len(told))
    return trained, other


def gateway(given: Any) -> dict[str, Any]:
    """Score the policy that the part `learn` trained as an agent, and train it on for some steps as one."""
    root = BENCH / "runs" / "agents" / "with"
    if not root.is_dir():
        raise SystemExit(f"'{root}' is not there: run the part `learn` first")
    sets = played_by_agent(given.asked)
    with doing(f"{given.asked} tasks through the gateway"):
        success = score(root, sets)
    last = RunDir(root).checkpoint_steps()[-1]
    sets |= {"run.steps": last + STEPS, "evaluation.every": 10**6}
    sets |= {"trainer.prompts_per_step": PROMPTS, "rollout.groups_per_request": PROMPTS}
    with doing(f"{STEPS} steps through the gateway"):
        done = run(RECIPE, "agents/gateway", sets, fork_of=root)
    trained, other = drift(done.root)
    table = Table("tasks", "success", "tokens trained through the gateway", "other than heard")
    table.add_row(str(given.asked), f"{success:.3f}", str(trained), str(other))
    show(table)
    return {"gateway_success": round(success, 3), "drift_tokens": other}
