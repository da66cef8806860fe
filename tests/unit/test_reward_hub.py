"""The shared rewards against answers of real shape whose worth is known, the mistakes of others among them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import numpy as np
import pytest

from relax_hpc.files.errors import RunError
from relax_hpc.recipe import Recipe
from relax_hpc.records import Prompt
from relax_hpc.registry import RegistryError
from relax_hpc.rewards import LoadedReward, make_rewards
from relax_hpc.rewards.hub.answers import dapo, f1, gpqa
from relax_hpc.rewards.hub.form import length, of_format
from relax_hpc.rewards.hub.instructions import CHECKS, ifeval
from relax_hpc.rewards.hub.remote import remote
from relax_hpc.rewards.math import deepscaler


def prompt(answer: str | None = None, **row: Any) -> Prompt:
    return Prompt(0, 7, "?", np.zeros(1, np.int32), answer, row)


LONG = "So we go on. " * 40

DAPO = [
    ("34", "Answer: 34", 1), ("34", "Let us see.\nAnswer: 34", 1), ("34", "answer: 34.", 1), ("34", "Answer: $34$", 1),
    ("34", "Answer: 33\nNo, wait.\nAnswer: 34", 1), ("34", "Answer: 34\nNo, wait.\nAnswer: 33", 0), ("34", "34", 0), ("34", "", 0),
    ("34", f"Answer: 34\n{LONG}", 0), ("34", f"{LONG}\nAnswer: 34", 1), ("34", "**Answer: 34**", 1), ("34", "Answer: x = 34", 1),
    ("34", "Answer: \\boxed{34}", 1), ("34", "Answer: \\text{34}", 1), ("34", "Answer: 34 degrees", 1), ("34", "Answer: 34^\\circ", 1),
    ("34", "Answer: 34%", 1), ("34", "Answer: 34\\%", 1), ("34", "Answer: 34.0", 1), ("34", "Answer: 34.5", 0), ("34", "Answer: 340", 0),
    ("1234", "Answer: 1,234", 1), ("1,234", "Answer: 1234", 1), ("1234567", "Answer: 1,234,567", 1), ("-3", "Answer: -3", 1), ("3", "Answer: -3", 0),
    ("2.5", "Answer: 2.5", 1), ("2.5", "Answer: 2", 0), ("2.50", "Answer: 2.5", 1), ("\\frac{1}{2}", "Answer: \\frac12", 1),
    ("\\frac{1}{2}", "Answer: \\dfrac{1}{2}", 1), ("\\sqrt{3}", "Answer: $\\sqrt3$", 1), ("(1,2)", "Answer: (1, 2)", 1), ("(1,2)", "Answer: 12", 0),
    ("blue", "Answer: blue", 1), ("blue", "Answer: the blue", 1), ("n+1", "Answer: n + 1", 1), ("10 meters", "Answer: 10", 1),
    ('["3", "three"]', "Answer: three", 1), ("nan", "Answer: 3", 0), ("1e400", "Answer: 2", 0), ("34", "ANSWER : 34", 1), ("34", "Answer:\n34", 0),
]  # fmt: skip


@pytest.mark.parametrize(("reference", "answer", "right"), DAPO)
def test_dapo(reference: str, answer: str, right: int) -> None:
    assert dapo(prompt(reference), answer) == {"reward": 2 * right - 1, "accuracy": right}


DEEPSCALER = [
    ("5", "<think>4?</think> \\boxed{5}", 1), ("5", "<think>\\boxed{5}</think> so", 0), ("5", "\\boxed{5}", 0), ("5", "<think>a</think>\\boxed{6}", 0),
    ("5", "<think>a</think>\\boxed{6} no, \\boxed{5}", 1), ("5", "<think>a</think>\\boxed{5} no, \\boxed{6}", 0), ("5", "<think>a</think>5", 0),
    ('["5", "6"]', "<think>a</think>\\boxed{6}", 1), ('["5", "6"]', "<think>a</think>\\boxed{7}", 0), ("[5, 6]", "<think>a</think>\\boxed{5}", 1),
    ("\\frac{1}{2}", "<think>a</think>\\boxed{0.5}", 1), ("\\frac{1}{2}", "<think>a</think>\\boxed{\\frac{2}{4}}", 1), ("0.5", "<think>a</think>\\boxed{\\frac12}", 1),
    ("\\boxed{5}", "<think>a</think>\\boxed{5}", 1), ("$5$", "<think>a</think>\\boxed{5}", 1), ("x+1", "<think>a</think>\\boxed{1+x}", 1),
    ("x+1", "<think>a</think>\\boxed{x-1}", 0), ("\\sqrt{2}", "<think>a</think>\\boxed{\\sqrt{2}}", 1), ("\\sqrt{2}", "<think>a</think>\\boxed{2}", 0),
    ("(1,2)", "<think>a</think>\\boxed{(1,2)}", 1), ("(1,2)", "<think>a</think>\\boxed{(2,1)}", 0), ("12", "<think>a</think>\\boxed{12", 0),
    ("12", "<think>a</think>\\boxed{}", 0), ("12", "", 0), ("12", "</think>\\boxed{12}", 0), ("12", "<think>a</think>b</think>\\boxed{12}", 1),
    ("1000", "<think>a</think>\\boxed{1,000}", 1), ("-2", "<think>a</think>\\boxed{-2}", 1), ("-2", "<think>a</think>\\boxed{2}", 0),
    ("\\pi", "<think>a</think>\\boxed{\\pi}", 1), ("2\\pi", "<think>a</think>\\boxed{6.28}", 0), ("5", "<think>a</think>\\boxed{\\text{five}}", 0),
]  # fmt: skip


@pytest.mark.parametrize(("reference", "answer", "right"), DEEPSCALER)
def test_deepscaler(reference: str, answer: str, right: int) -> None:
    assert deepscaler(prompt(reference), answer) == right


GPQA = [
    ("C", "The answer is C.", 1), ("C", "The answer is (C).", 1), ("(C)", "Answer: C", 1), ("c", "answer: **C**", 1), ("C", "\\boxed{C}", 1),
    ("C", "\\boxed{\\text{C}}", 1), ("C", "$\\boxed{(C)}$", 1), ("C", "C", 1), ("C", "(C)", 1), ("C", "C)", 1), ("C", "Reasoning.\n\nC.", 1),
    ("C", "The answer is B. No: the answer is C.", 1), ("C", "The answer is C. No: the answer is B.", 0), ("C", "<think>The answer is C</think> It is D.", 0),
    ("C", "<think>The answer is D</think> The answer is C", 1), ("C", "Carbon", 0), ("C", "Correct", 0), ("A", "The answer is A proton.", 0),
    ("A", "A proton is heavy.", 0), ("C", "Option C", 1), ("C", "I choose option C over option D", 0), ("C", "(B) is wrong, so it must be (C)", 1),
    ("C", "The answer is option C, because it is heavier.", 1), ("B", "The answer is C because (B) is wrong", 0), ("C", "", 0), ("C", "Answer:\nC", 1),
    ("C", "The answer is Carbon", 0), ("D", "Final answer: D", 1), ("D", "**Answer: D**", 1), ("D", "Answer = D", 1), ("D", "The answer is $D$", 1),
    ("C", "answer" + " " * 20000 + "x", 0), ("C", "The answer is \\boxed{C}", 1), ("C", "my answer is: C!", 1),
]  # fmt: skip


@pytest.mark.parametrize(("reference", "answer", "right"), GPQA)
def test_gpqa(reference: str, answer: str, right: int) -> None:
    assert gpqa(prompt(reference), answer) == right


F1 = [
    ("Paris", "Paris", 1), ("Paris", "paris.", 1), ("the Eiffel Tower", "Eiffel Tower", 1), ("Eiffel Tower", "The Tower", 2 / 3), ("Paris", "London", 0),
    ("Paris", "", 0), ("yes", "yes", 1), ("yes", "Yes.", 1), ("yes", "yes it is", 0), ("yes it is", "yes", 0), ("no", "yes", 0), ("noanswer", "noanswer", 1),
    ("noanswer", "no answer", 0), ("a b c d", "b c d", 1), ("b c d", "b c x", 2 / 3), ("b b", "b", 2 / 3), ("b", "b b", 2 / 3), ("b c", "c b", 1),
    ('["Paris", "City of Light"]', "City of Light", 1), ('["Paris", "City of Light"]', "city light", 4 / 5), ("Paris", "<answer>Paris</answer>", 1),
    ("Paris", "It is <answer>Paris</answer>, France", 1), ("Paris", "<think>London</think>Paris", 1), ("Paris", "<think>Paris</think>London", 0),
    ("U.S.A.", "USA", 1), ("it's", "its", 1), ("42", "42", 1), ("42", "The number is 42", 1 / 2), ("New York City", "New York", 4 / 5),
    ("an apple", "apple", 1), ("anapple", "apple", 0), ("no one", "no one", 1),
]  # fmt: skip


@pytest.mark.parametrize(("reference", "answer", "worth"), F1)
def test_f1(reference: str, answer: str, worth: float) -> None:
    assert f1(prompt(reference), answer) == pytest.approx(worth)


IFEVAL: list[tuple[str, dict[str, Any], str, str]] = [
    # instruction, its options, an answer that follows it, one that does not
    ("keywords:existence", {"keywords": ["tea", "Cup"]}, "A cup of Tea", "A cup"),
    ("keywords:frequency", {"keyword": "tea", "frequency": 2, "relation": "at least"}, "tea TEA", "tea"),
    ("keywords:frequency", {"keyword": "tea", "frequency": 2, "relation": "less than"}, "tea", "tea tea"),
    ("keywords:forbidden_words", {"forbidden_words": ["tea"]}, "a team", "some tea, please"),
    ("keywords:letter_frequency", {"letter": "q", "let_frequency": 2, "let_relation": "at least"}, "Quick quiz", "quick"),
    ("language:response_language", {"language": "de"}, "Das ist ein schöner Tag im Garten.", "This is a lovely day in the garden."),
    ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "at least"}, "One is here. Two is there.", "Dr. Smith is here"),
    ("length_constraints:number_sentences", {"num_sentences": 3, "relation": "less than"}, "Dr. Smith came. He left.", "One. Two. Three."),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "one\n***\ntwo", "one\n\ntwo"),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "one *** two ***", "one *** *** two"),
    ("length_constraints:number_words", {"num_words": 3, "relation": "at least"}, "one, two, three", "one two"),
    ("length_constraints:nth_paragraph_first_word", {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Tea"}, "x\n\n\"tea, please", "tea\n\nx"),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[name] of [town]", "[name]"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Bye.\nP. S. tea", "Bye. PS tea"),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, "Bye.\nP.P.S tea", "Bye.\nP.S. tea"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* one\n- two", "* one\n* two\n* three"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 1}, "* one\n**bold** two", "**bold** two"),
    ("detectable_format:constrained_response", {}, "Well. My answer is maybe.", "My answer is perhaps."),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*one* and *two*", "*one* and **"),
    ("detectable_format:multiple_sections", {"section_spliter": "Section", "num_sections": 2}, "Section 1 a\nSection 2 b", "Section 1 a"),
    ("detectable_format:json_format", {}, '```json\n{"a": 1}\n```', "{'a': 1}"),
    ("detectable_format:json_format", {}, "[1, 2]", "a"),
    ("detectable_format:title", {}, "<<Tea>>\nGood.", "<< >>\nGood."),
    ("combination:two_responses", {}, "one\n******\ntwo", "one\n******\none"),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Make tea"}, "make tea: here", "Here. Make tea"),
    ("startend:end_checker", {"end_phrase": "Any questions?"}, 'So. any questions?"', "Any questions? No."),
    ("startend:quotation", {}, '"tea"', '"tea'),
    ("change_case:capital_word_frequency", {"capital_frequency": 2, "capital_relation": "at least"}, "NASA and ESA", "Nasa and ESA"),
    ("change_case:english_capital", {}, "THIS IS A LOVELY DAY IN THE GARDEN", "This is a lovely day in the garden"),
    ("change_case:english_lowercase", {}, "this is a lovely day in the garden", "This is a lovely day in the garden"),
    ("punctuation:no_comma", {}, "one two", "one, two"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options", "follows", "does_not"), IFEVAL)
def test_ifeval(name: str, options: dict[str, Any], follows: str, does_not: str) -> None:
    row = prompt(
        instruction_id_list=[name], kwargs=[{**options, "other": None}]
    )  # rows have nulls for other kinds' options
    assert ifeval(row, follows) == {"reward": 1.0, "followed": 1.0}
    assert ifeval(row, does_not) == {"reward": 0.0, "followed": 0.0}
    assert ifeval(row, " ")["reward"] == 0.0


def test_ifeval_wants_all_instructions_and_names_a_row_that_has_none() -> None:
    assert CHECKS.keys() == {name for name, *_ in IFEVAL} and len(CHECKS) == 25
    two = prompt(instruction_id_list=json.dumps(["punctuation:no_comma", "startend:quotation"]), kwargs="[{}, {}]")
    assert ifeval(two, "no comma") == {"reward": 0.0, "followed": 0.5}
    with pytest.raises(ValueError, match="instruction_id_list = None"):
        ifeval(prompt(), "tea")
    with pytest.raises(ValueError, match="'tea:none' is not one of IFEval's"):
        ifeval(prompt(instruction_id_list=["tea:none"], kwargs=[{}]), "tea")
    with pytest.raises(ValueError, match=r"cannot be checked with \{'words': 3\}"):
        ifeval(prompt(instruction_id_list=["punctuation:no_comma"], kwargs=[{"words": 3}]), "tea")


@pytest.mark.parametrize(("reward", "reference"), [(dapo, ""), (gpqa, None), (f1, " "), (deepscaler, None)])
def test_a_missing_reference_is_a_fault_of_the_row(reward: Any, reference: str | None) -> None:
    with pytest.raises(ValueError, match="the reference answer is empty: answer_key"):
        reward(prompt(reference), "Answer: 3")


def test_a_reference_of_the_wrong_kind_is_named() -> None:
    with pytest.raises(ValueError, match="'Carbon' is no letter, expected one such as 'C'"):
        gpqa(prompt("Carbon"), "C")
    with pytest.raises(ValueError, match="has no mathematical expression"):
        deepscaler(prompt('["5", ""]'), "<think>a</think>\\boxed{5}")


@pytest.mark.parametrize(
    ("options", "answer", "worth"),
    [
        ({"tags": ["think", "answer"]}, "<think>a</think><answer>b</answer>", 1),
        ({"tags": ["think", "answer"]}, "<answer>b</answer><think>a</think>", 0),
        ({"tags": ["think", "answer"]}, "<think>a<answer>b</answer></think>", 0),
        ({"tags": ["think"]}, "<think>a</think><think>b</think>", 0),
        ({"tags": ["think"]}, "<think>a", 0),
        ({"pattern": r"<a>.*</a>"}, " <a>\n1\n</a>\n", 1),
        ({"pattern": r"\d+"}, "12a", 0),
        ({"pattern": r".*b", "tags": ["a"]}, "<a>x</a>b", 1),
    ],
)
def test_format(options: dict[str, Any], answer: str, worth: float) -> None:
    assert of_format(prompt(), answer, **options) == worth


@pytest.mark.parametrize(
    ("options", "answer", "worth"),
    [
        ({"most": 2}, "one two", 1), ({"most": 2}, "one two three", 0), ({"most": 2, "margin": 1}, "one two three", 0.5),
        ({"most": 2, "margin": 3}, "1 2 3 4 5", 0.25), ({"most": 2, "margin": 3}, "1 2 3 4 5 6", 0), ({"most": 9, "least": 2}, "one", 0),
        ({"most": 3, "unit": "characters"}, "abc", 1), ({"most": 3, "unit": "characters"}, "abcd", 0),
    ],
)  # fmt: skip
def test_length(options: dict[str, Any], answer: str, worth: float) -> None:
    assert length(prompt(), answer, **options) == pytest.approx(worth)


@pytest.mark.parametrize(
    ("reward", "options", "said"),
    [
        (of_format, {}, "needs `pattern` or `tags`"), (of_format, {"pattern": "("}, "is no regular expression"),
        (length, {"most": 3, "unit": "pages"}, "unit = 'pages'"), (length, {"most": 3, "least": 4}, "expected 0 <= least <= most"),
    ],
)  # fmt: skip
def test_wrong_options_are_named(reward: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        reward(prompt(), "tea", **options)


def loaded(**source: Any) -> LoadedReward:
    tables = {"model": {"name": "tiny"}, "rollout": {"max_new_tokens": 8}, "source": [{"prompts": "x.jsonl", **source}]}
    return make_rewards(Recipe.model_validate(tables).sources)[0]


def test_a_sum_has_a_column_for_each_part_and_its_numbers() -> None:
    parts = [
        {"reward": "dapo", "weight": 0.5, "name": "right"},
        {"reward": "length", "weight": 0.2, "options": {"most": 2}},
    ]
    score = loaded(rewards=parts)
    assert score.name == "right + length" and score.is_quick
    assert score(prompt("3"), ["Answer: 3", "I say Answer: 3"]) == [
        (pytest.approx(0.7), {"right": 1.0, "right.accuracy": 1.0, "length": 1.0}),
        (pytest.approx(0.5), {"right": 1.0, "right.accuracy": 1.0, "length": 0.0}),
    ]


def test_rows_of_several_kinds_have_rewards_of_their_own() -> None:
    parts = [
        {"reward": "gpqa", "kind": "choice"},
        {"reward": "f1", "kind": "text"},
        {"reward": "length", "options": {"most": 9}, "weight": 0},
    ]
    score = loaded(rewards=parts, reward_column="type")
    assert score(prompt("C", type="choice"), ["C"]) == [(1.0, {"gpqa": 1.0, "length": 1.0})]
    assert score(prompt("C", type="text"), ["D"]) == [(0.0, {"f1": 0.0, "length": 1.0})]
    only = loaded(rewards=parts[:2], reward_column="type")
    with pytest.raises(
        ValueError, match=r"column 'type' \(reward_column\) is 'code', expected one of \['choice', 'text'\]"
    ):
        only(prompt("C", type="code"), ["C"])


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ({"reward": "math", "rewards": [{"reward": "f1"}]}, "`reward` and `rewards` are both given"),
        ({"rewards": [{"reward": "f1"}, {"reward": "f1"}]}, "rewards has 'f1' twice"),
        ({"rewards": [{"reward": "f1", "kind": "a"}, {"reward": "f1"}], "reward_column": "type"}, "rewards has 'f1' twice"),
        ({"rewards": [{"reward": "f1", "kind": "a"}]}, "go together"),
        ({"reward_column": "type"}, "go together"),
        ({"rewards": [{"reward": "f1"}], "answer_key": ""}, r"source.0.rewards.0.reward = 'f1' compares with an answer"),
        ({"rewards": [{"reward": "f2"}]}, "unknown reward 'f2'"),
        ({"rewards": [{"reward": "length", "options": {"least": 1}}]}, "cannot be called"),
    ],
)  # fmt: skip
def test_rewards_that_do_not_fit_together_are_refused(source: dict[str, Any], said: str) -> None:
    with pytest.raises((ValueError, RunError, RegistryError), match=said):
        loaded(**source)


class Service(BaseHTTPRequestHandler):
    """A reward service that says what the test told it to say."""

    replies: list[tuple[int, str, bytes]] = []
    heard: list[tuple[str | None, Any]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.heard.append((self.headers["Authorization"], body))
        status, kind, said = self.replies.pop(0)
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    def log_message(self, *words: Any) -> None: ...


@pytest.fixture
def service() -> Iterator[str]:
    Service.replies, Service.heard = [], []
    server = HTTPServer(("127.0.0.1", 0), Service)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/score"
    server.shutdown()
    thread.join()
    server.server_close()


def test_remote_asks_for_a_group_at_once_with_the_key_and_again_where_it_failed(
    service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    Service.replies = [
        (503, "text/plain", b"later"),
        (200, "application/json", b'{"rewards": [1, {"reward": 0, "tone": 0.5}]}'),
    ]
    score = loaded(reward="remote", answer_key="", reward_options={"url": service, "key_variable": "JUDGE_KEY"})
    assert score(prompt(None, level=3), ["a", "b"]) == [(1.0, {}), (0.0, {"tone": 0.5})]
    asked = {"prompt": "?", "answer": None, "metadata": {"level": 3}, "responses": ["a", "b"]}
    assert Service.heard == [("Bearer secret", asked)] * 2


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        ((200, "text/html", b"<html>Log in</html>"), 'answered text/html, expected JSON with "rewards": <html>Log in'),
        ((200, "application/json", b'{"rewards": [1]}'), r"expected a list of 2"),
        ((200, "application/json", b"[1, 2]"), 'expected JSON with "rewards"'),
        ((403, "text/plain", b"no key"), "answered 403, expected 200: no key"),
        ((302, "text/plain", b"elsewhere"), "answered 302, expected 200"),
    ],
)
def test_another_answer_of_a_service_is_named(service: str, reply: tuple[int, str, bytes], said: str) -> None:
    Service.replies = [reply]
    with pytest.raises(RuntimeError, match=said):
        remote(prompt(), ["a", "b"], url=service)


def test_a_service_that_is_not_there_and_a_key_that_is_not_set_are_named() -> None:
    with pytest.raises(Exception, match="http://127.0.0.1:9/ does not answer"):
        remote(prompt(), ["a"], url="http://127.0.0.1:9/", attempts=1)
    with pytest.raises(RuntimeError, match="key_variable = 'NO_SUCH_KEY'"):
        remote(prompt(), ["a"], url="http://127.0.0.1:9/", key_variable="NO_SUCH_KEY")
