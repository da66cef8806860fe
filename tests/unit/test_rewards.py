"""Rewards: the built-in ones against known answers, and a runner that survives whatever a reward does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from tokenizers_for_tests import char_tokenizer

from relax_hpc.data import PromptSources
from relax_hpc.files.errors import RunError
from relax_hpc.recipe import Recipe
from relax_hpc.records import Failure, Prompt
from relax_hpc.registry import RegistryError
from relax_hpc.rewards import RewardRunner, Score, make_rewards, parts

REPOSITORY = Path(__file__).resolve().parents[2]
USER = Path(__file__).with_name("user_code.py")
BY_ANSWER = {"prompts": "x.jsonl", "reward": f"{USER}:by_answer"}


def recipe(*sources: dict[str, Any], limit_s: float = 20.0) -> Recipe:
    return Recipe.model_validate(
        {
            "model": {"name": "tiny"},
            "rollout": {"max_new_tokens": 8, "reward_time_limit_s": limit_s},
            "source": list(sources),
        }
    )


def prompt(answer: str | None = None, source: int = 0, index: int = 7) -> Prompt:
    return Prompt(source, index, "?", np.zeros(1, np.int32), answer)


def scores(reward_runner: RewardRunner, *samples: tuple[Prompt, str]) -> list[float]:
    verdicts = reward_runner.score(samples)
    assert all(isinstance(v, Score) for v in verdicts), verdicts
    return [v.reward for v in verdicts if isinstance(v, Score)]


def opened(*sources: dict[str, Any], limit_s: float = 20.0) -> closing[RewardRunner]:
    """A runner over these sources, closed at the end of `with`."""
    return closing(RewardRunner(recipe(*sources, limit_s=limit_s)))


SOURCES = (
    {"prompts": "x.jsonl"},
    {"prompts": "x.jsonl", "reward": "math"},
    BY_ANSWER,
    {"prompts": "x.jsonl", "reward": f"{USER}:length", "reward_options": {"scale": 0.5}},
    {"prompts": "x.jsonl", "reward": "geo3k"},
    {"prompts": "x.jsonl", "reward": "openr1mm"},
    {"prompts": "x.jsonl", "reward": "multiple_choice"},
)
"""Exact match (source 0), mathematics (1), the user's own (2, 3), those of questions with media (4, 5, 6)."""


@pytest.fixture(scope="module")
def reward_runner() -> Iterator[RewardRunner]:
    """One whose time limit nobody reaches on a busy machine either."""
    with opened(*SOURCES, limit_s=120.0) as built:
        yield built


@pytest.fixture(scope="module")
def hasty() -> Iterator[RewardRunner]:
    with opened(*SOURCES, limit_s=2.0) as built:
        yield built


def test_exact_match(reward_runner: RewardRunner) -> None:
    p = prompt("46")
    assert scores(reward_runner, (p, "46"), (p, " 46\n"), (p, "146"), (p, "46."), (p, "")) == [1, 1, 0, 0, 0]
    with opened({"prompts": "x.jsonl", "reward_options": {"strip": False}}) as strict:
        assert scores(strict, (p, "46"), (p, " 46")) == [1, 0]


@pytest.mark.parametrize(
    ("reference", "answer", "expected"),
    [
        ("1/2", "so the result is \\boxed{\\frac{1}{2}}", 1),
        ("\\frac{1}{2}", "The answer is 0.5", 1),
        ("\\frac12", "\\boxed{\\frac{2}{4}}", 1),
        ("$\\frac12$", "\\boxed{\\frac{1}{3}}", 0),
        ("\\boxed{x^2+2x+1}", "$(x+1)^2$", 1),
        ("72", "She sold 48+24 = 72 clips.", 1),
        ("72", "", 0),
        ("72", "\\frac{{{", 0),
        ("1,000", "$1000$", 1),
    ],
)
def test_mathematical_equivalence(reward_runner: RewardRunner, reference: str, answer: str, expected: float) -> None:
    assert scores(reward_runner, (prompt(reference, source=1), answer)) == [expected]


