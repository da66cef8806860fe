"""What is SGLang's alone: its process and its key, weights swapped in mid-generation, experts, a server that was there already."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import urllib3
from numpy.typing import NDArray
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig

from relax_hpc.engines import Abort, Ask, Completion, EngineError, EngineRestarted, Sampling
from relax_hpc.engines.model_folder import weights_of
from relax_hpc.engines.sglang import SglangEngine
from relax_hpc.engines.sglang.client import Client, EngineRefused
from relax_hpc.engines.sglang.outside.checks import KEY_VARIABLE
from relax_hpc.files.errors import RunError
from tests import tiny
from tests.runs import wait_for

PROMPTS = tiny.prompts([3, 9, 1, 9, 5, 3])
PATIENCE_S = 120.0
LONG = Sampling(temperature=2.0, max_new_tokens=200)
MODEL = {"context": 512}


class Setup:
    """An engine whose server splits a model with experts over two processes; transformers has versions 3 and 4 of it.

    Its output layer is tied, which SGLang does not know of models with experts.
    """

    def __init__(self, folder: Path) -> None:
        rollout = {"engine": "sglang", "device": "cpu", "routed_experts": True, "sglang": {"tensor_parallel": 2}}
        self.recipe = tiny.recipe(model=MODEL, rollout=rollout)
        self.folder = tiny.folder(self.recipe, folder)
        config = Qwen3MoeConfig(
            vocab_size=len(AutoTokenizer.from_pretrained(folder)), hidden_size=32, intermediate_size=64,
            moe_intermediate_size=16, num_experts=6, num_experts_per_tok=2, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, max_position_embeddings=MODEL["context"], eos_token_id=1, pad_token_id=0,
            initializer_range=0.2, norm_topk_prob=True, tie_word_embeddings=True,
        )  # fmt: skip
        self.models = {}
        for version in (3, 4):
            torch.manual_seed(version)
            self.models[version] = AutoModelForCausalLM.from_config(config).eval()
        self.models[3].save_pretrained(folder)
        self.engine = SglangEngine(self.recipe, folder)

    def load(self, version: int, engine: SglangEngine | None = None) -> None:
        (engine or self.engine).load(version, weights_of(self.models[version]).items())

    def has_nothing_to_do(self) -> None:
        """In a moment: its scheduler hears last that requests were ended. To make all their tokens would take it longer."""

        def requests() -> int:
            [load] = self.engine.client._request("GET", "/v1/loads", None, 5)["loads"]
            return int(load["num_running_reqs"] + load["num_waiting_reqs"])

        wait_for(lambda: requests() == 0, timeout=4)

    def processes(self) -> list[psutil.Process]:
        """The server's."""
        assert self.engine._server is not None and self.engine._server._process is not None
        main = psutil.Process(self.engine._server._process.pid)
        return [main, *main.children(recursive=True)]

    @torch.no_grad()
    def logprobs(self, version: int, prompt: NDArray[np.int32], answer: NDArray[np.int32]) -> NDArray[np.float32]:
        """[T] of the answer's tokens under a version that made all of it, at LONG's temperature."""
        logits = self.models[version](torch.tensor(np.concatenate([prompt, answer]))[None].long()).logits[0]
        whole = (logits[len(prompt) - 1 : -1] / LONG.temperature).log_softmax(-1).numpy()
        return whole[np.arange(len(answer)), answer]  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patched:  # one key of 64 begins so, and must not be taken for an option
        patched.setattr("secrets.token_urlsafe", lambda count: "-" + "k" * count)
        made = Setup(tmp_path_factory.mktemp("model"))
    yield made
    made.engine.close()


