"""The gateway: real clients of OpenAI, Anthropic and curl speak to a tiny model; what is trained is what was sampled."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import numpy as np
import openai
import psutil
import pytest
import torch
from transformers import AutoTokenizer

from relax_hpc.engines import Completion, Sampling, Streams, make_engine
from relax_hpc.gateway import Gateway, Session
from relax_hpc.gateway.app import MAX_BODY_BYTES
from relax_hpc.gateway.openai import MODEL
from relax_hpc.gateway.relay import Relay
from relax_hpc.gateway.tree import samples
from relax_hpc.records import Finish
from relax_hpc.trainers import make_trainer
from tests import tiny

TEMPLATE = """\
{%- for tool in tools or [] %}tool {{ tool.function.name }}<eos>{% endfor %}
{%- for message in messages %}{{ message.role }}: {{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>
{%- endfor %}<eos>{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""
ALPHABET = "".join(map(chr, range(32, 127))) + "\n"
ASKED: list[Any] = [{"role": "user", "content": "1+1="}]
TOOL: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
SAMPLING = Sampling(max_new_tokens=6)


class Place:
    """A gateway over a tiny model, whose engine runs in a thread; it notes all that the engine sampled."""

    def __init__(self, folder: Path) -> None:
        recipe = tiny.recipe(model={"context": 512, "alphabet": ALPHABET}, rollout={"device": "cpu"})
        tiny.folder(recipe, folder)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.tokenizer.chat_template = TEMPLATE
        self.engine = make_engine(recipe, folder)
        assert isinstance(self.engine, Streams)
        self.engine.load(3, dict(make_trainer(recipe, folder, 0, 1).export()).items())
        self.script: list[str] = []
        self.paused = threading.Lock()
        """Held by a test, it keeps the engine from working."""
        self.gateway, self.sampled = Gateway(self.tokenizer, self.engine.context), list[Completion]()
        self.relay, self.stop = Relay(self.gateway, self.engine), threading.Event()
        answer = self.gateway.answer

        def noted(key: int, completion: Completion) -> None:
            completion = self._scripted(completion)
            self.sampled.append(completion)
            answer(key, completion)

        self.gateway.answer = noted  # type: ignore[method-assign]
        self.thread = threading.Thread(target=self._work)
        self.thread.start()

    def _scripted(self, completion: Completion) -> Completion:
        """The answer, or that of the script in its place: no tiny model calls tools."""
        if not self.script:
            return completion
        tokens = np.array(self.tokenizer.encode(self.script.pop(0), add_special_tokens=False), np.int32)
        return Completion(tokens, np.full(len(tokens), -0.5, np.float32), [(0, 3)], Finish.STOP)

    def _work(self) -> None:
        torch.set_num_threads(1)
        while not self.stop.is_set():
            with self.paused:
                self.relay.advance(0.05)
            time.sleep(0)

    def session(self, seed: int = 1) -> Session:
        self.sampled.clear()
        return self.gateway.begin(seed, SAMPLING)

    def openai(self, session: Session) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.gateway.url}/v1", api_key=session.key, max_retries=0)

    def anthropic(self, session: Session) -> anthropic.Anthropic:
        return anthropic.Anthropic(base_url=self.gateway.url, api_key=session.key, max_retries=0)

    def close(self) -> None:
        self.stop.set()
        self.thread.join()
        self.relay.close()
        self.gateway.close()
        self.engine.close()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    made = Place(tmp_path_factory.mktemp("model"))
    yield made
    made.close()


def drift(place: Place, session: Session) -> int:
    """Tokens in the loss of a session's samples that are not, one for one, those that the engine sampled."""
    made, _ = samples(session.tree, 0)
    trained = [
        (t, p) for s in made for t, p in zip(s.tokens[s.loss_mask == 1], s.logprobs[s.loss_mask == 1], strict=True)
    ]
    sampled = [(t, p) for c in place.sampled for t, p in zip(c.tokens, c.logprobs, strict=True)]
    return sum(a != b for a, b in zip(sorted(trained), sorted(sampled), strict=True))


def test_an_openai_client_goes_on_from_the_tokens_that_were_sampled(place: Place) -> None:
    session = place.session()
    client = place.openai(session)
    messages = [*ASKED]
    for question in ("2", "3"):
        reply = client.chat.completions.create(model=MODEL, messages=messages, logprobs=True)
        [choice] = reply.choices
        assert choice.logprobs and choice.logprobs.content
        assert np.allclose([c.logprob for c in choice.logprobs.content], place.sampled[-1].logprobs)
        assert reply.usage and reply.usage.completion_tokens == len(place.sampled[-1].tokens)
        messages += [choice.message.model_dump(), {"role": "user", "content": question}]
    client.chat.completions.create(model=MODEL, messages=messages)
    [sample], [told] = samples(session.tree, 2)
    assert drift(place, session) == 0 and sample.turns == 3 and sample.rollout == 2
    assert place.tokenizer.decode(told.tolist()) == "user: 1+1=<eos>assistant: "
    at = len(told)
    questions = ("2", "3", None)
    for said, asked in zip(place.sampled, questions, strict=True):
        assert sample.tokens[at : at + len(said.tokens)].tolist() == said.tokens.tolist()
        at += len(said.tokens)
        if asked is None:
            break
        end = "" if said.tokens[-1] == place.tokenizer.eos_token_id else "<eos>"
        between = place.tokenizer.encode(f"{end}user: {asked}<eos>assistant: ", add_special_tokens=False)
        assert sample.tokens[at : at + len(between)].tolist() == between
        at += len(between)
    assert at == len(sample.tokens)
    assert sample.spans == [(0, 3)]


def test_a_tool_call_and_a_stream_are_told_as_openai_tells_them(place: Place) -> None:
    session = place.session()
    client = place.openai(session)
    place.script = ['so<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><eos>']
    asked = client.chat.completions.create(model=MODEL, messages=ASKED, tools=[TOOL])
    choice = asked.choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content == "so" and choice.message.tool_calls
    [call] = choice.message.tool_calls
    assert call.type == "function" and (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1})
    told: Any = {"role": "tool", "tool_call_id": call.id, "content": "2"}
    renamed: Any = {**choice.message.model_dump(), "content": " so\n"}  # as harnesses do
    renamed["tool_calls"][0] |= {"id": "x"}
    chunks = [
        *client.chat.completions.create(
            model=MODEL,
            messages=[*ASKED, renamed, told],
            tools=[TOOL],
            stream=True,
            stream_options={"include_usage": True},
        )
    ]
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    last = place.sampled[-1]
    assert text == place.tokenizer.decode(last.tokens.tolist(), skip_special_tokens=True)
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] in ("stop", "length")
    assert chunks[-1].usage and chunks[-1].usage.completion_tokens == len(last.tokens)
    [sample], [before] = samples(session.tree, 0)
    assert drift(place, session) == 0 and sample.turns == 2
    between = sample.tokens[len(before) + len(place.sampled[0].tokens) : -len(last.tokens)]
    assert place.tokenizer.decode(between.tolist()) == "tool: 2<eos>assistant: "