@pytest.mark.parametrize("source", [1, 4])
def test_a_reference_answer_that_is_no_mathematics_is_the_datas_fault(reward_runner: RewardRunner, source: int) -> None:
    (verdict,) = reward_runner.score([(prompt("", source=source), "\\boxed{3}")])
    assert isinstance(verdict, Failure) and "has no mathematical expression" in verdict.detail


def test_geo3k_weighs_the_boxed_answer_and_the_form(reward_runner: RewardRunner) -> None:
    expected = {
        "<think>a\nb</think>\nso \\boxed{\\frac{10}{4}}.": (1, 1),
        "\\boxed{2.5}": (1, 0),
        "<think>a</think> \\boxed{7}": (0, 1),
        "<think>a</think> 2.5": (0, 0),  # not boxed
        "<think>\\boxed{2.5}</think>": (1, 0),  # boxed before the thought ends
        "well <think>a</think> \\boxed{2.5}": (1, 0),
        "<think>a</think> \\boxed{2.5": (0, 0),  # cut off
        "<think>a</think> \\boxed{} 2.5 $2.5$": (0, 1),
        "\\boxed{7} \\boxed{2.5}": (1, 0),  # the last one counts
        "\\boxed{2.5} \\boxed{7}": (0, 0),
        "<think>\\boxed{2.5}": (1, 0),
        "": (0, 0),
    }
    asked = prompt("\\frac{5}{2}", source=4)
    for verdict, (text, (accuracy, form)) in zip(
        reward_runner.score([(asked, text) for text in expected]), expected.items(), strict=True
    ):
        assert isinstance(verdict, Score) and verdict.reward == pytest.approx(0.9 * accuracy + 0.1 * form), text
        assert verdict.extra == {"accuracy": accuracy, "format": form}, text


@pytest.mark.parametrize(
    ("reference", "answer", "expected"),
    [
        ("1/2", "<think>half</think><answer>$\\frac12$</answer>", 1),
        ("<answer>$0.5$</answer>", "<answer>1/2</answer>", 1),
        ("1/2", "so it is $0.5$", 1),  # without tags the whole text is compared
        ("1/2", "<answer>1/3</answer> though 1/2", 0),
        ("a red cube", "<think>…</think><answer> a red cube\n</answer>", 1),
        ("a red cube", "<answer>a blue cube</answer>", 0),
        ("a red cube", "", 0),
        ("1/2", "<think>a</think>b</think><answer>1/2</answer>", 0),
        ("1/2", "<answer>1/3</answer><answer>1/2</answer>", 0),
        ("1/2", "<answer>\\frac{{{</answer>", 0),
    ],
)
def test_openr1mm_compares_mathematics_then_text(
    reward_runner: RewardRunner, reference: str, answer: str, expected: float
) -> None:
    assert scores(reward_runner, (prompt(reference, source=5), answer)) == [expected]


def test_multiple_choice_is_the_text_in_the_answers_tags(reward_runner: RewardRunner) -> None:
    asked, tagged = prompt("B. a violin", source=6), prompt("<answer>B. a violin</answer>", source=6)
    right, wrong = "<think>A?</think><answer>\nB. a violin </answer>", "<answer>A. a flute</answer>"
    changed = "<answer>A. a flute</answer> no, <answer>B. a violin</answer>"
    assert scores(reward_runner, *((p, right) for p in (asked, tagged)), (asked, changed)) == [1, 1, 1]
    missing = ("B. a violin", "", "<answer>B. a violin", "B. a violin</answer>", "<answer></answer>", wrong)
    assert scores(reward_runner, *((asked, text) for text in missing)) == [0] * len(missing)
    assert make_rewards(recipe(*SOURCES).sources)[6].is_quick


@pytest.mark.parametrize("name", ["geo3k", "openr1mm", "multiple_choice"])
def test_rewards_that_compare_need_an_answer(name: str) -> None:
    with pytest.raises(RunError, match=rf"source.0.reward = '{name}' compares with an answer, but answer_key is empty"):
        make_rewards(recipe({"prompts": "x.jsonl", "reward": name, "answer_key": ""}).sources)


