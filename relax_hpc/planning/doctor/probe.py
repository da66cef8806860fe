"""`python -m relax_hpc.planning.doctor.probe ASKED.json`: one task a node looks at its node, and at the others.

own checks ► listen on a free port ► hello (a file, by rename) ► see the others' hellos ► connect to them ► caches ► findings (a file)
                                                                 the port closes when all have connected, or time is up
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from rich.filesize import decimal

from relax_hpc.files.publish import read_json, replace, to_json
from relax_hpc.planning.doctor.checks import Check, failed, note, ok, warning
from relax_hpc.planning.doctor.files import semantics
from relax_hpc.planning.doctor.python import libraries
from relax_hpc.planning.doctor.seen import seen
from relax_hpc.planning.doctor.two_nodes import Watch, pulse

LEAST_SHM_BYTES = 1 << 30
CONNECT_S = 5.0
POLL_S = 0.1
TOKEN_BYTES = 32
WATCH_S = 8.0
"""Seconds to watch another node's changes: nodes are not to be held for longer."""


class Probe:
    """One node's checks of itself and of the others."""

    def __init__(self, folder: Path, asked: dict[str, Any], index: int) -> None:
        self.folder, self.asked = folder, asked
        self.name = f"{asked['group']}-{index}"
        self.host = socket.gethostname()
        self.deadline: float = time.monotonic() + asked["wait_s"]
        self.leave_at = time.monotonic() + asked["leave_s"]
        self.others = [f"{asked['group']}-{i}" for i in range(asked["nodes"]) if i != index]
        self.peers = self._peers(index)

    def _peers(self, index: int) -> list[str]:
        """The nodes to connect to: the next in a ring and the first trainer node; all pairs would be too many."""
        ring = f"{self.asked['group']}-{(index + 1) % self.asked['nodes']}"
        return [name for name in dict.fromkeys([ring, "trainer-0"]) if name != self.name]

    def work(self) -> None:
        """Make all checks, and write the findings into a file."""
        token = secrets.token_hex(TOKEN_BYTES)
        checks = [ok("answer", self.host), *self.interface()]
        with listener(token) as port, pulse(self.folder, self.name):
            hello = {"host": self.host, "port": port, "token": token, "addresses": addresses(self.asked["interface"])}
            replace(self.folder / f"hello-{self.name}.json", to_json(hello), durable=False)
            checks += [*self.files(), *self.gpus(), *self.memory()]
            if self.asked["libraries"]:
                checks += libraries(sys.executable, limit_s=self._left_s())
            checks += self.network()
            if self.peers and self._hello(self.peers[0]):
                watch = Watch(self.folder / f"pulse-{self.peers[0]}", WATCH_S)
                watch.work()
                checks += seen(watch, self.host)
            findings = {"name": self.name, "host": self.host, "checks": [check.to_json() for check in checks]}
            replace(self.folder / f"found-{self.name}.json", to_json(findings), durable=False)
            while time.monotonic() < self.leave_at and self.folder.exists() and not (self.folder / "over").exists():
                time.sleep(POLL_S)

    def _left_s(self) -> float:
        """Seconds until the others must have been seen; any longer, and this node could not report at all."""
        return max(1.0, self.deadline - time.monotonic())

    def files(self) -> list[Check]:
        own = self.folder / self.name
        own.mkdir()
        return semantics(own, trainer_processes=self.asked["trainer_processes"])

    def interface(self) -> list[Check]:
        name = self.asked["interface"]
        if name is None:
            return []
        there = sorted(psutil.net_if_addrs())
        if any(known == name or known.startswith(name) for known in there):  # NCCL takes the name as a prefix
            return [ok("slurm.interface", name)]
        return [failed("slurm.interface", f"no '{name}' on {self.host}", f"one of {', '.join(there)}", "--set slurm.interface=NAME, or leave it out")]  # fmt: skip

    def memory(self) -> list[Check]:
        total, shm = psutil.virtual_memory().total, shutil.disk_usage("/dev/shm").free
        words = decimal(shm) + " free"
        small = shm < LEAST_SHM_BYTES
        return [
            ok("memory", f"{decimal(total)}, {len(os.sched_getaffinity(0))} CPUs for a task"),
            warning("/dev/shm", words, decimal(LEAST_SHM_BYTES), "NCCL and spool.node_cache need it: containers often give 64 MB") if small else ok("/dev/shm", words),
        ]  # fmt: skip

    def gpus(self) -> list[Check]:
        wanted = self.asked["gpus"]
        if not wanted:
            return [note("GPUs", "none asked for: skipped")]
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        seen = len([device for device in visible.split(",") if device])
        expected = f"{wanted} in CUDA_VISIBLE_DEVICES"
        words = f"CUDA_VISIBLE_DEVICES = '{visible}'"
        fix = "ask the site for gres.conf with File= and ConstrainDevices; look with `srun --gres=gpu:1 env`"
        first = ok("GPUs of Slurm", words) if seen == wanted else warning("GPUs of Slurm", words, expected, fix)
        return [first, *self._cuda(wanted)]

    def _cuda(self, wanted: int) -> list[Check]:
        """Check GPUs through torch and the driver; torch runs in a process of its own, for it may hang on a broken GPU."""
        code = "import torch; print(torch.cuda.device_count(), torch.version.cuda)"
        try:
            said = _output([sys.executable, "-P", "-c", code], self._left_s())
        except (OSError, subprocess.SubprocessError) as error:
            return [failed("torch.cuda", str(error), f"{wanted} GPUs", "look at the node: `nvidia-smi`")]
        count, version = said.split()
        try:
            query = ["nvidia-smi", "--query-gpu=driver_version,name", "--format=csv,noheader"]
            driver = _output(query, CONNECT_S).splitlines()[0]
        except (OSError, subprocess.SubprocessError, IndexError):
            driver = "no nvidia-smi"
        words = f"torch sees {count} GPUs, built for CUDA {version}; driver {driver}"
        if int(count) >= wanted:
            return [ok("torch.cuda", words)]
        fix = "a torch built for CUDA, and a driver that is new enough for it: https://pytorch.org/get-started"
        return [failed("torch.cuda", words, f"{wanted} GPUs", fix)]

    def network(self) -> list[Check]:
        """Check the other nodes: do their files show here, do their names resolve, can they be connected to."""
        checks, began = [], time.monotonic()
        while time.monotonic() < self.deadline and not all(self._hello(name) for name in {*self.others, *self.peers}):
            time.sleep(POLL_S)
        absent = [name for name in self.others if not self._hello(name)]
        if absent:
            checks.append(warning("files of the others", f"{self.host} sees nothing of {', '.join(absent)}", "each node's file, made by rename", "see what is said of that node"))  # fmt: skip
        elif self.others:
            checks.append(ok("files of the others", f"seen within {time.monotonic() - began:.1f} s"))
        for name in self.peers:
            about = self._hello(name)
            if about is not None:
                checks += self._reach(name, about)
        return checks

    def _hello(self, name: str) -> dict[str, Any] | None:
        found: dict[str, Any] | None = read_json(self.folder / f"hello-{name}.json")
        return found

    def _reach(self, name: str, about: dict[str, Any]) -> list[Check]:
        checks = []
        try:
            socket.getaddrinfo(about["host"], None)
            checks.append(ok("host names", f"{about['host']} resolves"))
        except OSError as error:
            checks.append(warning("host names", f"{self.host} cannot resolve '{about['host']}': {error}", "nodes that know each other", "slurm.interface makes gloo and NCCL do without names; or ask the site"))  # fmt: skip
        tried = []
        for address in [*about["addresses"], about["host"]]:
            try:
                greet(address, about["port"], about["token"])
            except OSError as error:
                tried.append(f"{address}: {error}")
            else:
                return [*checks, ok("connections", f"{self.host} to {about['host']} at {address}")]
        return [*checks, failed("connections", f"{self.host} cannot reach {name} ({about['host']}): {'; '.join(tried)}", "TCP on ports that the system chooses", "a firewall between nodes? slurm.interface names another network")]  # fmt: skip


