"""Sandboxes: what is tried from inside succeeds without one and is held back in it, nothing is left behind, and what is missing is named."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from pydantic import TypeAdapter, ValidationError

from relax_hpc.environments import Environments
from relax_hpc.environments.channel import from_child
from relax_hpc.files.errors import RunError
from relax_hpc.recipe import Recipe
from relax_hpc.recipe.sandbox import AnySandbox, Sandbox
from relax_hpc.records import Prompt
from relax_hpc.sandbox import attempts, wrap
from relax_hpc.sandbox.escapes import escapes
from relax_hpc.sandbox.kinds import Place, apptainer, enroot

DOCS = Path(__file__).parents[2] / "docs" / "agents.md"
needs_bwrap = pytest.mark.skipif(bool(wrap.missing("bwrap")), reason=f"bwrap: {wrap.missing('bwrap')}")
needs_landlock = pytest.mark.skipif(bool(wrap.missing("landlock")), reason=f"landlock: {wrap.missing('landlock')}")
KINDS = [pytest.param("bwrap", marks=needs_bwrap), pytest.param("landlock", marks=needs_landlock)]
IMAGE = Path("/images/tools.sif")


def succeeded(kind: str, names: list[str] | None = None, **options: Any) -> set[str]:
    return {name for name, escaped in escapes(kind, names, **options).items() if escaped}


def passes_in_the_docs() -> set[str]:
    """The attempts that the docs' table of Landlock names."""
    table = DOCS.read_text().split("<!-- passes Landlock -->")[1].split("<!-- end -->")[0]
    return {line.split("|")[1].strip(" `") for line in table.splitlines() if line.startswith("| `")}


def test_each_attempt_succeeds_without_a_sandbox() -> None:
    names = {attempt.__name__ for attempt in attempts.QUIET} - {
        "change_code_of_the_worker",  # it would
        "open_a_socket_of_the_host", "ask_the_kernels_keyring", "make_calls_in_a_ring", "make_a_user_namespace",  # a kernel's own
    }  # fmt: skip
    assert succeeded("none", sorted(names)) == names


@needs_bwrap
def test_no_attempt_succeeds_from_namespaces() -> None:
    assert succeeded("bwrap") == set()
    assert succeeded("bwrap", ["connect_to_a_socket_file", "connect_by_tcp"], has_socket=True) == set()


@needs_landlock
def test_landlock_lets_pass_what_the_docs_say_and_no_more() -> None:
    found = succeeded("landlock") | succeeded(
        "landlock", ["connect_to_a_socket_file", "connect_by_tcp"], has_socket=True
    )
    assert found == passes_in_the_docs()


