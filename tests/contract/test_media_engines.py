"""What every engine promises where prompts show media; the oracle is transformers' own forward, one sequence at a time."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from relax_hpc.engines import Abort, Ask, Completion, Engine, EngineError, Sampling, Streams, make_engine
from relax_hpc.engines.sglang import SglangEngine, media_files
from relax_hpc.engines.sglang.media_files import MediaFiles
from relax_hpc.files.errors import Damaged
from relax_hpc.records import Finish, Media
from relax_hpc.trainers import make_scoring
from relax_hpc.trainers.torch import load_model, tensors_of
from tests import omni, omni_served, tiny
from tests.omni import Shown

EACH = 3
"""Samples of each prompt."""
SAMPLING = Sampling(max_new_tokens=8)
LONG = Sampling(max_new_tokens=120)
SERVED = ("qwen3_vl", "qwen3_vl_moe", "qwen3_omni") if os.environ.get("TESTS_EVERY_KIND") else ("qwen3_omni",)
"""Models of which a server is started, half a minute each; TESTS_EVERY_KIND=1 starts all."""
ROUTED = ("qwen3_vl_moe", "qwen3_omni")
"""Kinds with experts."""
EXACT = 1e-5
"""The most by which a logprob may differ, in nats."""
IN_COMPANY = 2e-5
"""The same in a stream, where batches have any shape: Gemma 4 was seen to round by 1.5e-5, the others by less than EXACT."""


@dataclass
class Setup:
    """An engine with version 0 of a model, and transformers' models of versions 0 and 1, whose encoders differ too."""

    kind: str
    folder: Path
    engine: Engine
    models: dict[int, Any]
    prompts: list[Shown] = field(default_factory=list)

    def load(self, version: int) -> None:
        self.engine.load(version, {n: t.detach().clone() for n, t in tensors_of(self.models[version]).items()}.items())

    def generate(self, each: int = EACH, sampling: Sampling = SAMPLING, **how: Any) -> list[Completion]:
        tokens, media = [p.tokens for p in self.prompts], [p.media for p in self.prompts]
        return self.engine.generate(tokens, each, sampling, 3, media=media, **how)

    def check(
        self, done: Completion, prompt: Shown, begun: NDArray[np.int32] | None = None, exact: float = EXACT
    ) -> None:
        """Every token's logprob is that of the version which its span names; begun: the answer's tokens before them."""
        before = np.empty(0, np.int32) if begun is None else begun
        ends = [start for start, _ in done.spans[1:]] + [len(done.tokens)]
        for (start, version), end in zip(done.spans, ends, strict=True):
            answer = np.concatenate([before, done.tokens[:end]])
            logits = omni.plain_logits(self.models[version], prompt, answer).detach().log_softmax(-1).numpy()
            expected = logits[np.arange(len(answer)), answer][len(before) + start :]
            np.testing.assert_allclose(done.logprobs[start:end], expected, atol=exact)


