"""Tokens in, tokens out, as verifiers' clients speak to /inference/v1/generate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from relax_hpc.gateway.openai import Request, check_model, usage
from relax_hpc.gateway.refusals import Refusal
from relax_hpc.gateway.sessions import Call, Turn


class Sampled(BaseModel):
    """Arguments of the sampling. Those of the distribution are the recipe's; the tokens that end an answer the model's."""

    model_config = ConfigDict(extra="ignore")
    max_tokens: int | None = Field(None, ge=1)
    stop: str | list[str] | None = None
    seed: int | None = None
    n: Literal[1] | None = None
    prompt_logprobs: Literal[0] | None = None
    logprobs: Literal[0, 1] | None = None


class Generate(Request):
    """The body of /inference/v1/generate."""

    model: str
    token_ids: list[int] = Field(min_length=1)
    sampling_params: Sampled = Field(default_factory=lambda: Sampled.model_validate({}))
    stream: Literal[False] | None = None
    cache_salt: str | None = None
    priority: int | None = None
    return_token_ids: bool | None = None


class TokenApi:
    """Translates requests in tokens."""

    def __init__(self, vocabulary: int) -> None:
        """vocabulary: number of tokens of the model."""
        self._vocabulary = vocabulary

    def call(self, body: Mapping[str, Any]) -> Call:
        """Read a body. Raises Refusal."""
        asked: Generate = Generate.read(body)
        check_model(asked.model)
        sampled = asked.sampling_params
        least, most = min(asked.token_ids), max(asked.token_ids)
        if least < 0 or most >= self._vocabulary:
            raise Refusal(
                f"token_ids has {least if least < 0 else most}, but the policy's tokens are 0 to {self._vocabulary - 1}: they are "
                "another model's; use the tokenizer of the run's model",
                param="token_ids",
            )
        stop = (sampled.stop,) if isinstance(sampled.stop, str) else tuple(sampled.stop or ())
        tokens = np.asarray(asked.token_ids, np.int32)
        return Call(tokens=tokens, max_tokens=sampled.max_tokens, stop=stop, seed=sampled.seed)

    def reply(self, call: Call, turn: Turn, words: list[str]) -> dict[str, Any]:
        """The whole reply. words: the text of each token."""
        said, pairs = turn.said, zip(turn.said.tokens.tolist(), turn.said.logprobs.tolist(), strict=True)
        content = [{"token": f"token_id:{t}", "logprob": p, "bytes": None, "top_logprobs": []} for t, p in pairs]
        choice = {
            "index": 0, "token_ids": said.tokens.tolist(), "finish_reason": "length" if turn.cut else "stop",
            "logprobs": {"content": content}, "routed_experts": None,
        }  # fmt: skip
        assert call.tokens is not None
        return {
            "request_id": turn.id, "choices": [choice], "prompt_token_ids": call.tokens.tolist(), "usage": usage(turn),
        }  # fmt: skip

    def events(self, call: Call, turn: Turn, words: list[str]) -> Iterator[str]:
        raise NotImplementedError  # `stream` is refused

    def error(self, refusal: Refusal) -> dict[str, Any]:
        return refusal.openai()

    def error_event(self, refusal: Refusal) -> str:
        raise NotImplementedError