def run(sandbox: dict[str, Any], code: str, folder: Path, **options: Any) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-I", "-S", "-c", code]
    made = Sandbox.model_validate(sandbox)
    return wrap.start(made, command, folder=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_a_command_works_in_its_folder_with_its_own_environment(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    code = "import json, os, sys; open('made', 'w').write('x'); print(json.dumps([os.getcwd(), dict(os.environ)])); sys.exit(3)"
    process = run({"kind": kind}, code, tmp_path, given={"TASK": "1"})
    out, said = process.communicate(timeout=60)
    assert process.returncode == 3, said
    folder, variables = json.loads(out)
    assert (folder, variables["TASK"], variables["HOME"]) == (str(tmp_path), "1", str(tmp_path))
    assert "secret" not in out.decode() and (tmp_path / "made").read_text() == "x"


@pytest.mark.parametrize("kind", KINDS)
def test_one_whose_time_is_over_is_ended_with_the_reason(kind: str, tmp_path: Path) -> None:
    process = run({"kind": kind, "time_limit_s": 0.5}, "while True: pass", tmp_path)
    assert process.communicate(timeout=60)[1] == b"sandbox: time_limit_s = 0.5 is over\n"
    assert process.returncode == 124


@pytest.mark.parametrize("kind", KINDS)
def test_the_end_is_said_first_and_then_comes_for_all(kind: str, tmp_path: Path) -> None:
    code = """if True:
        import os, signal, sys, time
        if os.fork() == 0:  # one that does not listen, in a session of its own
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(60)
        signal.signal(signal.SIGTERM, lambda *_: (open("heard", "w"), sys.exit()))
        print("ready", flush=True)
        signal.pause()"""
    process = run({"kind": kind}, code, tmp_path)
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    inside = psutil.Process(process.pid).children(recursive=True)
    wrap.end(process)
    assert (tmp_path / "heard").exists()
    assert len(inside) >= 2 and not [one for one in inside if one.is_running()]


@pytest.mark.parametrize("kind", KINDS)
def test_a_sandbox_ends_with_who_started_it(kind: str, tmp_path: Path) -> None:
    code = f"""if True:
        import sys, time
        from pathlib import Path
        from relax_hpc.recipe.sandbox import Sandbox
        from relax_hpc.sandbox.wrap import start
        print(start(Sandbox(kind="{kind}"), ["sleep", "60"], folder=Path("{tmp_path}")).pid, flush=True)
        time.sleep(60)"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as starter:
        assert starter.stdout is not None
        warden = psutil.Process(int(starter.stdout.readline()))
        until = time.monotonic() + 30
        while not (inside := warden.children(recursive=True)) and time.monotonic() < until:
            time.sleep(0.02)
        os.kill(starter.pid, signal.SIGKILL)
    gone, left = psutil.wait_procs([warden, *inside], timeout=30)
    assert gone and not left


SPY = """
import os
from relax_hpc.environments import Turn
class Spy:
    def reset(self, prompt): self.asked = prompt.answer
    def step(self, answer):
        seen = str((os.path.exists(self.asked), os.environ.get("WANDB_API_KEY")))
        return Turn(True, [{"type": "image", "image": bytes([255])}, {"type": "text", "text": seen}], extra={"n": 1})
    def close(self): ...
"""


@pytest.mark.parametrize(
    ("kind", "sees"), [("none", "(True, 'secret')"), pytest.param("bwrap", "(False, None)", marks=needs_bwrap)]
)
def test_an_environment_lives_in_the_sandbox_of_its_source(
    kind: str, sees: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    (tmp_path / "code").mkdir()
    (tmp_path / "secret").touch()
    (tmp_path / "code" / "spy.py").write_text(SPY)
    source = {"task": "chain_sum", "environment": f"{tmp_path}/code/spy.py:Spy", "sandbox": kind}
    recipe = Recipe.model_validate({"model": {"name": "tiny"}, "rollout": {"max_new_tokens": 8}, "source": [source]})
    with closing(Environments(recipe)) as environments:
        (seat,) = environments.begin([(0, Prompt(0, 0, "?", np.zeros(1, np.int32), str(tmp_path / "secret")))])
        environments.wait(lambda: None)
        environments.show(seat, "a")
        environments.wait(lambda: None)
    assert seat.failure is None, seat.failure
    (turn,) = seat.turns
    assert list(turn.observation) == [{"type": "image", "image": b"\xff"}, {"type": "text", "text": sees}]
    assert turn.extra == {"n": 1}


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.abort, ()


@pytest.mark.parametrize(
    "message", [pickle.dumps(Evil()), b"[[1]]", b'[["yes", "", null, {}]]', b"[" * 100_000, b"3", b"{}x"]
)
def test_what_a_hostile_process_sends_is_an_error_of_its_own(message: bytes) -> None:
    answer = from_child(message)
    assert answer.seat is None and answer.wrong and answer.wrong[0] == "answered in another form than a turn"


def test_commands_of_images_are_as_they_are(tmp_path: Path) -> None:
    place = Place(Path("/w"), (Path("/data"),), (Path("/out"),), Path("/run/gateway"), ("KEY",))
    assert apptainer(Sandbox(kind="apptainer", image=IMAGE), place, ["agent", "--x"]) == [
        "apptainer", "exec", "--containall", "--no-home", "--no-privs", "--pwd", "/w", "--net", "--network", "none",
        "--bind", "/data:/data:ro", "--bind", "/w:/w", "--bind", "/out:/out", "--bind", "/run/gateway:/run/gateway",
        "/images/tools.sif", "agent", "--x",
    ]  # fmt: skip
    assert enroot(Sandbox(kind="enroot", image=IMAGE, network=True), place, ["agent", "--x"]) == [
        "enroot", "start", "--mount", "/data:/data:x-create=auto,rbind,ro", "--mount", "/w:/w:x-create=auto,rbind,rw",
        "--mount", "/out:/out:x-create=auto,rbind,rw", "--mount", "/run/gateway:/run/gateway:x-create=auto,rbind,rw",
        "--env", "KEY", "/images/tools.sif", "/bin/sh", "-c", 'cd "$0" && exec "$@"', "/w", "agent", "--x",
    ]  # fmt: skip
    given = wrap.environment(Sandbox(kind="apptainer", image=IMAGE), tmp_path, {"KEY": "k"})
    assert given["APPTAINERENV_KEY"] == "k" and "KEY" not in given


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("jail", "'none', 'bwrap', 'landlock', 'apptainer' or 'enroot'"),
        ("apptainer", "needs an image"),
        ({"kind": "bwrap", "image": "/x.sif"}, "is for apptainer and enroot"),
        ({"kind": "enroot", "image": "/x.sqsh"}, "say network = true, or use another kind"),
        ({"kind": "bwrap", "writable": ["out"]}, "'out' must be an absolute path"),
        ({"kind": "bwrap", "memory": 3}, "Extra inputs"),
    ],
)
def test_a_wrong_table_is_refused(value: object, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TypeAdapter(AnySandbox).validate_python(value)


def test_what_this_node_does_not_have_is_refused_with_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrap.missing.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))
    try:
        with pytest.raises(
            RunError, match=r"kind = 'bwrap': .* does not have it: there is no program 'bwrap' in PATH; it has none"
        ):
            wrap.wrap(Sandbox(kind="bwrap"), ["true"], folder=tmp_path)
    finally:
        wrap.missing.cache_clear()
    with pytest.raises(RunError, match="no '/absent' on this node"):
        wrap.wrap(Sandbox(kind="landlock"), ["true"], folder=Path("/absent"))
