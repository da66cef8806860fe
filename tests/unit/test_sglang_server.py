"""SGLang's command line and environment as the recipe asks for them, and a client against a server that has bad days."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from relax_hpc.engines import EngineError
from relax_hpc.engines.sglang import client as module
from relax_hpc.engines.sglang.client import ATTEMPTS, Client, EngineRefused
from relax_hpc.engines.sglang.fleet import Fleet
from relax_hpc.engines.sglang.server import Server
from relax_hpc.engines.sglang.weights_files import WeightsFiles
from relax_hpc.files.errors import RunError
from tests import tiny

MODEL = Path(__file__).resolve().parents[2] / "recipes" / "models" / "Qwen3-0.6B"


def server(device: str = "cuda", **sglang: Any) -> Server:
    return Server(tiny.recipe(rollout={"engine": "sglang", "device": device, "sglang": sglang}), MODEL, 64)


def test_the_command_line_says_what_the_recipe_asks_and_its_own_arguments_come_last() -> None:
    args = {"attention_backend": "triton", "log-level": "info", "enable-mixed-chunk": True, "x": [1, 2], "y": False}
    words = server(tensor_parallel=4, expert_parallel=2, mem_fraction=0.8, args=args).arguments(30000)
    assert words == [
        "--model-path", str(MODEL), "--load-format", "dummy", "--dtype", "float32", "--host", "127.0.0.1", "--port", "30000",
        "--context-length", "72", "--log-level", "info", "--tensor-parallel-size", "4", "--data-parallel-size", "1",
        "--expert-parallel-size", "2", "--mem-fraction-static", "0.8", "--watchdog-timeout", "120.0",
        "--attention-backend", "triton", "--enable-mixed-chunk", "--x", "1", "2",
    ]  # fmt: skip


def test_each_of_several_servers_has_gpus_of_its_own() -> None:
    rollout = {"engine": "sglang", "device": "cuda", "sglang": {"tensor_parallel": 2, "data_parallel": 2, "servers": 3}}
    recipe = tiny.recipe(rollout=rollout)
    assert recipe.rollout.devices_each == 12
    last = Server(recipe, MODEL, 64, place=2).arguments(30000)
    assert last[last.index("--base-gpu-id") + 1] == "8"


def test_the_router_is_told_what_the_recipe_asks() -> None:
    asked = {"servers": 2, "router": {"policy": "round_robin", "balance-abs-threshold": 8}}
    fleet = Fleet(tiny.recipe(rollout={"engine": "sglang", "device": "cpu", "sglang": asked}), MODEL, 64)
    for server in fleet._servers:
        server.client = Client(f"http://127.0.0.1:{fleet._servers.index(server)}")
    told = fleet.arguments(30000, 30001, "k")
    assert (
        told["policy"] == "round_robin" and told["balance_abs_threshold"] == 8 and told["balance_rel_threshold"] == 1.1
    )
    assert told["worker_urls"] == ["http://127.0.0.1:0", "http://127.0.0.1:1"]


def test_a_router_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(RunError, match=r"servers = 2, but sglang-router is not installed.*sglang-router==0\.3\.2"):
        Fleet(tiny.recipe(rollout={"engine": "sglang", "sglang": {"servers": 2}}), MODEL, 64)


def test_the_platform_without_a_gpu_is_chosen_only_there() -> None:
    on_cpu, on_gpu = server("cpu"), server()
    assert "torch_native" in on_cpu.arguments(1) and "torch_native" not in on_gpu.arguments(1)
    assert on_cpu.environment("/s")["SGLANG_PLATFORM"] == "relax_hpc_cpu"
    assert "SGLANG_PLATFORM" not in on_gpu.environment("/s")
    assert on_gpu.environment("/s")["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] == "file:///s/rendezvous"
    assert "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE" not in server(data_parallel=2).environment("/s")
    shares = server("cpu", tensor_parallel=3).environment("/s")["SGLANG_CPU_OMP_THREADS_BIND"].split("|")
    assert len(shares) == 3 and all(shares)


class Answers(ThreadingHTTPServer):
    """Answers with these statuses, one a request, the last one again and again."""

    statuses: list[int]
    asked = 0


class Handler(BaseHTTPRequestHandler):
    server: Answers

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.asked += 1
        status = self.server.statuses.pop(0) if len(self.server.statuses) > 1 else self.server.statuses[0]
        self.send_response(status)
        self.end_headers()
        self.wfile.write(b'{"why": "a bad day"}')

    def log_message(self, *words: Any) -> None: ...


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Answers]:
    monkeypatch.setattr(module, "FIRST_WAIT_S", 0.01)
    served = Answers(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=served.serve_forever, args=(0.01,))
    thread.start()
    yield served
    served.shutdown()
    thread.join()
    served.server_close()


def test_a_request_is_sent_again_where_the_server_has_a_bad_moment(answers: Answers) -> None:
    client = Client(f"http://127.0.0.1:{answers.server_port}")
    answers.statuses = [503, 500, 200]
    assert client.generate({}) == {"why": "a bad day"} and answers.asked == 3
    answers.statuses, answers.asked = [503], 0
    with pytest.raises(EngineError, match=r"answered 503 to /generate.*a bad day"):
        client.generate({})
    assert answers.asked == ATTEMPTS
    answers.asked = 0
    with pytest.raises(EngineError):
        client.generate({}, lost=lambda: True)
    assert answers.asked == 1, "its process is gone: asking again is in vain"


def test_a_request_that_is_wrong_and_control_calls_are_sent_once(answers: Answers) -> None:
    client = Client(f"http://127.0.0.1:{answers.server_port}")
    answers.statuses = [400]
    with pytest.raises(EngineRefused, match="answered 400"):
        client.generate({})
    answers.statuses = [500]
    with pytest.raises(EngineError, match="/pause_generation"):
        client.pause()
    assert answers.asked == 2
    answers.shutdown()
    answers.server_close()
    assert not client.healthy()


def test_weights_are_files_in_memory_that_end_with_us(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relax_hpc.engines.sglang.weights_files.BUCKET_BYTES", 32)
    from safetensors.torch import load_file

    tensors = {
        "a": torch.arange(6.0).reshape(2, 3),
        "b": torch.ones(2),
        "tied": torch.ones(2),
        "c": torch.zeros(3, 4).T,
    }
    with WeightsFiles() as files:
        files.write(tensors.items(), leave_out={"tied"})
        paths = sorted(files.folder.iterdir())
        found = {name: tensor for path in paths for name, tensor in load_file(path).items()}
        assert len(paths) == 2 and all(path.is_symlink() and "/proc/" in str(path.readlink()) for path in paths)
        targets = [path.readlink() for path in paths]
    assert found.keys() == {"a", "b", "c"} and all(torch.equal(found[n], tensors[n]) for n in found)
    assert files.shapes == {name: tensor.shape for name, tensor in tensors.items()}
    assert not files.folder.exists() and not any(target.exists() for target in targets)
