"""Agents as processes: each way in which one fails costs its own sample, is named, and leaves no process behind."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from pydantic import ValidationError
from transformers import AutoTokenizer

from relax_hpc.records import Finish, Group
from relax_hpc.roles.rollout.runner import RolloutRunner
from relax_hpc.spool.request import Request
from relax_hpc.trainers import make_trainer
from tests import tiny
from tests.unit.test_gateway import ALPHABET, TEMPLATE

GOOD = """
import json, os, urllib.request
def ask(model="policy"):
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "1+1="}]}).encode()
    headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    return json.load(urllib.request.urlopen(urllib.request.Request(url, body, headers)))
def leave(text='{"reward": 2}'):
    open(os.environ["RELAX_HPC_RESULT"], "w").write(text)
"""
SLEEP_S = str(10**6 + os.getpid())
"""Names the process that an agent leaves behind."""
DEAF = f"""
import signal, subprocess, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen(["sleep", "{SLEEP_S}"])
"""
KINDS = {
    "exits": (GOOD + "ask(); leave(); print('bad luck'); raise SystemExit(3)", "exit status 3; its last output:\nbad luck"),
    "says too much": (GOOD + "ask(); print('x' * 10**7); raise SystemExit('the end')", "xxxx"),
    "no reward": (GOOD + "ask()", "ended without writing $RELAX_HPC_RESULT"),
    "not a number": (GOOD + "ask(); leave('{\"reward\": \"good\"}')", "the reward is 'good'; expected"),
    "no JSON": (GOOD + "ask(); leave('{')", "JSONDecodeError"),
    "never asks": (GOOD + "leave()", "the agent never asked the model"),
    "deaf": (GOOD + DEAF + "time.sleep(1000)", "the agent reached its time limit"),
    "for ever": (
        GOOD + "while True:\n    try: ask('gpt-4o')\n    except OSError: pass",
        "requests in a row were refused, the last one: there is no model 'gpt-4o'",
    ),
    "good": (GOOD + "ask(); leave()", ""),
}  # fmt: skip
"""Kind of agent: its program, and what the detail of its failure says."""
PICK = "import json, os; exec(json.load(open(os.environ['RELAX_HPC_TASK']))['metadata']['program'])"


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Group]]:
    """A group of two agents of each kind, played at once."""
    folder = tmp_path_factory.mktemp("agents")
    rows = [{"prompt": kind, "answer": "", "program": program} for kind, (program, _) in KINDS.items()]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    agent = {"command": [sys.executable, "-S", "-c", PICK], "timeout_s": 8, "at_once": 20}
    recipe = tiny.recipe(
        model={"context": 128, "alphabet": ALPHABET},
        source=[{"prompts": str(folder / "rows.jsonl"), "agent": agent}],
        rollout={"device": "cpu", "max_new_tokens": 4},
    )
    model = tiny.folder(recipe, folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(model)
    runner = RolloutRunner(recipe, model)
    runner.engine.load(0, dict(make_trainer(recipe, model, 0, 1).export()).items())
    request = Request("r0", tuple((0, i) for i in range(len(KINDS))), 2, 1, 0)
    groups = runner.groups(request, runner.prompts(request), lambda state: None)
    yield {group.prompt.text: group for group in groups}
    runner.close()


@pytest.mark.parametrize("kind", KINDS)
def test_an_agent_that_fails_is_named_and_fails_alone(played: dict[str, Group], kind: str) -> None:
    group, said = played[kind], KINDS[kind][1]
    if kind != "good":
        assert [s.finish for s in group.samples] == [Finish.FAILED] * 2 and group.reason.startswith("the agent")
        assert said in f"{group.reason}: {group.detail}" and len(group.detail) < 20_000
    else:
        assert not group.reason and [s.reward for s in group.samples] == [2, 2]
        assert all(s.loss_mask.all() and len(s.tokens) for s in group.samples), "all that was told is the prompt"


def test_what_a_deaf_agent_started_is_gone(played: dict[str, Group]) -> None:
    time.sleep(0.1)
    left = [p for p in psutil.process_iter(["cmdline"]) if SLEEP_S in (p.info["cmdline"] or ())]
    assert not left


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"source": [{"task": "chain_sum", "agent": {"command": []}}]}, "at least 1 item"),
        ({"source": [{"task": "chain_sum", "agent": {"command": ["a"]}, "environment": "x.py:Y"}]}, "both given"),
        ({"source": [{"task": "chain_sum", "agent": {"command": ["a"]}}, {"task": "gcd"}]}, "source 1 has no `agent`"),
        ({"source": [{"task": "chain_sum", "agent": {"command": ["a"]}}], "async": {"max_staleness": 1, "on_stale": "mask", "partial": {"abort_at_publish": True}}}, "leave the table out"),
    ],
)  # fmt: skip
def test_recipes_that_agents_do_not_fit_are_refused(change: Any, named: str) -> None:
    with pytest.raises(ValidationError, match=named):
        tiny.recipe(**change)