def check(setup: Setup, done: list[Completion], samples_per_prompt: int) -> set[int]:
    """Every token's logprob is that of the version which its span names; how many spans the completions have."""
    for i, completion in enumerate(done):
        check_answer(setup, PROMPTS[i // samples_per_prompt], completion)
    return {len(completion.spans) for completion in done}


def check_answer(setup: Setup, prompt: NDArray[np.int32], done: Completion) -> None:
    assert done.spans[0][0] == 0
    ends = [start for start, _ in done.spans[1:]] + [len(done.tokens)]
    for (start, version), end in zip(done.spans, ends, strict=True):
        expected = setup.logprobs(version, prompt, done.tokens)[start:end]
        np.testing.assert_allclose(done.logprobs[start:end], expected, atol=5e-5)


def test_nothing_is_generated_before_the_first_version(setup: Setup) -> None:
    """The server has begun with weights of chance."""
    assert setup.engine.version == -1
    with pytest.raises(EngineError, match="no version was loaded"):
        setup.engine.generate(PROMPTS, 1, LONG, 0)
    with pytest.raises(EngineError, match="no version was loaded"):
        setup.engine.stream().ask([Ask(0, PROMPTS[0], LONG, 0)])


def test_weights_swapped_in_mid_generation_make_the_tokens_from_there_on(setup: Setup) -> None:
    """The prompts are in the prefix cache before: what the old weights left there must not be used again."""
    setup.load(3)
    assert check(setup, setup.engine.generate(PROMPTS, 2, LONG, 0), 2) == {1}

    def swap(tokens: int) -> None:
        if setup.engine.version == 3:
            setup.load(4)

    done = setup.engine.generate(PROMPTS, 8, LONG, 0, swap)
    assert 2 in check(setup, done, 8)
    assert {version for c in done for _, version in c.spans} == {3, 4}
    assert check(setup, setup.engine.generate(PROMPTS, 2, LONG, 0), 2) == {1}


def test_weights_swapped_while_a_stream_is_under_way_make_the_tokens_from_there_on(setup: Setup) -> None:
    """Asks that come before, between and after; also what an aborted answer has so far is of the versions that it names."""
    setup.load(3)
    stream, done = setup.engine.stream(), dict[int, Completion]()
    stream.ask([Ask(i, PROMPTS[i % 6], LONG if i else Sampling(max_new_tokens=1), i) for i in range(13)])
    while 0 not in done:
        done |= dict(stream.advance(10))
    setup.load(4)
    stream.ask([Ask(i, PROMPTS[i % 6], LONG, i) for i in range(13, 18)])
    while len(done) < 9:
        done |= dict(stream.advance(10))
    done |= dict(stream.abort())
    assert done.keys() == set(range(18)) and not stream.busy
    for key in range(1, 18):
        if len(done[key].tokens):
            check_answer(setup, PROMPTS[key % 6], done[key])
    versions = [tuple(version for _, version in done[key].spans) for key in range(18)]
    assert (3, 4) in versions[1:13] and set(versions[13:]) <= {(4,), ()} and versions[0] == (3,)
    ended = [made for made in done.values() if made.finish is not None]
    assert all(made.routed_experts is not None and len(made.routed_experts) for made in ended)


def test_what_was_aborted_goes_on_with_newer_weights(setup: Setup) -> None:
    setup.load(3)

    def stop(tokens: int) -> None:
        raise Abort

    cut = setup.engine.generate(PROMPTS, 1, LONG, 0, stop)
    rows = [i for i, c in enumerate(cut) if c.finish is None]
    assert any(len(cut[i].tokens) for i in rows), "none was in the middle of an answer"
    assert all(c.routed_experts is None for c in cut if c.finish is None)
    setup.load(4)
    begun = [cut[i].tokens for i in rows]
    rest = setup.engine.generate([PROMPTS[i] for i in rows], 1, LONG, 1, begun=begun)
    for i, old, new in zip(rows, begun, rest, strict=True):
        whole, prompt = np.concatenate([old, new.tokens]), PROMPTS[i]
        assert new.finish is not None and len(whole) <= LONG.max_new_tokens and new.spans == [(0, 4)]
        for version, part, given in (
            (3, slice(0, len(old)), cut[i].logprobs),
            (4, slice(len(old), None), new.logprobs),
        ):
            np.testing.assert_allclose(given, setup.logprobs(version, prompt, whole)[part], atol=5e-5)
        assert new.routed_experts is not None and len(new.routed_experts) == len(prompt) + len(whole) - 1
    setup.has_nothing_to_do()


def test_an_outside_server_without_a_folder_gets_its_weights_in_a_group_of_processes(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """We are rank 0, the server's two processes are 1 and 2; what is not announced is refused before anything is sent."""
    client = setup.engine.client
    with pytest.raises(EngineRefused, match="begin_weight_update"):
        client.receive(["x"], ["float32"], [[1]], "nobody's")
    rollout = {"engine": "sglang", "device": "cpu", "sglang": {"address": client.address}}
    monkeypatch.setenv(KEY_VARIABLE, client._headers["Authorization"].split()[1])
    monkeypatch.setattr("relax_hpc.engines.sglang.group.BUCKET_BYTES", 4096)
    outside = SglangEngine(tiny.recipe(model=MODEL, rollout=rollout), setup.folder)
    client.begin_update()  # somebody was killed there
    for version in (3, 4):
        setup.load(version, outside)
        done = outside.generate(PROMPTS, 2, LONG, 0)
        assert check(setup, done, 2) == {1} and {v for c in done for _, v in c.spans} == {version}
    here = psutil.Process().net_connections()
    assert {c.laddr.ip for c in here if c.status == psutil.CONN_LISTEN} <= {"127.0.0.1"}

    # It refuses what comes: an error at once, not a broadcast that nobody takes; the next one finds it ready.
    receive = Client.receive
    with monkeypatch.context() as patched:
        patched.setattr(
            Client, "receive", lambda c, names, dtypes, shapes, group: receive(c, names, dtypes, shapes, "other")
        )
        with pytest.raises(EngineError, match="answered 400 to /update_weights_from_distributed"):
            setup.load(3, outside)
    assert outside.version == -1
    setup.load(3, outside)
    assert check(setup, outside.generate(PROMPTS, 2, LONG, 0), 2) == {1}
    outside.close()
    setup.load(4)


def test_the_server_listens_on_loopback_and_wants_its_key_which_nobody_sees(setup: Setup) -> None:
    address = setup.engine.client.address
    assert urllib3.request("POST", f"{address}/generate", json={"input_ids": [5]}, retries=False).status == 401
    assert urllib3.request("POST", f"{address}/abort_request", json={"abort_all": True}, retries=False).status == 401
    key = setup.engine.client._headers["Authorization"].split()[1]
    listening = set()
    for process in setup.processes():
        assert key not in " ".join(process.cmdline()) and key not in str(process.environ())
        listening |= {c.laddr.ip for c in process.net_connections() if c.status == psutil.CONN_LISTEN}
    assert listening == {"127.0.0.1"}


class GivenUp(Exception):
    """What a worker raises in `progress` when it is asked to stop."""


def test_a_generation_that_is_given_up_ends_on_the_server_too(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relax_hpc.engines.sglang.stream.ABORT_S", PATIENCE_S)

    def stop(tokens: int) -> None:
        raise GivenUp

    began = time.monotonic()
    with pytest.raises(GivenUp):
        setup.engine.generate(PROMPTS, 64, LONG, 0, stop)
    assert time.monotonic() - began < PATIENCE_S, "its requests were not ended, they were given up"
    setup.has_nothing_to_do()
    assert len(setup.engine.generate(PROMPTS, 1, Sampling(max_new_tokens=2), 0)) == 6


def test_a_server_that_makes_no_tokens_any_more_is_noticed(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests alone would wait for ever; `generate` ends it and starts it again."""
    monkeypatch.setattr("relax_hpc.engines.sglang.stream.SILENCE_S", 0.1)
    monkeypatch.setattr("relax_hpc.engines.sglang.client.PULSE_S", 4.0)
    schedulers = [p for p in setup.processes() if "scheduler" in " ".join(p.cmdline())]
    assert len(schedulers) == 2
    bodies = [setup.engine._requests.body(prompt, [0] * 8, LONG, 200) for prompt in PROMPTS]
    for scheduler in schedulers:
        scheduler.suspend()
    try:
        with pytest.raises(EngineError, match="did not answer /health_generate"):
            setup.engine._ask(bodies, lambda tokens: None)
    finally:
        for scheduler in schedulers:
            scheduler.resume()
    assert len(setup.engine.generate(PROMPTS, 1, Sampling(max_new_tokens=2), 0)) == 6


def test_a_stream_notices_a_server_that_makes_no_tokens_any_more(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relax_hpc.engines.sglang.stream.SILENCE_S", 0.1)
    monkeypatch.setattr("relax_hpc.engines.sglang.client.PULSE_S", 4.0)
    restarts: list[Any] = []
    monkeypatch.setattr(SglangEngine, "_restart", lambda engine, progress: restarts.append(progress))
    beats: list[int] = []
    stream = setup.engine.stream(lambda: beats.append(1))
    schedulers = [p for p in setup.processes() if "scheduler" in " ".join(p.cmdline())]
    for scheduler in schedulers:
        scheduler.suspend()
    try:
        stream.ask([Ask(i, PROMPTS[i % 6], LONG, i) for i in range(12)])
        with pytest.raises(EngineRestarted, match="did not answer /health_generate"):
            while stream.busy:
                stream.advance(0.3)
    finally:
        for scheduler in schedulers:
            scheduler.resume()
    [progress] = restarts
    progress()
    assert not stream.busy and beats == [1], "it has no heartbeat while it is started again"
    setup.engine.client.abort()


def test_a_server_that_is_there_already_is_used_by_its_address(
    setup: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = setup.engine.client
    where: dict[str, Any] = {"address": client.address, "folder": str(tmp_path)}
    recipe = tiny.recipe(model=MODEL, rollout={"engine": "sglang", "device": "cpu", "sglang": where})
    monkeypatch.setenv(KEY_VARIABLE, "wrong")
    with pytest.raises(RunError, match=f"{client.address} answered 401.*{KEY_VARIABLE}"):
        SglangEngine(recipe, setup.folder)
    monkeypatch.setenv(KEY_VARIABLE, client._headers["Authorization"].split()[1])
    outside = SglangEngine(recipe, setup.folder)
    setup.load(3, outside)
    assert check(setup, outside.generate(PROMPTS, 2, LONG, 0), 2) == {1}
    assert list(tmp_path.iterdir()) == [], "nothing is left of the weights that went through the folder"
    outside.close()
    assert len(setup.engine.generate(PROMPTS, 1, Sampling(max_new_tokens=2), 0)) == 6, "it is not ours to end"
    large = tiny.recipe(model={"context": 4096}, rollout={"engine": "sglang", "device": "cpu", "sglang": where})
    with pytest.raises(RunError, match=r"room for 520 tokens.*4096"):
        SglangEngine(large, tiny.folder(large, tmp_path / "large"))


def test_a_tokenizer_of_another_model_is_refused(setup: Setup, tmp_path: Path) -> None:
    tiny.folder(setup.recipe, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.add_tokens(["one too many"])
    tokenizer.save_pretrained(tmp_path)
    rows = len(load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"])
    with pytest.raises(RunError, match=f"tokenizer has {rows + 1} tokens, the model's vocabulary has {rows}"):
        SglangEngine(setup.recipe, tmp_path)


def test_experts_of_every_token_are_those_of_transformers_routers(setup: Setup, tmp_path: Path) -> None:
    setup.load(4)
    for i, done in enumerate(setup.engine.generate(PROMPTS, 3, LONG, 0)):
        with torch.no_grad():
            whole = setup.models[4](torch.tensor([[*PROMPTS[i // 3], *done.tokens]]), output_router_logits=True)
        expected = torch.stack([layer.topk(2, -1).indices for layer in whole.router_logits], 1)[:-1]
        assert done.routed_experts is not None and done.routed_experts.dtype == np.uint8
        assert np.array_equal(np.sort(done.routed_experts, -1), np.sort(expected.numpy(), -1))
    with pytest.raises(RunError, match="qwen3 without experts"):
        SglangEngine(setup.recipe, tiny.folder(setup.recipe, tmp_path))