def test_forks_and_rewritten_histories_are_samples_whose_shared_turns_are_trained_once(place: Place) -> None:
    session = place.session()
    client = place.openai(session)

    def say(messages: Any) -> dict[str, Any]:
        return client.chat.completions.create(model=MODEL, messages=messages).choices[0].message.model_dump()

    first = [*ASKED, say(ASKED)]
    for question in ("left", "right"):
        say([*first, {"role": "user", "content": question}])
    say([{"role": "user", "content": "in short: 1+1="}])  # compressed
    made, told = samples(session.tree, 0)
    shared, left, right, short = (c.tokens for c in place.sampled)
    assert [s.tokens[s.loss_mask == 1].tolist() for s in made] == [
        [*shared, *left], right.tolist(), short.tolist(),
    ]  # fmt: skip
    assert [s.turns for s in made] == [2, 2, 1] and drift(place, session) == 0
    begin = len(told[0]) + len(shared)
    assert made[0].tokens[:begin].tolist() == made[1].tokens[:begin].tolist() and not made[1].logprobs[:begin].any()


def test_tokens_in_tokens_out_go_on_where_they_are_known(place: Place) -> None:
    session = place.session()

    def ask(tokens: list[int]) -> httpx.Response:
        sampled = {"max_tokens": 4, "logprobs": 1, "stop_token_ids": [1]}
        return httpx.post(
            f"{place.gateway.url}/inference/v1/generate",
            headers={"authorization": f"Bearer {session.key}"},
            json={"model": MODEL, "token_ids": tokens, "sampling_params": sampled},
        )

    first = ask([5, 6, 7]).json()["choices"][0]
    assert [e["token"] for e in first["logprobs"]["content"]] == [f"token_id:{t}" for t in first["token_ids"]]
    ask([5, 6, 7, *first["token_ids"], 8, 9])
    [sample], [told] = samples(session.tree, 0)
    assert told.tolist() == [5, 6, 7] and sample.turns == 2 and drift(place, session) == 0
    other = ask([5, 10**6])
    assert other.status_code == 400 and "another model's" in other.json()["error"]["message"]


