"""One side of a benchmark as a long-lived process: requests and answers are lines of JSON on its stdin and stdout.

    benchmark ──{"call": NAME, "arguments": {…}}──► child: handler runs, times itself ──{"value": …}──► benchmark

Standard library only: it is imported by the benchmark and, in a peer's own environment, by the peer's side.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any


class ChildError(Exception):
    """A side of the benchmark failed; the message holds its traceback or the end of its log."""


def serve(handlers: Mapping[str, Callable[..., Any]]) -> None:
    """The child's main loop: answer requests until stdin closes. What libraries print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    print(json.dumps({"value": "ready"}), file=answers)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"value": handlers[request["call"]](**request["arguments"])}
        except Exception:
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), file=answers)


class Child:
    """The benchmark's handle on a side; a context manager that ends the process."""

    def __init__(self, name: str, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        self.name, self.log = name, log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as stderr:
            self._process = subprocess.Popen(
                list(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True,
                env=environment,
            )  # fmt: skip
        self._answers: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()
        self.receive()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put(None)

    def send(self, call: str, **arguments: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"call": call, "arguments": arguments}) + "\n")
        self._process.stdin.flush()

    def receive(self, timeout_s: float = 600.0) -> Any:
        """The answer to the oldest request without one. Raises ChildError."""
        try:
            line = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            raise ChildError(f"{self.name}: no answer within {timeout_s:.0f} s; its log is {self.log}") from None
        if line is None:
            end = self.log.read_text(errors="replace")[-2000:]
            raise ChildError(f"{self.name} ended with {self._process.wait()}; the end of {self.log}:\n{end}")
        answer = json.loads(line)
        if "error" in answer:
            raise ChildError(f"{self.name}:\n{answer['error']}")
        return answer["value"]

    def call(self, call: str, **arguments: Any) -> Any:
        self.send(call, **arguments)
        return self.receive()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        """Close its stdin, which ends it; kill it if it does not."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        deadline = time.monotonic() + 30
        while self._process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
