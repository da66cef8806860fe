"""What every engine promises; the oracle is transformers without a cache, without padding, one sequence at a time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.stats import chisquare
from transformers import AutoModelForCausalLM

from relax_hpc.engines import ENGINES, Abort, Ask, Completion, Engine, Sampling, Stream, Streams, make_engine
from relax_hpc.engines.sglang import SglangEngine
from relax_hpc.engines.torch import TorchEngine
from relax_hpc.files.run_dir import RunDir
from relax_hpc.records import Finish
from relax_hpc.trainers import make_trainer
from relax_hpc.weights import FilePublisher, FileReceiver
from tests import tiny

EOS = 1  # of the tiny model's tokenizer


class Setup:
    """An engine with weights, and the same model in transformers' hands."""

    def __init__(self, name: str, folder: Path, model: dict[str, Any] | None = None) -> None:
        self.recipe = tiny.recipe(model=model, rollout={"engine": name, "device": "cpu"})
        self.folder = tiny.folder(self.recipe, folder)
        self.engine: Engine = make_engine(self.recipe, folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder).eval()
        self.weights = dict(make_trainer(self.recipe, folder, 0, 1).export())
        self.engine.load(3, self.weights.items())

    @torch.no_grad()
    def logprobs(
        self, prompt: NDArray[np.int32], answer: NDArray[np.int32], temperature: float = 1.0
    ) -> NDArray[np.float32]:
        """[len(answer), V] after each token of the prompt's end and the answer."""
        logits = self.model(torch.tensor(np.concatenate([prompt, answer]))[None].long(), use_cache=False).logits[0]
        return (logits / temperature).log_softmax(-1)[len(prompt) - 1 : -1].numpy()  # type: ignore[no-any-return]