def test_an_anthropic_client_calls_tools_and_streams(place: Place) -> None:
    session = place.session()
    client = place.anthropic(session)
    tools: Any = [{"name": "add", "description": "adds", "input_schema": {"type": "object", "properties": {}}}]
    more: Any = {"model": MODEL, "max_tokens": 5, "system": "be brief", "tools": tools}
    place.script = ['<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><eos>']
    reply = client.messages.create(messages=ASKED, **more)
    [block] = reply.content
    assert reply.stop_reason == "tool_use" and block.type == "tool_use" and block.input == {"a": 1}
    result = {"type": "tool_result", "tool_use_id": block.id, "content": "2"}
    turns: Any = [*ASKED, {"role": "assistant", "content": [block.model_dump()]}, {"role": "user", "content": [result]}]
    with client.messages.stream(messages=turns, **more) as stream:
        said = stream.get_final_message()
    last = place.sampled[-1].tokens
    assert said.content[0].type == "text" and said.usage.output_tokens == len(last) <= 5
    assert said.content[0].text == place.tokenizer.decode(last.tolist(), skip_special_tokens=True)
    [sample], [told] = samples(session.tree, 0)
    assert sample.turns == 2 and drift(place, session) == 0
    assert place.tokenizer.decode(told.tolist()) == "tool add<eos>system: be brief<eos>user: 1+1=<eos>assistant: "
    with pytest.raises(anthropic.BadRequestError, match="tool_choice.*the model decides"):
        client.messages.create(messages=ASKED, **more, tool_choice={"type": "any"})