@contextmanager
def listener(token: str) -> Iterator[int]:
    """Open a port that answers those who know the token; it is closed at the end."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as server:
        server.bind(("", 0))
        server.listen(64)
        server.settimeout(POLL_S)
        over = threading.Event()
        thread = threading.Thread(target=_serve, args=(server, token, over), daemon=True)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            over.set()
            thread.join()


def _serve(server: socket.socket, token: str, over: threading.Event) -> None:
    while not over.is_set():
        try:
            connection, _ = server.accept()
        except TimeoutError:
            continue
        except OSError:
            return
        with connection, connection.makefile("rb") as said, contextlib.suppress(OSError):
            connection.settimeout(CONNECT_S)
            if hmac.compare_digest(said.read(2 * TOKEN_BYTES), token.encode()):
                connection.sendall(_answer(token))


def greet(address: str, port: int, token: str) -> None:
    """Connect, show the token, and check that the other side knows it too. Raises OSError."""
    with socket.create_connection((address, port), CONNECT_S) as connection, connection.makefile("rb") as said:
        connection.sendall(token.encode())
        if not hmac.compare_digest(said.read(len(_answer(token))), _answer(token)):
            raise ConnectionError("somebody else answers there")


def _answer(token: str) -> bytes:
    return hashlib.sha256(f"answer {token}".encode()).hexdigest().encode()


def addresses(interface: str | None) -> list[str]:
    """This node's IPv4 addresses; only those of `interface` where it is given."""
    return [
        address.address
        for name, known in psutil.net_if_addrs().items()
        for address in known
        if address.family == socket.AF_INET and not address.address.startswith("127.") and name.startswith(interface or "")
    ]  # fmt: skip


def _output(command: list[str], limit_s: float) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=limit_s).stdout.strip()


def main() -> None:
    path = Path(sys.argv[1])
    try:
        asked = json.loads(path.read_bytes())
        Probe(path.parent, asked, int(os.environ["SLURM_PROCID"])).work()
    except FileNotFoundError as error:
        if path.parent.exists():
            raise SystemExit(
                f"{socket.gethostname()} does not see '{error.filename}', which lies in run.root"
            ) from None


if __name__ == "__main__":
    main()