def test_a_users_reward_gives_numbers_for_columns(reward_runner: RewardRunner) -> None:
    assert reward_runner.score([(prompt(source=3), "four")]) == [Score(2.0, {"characters": 4.0})]
    assert scores(reward_runner, (prompt(source=2), "true")) == [1.0]


@pytest.mark.parametrize(
    ("answer", "parts"),
    [
        ("raise", ["KeyError", "'key'"]),
        ("exit", ["SystemExit", "3"]),
        ("crash", ["died", "-11"]),
        ("nan", ["nan", "finite number"]),
        ("text", ["'1.0' (str)", "finite number"]),
        ("none", ["None", "finite number"]),
        ("dict", ["'score'", "'reward'"]),
        ("inf", ["inf", "'other'"]),
        ("huge", ["1e+300", "finite number"]),
        ("slash", ["'a/b'", "without '/'"]),
        ("unnamed", ["1 (int)", "printable text"]),
        ("surrogate", ["ValueError: no ?"]),
        ("unpicklable", ["function", "finite number"]),
        ("sleep", ["longer than 2 s", "rollout.reward_time_limit_s"]),
        ("spin", ["longer than 2 s"]),
    ],
)
def test_a_reward_that_misbehaves_fails_its_own_sample_only(hasty: RewardRunner, answer: str, parts: list[str]) -> None:
    verdicts = hasty.score([(prompt(source=2, index=i), a) for i, a in enumerate(["fine", answer, "fine", "fine"])])
    assert [type(v) for v in verdicts] == [Score, Failure, Score, Score]
    failure = verdicts[1]
    assert isinstance(failure, Failure) and "prompt" not in failure.reason, "equal ones could not be counted"
    reason = f"{failure.reason} {failure.detail}"
    assert not [p for p in [*parts, f"{USER}:by_answer", "source 2", "prompt 1"] if p not in reason], reason


def test_progress_is_told_while_a_reward_hangs_and_the_others_go_on(hasty: RewardRunner) -> None:
    heartbeats: list[float] = []
    samples = [(prompt(source=2), "sleep"), *[(prompt(source=2), "fine")] * 20, (prompt("1"), "1")]
    verdicts = hasty.score(samples, lambda: heartbeats.append(time.monotonic()))
    assert [isinstance(v, Score) for v in verdicts] == [False] + [True] * 21
    assert any(heartbeats[0] + 0.2 < heartbeat < heartbeats[-1] - 0.2 for heartbeat in heartbeats), (
        "one reward alone was waited for, for two seconds"
    )


def test_a_group_that_failed_is_scored_no_further_and_holds_up_no_other(hasty: RewardRunner, tmp_path: Path) -> None:
    hangs, fine = prompt(source=2, index=1), prompt(source=2, index=2)
    samples = [*[(hangs, f"hang {tmp_path}")] * 12, *[(fine, "fine")] * 4]
    verdicts = hasty.score(samples, groups=[*[0] * 12, *[1] * 4])
    assert len({id(v) for v in verdicts[:12]}) == 1 and isinstance(verdicts[0], Failure)
    assert verdicts[12:] == [Score(0.5, {})] * 4
    assert 1 <= len(list(tmp_path.iterdir())) <= 6, "all of its samples were waited for, two at a time"


def test_an_async_reward_is_awaited_with_the_time_limit() -> None:
    with opened({"prompts": "x.jsonl", "reward": f"{USER}:awaited"}, limit_s=4.0) as reward_runner:
        assert reward_runner.score([(prompt(), str(i)) for i in range(6)]) == [
            Score(float(i), {"loops": 1.0}) for i in range(6)
        ]
        hung, fine = reward_runner.score([(prompt(), "hang"), (prompt(), "2")])
        assert isinstance(hung, Failure) and "longer than 4 s" in hung.reason and isinstance(fine, Score)
        (wrong,) = reward_runner.score([(prompt(), "no number")])
        assert isinstance(wrong, Failure) and wrong.reason.endswith("raised ValueError")
        assert "user_code.py" in wrong.detail and "in awaited" in wrong.detail


