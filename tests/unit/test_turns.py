"""Later turns through the chat templates of real models, and the calls of tools in what models say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from mistral_common.integrations.chat_templates.template_generator import TemplateConfig, build_chat_template
from mistral_common.tokens.tokenizers.base import TokenizerVersion
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from relax_hpc.data.render import ContentError, NextTurn, after_dummy, rendered_turn
from relax_hpc.environments.tools import Call, CallError, parse_calls
from relax_hpc.environments.tools.schemas import schemas_of, with_tools
from relax_hpc.registry import RegistryError
from tests import tiny

TEMPLATES = Path(__file__).parents[1] / "templates"
ANSWERS = [{"role": "tool", "content": "4"}, {"role": "tool", "content": "5"}]
ASKS = [{"role": "user", "content": "more?"}]
THOUGHT = "<think>\nhm\n</think>\n\nit is 4"
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}


def turn(model: str, said: str, new: list[dict[str, Any]], **options: Any) -> NextTurn:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"?": 0}, "?")), bos_token="<bos>")
    tokenizer.chat_template = model if "{" in model else (TEMPLATES / f"{model}.jinja").read_text()
    return rendered_turn(tokenizer, after_dummy(said), new, options.pop("tools", ()), options)


QWEN_TOOLS = (
    "<|im_end|>\n<|im_start|>user\n<tool_response>\n4\n</tool_response>\n<tool_response>\n5\n</tool_response><|im_end|>\n"
    "<|im_start|>assistant\n"
)
QWEN_USER = "<|im_end|>\n<|im_start|>user\nmore?<|im_end|>\n<|im_start|>assistant\n"
LLAMA = "<|eot_id|><|start_header_id|>{}<|end_header_id|>\n\n{}<|eot_id|>"
LLAMA_END = "<|start_header_id|>assistant<|end_header_id|>\n\n"


@pytest.mark.parametrize(
    ("model", "said", "new", "text"),
    [
        ("qwen3", "it is 4", ANSWERS, QWEN_TOOLS),
        ("qwen3", THOUGHT, ANSWERS, QWEN_TOOLS),
        ("qwen3", "it is 4", ASKS, QWEN_USER),
        ("qwen3_vl", "it is 4", ANSWERS, QWEN_TOOLS),
        ("qwen3_vl", THOUGHT, ASKS, QWEN_USER),
        ("llama3_1", "it is 4", ASKS, LLAMA.format("user", "more?") + LLAMA_END),
        ("llama3_1", "it is 4", ANSWERS[:1], LLAMA.format("ipython", '"4"') + LLAMA_END),
        (
            "gemma3",
            "it is 4",
            ASKS,
            "<end_of_turn>\n<start_of_turn>user\nmore?<end_of_turn>\n<start_of_turn>model\n",
        ),
    ],
)
def test_a_later_turn_is_rendered_from_the_end_of_turn_token_on(
    model: str, said: str, new: list[dict[str, Any]], text: str
) -> None:
    assert turn(model, said, new, tools=[TOOL] if new is ANSWERS else ()) == NextTurn(text, rewritten=False)


@pytest.mark.parametrize(
    ("said", "options"), [(THOUGHT, {}), ("it is 4", {"enable_thinking": False})], ids=["thought", "empty thought"]
)
def test_a_template_that_leaves_out_old_thinking_is_noticed(said: str, options: dict[str, Any]) -> None:
    found = turn("qwen3", said, ASKS, **options)
    assert found.rewritten and found.text.startswith(QWEN_USER)


@pytest.mark.parametrize(
    ("version", "answers"),
    [
        ("v3", '[TOOL_RESULTS]{{"content": {}, "call_id": "000000000"}}[/TOOL_RESULTS]'),
        ("v7", "[TOOL_RESULTS]000000000[TOOL_CONTENT]{}[/TOOL_RESULTS]"),
        ("v13", "[TOOL_RESULTS]{}[/TOOL_RESULTS]"),
    ],
)
def test_mistrals_own_templates_continue_a_turn(version: str, answers: str) -> None:
    """As Mistral's library makes them for its tokenizers' versions, of Mistral 7B 0.3, Small 3 and Small 3.2."""
    template = build_chat_template(TemplateConfig(TokenizerVersion(version)))
    found = turn(template, '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]', ANSWERS, tools=[TOOL])
    assert found == NextTurn("</s>" + answers.format(4) + answers.format(5), rewritten=False)
    assert turn(template, "it is 4", ASKS) == NextTurn("</s>[INST]more?[/INST]", rewritten=False)
    moved = turn(template, "it is 4", ASKS, tools=[TOOL])
    assert moved.rewritten == (version != "v13"), (
        "tools stand before the last question: the first one is shown without them"
    )


def test_a_template_that_knows_no_tools_answers_refuses_with_the_roles() -> None:
    with pytest.raises(ContentError, match=r"roles \['user', 'assistant', 'tool'"):
        turn("gemma3", "it is 4", ANSWERS)


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("no call of a tool: {x}", []),
        ('{"answer": 4}', []),
        (
            'so\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n<tool_call>\n{"name": "b"}\n</tool_call>',
            [Call("add", {"a": 1}), Call("b", {})],
        ),
        ('<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}', [Call("add", {"a": 1})]),
        (
            '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}, {"name": "b"}]',
            [Call("add", {"a": 1}), Call("b", {})],
        ),
        ('[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]b[ARGS]{}', [Call("add", {"a": 1}), Call("b", {})]),
        (' [{"name": "add", "arguments": {"a": 1}}]', [Call("add", {"a": 1})]),
        (
            '<|python_tag|>{"name": "add", "parameters": {"a": 1}}; {"name": "b", "parameters": {}}',
            [Call("add", {"a": 1}), Call("b", {})],
        ),
        ('{"name": "add", "parameters": {"a": 1}}', [Call("add", {"a": 1})]),
    ],
)
def test_calls_are_found_in_the_formats_of_model_families(text: str, calls: list[Call]) -> None:
    assert parse_calls(text) == calls


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<tool_call>add(1)</tool_call>", "the tool call is not JSON .*add"),
        ('<tool_call>["add"]</tool_call>', "a tool call is .*found"),
        ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "arguments of a tool call are an object"),
        ("[TOOL_CALLS]add 1", "not JSON"),
    ],
)
def test_a_broken_call_says_what_is_wrong(text: str, message: str) -> None:
    with pytest.raises(CallError, match=message):
        parse_calls(text)


def add(a: int, b: int = 0) -> int:
    """
    Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


