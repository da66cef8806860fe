"""The server's process: a child of the worker, on loopback, with a key that nobody else has; started again in place."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

import relax_hpc.engines.sglang.cpu_platform as cpu_platform
from relax_hpc.engines.sglang.adapters import server_arguments
from relax_hpc.engines.sglang.client import Client
from relax_hpc.files.errors import RunError
from relax_hpc.media.families import family_of
from relax_hpc.parent import start_child
from relax_hpc.recipe.schema import Recipe
from relax_hpc.records import Progress

KNOWN_GOOD = {"sglang": "0.5.23", "torch": "2.13.0", "transformers": "5.19.0"}
"""The versions that the tests run with."""
LOOK_EVERY_S = 0.25
START_SHARE = 0.9
"""Share of supervision.start_s after which starting is given up: the worker must say why before it is ended itself."""
CPU_TOKENS = 65536
"""Tokens of key/value cache without a GPU, where a share of the memory would be the whole machine's."""
CONTEXT_MARGIN = 8
"""Positions beyond the context: SGLang keeps a few for itself, at the cost of the context's last tokens otherwise."""
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


class Server:
    """SGLang for one worker, on the GPUs that the worker sees. `place`: its number among the worker's servers."""

    def __init__(self, recipe: Recipe, model_dir: Path, context: int, place: int = 0) -> None:
        self._recipe, self._model_dir, self._context, self._place = recipe, model_dir, context, place
        self._shows = bool(family_of(AutoConfig.from_pretrained(model_dir, local_files_only=True)).modalities)
        self._process: subprocess.Popen[bytes] | None = None
        self.client: Client

    def start(self, progress: Progress) -> None:
        """Start the server, and wait until it answers. Raises RunError if it does not."""
        began = time.monotonic()
        self.launch(new_key())
        while not self.answers(progress, began):
            self.launch(new_key())

    def launch(self, key: str) -> None:
        """Begin to start the server. key: the API key that every call to it must have."""
        check_installed()
        self._port = free_port()
        self.client = Client(f"http://127.0.0.1:{self._port}", key)
        self._scratch = tempfile.TemporaryDirectory(prefix="relax-hpc-sglang-")
        command = ["-m", "relax_hpc.engines.sglang.serve", *self.arguments(self._port)]
        self._process = start_python(command, f"{key} {os.getpid()}", **self.environment(self._scratch.name))

    def answers(self, progress: Progress, began: float) -> bool:
        """Wait until the server, started at `began` (time.monotonic()), answers; False where somebody took its port, and
        may know its key now. Raises RunError if it ended, or is not there in time."""
        start_s = self._recipe.supervision.start_s
        try:
            if comes_up("SGLang", lambda: self.alive, self.client.healthy, progress, began, start_s):
                return True
        except BaseException:
            self.stop()
            raise
        self.stop()
        if not taken(self._port):
            raise RunError(f"SGLang ended before it answered: see this worker's log; {versions_in_words()}")
        return False

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def stop(self) -> None:
        """End the server at once, with all its processes: nothing that it holds is kept."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process = None
        self._scratch.cleanup()

    def arguments(self, port: int) -> list[str]:
        """SGLang's command line; the recipe's `args` come last and replace ours."""
        asked = self._recipe.rollout.sglang
        values: dict[str, Any] = {
            "model-path": self._model_dir, "load-format": "dummy", "dtype": self._recipe.trainer.dtype,
            "host": "127.0.0.1", "port": port, "context-length": self._context + CONTEXT_MARGIN, "log-level": "warning",
            "tensor-parallel-size": asked.tensor_parallel, "data-parallel-size": asked.data_parallel,
            "expert-parallel-size": asked.expert_parallel, "max-running-requests": asked.max_running,
            "mem-fraction-static": asked.mem_fraction, "watchdog-timeout": self._recipe.supervision.hang_s,
            "enable-return-routed-experts": self._recipe.rollout.routed_experts,
            "skip-server-warmup": self._shows,  # it would show a picture in a chat, for which there may be no template
            "enable-precise-embedding-interpolation": self._shows,  # as transformers, and so the trainer, does it
        }  # fmt: skip
        if self.on_gpu:
            values["enable-memory-saver"] = self._recipe.run.placement == "colocate"
            values["base-gpu-id"] = self._place * asked.tensor_parallel * asked.data_parallel or None
        else:
            values |= {
                "device": "cpu", "attention-backend": "torch_native", "sampling-backend": "pytorch",
                "max-total-tokens": max(CPU_TOKENS, self._context + CONTEXT_MARGIN),
                "mem-fraction-static": asked.mem_fraction or 0.1,
            }  # fmt: skip
        lora = self._recipe.trainer.lora
        if lora is not None and lora.sync == "adapter":
            values |= server_arguments(lora, self.on_gpu)
        values |= {name.replace("_", "-"): value for name, value in asked.args.items()}
        return [word for name, value in values.items() for word in _words(name, value)]

    def environment(self, scratch: str) -> dict[str, str]:
        """Variables of the server's environment beyond the worker's own. `scratch`: a folder that only we may enter."""
        values = {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1", "TMPDIR": scratch}
        if self._recipe.rollout.sglang.data_parallel == 1:
            # Its processes meet over a file: torch's own store would listen on every interface, and let anybody in
            values["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] = f"file://{scratch}/rendezvous"
        if not self.on_gpu:
            values |= {"SGLANG_PLATFORM": cpu_platform.NAME}
            values |= dict.fromkeys(THREAD_VARIABLES, str(self._recipe.rollout.threads))
            values["SGLANG_CPU_OMP_THREADS_BIND"] = self._cpu_shares()
        return values

    def _cpu_shares(self) -> str:
        """The CPUs of each of the server's ranks, in SGLang's notation; by itself it takes a NUMA node each."""
        asked, cpus = self._recipe.rollout.sglang, sorted(os.sched_getaffinity(0))
        ranks = asked.tensor_parallel * asked.data_parallel
        ours = range(self._place * ranks, (self._place + 1) * ranks)
        shares = [cpus[rank :: asked.devices] or [cpus[rank % len(cpus)]] for rank in ours]
        return "|".join(",".join(map(str, share)) for share in shares)

    @property
    def on_gpu(self) -> bool:
        device = self._recipe.rollout.device
        return device == "cuda" or (device == "auto" and torch.cuda.is_available())


def start_python(command: Sequence[str], said: str, **environment: str) -> subprocess.Popen[bytes]:
    """Start Python with this line on its standard input: no other user can read that, as they can a command line."""
    process = start_child(
        [sys.executable, "-P", *command],
        stdin=subprocess.PIPE,
        stdout=sys.stderr.fileno(),  # the worker's log
        env={**os.environ, **environment},
        start_new_session=True,  # so that all of it can be ended by its group
    )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
        pipe.write(f"{said}\n".encode())
    return process


def _words(name: str, value: Any) -> list[str]:
    """Format one argument as words: True is a flag alone, None and False are left out, a list is a word each."""
    if value is None or value is False:
        return []
    if value is True:
        return [f"--{name}"]
    return [f"--{name}", *map(str, value if isinstance(value, list) else [value])]


def comes_up(
    who: str, alive: Callable[[], bool], ready: Callable[[], bool], progress: Progress, began: float, start_s: float
) -> bool:
    """Wait until a process, started at `began` (time.monotonic()), is ready; False where it ended. Raises RunError."""
    limit_s = START_SHARE * start_s
    while alive():
        if ready():
            return True
        if time.monotonic() - began > limit_s:
            raise RunError(
                f"{who} did not answer within {limit_s:.0f} s: raise supervision.start_s = {start_s:.0f}, or see this worker's "
                f"log; {versions_in_words()}"
            )
        progress()
        time.sleep(LOOK_EVERY_S)
    return False


def new_key() -> str:
    return secrets.token_urlsafe(32)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def taken(port: int) -> bool:
    """Return True if somebody took the port between our look at it and the server's."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # leftovers of our own server do not count
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False


def installed_versions() -> Mapping[str, str]:
    """Versions of SGLang and of the packages that must fit it; those not installed are left out."""
    found = {}
    for name in KNOWN_GOOD:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def versions_in_words() -> str:
    """Say which versions are installed, and which are known to work."""
    found, known = (
        ", ".join(f"{n} {v}" for n, v in versions.items()) for versions in (installed_versions(), KNOWN_GOOD)
    )
    return f"installed: {found}; known to work together: {known}"


def check_installed() -> None:
    """Raise RunError where SGLang is not installed."""
    if "sglang" not in installed_versions():
        raise RunError(
            f"rollout.engine = 'sglang', but SGLang is not installed in {sys.prefix}: "
            f"pip install 'relax-hpc[sglang]' on a machine with GPUs, `tools/setup.sh sglang-cpu` without; {versions_in_words()}"
        )
