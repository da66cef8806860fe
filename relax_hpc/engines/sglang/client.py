"""Client of SGLang's server over HTTP; each answer's status is checked.

    generate                                       tokens in, tokens out; asked again where the server did not answer
    pause ► update_from_disk ► resume              a version from a folder
    pause ► begin_update ► receive … ► end_update ► resume      a version through a torch.distributed group (see group.py)

Between pause and resume requests stay where they are. Their cache is thrown away, and computed again with the new
weights, so that every token's logprob is of the version that it is said to be of.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tenacity
import urllib3

from relax_hpc.engines.base import EngineError

CONTROL_S = 600.0
"""Time limit of control calls in seconds; loading a large model's weights takes longest."""
LOOK_S = 5.0
"""Time limit in seconds of calls that answer at once."""
PULSE_S = 40.0
"""Seconds to wait for a token; SGLang itself gives up after 20."""
CONNECT_S = 5.0
KEPT_CONNECTIONS = 64
"""Connections kept open; more may be open at a time, since control calls must not wait for requests to end."""
FIRST_WAIT_S = 0.2
ATTEMPTS = 4
"""Times a request is sent where the server does not answer, or answers 5xx."""
SAID_BYTES = 500


class EngineRefused(EngineError):
    """The server answered 4xx: asking again would end the same way."""


class Client:
    """Client of one server at an address such as http://127.0.0.1:30000. Threads may share it."""

    def __init__(self, address: str, key: str = "") -> None:
        self.address = address.rstrip("/")
        self._pool = urllib3.PoolManager(maxsize=KEPT_CONNECTIONS, retries=False)
        self._headers = {"Content-Type": "application/json"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"

    def healthy(self) -> bool:
        """Return True if the server answers, and its scheduler lives."""
        try:
            self._request("GET", "/health", None, LOOK_S)
        except EngineError:
            return False
        return True

    def pulse(self) -> None:
        """Return when the scheduler has made a token, for us or for others. Raises EngineError if it does not."""
        self._request("GET", "/health_generate", None, PULSE_S)

    def about(self) -> dict[str, Any]:
        """The server's description of itself: its arguments and limits."""
        return dict(self._request("GET", "/server_info", None, CONTROL_S))

    def generate(self, body: Mapping[str, Any], lost: Callable[[], bool] = lambda: False) -> Any:
        """Ask /generate, however long it takes. lost: returns True where asking again is in vain. Raises EngineError."""
        again = lambda error: isinstance(error, EngineError) and not isinstance(error, EngineRefused) and not lost()
        attempts = tenacity.Retrying(
            retry=tenacity.retry_if_exception(again),
            wait=tenacity.wait_exponential(FIRST_WAIT_S, max=5),
            stop=tenacity.stop_after_attempt(ATTEMPTS),
            reraise=True,
        )
        return attempts(self._request, "POST", "/generate", body, None)

    def abort(self) -> None:
        """End all requests where they are."""
        self._request("POST", "/abort_request", {"abort_all": True}, LOOK_S)

    def pause(self) -> None:
        """Hold all requests until `resume`."""
        self._request("POST", "/pause_generation", {"mode": "retract"}, CONTROL_S)

    def resume(self) -> None:
        self._request("POST", "/continue_generation", {}, CONTROL_S)

    def release_memory(self) -> None:
        """Give the memory of weights and cache back, on a GPU; nothing may be running."""
        self._request("POST", "/release_memory_occupation", {}, CONTROL_S)

    def onload(self) -> None:
        """Take the released memory again; its content is lost."""
        self._request("POST", "/resume_memory_occupation", {}, CONTROL_S)

    def update_from_disk(self, folder: str, version: str) -> None:
        """Load the safetensors files of `folder`; the prefix cache of the old weights is dropped."""
        body = {"model_path": folder, "load_format": "safetensors", "weight_version": version, "flush_cache": True}
        self._request("POST", "/update_weights_from_disk", body, CONTROL_S)

    def load_adapter(self, name: str, folder: str) -> None:
        """Load the adapter in `folder`, as PEFT has it, under a name of its own."""
        self._request("POST", "/load_lora_adapter", {"lora_name": name, "lora_path": folder}, CONTROL_S)

    def unload_adapter(self, name: str) -> None:
        """Unload an adapter, once no request uses it."""
        self._request("POST", "/unload_lora_adapter", {"lora_name": name}, CONTROL_S)

    def wait_for_ranks(self, copies: int) -> None:
        """Return when all processes have done what was asked before, in each of the server's copies of the weights: of
        several that share a copy, the first answers as soon as it is done itself, but all of them make a token."""
        for copy in range(copies):
            body: dict[str, Any] = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
            if copies > 1:
                body["routed_dp_rank"] = copy
            self._request("POST", "/generate", body, CONTROL_S)

    def join_group(self, address: str, port: int, rank_offset: int, world: int, name: str, backend: str) -> None:
        """Join a torch.distributed group as the ranks from `rank_offset` on; returns when all `world` have joined."""
        body = {
            "master_address": address, "master_port": port, "rank_offset": rank_offset, "world_size": world,
            "group_name": name, "backend": backend,
        }  # fmt: skip
        self._request("POST", "/init_weights_update_group", body, CONTROL_S)

    def leave_group(self, name: str) -> None:
        self._request("POST", "/destroy_weights_update_group", {"group_name": name}, CONTROL_S)

    def begin_update(self) -> None:
        """Open an update; only then broadcast: a server that refused does not receive, and the sender hangs."""
        with contextlib.suppress(EngineRefused):  # left open by a worker that was killed in an update
            self._request("POST", "/end_weight_update", {}, CONTROL_S)
        self._request("POST", "/begin_weight_update", {}, CONTROL_S)

    def receive(self, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]], group: str) -> None:
        """Load tensors that rank 0 of `group` broadcasts, their bytes one after the other; dtypes such as "bfloat16"."""
        body = {
            "names": list(names), "dtypes": list(dtypes), "shapes": [list(s) for s in shapes], "group_name": group,
            "load_format": "flattened_bucket", "flush_cache": False,
        }  # fmt: skip
        self._request("POST", "/update_weights_from_distributed", body, CONTROL_S)

    def end_update(self, version: str) -> None:
        """Close an update once it is whole: drop the prefix cache of the old weights, and report `version` from now on."""
        self._request("POST", "/end_weight_update", {}, CONTROL_S)
        self._request("POST", "/flush_cache", {}, CONTROL_S)
        body = {"new_version": version, "abort_all_requests": False}
        self._request("POST", "/update_weight_version", body, CONTROL_S)

    def _request(self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float | None) -> Any:
        """Send a request; returns the answer, parsed where it is JSON. Raises EngineError, or EngineRefused for 4xx."""
        data = None if body is None else json.dumps(body).encode()
        timeout = urllib3.Timeout(connect=CONNECT_S, read=timeout_s)
        try:
            answer = self._pool.request(method, self.address + path, body=data, headers=self._headers, timeout=timeout)
        except urllib3.exceptions.HTTPError as error:
            raise EngineError(f"SGLang at {self.address} did not answer {path}: {error}") from error
        if answer.status >= 400:
            said = answer.data[:SAID_BYTES].decode(errors="replace")
            kind = EngineRefused if answer.status < 500 else EngineError
            raise kind(f"SGLang at {self.address} answered {answer.status} to {path}: {said}")
        try:
            return json.loads(answer.data)
        except ValueError:
            return answer.data.decode(errors="replace")
