"""Several servers of one worker behind sglang-router, and a client that asks them as one.

    requests ──► router ──► one of the servers each
    pause, load, resume, abort … ──► every server: all have one version, or none is asked anything

A server or a router that is lost takes the others with it: all are started again in place.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

from relax_hpc.engines.base import EngineError
from relax_hpc.engines.sglang.client import LOOK_S, Client
from relax_hpc.engines.sglang.server import Server, comes_up, free_port, new_key, start_python, taken
from relax_hpc.files.errors import RunError
from relax_hpc.recipe.schema import Recipe
from relax_hpc.records import Progress

PROGRAM = Path(__file__).with_name("route.py")
KNOWN_GOOD = "0.3.2"
BALANCED = {"balance_abs_threshold": 2, "balance_rel_threshold": 1.1}
"""Settings of the router's balance. Prompts that begin alike go to one server as long as it has at most so many more
requests than the others, or so many times theirs. With the defaults, 64 and 1.5, all samples of a request would."""
UNLIMITED_S = 10 * 24 * 3600
"""The router's time limit in seconds: none in effect, since an answer takes as long as it takes."""


class FleetClient(Client):
    """A client that asks the router to generate, and every server for everything else."""

    def __init__(self, address: str, key: str, servers: Sequence[Client]) -> None:
        super().__init__(address, key)
        self._servers = servers
        self._threads = ThreadPoolExecutor(2 * len(servers), "fleet")

    def generate(self, body: Mapping[str, Any], lost: Callable[[], bool] = lambda: False) -> Any:
        """Generate. `body`: a request for one sequence, since the router takes no lists of sampling parameters."""
        alone = {name: body[name][0] for name in ("input_ids", "sampling_params", "image_data") if name in body}
        return [super().generate({**body, **alone}, lost)]

    def wait_for_ranks(self, copies: int) -> None:
        list(self._threads.map(lambda server: server.wait_for_ranks(copies), self._servers))

    def ready(self) -> bool:
        """Return True if the router knows all servers."""
        try:
            said = super()._request("GET", "/readiness", None, LOOK_S)
        except EngineError:
            return False
        return isinstance(said, dict) and said.get("healthy_workers") == len(self._servers)

    def _request(self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float | None) -> Any:
        """Ask every server; returns the first one's answer, once all have answered. /generate goes to the router."""
        if path == "/generate":
            return super()._request(method, path, body, timeout_s)
        return list(self._threads.map(lambda s: s._request(method, path, body, timeout_s), self._servers))[0]


class Fleet:
    """Several servers with the interface of one Server."""

    def __init__(self, recipe: Recipe, model_dir: Path, context: int) -> None:
        """Raises RunError where sglang-router is not installed."""
        self._recipe = recipe
        self._servers = [Server(recipe, model_dir, context, place) for place in range(recipe.rollout.sglang.servers)]
        self._router: subprocess.Popen[bytes] | None = None
        self.client: FleetClient
        check_installed(len(self._servers))

    def start(self, progress: Progress) -> None:
        """Start all servers and the router, and wait until they answer. Raises RunError when one does not."""
        began = time.monotonic()
        try:
            while not self._starts(progress, began):
                self.stop()
        except BaseException:
            self.stop()
            raise

    def _starts(self, progress: Progress, began: float) -> bool:
        """Start all once; returns False where somebody took a port, and may know the key that all share."""
        key = new_key()
        for server in self._servers:
            server.launch(key)
        return all(server.answers(progress, began) for server in self._servers) and self._routes(key, progress, began)

    def _routes(self, key: str, progress: Progress, began: float) -> bool:
        """Start the router; returns False where somebody took its port."""
        port, counters = free_port(), free_port()
        self.client = FleetClient(f"http://127.0.0.1:{port}", key, [server.client for server in self._servers])
        said = {"worker": os.getpid(), "arguments": self.arguments(port, counters, key)}
        router = self._router = start_python([str(PROGRAM)], json.dumps(said))
        who, start_s = f"sglang-router with its {len(self._servers)} servers", self._recipe.supervision.start_s
        if comes_up(who, lambda: router.poll() is None, self.client.ready, progress, began, start_s):
            return True
        if not taken(port) and not taken(counters):
            raise RunError("sglang-router ended before it answered: see this worker's log")
        return False

    def arguments(self, port: int, counters: int, key: str) -> dict[str, Any]:
        """The router's arguments; the recipe's `router` replaces ours. We repeat requests ourselves and watch the
        servers: the router's own checks would have them make tokens while they rest."""
        given = {name.replace("-", "_"): value for name, value in self._recipe.rollout.sglang.router.items()}
        return {
            "host": "127.0.0.1", "port": port, "api_key": key, "prometheus_host": "127.0.0.1", "prometheus_port": counters,
            "worker_urls": [server.client.address for server in self._servers], "worker_startup_check_interval": 1,
            "disable_retries": True, "disable_circuit_breaker": True, "disable_health_check": True,
            "request_timeout_secs": UNLIMITED_S, "log_level": "error",
            **BALANCED, **given,
        }  # fmt: skip

    @property
    def alive(self) -> bool:
        """True while no server and no router is lost."""
        routes = self._router is not None and self._router.poll() is None
        return routes and all(server.alive for server in self._servers)

    def stop(self) -> None:
        """End the router and all servers at once."""
        if self._router is not None:
            self._router.kill()
            self._router.wait()
            self._router = None
        for server in self._servers:
            server.stop()


def check_installed(servers: int) -> None:
    """Raise RunError where sglang-router is not installed. servers: the recipe's number of them, for the message."""
    try:
        metadata.version("sglang-router")
    except metadata.PackageNotFoundError:
        raise RunError(
            f"rollout.sglang.servers = {servers}, but sglang-router is not installed in {sys.prefix}: "
            f"pip install sglang-router=={KNOWN_GOOD}, or use rollout.sglang.servers = 1 and more rollout.workers"
        ) from None