def test_a_batch_reward_gets_the_answers_of_each_group_at_once() -> None:
    with opened({"prompts": "x.jsonl", "reward": f"{USER}:ranked"}) as reward_runner:
        answers = ["c", "few", "a", "raise", "b", "x", "y"]
        groups = [0, 1, 0, 2, 0, 1, 2]
        verdicts = reward_runner.score(
            [(prompt(index=g), a) for a, g in zip(answers, groups, strict=True)], groups=groups
        )
    assert [verdicts[i] for i in (0, 2, 4)] == [Score(float(place), {"of": 3.0}) for place in (2, 0, 1)]
    few, raised = verdicts[1], verdicts[3]
    assert isinstance(few, Failure) and "one value for each of 2 answers" in few.detail and verdicts[5] == few
    assert isinstance(raised, Failure) and "KeyError" in raised.reason and verdicts[6] == raised


def test_rewards_run_elsewhere_without_torch(reward_runner: RewardRunner) -> None:
    (verdict,) = reward_runner.score([(prompt(source=2), "pid")])
    assert isinstance(verdict, Score)
    assert verdict.extra["pid"] != os.getpid() and verdict.extra["torch"] == 0.0


def test_light_children_of_a_main_module_that_imports_torch(tmp_path: Path) -> None:
    """A role's main module imports torch; spawned children would import it again."""
    main = tmp_path / "role.py"
    main.write_text(
        "import sys, numpy as np\n"
        "import torch\n"
        "from test_rewards import opened, prompt, BY_ANSWER\n"
        "if __name__ == '__main__':\n"
        "    with opened(BY_ANSWER) as judge:\n"
        "        print(judge.score([(prompt(), 'pid')])[0].extra['torch'], __spec__)\n"
    )
    environment = os.environ | {"PYTHONPATH": f"{REPOSITORY}:{USER.parent}"}
    ended = subprocess.run([sys.executable, str(main)], capture_output=True, text=True, env=environment, check=True)
    assert ended.stdout == "0.0 None\n"


def test_a_pool_whose_idle_child_was_killed_goes_on() -> None:
    with opened(BY_ANSWER) as reward_runner:
        scores(reward_runner, (prompt(), "fine"))
        for child in pool_children():
            child.send_signal(signal.SIGKILL)
        assert scores(reward_runner, *[(prompt(), "fine")] * 10) == [0.5] * 10
        time.sleep(0.5)
        for child in pool_children():
            child.send_signal(signal.SIGKILL)
        time.sleep(1)
        assert scores(reward_runner, *[(prompt(), "fine")] * 10) == [0.5] * 10


def test_processes_that_were_warmed_up_are_those_that_score() -> None:
    with opened({"prompts": "x.jsonl"}) as quick, opened(BY_ANSWER) as reward_runner:
        quick.warm_up()
        assert pool_children() == []
        reward_runner.warm_up()
        begun = {child.pid for child in pool_children()}
        assert scores(reward_runner, (prompt(), "fine")) == [0.5]
        assert begun == {child.pid for child in pool_children()} != set()


def pool_children() -> list[psutil.Process]:
    """Of all pools of this process, those that are alive.

    A pool that broke leaves children that were killed to be reaped when it is used again or closed: they have no command line.
    """
    alive = [p for p in psutil.Process().children() if p.status() != psutil.STATUS_ZOMBIE]
    return [p for p in alive if "spawn_main" in " ".join(p.cmdline())]


def test_a_killed_role_leaves_no_reward_behind(tmp_path: Path) -> None:
    main = tmp_path / "role.py"
    main.write_text(
        "from test_rewards import opened, prompt, BY_ANSWER\n"
        "if __name__ == '__main__':\n"
        "    with opened(BY_ANSWER) as judge:\n"
        "        judge.score([(prompt(), 'fine')])\n"
        "        print('ready', flush=True)\n"
        "        judge.score([(prompt(), 'spin'), (prompt(), 'spin')])\n"
    )
    environment = os.environ | {"PYTHONPATH": f"{REPOSITORY}:{USER.parent}"}
    with subprocess.Popen([sys.executable, str(main)], stdout=subprocess.PIPE, text=True, env=environment) as role:
        assert role.stdout is not None and role.stdout.readline() == "ready\n"
        time.sleep(0.5)
        children = psutil.Process(role.pid).children(recursive=True)
        assert len(children) >= 2
        role.kill()
    _, alive = psutil.wait_procs(children, timeout=120)
    assert not alive


