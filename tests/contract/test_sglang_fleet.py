"""Several servers behind the real router: they answer as one, take versions together, and are lost together."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
import urllib3
from transformers import AutoModelForCausalLM

from relax_hpc.engines import Abort, EngineRestarted, Sampling
from relax_hpc.engines.model_folder import weights_of
from relax_hpc.engines.sglang import SglangEngine
from relax_hpc.engines.sglang.client import EngineRefused
from relax_hpc.engines.sglang.fleet import Fleet
from tests import tiny
from tests.runs import wait_for

PROMPTS = tiny.prompts([3, 9, 1, 5])
LONG = Sampling(temperature=2.0, max_new_tokens=200)
COPIES = 24


class Setup:
    """An engine with two servers; transformers has versions 3 and 4 of their model."""

    def __init__(self, folder: Path) -> None:
        rollout = {"engine": "sglang", "device": "cpu", "sglang": {"servers": 2}}
        recipe = tiny.recipe(model={"context": 256}, rollout=rollout)
        tiny.folder(recipe, folder)
        self.models = {3: AutoModelForCausalLM.from_pretrained(folder).eval()}
        torch.manual_seed(4)
        self.models[4] = AutoModelForCausalLM.from_config(self.models[3].config).eval()
        self.engine = SglangEngine(recipe, folder)
        assert isinstance(self.engine._server, Fleet)
        self.fleet = self.engine._server

    def load(self, version: int) -> None:
        self.engine.load(version, weights_of(self.models[version]).items())

    def running(self) -> list[int]:
        """Requests that each server has."""
        loads = [server.client._request("GET", "/v1/loads", None, 5)["loads"][0] for server in self.fleet._servers]
        return [load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads]

    def processes(self) -> list[psutil.Process]:
        parents = [self.fleet._router, *(server._process for server in self.fleet._servers)]
        mains = [psutil.Process(parent.pid) for parent in parents if parent is not None]
        return [process for main in mains for process in (main, *main.children(recursive=True))]


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    torch.set_num_threads(1)
    made = Setup(tmp_path_factory.mktemp("model"))
    yield made
    made.engine.close()


def test_a_request_is_shared_out_and_every_server_takes_a_version_in_its_midst(setup: Setup) -> None:
    setup.load(3)
    seen: list[list[int]] = []

    def swap(tokens: int) -> None:
        seen.append(setup.running())
        if setup.engine.version == 3 and min(seen[-1]) > 1:
            setup.load(4)

    done = setup.engine.generate(PROMPTS, COPIES, LONG, 0, swap)
    assert setup.engine.version == 4, f"no two servers had requests at a time: {seen}"
    assert {version for c in done for _, version in c.spans} == {3, 4}
    for i, completion in enumerate(done):
        prompt = PROMPTS[i // COPIES]
        whole = torch.tensor(np.concatenate([prompt, completion.tokens]))[None].long()
        ends = [start for start, _ in completion.spans[1:]] + [len(completion.tokens)]
        for (start, version), end in zip(completion.spans, ends, strict=True):
            with torch.no_grad():
                logits = setup.models[version](whole).logits[0, len(prompt) - 1 : -1] / LONG.temperature
            expected = logits.log_softmax(-1).numpy()[np.arange(len(completion.tokens)), completion.tokens]
            np.testing.assert_allclose(completion.logprobs[start:end], expected[start:end], atol=5e-5)


def test_what_is_given_up_ends_on_every_server(setup: Setup) -> None:
    setup.load(3)

    def enough(tokens: int) -> None:
        if min(setup.running()) > 0:
            raise Abort

    done = setup.engine.generate(PROMPTS, COPIES, LONG, 1, enough)
    assert len(done) == len(PROMPTS) * COPIES and any(c.finish is None for c in done)
    wait_for(lambda: setup.running() == [0, 0], timeout=4)  # to make all their tokens would take longer


def test_router_and_servers_listen_on_loopback_and_want_their_key_which_nobody_sees(setup: Setup) -> None:
    address, key = setup.engine.client.address, setup.engine.client._headers["Authorization"].split()[1]
    for path in ("/generate", "/workers", "/flush_cache"):
        alone = {
            "Connection": "close"
        }  # who is refused unread is hung up on: the next one would meet a dead connection
        refused = urllib3.request("POST", address + path, json={"url": "http://a"}, headers=alone, retries=False)
        assert refused.status == 401
    listening = set()
    for process in setup.processes():
        assert key not in " ".join(process.cmdline()) and key not in str(process.environ())
        listening |= {c.laddr.ip for c in process.net_connections() if c.status == psutil.CONN_LISTEN}
    assert listening == {"127.0.0.1"}
    with pytest.raises(EngineRefused, match="answered 4"):  # the router's own answer, past the tries of a lost server
        setup.engine.client.generate({"input_ids": ["no token"], "sampling_params": [{}]})


def test_a_lost_server_is_noticed_and_all_are_started_again(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    setup.load(3)
    before, started = setup.processes(), []
    monkeypatch.setattr(Fleet, "start", lambda fleet, progress: started.append(fleet))

    def kill(tokens: int) -> None:
        if setup.fleet.alive and setup.running()[1] > 0:
            lost = setup.fleet._servers[1]._process
            assert lost is not None
            lost.kill()
            lost.wait()

    with pytest.raises(EngineRestarted, match="SGLang was started again"):
        setup.engine.generate(PROMPTS, COPIES, LONG, 2, kill)
    assert started == [setup.fleet] and setup.engine.version == -1
    psutil.wait_procs(before, timeout=120)
    assert not any(process.is_running() for process in before), "what was left was not ended"
