"""Names in recipes: built-ins, modules, files, and errors that say what would have been right."""

from __future__ import annotations

from pathlib import Path

import pytest

from relax_hpc.registry import RegistryError, check_call, resolve


def test_built_in_module_and_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve("reward", "exact", {"exact": 1}) == 1
    assert resolve("reward", "os.path:join", {})("a", "b") == "a/b"
    (tmp_path / "own.py").write_text("def f(x):\n    return x + 1\n")
    assert resolve("reward", f"{tmp_path}/own.py:f", {})(1) == 2
    monkeypatch.chdir(tmp_path)
    assert resolve("reward", "own.py:f", {})(1) == 2


def test_two_files_of_one_name_are_two_modules(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "own.py").write_text(f"def f():\n    return {name!r}\n")
    assert [resolve("reward", f"{tmp_path}/{name}/own.py:f", {})() for name in ("a", "b")] == ["a", "b"]


def test_a_file_is_loaded_once(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("class A: pass\n")
    name = f"{tmp_path}/own.py:A"
    assert resolve("x", name, {}) is resolve("x", name, {})


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("exat", r"unknown reward 'exat'.*\['exact', 'math'\].*MODULE:NAME"),
        (":f", "unknown reward ':f'"),
        ("os.path:", "unknown reward 'os.path:'"),
        ("os.path:joni", "os.path has no 'joni'; it has .*'join'"),
        ("no_such_module:f", "cannot import 'no_such_module'.*installed in"),
        ("/no/such/file.py:f", "no file '/no/such/file.py'.*seen from"),
    ],
)
def test_an_error_says_what_would_have_been_right(name: str, said: str) -> None:
    with pytest.raises(RegistryError, match=said):
        resolve("reward", name, {"math": 1, "exact": 2})


@pytest.mark.parametrize("content", ["def f(:\n", "raise KeyError('missing')\n", "import no_such_thing\n"])
def test_code_that_does_not_load_is_named(tmp_path: Path, content: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_for_test.py").write_text(content)
    monkeypatch.syspath_prepend(tmp_path)
    for name in (f"{tmp_path}/broken_for_test.py:f", "broken_for_test:f"):
        for _ in range(2):
            with pytest.raises(RegistryError, match="(import.*broken_for_test|broken_for_test.*load)"):
                resolve("reward", name, {})


def test_a_wrong_signature_is_told_before_anything_starts() -> None:
    def reward(prompt: object, answer: str, *, scale: float) -> float:
        return scale

    check_call("reward", "own:reward", reward, "prompt", "answer", scale=2.0)
    with pytest.raises(
        RegistryError, match=r"reward 'own:reward\(.*scale.*' cannot be called as \(prompt, answer\).*scale"
    ):
        check_call("reward", "own:reward", reward, "prompt", "answer")
    with pytest.raises(RegistryError, match="scal=2"):
        check_call("reward", "own:reward", reward, "prompt", "answer", scal=2)
    with pytest.raises(RegistryError, match="is a int, not something to call"):
        check_call("reward", "own:x", 3, "prompt")  # type: ignore[arg-type]
    check_call("reward", "max", max, "prompt", "answer")