def test_a_seed_draws_the_same_again_in_its_session_and_otherwise_in_another(place: Place) -> None:
    def said(seed: int, asked: int | None) -> list[list[int]]:
        client = place.openai(place.session(seed))
        for _ in range(2):
            client.chat.completions.create(model=MODEL, messages=ASKED, seed=asked)
        return [c.tokens.tolist() for c in place.sampled]

    one, again = said(1, 7)
    assert one == again
    assert said(2, 7)[0] != one
    first, second = said(1, None)
    assert first != second and said(1, None) == [first, second]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"n": 2}, "n: Input should be 1, found '2'"),
        ({"model": "gpt-4o"}, "no model 'gpt-4o': use model = 'policy'"),
        ({"tool_choice": "required"}, "tool_choice = 'required' is not supported: the model decides"),
        ({"response_format": {"type": "json_object"}}, "response_format.*ask for the format in the messages"),
        ({"logit_bias": {"1": 2}}, "logit_bias.* is not supported: leave it out"),
        ({"messages": []}, "messages is empty"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "part of type 'image_url': the gateway takes text only"),
        ({"messages": [{"role": "wizard", "content": "?"}]}, "messages.0.role = 'wizard' is not known: use one of system"),
        ({"messages": [{"role": "user", "content": "1" * 600}]}, "leaves no room.*context of 512: shorten them"),
    ],
)  # fmt: skip
def test_what_it_cannot_do_is_refused_by_name(place: Place, change: Any, named: str) -> None:
    session = place.session()
    with pytest.raises(openai.APIStatusError, match=named) as caught:
        place.openai(session).post(
            "/chat/completions", cast_to=object, body={"model": MODEL, "messages": ASKED} | change
        )
    assert caught.value.status_code in (400, 404) and session.refused == 1 and not session.tree.nodes


def test_wrong_keys_ended_sessions_and_bodies_of_a_gigabyte_are_refused(place: Place, tmp_path: Path) -> None:
    session, other = place.session(), place.session()
    client = place.openai(session)
    with pytest.raises(openai.AuthenticationError, match="OPENAI_API_KEY"):
        openai.OpenAI(base_url=f"{place.gateway.url}/v1", api_key="wrong", max_retries=0).models.list()
    assert [m.id for m in client.models.list()] == [MODEL]
    place.gateway.end(other)
    with pytest.raises(openai.APIStatusError, match="has ended.*a key of its own") as caught:
        place.openai(other).with_options(max_retries=5).chat.completions.create(model=MODEL, messages=ASKED)
    assert caught.value.status_code == 410
    huge = tmp_path / "huge"
    with huge.open("wb") as file:
        file.truncate(1 << 30)
    too_large = {"message": f"the body is larger than {MAX_BODY_BYTES >> 20} MiB: shorten the messages"}
    before = psutil.Process().memory_info().rss
    for sent in (str(huge), "-"):  # of a known length; in chunks
        command = ["curl", "-s", "-m", "20", "-X", "POST", "-T", sent, "-H", f"x-api-key: {session.key}"]
        with huge.open("rb") as stdin:
            done = subprocess.run(
                [*command, f"{place.gateway.url}/v1/chat/completions"], stdin=stdin, capture_output=True
            )
        assert json.loads(done.stdout)["error"].items() >= too_large.items()
    assert psutil.Process().memory_info().rss - before < 8 * MAX_BODY_BYTES


def test_a_hundred_sessions_are_served_at_once_and_by_a_socket_of_this_user_alone(place: Place) -> None:
    assert stat.S_IMODE(os.stat(place.gateway.socket).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(place.gateway.socket.parent).st_mode) == 0o700
    sessions = [place.session(seed) for seed in range(100)]

    def ask(session: Session) -> None:
        transport = httpx.HTTPTransport(uds=str(place.gateway.socket))
        with httpx.Client(transport=transport, base_url="http://gateway", timeout=60) as client:
            body = {"model": MODEL, "messages": ASKED}
            reply = client.post("/v1/chat/completions", headers={"x-api-key": session.key}, json=body)
            assert reply.status_code == 200, reply.text

    threads = [threading.Thread(target=ask, args=(s,)) for s in sessions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(s.tree.nodes) for s in sessions] == [1] * 100


def test_an_answer_for_which_nobody_waits_is_not_kept(place: Place) -> None:
    session = place.session()
    client = place.openai(session)
    with place.paused:
        for stream in (False, True):
            with pytest.raises((openai.APITimeoutError, httpx.ReadTimeout)):
                hasty = client.with_options(timeout=0.3).chat.completions.create(
                    model=MODEL, messages=ASKED, stream=stream
                )
                list(hasty)
    client.chat.completions.create(model=MODEL, messages=ASKED)
    assert len(session.tree.nodes) == 1
