"""Reward `remote`: a service of one's own that is asked over HTTP, for a whole group at once."""

from __future__ import annotations

import functools
import json
import os
from typing import Any

import tenacity
import urllib3

from relax_hpc.records import Prompt

CONNECT_S = 5.0
KEPT_CONNECTIONS = 8
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 10.0
SAID_CHARACTERS = 200
_TRY_AGAIN = frozenset({408, 425, 429, 500, 502, 503, 504})


class NotNow(Exception):
    """The service did not answer, or says that it will later."""


def remote(
    prompt: Prompt, answers: list[str], *, url: str, key_variable: str = "", timeout_s: float = 20.0, attempts: int = 5
) -> list[Any]:
    """POST {"prompt", "answer", "metadata", "responses": […]} to `url`; it answers {"rewards": […]}, one for each
    response: a number, or an object with "reward" and other numbers.

    key_variable: the environment variable whose value is sent as a bearer key. What fails for now (no connection, 429,
    5xx) is asked again, `attempts` times, at growing intervals. Raises RuntimeError for any other answer, by name.
    """
    headers = {"Content-Type": "application/json"}
    if key_variable:
        if key_variable not in os.environ:
            raise RuntimeError(
                f"key_variable = '{key_variable}' of reward 'remote' is not set in the worker's environment"
            )
        headers["Authorization"] = f"Bearer {os.environ[key_variable]}"
    asked = {"prompt": prompt.text, "answer": prompt.answer, "metadata": prompt.metadata, "responses": answers}
    again = tenacity.Retrying(
        stop=tenacity.stop_after_attempt(attempts),
        wait=tenacity.wait_random_exponential(FIRST_WAIT_S, LONGEST_WAIT_S),
        retry=tenacity.retry_if_exception_type(NotNow),
        reraise=True,
    )
    return _rewards(url, again(_post, url, headers, json.dumps(asked).encode(), timeout_s), len(answers))


remote.batch = True  # type: ignore[attr-defined]  # the group's answers at once (relax_hpc.rewards.base.BATCH)


@functools.cache
def _connections() -> urllib3.PoolManager:
    return urllib3.PoolManager(maxsize=KEPT_CONNECTIONS, retries=False)


def _post(url: str, headers: dict[str, str], body: bytes, timeout_s: float) -> urllib3.BaseHTTPResponse:
    timeout = urllib3.Timeout(connect=min(CONNECT_S, timeout_s), read=timeout_s)
    try:
        answer = _connections().request("POST", url, body=body, headers=headers, timeout=timeout, redirect=False)
    except urllib3.exceptions.HTTPError as error:
        raise NotNow(f"{url} does not answer: {error}") from None
    if answer.status in _TRY_AGAIN:
        raise NotNow(f"{url} answered {answer.status}: {_begin(answer)}")
    return answer


def _rewards(url: str, answer: urllib3.BaseHTTPResponse, expected: int) -> list[Any]:
    if answer.status != 200:
        raise RuntimeError(f"{url} answered {answer.status}, expected 200: {_begin(answer)}")
    try:
        rewards = json.loads(answer.data)["rewards"]
    except (ValueError, KeyError, TypeError):
        kind = answer.headers.get("Content-Type", "no content type")
        raise RuntimeError(f'{url} answered {kind}, expected JSON with "rewards": {_begin(answer)}') from None
    if not isinstance(rewards, list) or len(rewards) != expected:
        raise RuntimeError(f"{url} answered rewards = {str(rewards)[:SAID_CHARACTERS]}, expected a list of {expected}")
    return rewards


def _begin(answer: urllib3.BaseHTTPResponse) -> str:
    return answer.data[:SAID_CHARACTERS].decode(errors="replace")
