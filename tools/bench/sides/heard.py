"""Run an agent that uses OpenAI's client, and keep what its client heard: heard.py FOLDER AGENT.py

Each token of each turn with its logprob becomes FOLDER/TICKET.json, and the ticket a number of the sample.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from typing import Any
from zlib import crc32

from openai.resources.chat.completions import Completions

heard: list[tuple[str, float]] = []
WITHOUT_LIST: dict[str, Any] = {"chat_template_kwargs": {"tools": []}}
"""The quickstart's prompts do without a list of tools: as `template_options` in its recipe."""
create: Any = Completions.create


def listen(self: Completions, **asked: Any) -> Any:
    reply = create(self, **asked, logprobs=True, extra_body=WITHOUT_LIST)
    heard.extend((each.token, each.logprob) for each in reply.choices[0].logprobs.content)
    return reply


Completions.create = listen  # type: ignore[method-assign]
runpy.run_path(sys.argv[2], run_name="__main__")
ticket = crc32(os.environ["OPENAI_API_KEY"].encode()) % 2**24
with open(f"{sys.argv[1]}/{ticket}.json", "x") as file:
    json.dump(heard, file)
with open(os.environ["RELAX_HPC_RESULT"], "r+") as file:
    result = json.load(file)
    result["metadata"]["ticket"] = ticket
    file.seek(0)
    json.dump(result, file)