def test_closing_stops_a_reward_in_the_middle() -> None:
    reward_runner = RewardRunner(recipe(BY_ANSWER, limit_s=1.0))
    assert isinstance(reward_runner.score([(prompt(), "spin")])[0], Failure)
    reward_runner.close()
    reward_runner.close()
    assert not pool_children()


ADDITION = {
    "task": "basic_arithmetic",
    "config": {"operators": ["+"], "min_terms": 2, "max_terms": 2, "allow_parentheses": False},
    "size": 20,
}


def test_reasoning_gym_judges_with_the_tasks_own_verifier_on_the_prompts_own_item() -> None:
    import reasoning_gym

    built = recipe(ADDITION, {"task": "countdown", "size": 5})
    sources = PromptSources(built.source, char_tokenizer(), 1000)
    rewards = make_rewards(built.source)
    assert [r.is_quick for r in rewards] == [True, False]  # countdown evaluates what the model wrote
    reward_runner = RewardRunner(built)
    for index in range(5):
        p, right = sources.prompt(0, index), sources.prompt(0, index).answer
        assert scores(reward_runner, (p, f"{right}"), (p, f" {right}\n"), (p, "x")) == [1, 1, 0]
        assert 0 < scores(reward_runner, (p, f"{right}.....5"))[0] < 1
        p = sources.prompt(1, index)
        oracle = reasoning_gym.create_dataset("countdown", size=5, seed=0)
        answers = [str(p.answer), "1+1", "9**9**", "import os"]
        assert scores(reward_runner, *[(p, a) for a in answers]) == [
            oracle.score_answer(a, oracle[index]) for a in answers
        ]
        assert scores(reward_runner, (p, str(p.answer))) == [1.0]
    reward_runner.close()


def test_a_verifier_that_stumbles_over_the_answer_says_wrong() -> None:
    built = recipe({"task": "prime_factorization", "size": 5})
    p = PromptSources(built.source, char_tokenizer(), 1000).prompt(0, 0)
    with opened({"task": "prime_factorization", "size": 5}) as reward_runner:
        assert scores(reward_runner, (p, "seven × two"), (p, str(p.answer))) == [0.0, 1.0]


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        (
            {"prompts": "x", "reward": "exakt"},
            RegistryError,
            "unknown reward 'exakt'.*'exact', 'f1', 'format', 'geo3k', ",
        ),
        ({"prompts": "x", "reward": f"{USER}:absent"}, RegistryError, "no 'absent'; it has .*by_answer"),
        ({"prompts": "x", "reward": "/nowhere.py:f"}, RegistryError, "no file '/nowhere.py'"),
        (
            {"prompts": "x", "reward": f"{USER}:one_argument"},
            RegistryError,
            r"one_argument\(prompt.*cannot be called as \(prompt, answer\)",
        ),
        ({"prompts": "x", "reward_options": {"stripped": True}}, RegistryError, "stripped=True"),
        ({"prompts": "x", "reward": "reasoning_gym"}, RunError, "source.0.reward.*only a source with a `task`"),
        ({"prompts": "x", "reward": "math", "answer_key": ""}, RunError, "answer_key is empty"),
        ({"task": "nope"}, RunError, "no such task"),
    ],
)
def test_a_reward_that_cannot_work_is_found_at_the_start(
    source: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make_rewards(recipe(source).source)


def test_parts_takes_numbers_of_any_kind() -> None:
    assert parts(np.float32(0.5)) == (0.5, {})
    assert parts({"reward": 1, "x": np.int64(2)}) == (1.0, {"x": 2.0})
    for wrong in (float("inf"), np.float32("nan"), "1", None, [1.0], {"reward": None}, 10**400, 4e38):
        with pytest.raises(ValueError, match="expected a finite number"):
            parts(wrong)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "two\nlines", "\ud800", 1, None])
def test_a_name_that_can_be_no_column_is_refused_before_there_is_a_shard(name: object) -> None:
    with pytest.raises(ValueError, match="under the name"):
        parts({"reward": 1.0, name: 2.0})
