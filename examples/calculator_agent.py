"""An agent as one has it already: OpenAI's client, a loop, and a tool. It knows nothing of relax_hpc but where its task and its result are.

    question ──► model ──calls the calculator──► its results ──► model … ──no call──► the answer, which is compared

Use: agent = {command = [PYTHON, "/path/to/calculator_agent.py"]}, in rows of plain text such as {"prompt": "12+30+5", "answer": "47"}.
"""

from __future__ import annotations

import json
import os
from typing import Any

import openai

TURNS = 4
EXPRESSION = {"expression": {"type": "string"}}
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": EXPRESSION, "required": ["expression"]},
    },
}


def calculate(arguments: str) -> str:
    """Answer a call; what is wrong with it is said to the model."""
    try:
        left, right = json.loads(arguments)["expression"].split("+")
        return str(int(left) + int(right))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"error: {error}"


def main() -> None:
    with open(os.environ["RELAX_HPC_TASK"]) as file:
        task = json.load(file)
    client, calls = openai.OpenAI(), 0
    messages: list[Any] = [{"role": "user", "content": task["prompt"]}]
    for _ in range(TURNS):
        reply = client.chat.completions.create(model=os.environ["OPENAI_MODEL"], messages=messages, tools=[TOOL])
        said = reply.choices[0].message
        messages.append(said)
        for call in said.tool_calls or ():
            calls += 1
            result = calculate(call.function.arguments) if call.type == "function" else "error: no function"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        if not said.tool_calls:
            break
    answer = messages[-1].content if messages[-1] is said else ""
    right = (answer or "").strip() == task["answer"]
    with open(os.environ["RELAX_HPC_RESULT"], "w") as file:
        json.dump({"reward": float(right), "metadata": {"calls": calls}}, file)


if __name__ == "__main__":
    main()
