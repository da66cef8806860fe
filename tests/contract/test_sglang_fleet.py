"""Several servers behind the real router: they answer as one, take versions together, and are lost together."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import urllib3
from PIL import Image
from transformers import AutoImageProcessor

from relax_hpc.engines import Abort, Ask, Completion, EngineRestarted, Sampling
from relax_hpc.engines.model_folder import weights_of
from relax_hpc.engines.sglang import SglangEngine
from relax_hpc.engines.sglang.client import EngineRefused
from relax_hpc.engines.sglang.fleet import Fleet
from relax_hpc.engines.sglang.outside.checks import KEY_VARIABLE
from relax_hpc.engines.sglang.outside.pictures import Pictures
from relax_hpc.files.errors import RunError
from relax_hpc.huggingface import from_config
from relax_hpc.records import Media
from relax_hpc.trainers.torch import load_model
from tests import omni, omni_served, tiny
from tests.runs import wait_for

PROMPTS = tiny.prompts([3, 9, 1, 5])
LONG = Sampling(temperature=2.0, max_new_tokens=120)
SHORT = Sampling(max_new_tokens=6)
COPIES = 24


def talkative(model: Any) -> Any:
    """Make ends and placeholders unlikely: each embedding but theirs has something in common, which the head finds again."""
    rows = model.get_input_embeddings().weight.data
    rows[:, 0] = 4.0
    rows[[1, omni.IMAGE, omni.VIDEO], 0] = 0.0
    return model


class Setup:
    """An engine with two servers; transformers has versions 3 and 4 of their model."""

    def __init__(self, folder: Path) -> None:
        rollout = {"engine": "sglang", "device": "cpu", "sglang": {"servers": 2}}
        self.folder = omni_served.folder("qwen3_vl", folder)
        first = load_model(folder, torch.device("cpu"))
        torch.manual_seed(4)
        self.models = {3: talkative(first), 4: talkative(from_config(first.config).eval())}
        self.engine = SglangEngine(omni.recipe(folder, rollout=rollout), folder)
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


def test_pictures_are_shown_by_whichever_server_is_asked(setup: Setup) -> None:
    setup.load(3)
    shown = omni.prompts("qwen3_vl")
    assert shown[0].tokens.tolist() == shown[-1].tokens.tolist()
    done = setup.engine.generate([s.tokens for s in shown], 8, SHORT, 3, media=[s.media for s in shown])
    for i, completion in enumerate(done):
        check(setup.models[3], shown[i // 8], completion)


def check(model: Any, shown: omni.Shown, done: Completion) -> None:
    logits = omni.plain_logits(model, shown, done.tokens).detach().log_softmax(-1).numpy()
    np.testing.assert_allclose(done.logprobs, logits[np.arange(len(done.tokens)), done.tokens], atol=1e-5)


def seen(folder: Path, sides: list[int], seed: int, **limits: Any) -> omni.Shown:
    """A prompt with real pictures, as the model's processor makes them."""
    rng = np.random.default_rng(seed)
    pictures = [Image.fromarray(rng.integers(0, 255, (side, 2 * side, 3), dtype=np.uint8)) for side in sides]
    made = AutoImageProcessor.from_pretrained(folder)(images=pictures, return_tensors="np", **limits)
    tokens = [5, 9]
    for grid in made["image_grid_thw"]:
        tokens += [omni.VISION, *[omni.IMAGE] * (int(grid.prod()) // 4), omni.VISION_END, 11]
    return omni.Shown(np.array(tokens, np.int32), Media.of(dict(made)))


def test_a_server_that_was_there_is_sent_pictures_that_it_processes_to_the_same(
    setup: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its own processor, without our hooks: these leave what they do not know alone."""
    server = setup.fleet._servers[0].client
    monkeypatch.setenv(KEY_VARIABLE, server._headers["Authorization"].split()[1])
    where = {"address": server.address, "folder": str(tmp_path)}
    outside = SglangEngine(omni.recipe(setup.folder, rollout={"engine": "sglang", "sglang": where}), setup.folder)
    outside.load(3, weights_of(setup.models[3]).items())
    shown = [seen(setup.folder, sides, seed) for seed, sides in enumerate(([40], [40], [70, 90]))]
    assert shown[0].tokens.tolist() == shown[1].tokens.tolist() and len(shown[2].tokens) > 60
    tokens, media = [s.tokens for s in shown], [s.media for s in shown]
    for _ in range(2):  # the second time from its caches
        for i, done in enumerate(outside.generate(tokens, 2, SHORT, 0, media=media)):
            check(setup.models[3], shown[i // 2], done)

    small = seen(setup.folder, [16], 0, size={"shortest_edge": 256, "longest_edge": 4096})
    with pytest.raises(RunError, match=r"pictures of \[\[32, 16\]\] pixels would be other ones.*image_tokens"):
        outside.generate([small.tokens], 1, SHORT, 0, media=[small.media])
    with pytest.raises(RunError, match=r"shows more than pictures \(\['pixel_values_videos'"):
        outside.generate(tokens[:1], 1, SHORT, 0, media=[omni.prompts("qwen3_vl")[4].media])
    assert media[2] is not None
    with monkeypatch.context() as patched:
        other = Pictures(setup.folder, setup.models[3].config).name(media[2])
        patched.setattr(Pictures, "name", lambda pictures, media: other[:1])
        with pytest.raises(RunError, match=f"of a prompt of {len(tokens[0])}: it sees other pictures than the trainer"):
            outside.generate(tokens[:1], 1, SHORT, 0, media=media[:1])
    outside.close()


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


def test_a_stream_is_shared_out_and_goes_on_with_a_version_taken_in_its_midst(setup: Setup) -> None:
    setup.load(3)
    stream, done = setup.engine.stream(), dict[int, Completion]()
    stream.ask([Ask(i, PROMPTS[i % len(PROMPTS)], LONG, i) for i in range(24)])
    wait_for(lambda: min(setup.running()) > 1, timeout=20)
    setup.load(4)
    while len(done) < 6:
        done |= dict(stream.advance(10))
    done |= dict(stream.abort())
    assert len(done) == 24 and not stream.busy
    assert {version for c in done.values() for _, version in c.spans} == {3, 4}
    wait_for(lambda: setup.running() == [0, 0], timeout=4)


def test_a_lost_server_is_noticed_and_all_are_started_again(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    setup.load(3)
    before, started = setup.processes(), []
    monkeypatch.setattr(Fleet, "start", lambda fleet, progress: started.append(fleet))

    stream = setup.engine.stream()
    stream.ask([Ask(i, PROMPTS[i % len(PROMPTS)], LONG, i) for i in range(24)])
    with pytest.raises(EngineRestarted, match="SGLang was started again"):
        while stream.busy:
            stream.advance(0.1)
            if setup.fleet.alive and setup.running()[1] > 0:
                lost = setup.fleet._servers[1]._process
                assert lost is not None
                lost.kill()
                lost.wait()
    assert not stream.busy
    assert started == [setup.fleet] and setup.engine.version == -1
    psutil.wait_procs(before, timeout=120)
    assert not any(process.is_running() for process in before), "what was left was not ended"