@pytest.fixture(scope="module", params=sorted(ENGINES))
def setup(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    torch.set_num_threads(1)
    made = Setup(request.param, tmp_path_factory.mktemp("model"))
    yield made
    made.engine.close()


PROMPTS = tiny.prompts([3, 9, 1, 9, 5, 3])


def same(a: list[Completion], b: list[Completion]) -> bool:
    return all(
        x.tokens.tobytes() == y.tokens.tobytes()
        and x.logprobs.tobytes() == y.logprobs.tobytes()
        and x.finish == y.finish
        for x, y in zip(a, b, strict=True)
    )


def alike(a: list[Completion], b: list[Completion]) -> bool:
    """The same tokens, with logprobs that a batch of another shape may have rounded otherwise."""
    return all(
        x.tokens.tolist() == y.tokens.tolist() and np.allclose(x.logprobs, y.logprobs, atol=2e-5)
        for x, y in zip(a, b, strict=True)
    )


@pytest.mark.quick
@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_logprobs_are_those_of_the_model(setup: Setup, temperature: float) -> None:
    """Many rows that end early and leave the batch: a row mixed up with another one would show."""
    done = setup.engine.generate(PROMPTS, 16, Sampling(temperature=temperature, max_new_tokens=40), 1)
    assert len(done) == 96
    assert len({len(c.tokens) for c in done}) > 5 or temperature < 1
    for i, completion in enumerate(done):
        expected = setup.logprobs(PROMPTS[i // 16], completion.tokens, temperature)
        chosen = expected[np.arange(len(completion.tokens)), completion.tokens]
        np.testing.assert_allclose(completion.logprobs, chosen, atol=2e-5)


def test_greedy_is_what_transformers_generates(setup: Setup) -> None:
    done = setup.engine.generate(PROMPTS, 2, Sampling(temperature=0, max_new_tokens=12), 0)
    for i, prompt in enumerate(PROMPTS):
        out = setup.model.generate(
            torch.tensor(prompt)[None].long(), do_sample=False, max_new_tokens=12, eos_token_id=EOS, pad_token_id=0
        )
        for copy in (0, 1):
            assert done[2 * i + copy].tokens.tolist() == out[0, len(prompt) :].tolist()
        chosen = setup.logprobs(prompt, done[2 * i].tokens).max(-1)
        np.testing.assert_allclose(done[2 * i].logprobs, chosen, atol=2e-5)


def test_a_seed_gives_the_same_bits_where_it_is_promised_and_another_seed_other_ones(setup: Setup) -> None:
    sampling = Sampling(max_new_tokens=20, top_p=0.9)
    first = setup.engine.generate(PROMPTS, 8, sampling, 5)
    setup.engine.generate(PROMPTS[:2], 3, Sampling(max_new_tokens=3), 9)
    torch.rand(7)
    assert same(first, setup.engine.generate(PROMPTS, 8, sampling, 5)) == setup.engine.seeded
    assert not same(first, setup.engine.generate(PROMPTS, 8, sampling, 6))


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"),
    [(1.0, 1.0, 0), (0.5, 1.0, 0), (1.5, 0.7, 0), (1.0, 1.0, 5), (1.0, 0.6, 8), (1.0, 1e-6, 0)],
)
def test_tokens_come_with_their_probabilities(setup: Setup, temperature: float, top_p: float, top_k: int) -> None:
    prompt, draws = PROMPTS[1], 2000
    done = setup.engine.generate([prompt], draws, Sampling(temperature, top_p, top_k, max_new_tokens=1), 2)
    whole = np.exp(setup.logprobs(prompt, prompt[:1], temperature)[0].astype(np.float64))
    kept: list[int] = []
    for token in np.argsort(-whole)[: top_k or None]:
        if whole[kept].sum() < top_p:
            kept.append(int(token))
    counts = np.bincount([c.tokens[0] for c in done], minlength=len(whole))
    assert counts[kept].sum() == draws, "a token outside top-p or top-k was drawn"
    expected = whole[kept] / whole[kept].sum() * draws
    common = expected >= 5
    if common.sum() > 1:
        rest = [counts[kept][~common].sum()], [expected[~common].sum()]
        observed, wanted = np.append(counts[kept][common], rest[0]), np.append(expected[common], rest[1])
        assert chisquare(observed[wanted > 0], wanted[wanted > 0]).pvalue > 1e-4
    for completion in done[:20]:
        assert completion.logprobs[0] == pytest.approx(np.log(whole[completion.tokens[0]]), abs=2e-5)


def test_the_end_token_is_the_last_and_says_stop(setup: Setup) -> None:
    done = setup.engine.generate(PROMPTS, 32, Sampling(temperature=1.5, max_new_tokens=30), 3)
    for completion in done:
        ends = np.flatnonzero(completion.tokens == EOS)
        if completion.finish == Finish.STOP:
            assert ends.tolist() == [len(completion.tokens) - 1]
        else:
            assert not ends.size and len(completion.tokens) == 30
    assert {c.finish for c in done} == {Finish.STOP, Finish.LENGTH}


@pytest.mark.parametrize("stops", [("7",), ("ab", "\n"), ("= ", "12")])
def test_stop_strings_end_an_answer_where_they_first_appear(setup: Setup, stops: tuple[str, ...]) -> None:
    alphabet = setup.recipe.model.alphabet  # type: ignore[union-attr]
    text = lambda tokens: "".join(alphabet[t - 3] if t > 2 else "?" for t in tokens)
    stopped = 0
    for completion in setup.engine.generate(PROMPTS, 64, Sampling(temperature=1.5, max_new_tokens=50, stop=stops), 4):
        found = min(
            (text(completion.tokens).find(s) + len(s) for s in stops if s in text(completion.tokens)), default=None
        )
        if found is None:
            assert completion.finish == Finish.LENGTH or completion.tokens[-1] == EOS
        else:
            assert completion.finish == Finish.STOP and found == len(completion.tokens)
            stopped += 1
    assert stopped > 0


def test_a_prompt_goes_on_the_same_in_any_company(setup: Setup) -> None:
    greedy = Sampling(temperature=0, max_new_tokens=10)
    together = setup.engine.generate(PROMPTS, 1, greedy, 0)
    for prompt, completion in zip(PROMPTS, together, strict=True):
        [alone] = setup.engine.generate([prompt], 1, greedy, 0)
        assert alone.tokens.tolist() == completion.tokens.tolist()


def test_a_long_batch_of_prompts_is_prefilled_in_parts(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relax_hpc.engines.torch_model.PREFILL_TOKENS", 20)
    greedy = Sampling(temperature=0, max_new_tokens=10)
    parts = setup.engine.generate(PROMPTS, 2, greedy, 0)
    monkeypatch.undo()
    assert [c.tokens.tolist() for c in parts] == [
        c.tokens.tolist() for c in setup.engine.generate(PROMPTS, 2, greedy, 0)
    ]


def test_the_context_cuts_answers_and_refuses_prompts(setup: Setup) -> None:
    long, short = tiny.prompts([63, 5], seed=3)
    for completion, prompt in zip(
        setup.engine.generate([long, short], 4, Sampling(max_new_tokens=100), 0), [long] * 4 + [short] * 4, strict=True
    ):
        assert len(prompt) + len(completion.tokens) <= 64
        expected = setup.logprobs(prompt, completion.tokens)[np.arange(len(completion.tokens)), completion.tokens]
        np.testing.assert_allclose(completion.logprobs, expected, atol=2e-5)
    with pytest.raises(ValueError, match="prompt 1 has 64 tokens.*context of 64"):
        setup.engine.generate([short, tiny.prompts([64])[0]], 1, Sampling(max_new_tokens=4), 0)
    with pytest.raises(ValueError, match="prompt 0 has 0 tokens"):
        setup.engine.generate([np.zeros(0, np.int32)], 1, Sampling(), 0)


def test_a_row_that_is_cut_stays_cut_while_others_go_on(setup: Setup) -> None:
    """Rows wait for the next compaction after their end; what they draw there must not reach them."""
    long, short = tiny.prompts([60, 2], seed=3)
    done = setup.engine.generate([long, *[short] * 9], 20, Sampling(temperature=30.0, max_new_tokens=60), 1)
    for completion in done[:20]:
        assert (completion.finish == Finish.STOP) == (completion.tokens[-1] == EOS)
        assert len(completion.tokens) == 4 or completion.finish == Finish.STOP


def test_no_prompts_make_no_completions(setup: Setup) -> None:
    assert setup.engine.generate([], 4, Sampling(), 0) == []


def test_progress_ends_with_every_token(setup: Setup) -> None:
    said: list[int] = []
    began = time.monotonic()
    done = setup.engine.generate(PROMPTS, 4, Sampling(max_new_tokens=10), 0, said.append)
    assert said == sorted(said) and said[-1] == sum(len(c.tokens) for c in done)
    assert all(0 < c.seconds <= time.monotonic() - began for c in done)


def test_what_was_cut_off_goes_on_as_if_it_had_not_been(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    for engine in ("torch", "sglang.engine"):
        monkeypatch.setattr(f"relax_hpc.engines.{engine}.PROGRESS_EVERY_S", 0.003)
    greedy = Sampling(temperature=0, max_new_tokens=50)
    whole = setup.engine.generate(PROMPTS, 2, greedy, 0)

    def stop(tokens: int) -> None:
        if time.monotonic() > began + 0.02:
            raise Abort

    began = time.monotonic()
    cut = setup.engine.generate(PROMPTS, 2, greedy, 0, stop)
    assert any(c.finish is None for c in cut)
    for was, now in zip(whole, cut, strict=True):
        assert now.tokens.tolist() == was.tokens[: len(now.tokens)].tolist() and len(now.logprobs) == len(now.tokens)
        assert now.spans == ([(0, 3)] if len(now.tokens) else [])
        assert now.finish == was.finish if now.finish is not None else len(now.tokens) < len(was.tokens)
    rows = [i for i, c in enumerate(cut) if c.finish is None]
    rest = setup.engine.generate([PROMPTS[i // 2] for i in rows], 1, greedy, 0, begun=[cut[i].tokens for i in rows])
    for i, c in zip(rows, rest, strict=True):
        assert [*cut[i].tokens, *c.tokens] == whole[i].tokens.tolist() and c.finish == whole[i].finish
        np.testing.assert_allclose([*cut[i].logprobs, *c.logprobs], whole[i].logprobs, atol=2e-5)


def test_a_stop_string_may_begin_in_what_was_there_before(setup: Setup) -> None:
    alphabet = setup.recipe.model.alphabet  # type: ignore[union-attr]
    [done] = setup.engine.generate([PROMPTS[1]], 1, Sampling(temperature=0, max_new_tokens=30), 0)
    text = "".join(alphabet[t - 3] if t > 2 else "?" for t in done.tokens)
    at = next(k for k in range(1, 29) if text.find(text[k - 1 : k + 2]) == k - 1)
    stops = Sampling(temperature=0, max_new_tokens=30, stop=(text[at - 1 : at + 2],))
    [rest] = setup.engine.generate([PROMPTS[1]], 1, stops, 0, begun=[done.tokens[:at]])
    assert rest.tokens.tolist() == done.tokens[at : at + 2].tolist() and rest.finish == Finish.STOP
    assert len(rest.logprobs) == 2 and rest.spans == [(0, 3)]
    with pytest.raises(ValueError, match="answer 0 has all of its 30 tokens"):
        setup.engine.generate([PROMPTS[1]], 1, stops, 0, begun=[np.zeros(30, np.int32)])


def test_a_version_is_taken_whole_or_not_at_all(setup: Setup) -> None:
    sampling = Sampling(temperature=0, max_new_tokens=5)
    before = setup.engine.generate(PROMPTS, 2, sampling, 0)
    assert before[0].spans == [(0, 3)]
    name = "model.layers.1.mlp.up_proj.weight"
    broken = {
        f"'{name}' is missing": {n: t for n, t in setup.weights.items() if n != name},
        "'model.extra' is not in the model": setup.weights | {"model.extra": torch.zeros(2)},
        rf"'{name}' is \[3, 32\], expected \[64, 32\]": {
            n: torch.zeros(3, 32) if n == name else t * 2 for n, t in setup.weights.items()
        },
    }
    for message, tensors in broken.items():
        with pytest.raises(ValueError, match=message):
            setup.engine.load(4, tensors.items())
    assert setup.engine.version == 3
    assert alike(before, setup.engine.generate(PROMPTS, 2, sampling, 0))


@pytest.mark.quick
def test_new_weights_are_used_and_named(setup: Setup) -> None:
    sampling = Sampling(temperature=0, max_new_tokens=5)
    before = setup.engine.generate(PROMPTS, 2, sampling, 0)
    setup.engine.load(7, ((n, t.flip(0)) for n, t in setup.weights.items()))
    after = setup.engine.generate(PROMPTS, 2, sampling, 0)
    assert after[0].spans == [(0, 7)] and not alike(before, after)
    tied = setup.weights | {"lm_head.weight": setup.weights["model.embed_tokens.weight"]}
    setup.engine.load(3, tied.items())
    assert alike(before, setup.engine.generate(PROMPTS, 2, sampling, 0))


def test_an_engine_that_rested_goes_on_with_the_weights_it_is_given_then(setup: Setup) -> None:
    sampling = Sampling(temperature=0, max_new_tokens=5)
    before = setup.engine.generate(PROMPTS, 2, sampling, 0)
    for _ in range(2):
        setup.engine.offload()
        assert setup.engine.version == -1
        setup.engine.onload()
    setup.engine.load(3, setup.weights.items())
    assert alike(before, setup.engine.generate(PROMPTS, 2, sampling, 0))


def test_a_version_is_read_where_the_file_transport_put_it(setup: Setup, tmp_path: Path) -> None:
    sampling, run = Sampling(temperature=0, max_new_tokens=5), RunDir(tmp_path)
    run.create()
    (run.lease / "commit_dir").mkdir()
    before = setup.engine.generate(PROMPTS, 2, sampling, 0)
    flipped = {name: tensor.flip(0) for name, tensor in setup.weights.items()}
    version = FilePublisher(run, run.lease / "commit_dir", 1, bucket_bytes=1 << 15).publish(8, flipped.items)
    with FileReceiver(run).fetch(version) as fetched:
        # Who reads the files has no use for what the tensors hold.
        zeros = [(name, tensor * 0) for name, tensor in fetched]
        reads = isinstance(setup.engine, SglangEngine)
        setup.engine.load(8, zeros if reads else fetched, files=fetched.files)
        there = setup.engine.generate(PROMPTS, 2, sampling, 0)
        assert len(fetched.files) > 2 and there[0].spans == [(0, 8)] and not alike(before, there)
        fetched.files[-1].unlink()  # the version is retired while it is taken: what is mapped is still whole
        setup.engine.load(3, setup.weights.items())
        setup.engine.load(8, fetched, files=fetched.files)
    assert alike(there, setup.engine.generate(PROMPTS, 2, sampling, 0))
    setup.engine.load(3, setup.weights.items())
    assert alike(before, setup.engine.generate(PROMPTS, 2, sampling, 0))


def test_the_torch_engine_at_rest_holds_no_weights(tmp_path: Path) -> None:
    engine = Setup("torch", tmp_path).engine
    assert isinstance(engine, TorchEngine)
    engine.offload()
    assert sum(p.untyped_storage().nbytes() for p in engine.model.parameters()) == 0


def test_a_cache_that_outgrows_its_room_keeps_what_it_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relax_hpc.engines.kv_cache.ROOM", 2)
    setup = Setup("torch", tmp_path)
    for i, completion in enumerate(setup.engine.generate(PROMPTS, 2, Sampling(max_new_tokens=40), 0)):
        expected = setup.logprobs(PROMPTS[i // 2], completion.tokens)[
            np.arange(len(completion.tokens)), completion.tokens
        ]
        np.testing.assert_allclose(completion.logprobs, expected, atol=2e-5)


def asks(count: int, sampling: Sampling, **how: Any) -> list[Ask]:
    return [Ask(i, PROMPTS[i % 6], sampling, 100 + i, **how) for i in range(count)]


def stream_of(setup: Setup) -> Stream:
    if not isinstance(setup.engine, Streams):
        pytest.skip("this engine has no streams: it generates batch by batch")
    return setup.engine.stream()


def answered(stream: Stream, wanted: list[Ask], at_once: int) -> dict[int, Completion]:
    """The answers of a stream that is given so many asks before each look at it."""
    done: dict[int, Completion] = {}
    for first in range(0, len(wanted), at_once):
        stream.ask(wanted[first : first + at_once])
        done |= dict(stream.advance(0.003))
    while stream.busy:
        done |= dict(stream.advance(10))
    assert done.keys() == {ask.key for ask in wanted} and not stream.advance(10)
    return done


def check_logprobs(setup: Setup, done: dict[int, Completion], wanted: list[Ask]) -> None:
    for ask in wanted:
        made = done[ask.key]
        before = np.concatenate([ask.context, ask.begun])
        expected = setup.logprobs(before, made.tokens)[np.arange(len(made.tokens)), made.tokens]
        np.testing.assert_allclose(made.logprobs, expected, atol=1e-5)


@pytest.mark.quick
@pytest.mark.parametrize("at_once", [1, 24])
def test_a_stream_answers_asks_that_come_in_mid_generation(setup: Setup, at_once: int) -> None:
    """Rows join and leave at all times; one that is mixed up with another shows in its logprobs."""
    stream, wanted = stream_of(setup), asks(24, Sampling(max_new_tokens=40))
    assert not stream.busy and stream.advance(10) == []
    done = answered(stream, wanted, at_once)
    check_logprobs(setup, done, wanted)
    assert len({len(c.tokens) for c in done.values()}) > 5
    for made in done.values():
        assert made.finish == (Finish.STOP if made.tokens[-1] == EOS else Finish.LENGTH)
        assert made.spans == [(0, 3)] and made.seconds > 0
        assert made.finish == Finish.STOP or len(made.tokens) == 40


def test_an_answer_of_a_stream_depends_on_its_ask_alone(setup: Setup) -> None:
    for sampling in (Sampling(temperature=0, max_new_tokens=20), Sampling(max_new_tokens=20, top_p=0.9, top_k=20)):
        if sampling.temperature and not setup.engine.seeded:
            continue  # its server draws by its own order
        wanted = asks(24, sampling)
        together = answered(stream_of(setup), wanted, 24)
        apart = answered(stream_of(setup), wanted, 1)
        for key, made in together.items():
            assert made.tokens.tolist() == apart[key].tokens.tolist()
            np.testing.assert_allclose(made.logprobs, apart[key].logprobs, atol=1e-5)
        whole = {made.tokens.tobytes() for made in together.values()}
        assert len(whole) > 6 or not sampling.temperature, "samples of a prompt drew the same numbers"


def test_a_stream_draws_each_answer_by_its_own_settings(setup: Setup) -> None:
    hows = [Sampling(0, max_new_tokens=9), Sampling(1.5, top_k=2, max_new_tokens=17), Sampling(0.5, max_new_tokens=13)]
    wanted = [Ask(i, PROMPTS[i % 6], hows[i % 3], i) for i in range(18)]
    done = answered(stream_of(setup), wanted, 5)
    for ask in wanted:
        made, own = done[ask.key], ask.sampling
        assert len(made.tokens) == own.max_new_tokens or made.tokens[-1] == EOS
        every = setup.logprobs(ask.context, made.tokens, own.temperature or 1.0)
        np.testing.assert_allclose(made.logprobs, every[np.arange(len(made.tokens)), made.tokens], atol=1e-5)
        rank = (every > made.logprobs[:, None] + 1e-4).sum(-1)
        assert rank.max() == 0 if own.temperature == 0 else rank.max() < (own.top_k or 50)


def test_what_a_stream_aborts_goes_on_as_if_it_had_not_been(setup: Setup) -> None:
    stream, greedy = stream_of(setup), Sampling(temperature=0, max_new_tokens=50)
    whole = answered(stream, asks(12, greedy), 12)
    stream.ask(asks(10, greedy))
    cut = dict(stream.advance(0.01))
    stream.ask(asks(12, greedy)[10:])
    cut |= dict(stream.abort())
    assert not stream.busy and stream.abort() == [] and cut.keys() == whole.keys()
    for key, made in cut.items():
        assert made.tokens.tolist() == whole[key].tokens[: len(made.tokens)].tolist()
        assert len(made.logprobs) == len(made.tokens) and made.spans == ([(0, 3)] if len(made.tokens) else [])
    going = [key for key, made in cut.items() if made.finish is None]
    assert going
    rest = [Ask(key, PROMPTS[key % 6], greedy, 100 + key, cut[key].tokens) for key in going]
    after = answered(stream, rest, 4)
    check_logprobs(setup, after, rest)
    for key in going:
        assert [*cut[key].tokens, *after[key].tokens] == whole[key].tokens.tolist()
        assert after[key].finish == whole[key].finish


def test_the_rest_of_a_drawn_answer_is_drawn_as_if_it_had_not_been_cut(setup: Setup) -> None:
    if not setup.engine.seeded:
        pytest.skip("its server draws by its own order")
    wanted = asks(12, Sampling(max_new_tokens=30))
    whole = answered(stream_of(setup), wanted, 12)
    rest = [Ask(a.key, a.context, a.sampling, a.seed, whole[a.key].tokens[:3]) for a in wanted]
    rest = [ask for ask in rest if len(whole[ask.key].tokens) > 3]
    for key, made in answered(stream_of(setup), rest, 12).items():
        assert made.tokens.tolist() == whole[key].tokens[3:].tolist()


def test_stop_strings_end_answers_of_a_stream_where_they_first_appear(setup: Setup) -> None:
    alphabet = setup.recipe.model.alphabet  # type: ignore[union-attr]
    text = lambda tokens: "".join(alphabet[t - 3] if t > 2 else "?" for t in tokens)
    hows = [Sampling(1.5, max_new_tokens=40, stop=stops) for stops in (("7",), ("ab", "\n"), ("= ", "12"), ())]
    wanted = [Ask(i, PROMPTS[i % 6], hows[i % 4], i) for i in range(64)]
    done = answered(stream_of(setup), wanted, 16)
    stopped = 0
    for ask in wanted:
        made = done[ask.key]
        ends = [text(made.tokens).find(s) + len(s) for s in ask.sampling.stop if s in text(made.tokens)]
        assert made.finish == (Finish.STOP if ends or made.tokens[-1] == EOS else Finish.LENGTH)
        assert not ends or min(ends) == len(made.tokens)
        stopped += bool(ends)
    assert stopped > 3


def test_a_stop_string_of_a_stream_may_begin_in_what_was_there_before(setup: Setup) -> None:
    alphabet = setup.recipe.model.alphabet  # type: ignore[union-attr]
    stream, greedy = stream_of(setup), Sampling(temperature=0, max_new_tokens=30)
    done = answered(stream, [Ask(0, PROMPTS[1], greedy, 0)], 1)[0]
    text = "".join(alphabet[t - 3] if t > 2 else "?" for t in done.tokens)
    at = next(k for k in range(1, 29) if text.find(text[k - 1 : k + 2]) == k - 1)
    how = Sampling(temperature=0, max_new_tokens=30, stop=(text[at - 1 : at + 2],))
    rest = answered(stream, [Ask(0, PROMPTS[1], how, 0, done.tokens[:at])], 1)[0]
    assert rest.tokens.tolist() == done.tokens[at : at + 2].tolist() and rest.finish == Finish.STOP


def test_a_stream_refuses_asks_without_room_and_keys_that_are_under_way(setup: Setup) -> None:
    stream, how = stream_of(setup), Sampling(max_new_tokens=30)
    long = tiny.prompts([64])[0]
    good = Ask(3, PROMPTS[0], how, 0)
    for bad, said in (
        ([Ask(7, long, how, 0)], "ask 7 has 64 tokens.*context of 64"),
        ([Ask(7, PROMPTS[0], how, 0, np.zeros(30, np.int32))], "the answer of ask 7 has all of its 30 tokens"),
        ([good], "ask 3 is under way already"),
    ):
        with pytest.raises(ValueError, match=said):
            stream.ask([good, *bad])
        assert not stream.busy, "some of them were taken"
    near = Ask(4, tiny.prompts([62], seed=3)[0], how, 0)
    done = answered(stream, [near, good], 1)
    assert len(done[4].tokens) <= 2
    check_logprobs(setup, done, [near, good])


def test_a_new_stream_takes_the_place_of_the_one_before(setup: Setup) -> None:
    first = stream_of(setup)
    first.ask(asks(6, Sampling(max_new_tokens=50)))
    wanted = asks(6, Sampling(temperature=0, max_new_tokens=5))
    check_logprobs(setup, answered(stream_of(setup), wanted, 6), wanted)


def test_a_stream_of_the_torch_engine_outgrows_its_room_and_gives_it_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relax_hpc.engines.slots.ROOM", 2)
    monkeypatch.setattr("relax_hpc.engines.torch_model.PREFILL_TOKENS", 20)
    setup = Setup("torch", tmp_path)
    stream, wanted = setup.engine.stream(), asks(24, Sampling(max_new_tokens=40))  # type: ignore[attr-defined]
    check_logprobs(setup, answered(stream, wanted, 8), wanted)
    assert stream._cache is None and stream._state is None