@pytest.fixture(
    scope="module",
    params=[("torch", kind) for kind in omni.KINDS] + [("sglang", kind) for kind in SERVED],
    ids="-".join,
)
def setup(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    torch.set_num_threads(1)
    engine, kind = request.param
    where = tmp_path_factory.mktemp(kind)
    folder = omni_served.folder(kind, where) if engine == "sglang" else omni.folder(kind, where)
    first = load_model(folder, torch.device("cpu"))
    second = copy.deepcopy(first)
    for name, parameter in second.named_parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(1.4 if "visual" in name or "audio" in name else 0.9)
    rollout = {"engine": engine, "routed_experts": engine == "sglang" and kind in ROUTED}
    made = make_engine(omni.recipe(folder, rollout=rollout), folder)
    setup = Setup(kind, folder, made, {0: first, 1: second}, omni.prompts(kind))
    setup.load(0)
    yield setup
    made.close()


@pytest.fixture(scope="module")
def generated(setup: Setup) -> list[Completion]:
    return setup.generate()


def test_logprobs_are_those_of_transformers(setup: Setup, generated: list[Completion]) -> None:
    for i, done in enumerate(generated):
        setup.check(done, setup.prompts[i // EACH])


def test_logprobs_of_the_trainer_are_those_of_the_engine(setup: Setup, generated: list[Completion]) -> None:
    asked = [p.tokens for p in setup.prompts for _ in range(EACH)]
    made = tiny.rollouts(asked, [done.tokens for done in generated], EACH)
    made = replace(made, media=tuple(p.media for p in setup.prompts for _ in range(EACH)))
    for budget in (16384, 40):  # all in one micro-batch; a few rows each
        recipe = omni.recipe(
            setup.folder,
            trainer={"tokens_per_micro_batch": budget},
            algorithm={"kl_coef": 0.1},
            scorer={"scores": ["reference"]},
        )
        scoring = make_scoring(recipe, setup.folder, 0, 1)
        scoring.hold("reference", setup.folder)
        found = scoring.logprobs("reference", made)
        np.testing.assert_allclose(found, np.concatenate([done.logprobs for done in generated]), atol=EXACT)


def test_a_stream_shows_each_answer_the_media_of_its_ask(setup: Setup) -> None:
    """Also where answers with other media, or with none, are under way, and where an answer was begun."""
    assert isinstance(setup.engine, Streams)
    stream, done, shown = setup.engine.stream(), dict[int, Completion](), setup.prompts
    wanted = [Ask(i, shown[i % len(shown)].tokens, SAMPLING, i, media=shown[i % len(shown)].media) for i in range(16)]
    for first in range(0, 16, 5):
        stream.ask(wanted[first : first + 5])
        done |= dict(stream.advance(0.01))
    while stream.busy:
        done |= dict(stream.advance(10))
    assert len(done) == 16
    rest = [replace(ask, begun=done[ask.key].tokens[:2]) for ask in wanted if len(done[ask.key].tokens) > 2]
    stream.ask(rest)
    after: dict[int, Completion] = {}
    while stream.busy:
        after |= dict(stream.advance(10))
    for ask in wanted:
        setup.check(done[ask.key], shown[ask.key % len(shown)], exact=IN_COMPANY)
    for ask in rest:
        setup.check(after[ask.key], shown[ask.key % len(shown)], ask.begun, IN_COMPANY)
    assert len(rest) > 3


def test_an_answer_that_was_cut_off_goes_on_with_the_media_of_its_prompt(setup: Setup) -> None:
    first = setup.generate(each=1)
    begun = [done.tokens[:2] for done in first if len(done.tokens) > 2]
    going = [p for p, done in zip(setup.prompts, first, strict=True) if len(done.tokens) > 2]
    assert len(going) > 3
    rest = setup.engine.generate([p.tokens for p in going], 1, SAMPLING, 8, begun=begun, media=[p.media for p in going])
    for prompt, answer, done in zip(going, begun, rest, strict=True):
        setup.check(done, prompt, answer)


def test_equal_tokens_with_other_media_are_other_prompts(setup: Setup) -> None:
    """Also where a cache of prefixes knows the first ones already, and where both are asked at once."""
    first, other = setup.prompts[0], setup.prompts[-1]
    assert first.tokens.tolist() == other.tokens.tolist()
    for shown in ([first, first], [other, first, other]):
        greedy = Sampling(temperature=0, max_new_tokens=4)
        done = setup.engine.generate([s.tokens for s in shown], 2, greedy, 0, media=[s.media for s in shown])
        for i, completion in enumerate(done):
            setup.check(completion, shown[i // 2])
    assert np.abs(done[0].logprobs[:1] - done[2].logprobs[:1]).max() > 100 * EXACT


def test_a_placeholder_that_is_drawn_ends_its_answer(setup: Setup) -> None:
    family = {omni.IMAGE, omni.VIDEO} | ({omni.AUDIO} if setup.kind in ("qwen3_omni", "gemma4_unified") else set())
    drew = 0
    for done in setup.generate(each=24, sampling=Sampling(temperature=1.5, max_new_tokens=24)):
        ends = np.isin(done.tokens, [*family, 1])
        assert not ends[:-1].any() and (done.finish is Finish.STOP) == bool(ends[-1])
        drew += int(done.tokens[-1]) in family
    assert drew > 3


def test_changed_media_are_refused_before_they_are_encoded(setup: Setup) -> None:
    media = setup.prompts[0].media
    assert media is not None
    pixels = media.tensors["pixel_values"].copy()
    pixels.view(np.uint8).reshape(-1)[77] ^= 1
    changed = Media({**media.tensors, "pixel_values": pixels}, media.digest)
    with pytest.raises(Damaged, match="the engine's encoders: a prompt's media"):
        setup.engine.generate([setup.prompts[0].tokens], 1, SAMPLING, 0, media=[changed])


def test_weights_swapped_in_mid_generation_are_the_encoders_too(setup: Setup) -> None:
    """What the old encoders made of the same media must not be used again, by answers that go on and by new ones."""
    if not setup.engine.swaps:
        setup.load(1)
        for i, done in enumerate(setup.generate()):
            setup.check(done, setup.prompts[i // EACH])
        setup.load(0)
        return

    def swap(tokens: int) -> None:
        if setup.engine.version == 0:
            setup.load(1)

    try:
        swapped = setup.generate(each=4 * EACH, sampling=LONG, progress=swap)
        assert max(len(done.spans) for done in swapped) == 2
        for i, done in enumerate(swapped):
            setup.check(done, setup.prompts[i // (4 * EACH)])
            assert {version for _, version in done.spans} <= {0, 1}
        for i, done in enumerate(setup.generate()):
            setup.check(done, setup.prompts[i // EACH])
            assert done.spans == [(0, 1)]
    finally:
        setup.load(0)


def test_what_was_given_back_goes_on_with_newer_weights(setup: Setup) -> None:
    def stop(tokens: int) -> None:
        raise Abort

    cut = setup.generate(each=1, sampling=LONG, progress=stop)
    rows = [i for i, done in enumerate(cut) if done.finish is None]
    setup.load(1)
    try:
        begun = [cut[i].tokens for i in rows]
        prompts = [setup.prompts[i] for i in rows]
        rest = setup.engine.generate(
            [p.tokens for p in prompts], 1, LONG, 1, begun=begun, media=[p.media for p in prompts]
        )
        for prompt, old, done in zip(prompts, begun, rest, strict=True):
            assert done.finish is not None and done.spans == [(0, 1)]
            setup.check(done, prompt, old)
    finally:
        setup.load(0)


def experts_of(model: Any, shown: Shown, answer: NDArray[np.int32]) -> NDArray[Any]:
    """[P + T - 1, layers, k] the experts that transformers' routers choose."""
    chosen: list[NDArray[Any]] = []
    gates = [module.gate for module in model.modules() if hasattr(module, "gate")]
    hooks = [gate.register_forward_hook(lambda module, given, out: chosen.append(out[-1].numpy())) for gate in gates]
    omni.plain_logits(model, shown, answer)
    for hook in hooks:
        hook.remove()
    return np.stack(chosen, 1)


def test_experts_of_placeholders_are_told_too(setup: Setup, generated: list[Completion]) -> None:
    """Where an engine tells them at all."""
    told = isinstance(setup.engine, SglangEngine) and setup.kind in ROUTED
    for i, done in enumerate(generated):
        assert (done.routed_experts is not None) == told
        if done.routed_experts is not None:
            expected = experts_of(setup.models[0], setup.prompts[i // EACH], done.tokens)
            assert np.array_equal(np.sort(done.routed_experts, -1), np.sort(expected, -1))


def test_what_changed_on_the_way_into_the_server_is_refused_there(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = setup.prompts[0]
    assert shown.media is not None
    whole = media_files.save

    def flipped(tensors: dict[str, NDArray[Any]]) -> bytes:
        found = bytearray(whole(tensors))
        found[-1] ^= 1
        return bytes(found)

    with MediaFiles() as files, monkeypatch.context() as patched:
        patched.setattr(media_files, "save", flipped)
        [name] = files.name(shown.media)
        with pytest.raises(Damaged, match="SGLang's encoders: a prompt's media have the checksum"):
            media_files.read(name)
        if isinstance(setup.engine, SglangEngine):
            body = setup.engine._requests.body(shown.tokens, [0], SAMPLING, 4, [name])
            with pytest.raises(EngineError, match="SGLang's encoders: a prompt's media have the checksum"):
                setup.engine.client._request("POST", "/generate", body, 30)
    assert setup.generate(each=1)
