"""Which attempts to escape succeed on this node: real processes against a stand-in for a run, its worker and its sockets."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from relax_hpc.recipe.sandbox import Sandbox
from relax_hpc.sandbox import attempts
from relax_hpc.sandbox.kinds import python_folders
from relax_hpc.sandbox.wrap import end, start

_WORKER = "import ctypes, signal, sys; b = ctypes.create_string_buffer(b'x' * 8); signal.signal(signal.SIGUSR1, lambda *_: sys.exit(1)); print(ctypes.addressof(b), flush=True); signal.pause()"  # fmt: skip
_LIMITS = {"memory_gb": 0.25, "disk_gb": 0.03125, "processes": 40}
_LEAVES_S = 0.5
_TIME_LIMIT_S = 60.0


def escapes(kind: str, names: list[str] | None = None, *, has_socket: bool = False) -> dict[str, bool]:
    """Make the attempts `names` (absent: all) from a sandbox of a kind; name -> True where one succeeded.

    has_socket: the sandbox has a Unix socket that it may use, as an agent has.
    """
    sandbox = Sandbox.model_validate({"kind": kind, "time_limit_s": _TIME_LIMIT_S, **_LIMITS})
    asked = [name for name in attempts.ALL if names is None or name in names]
    quiet = [name for name in asked if attempts.ALL[name] in attempts.QUIET]
    made: dict[str, bool] = {}
    with targets(sandbox) as (of, folder):
        for call in ([quiet] if quiet else []) + [[name] for name in asked if name not in quiet]:
            made |= _attempt(sandbox, of, folder, call, has_socket)
    return made


def _attempt(sandbox: Sandbox, of: dict[str, Any], folder: Path, names: list[str], has_socket: bool) -> dict[str, bool]:
    """Make attempts in one sandbox; one that was ended before it could say anything did not succeed."""
    with tempfile.TemporaryDirectory(dir=folder) as own:
        given = {"MARK": of["mark"]}
        command = [sys.executable, "-I", "-S", attempts.__file__, json.dumps(of), *names]
        process = start(
            sandbox, command, folder=Path(own), given=given, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            socket=Path(of["given"]) if has_socket else None,
        )  # fmt: skip
        try:
            out, said = process.communicate(timeout=2 * _TIME_LIMIT_S)
        finally:
            end(process)
    if not out and len(names) > 1:
        raise RuntimeError(f"the attempts could not be made: {said.decode()}")
    return dict.fromkeys(names, False) | (json.loads(out) if out else {}) | _seen_outside(of, names)


def _seen_outside(of: dict[str, Any], names: list[str]) -> dict[str, bool]:
    """What the attempts left outside, whatever they say."""
    run, seen = Path(of["run"]), {}
    for name, happened in (
        ("write_into_run", (run / "planted").exists()),
        ("remove_from_run", not Path(of["secret"]).exists()),
        ("signal_the_worker", not Path(f"/proc/{of['victim']}").exists()),
        ("limit_the_worker", resource.prlimit(of["victim"], resource.RLIMIT_CPU)[1] != resource.RLIM_INFINITY),
        ("leave_a_process", "leave_a_process" in names and _stays(of["mark"])),
    ):
        if name in names and happened:
            seen[name] = True
    return seen


def _stays(mark: str) -> bool:
    """Look for a process of a sandbox that is over."""
    time.sleep(_LEAVES_S)
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"MARK={mark}".encode() in path.read_bytes():
                return True
    return False


@contextlib.contextmanager
def targets(sandbox: Sandbox) -> Iterator[tuple[dict[str, Any], Path]]:
    """Make what the attempts aim at: a run with a file, a worker with a key, sockets; and a folder for sandboxes."""
    with contextlib.ExitStack() as stack:
        top = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        run, folder = top / "run", top / "sandboxes"
        for each in (run, folder):
            each.mkdir()
        (run / "secret").write_text("a key of the run")
        listeners = {}
        for name, family, kind, address in (
            ("tcp", socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 0)),
            ("udp", socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 0)),
            ("abstract", socket.AF_UNIX, socket.SOCK_STREAM, "\0" + (abstract := f"relax-{secrets.token_hex(8)}")),
            ("file", socket.AF_UNIX, socket.SOCK_STREAM, str(run / "socket")),
            ("given", socket.AF_UNIX, socket.SOCK_STREAM, str(top / "given")),
        ):
            listeners[name] = stack.enter_context(socket.socket(family, kind))
            listeners[name].bind(address)
            if kind == socket.SOCK_STREAM:
                listeners[name].listen()
        key = secrets.token_hex(16)
        worker = stack.enter_context(
            subprocess.Popen([sys.executable, "-c", _WORKER], env=os.environ | {"KEY": key}, stdout=subprocess.PIPE)
        )
        stack.callback(worker.kill)
        assert worker.stdout is not None
        of = {
            "run": str(run), "secret": str(run / "secret"), "home": str(Path.home()), "in_home": _own_names(Path.home()), "key_backwards": key[::-1], "victim": worker.pid,
            "address": int(worker.stdout.readline()), "tcp": listeners["tcp"].getsockname()[1],
            "udp": listeners["udp"].getsockname()[1], "abstract": abstract, "socket": str(run / "socket"),
            "given": str(top / "given"), "mark": secrets.token_hex(16), "namespace": sandbox.kind == "bwrap",
            "memory": int(sandbox.memory_gb * (1 << 30)), "disk": int(sandbox.disk_gb * (1 << 30)),
            "processes": sandbox.processes,
        }  # fmt: skip
        yield of, folder


def _own_names(home: Path) -> list[str]:
    """Names in the home folder, but those that lead to Python."""
    return [name for name in os.listdir(home) if not any(p.is_relative_to(home / name) for p in python_folders())]


def starts_per_s(kind: str, count: int = 20) -> float:
    """Measure how many sandboxes of a kind are started and ended in a second, one after the other."""
    sandbox = Sandbox.model_validate({"kind": kind})
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        for _ in range(count):
            start(sandbox, ["true"], folder=Path(folder)).wait()
        return count / (time.perf_counter() - began)