def bare(a):  # type: ignore[no-untyped-def]
    return a


def test_functions_and_schemas_become_schemas_and_others_are_named() -> None:
    made, given = schemas_of([add, TOOL["function"]], "mine.py:Mine")
    assert made["function"]["parameters"]["required"] == ["a"] and given == TOOL
    with pytest.raises(
        RegistryError, match=r"tool 0 of 'mine.py:Mine': the function 'bare' cannot be shown.*type hint"
    ):
        schemas_of([bare], "mine.py:Mine")
    with pytest.raises(RegistryError, match=r"tool 0 of 'mine.py:Mine' is no JSON schema: .*set"):
        schemas_of([{"name": "x", "parameters": {1, 2}}], "mine.py:Mine")


def test_tools_of_what_is_built_in_are_shown_to_the_model() -> None:
    [source] = with_tools(tiny.recipe(source=[{"task": "chain_sum", "environment": "calculator"}])).source
    [tool] = source.tools
    assert isinstance(tool, dict) and tool["function"]["name"] == "calculator"


def test_tools_that_are_no_list_are_named(tmp_path: Path) -> None:
    methods = "def reset(self, prompt): ...\n    def step(self, answer): ...\n    def close(self): ..."
    (tmp_path / "e.py").write_text(f"class E:\n    {methods}\n    def tools(self): return {{'name': 'x'}}\n")
    with pytest.raises(RegistryError, match=r"tools\(\) returned .*dict.*expected a list of JSON schemas"):
        with_tools(tiny.recipe(source=[{"task": "chain_sum", "environment": f"{tmp_path}/e.py:E"}]))
