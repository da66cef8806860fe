"""What is told when, to a real endpoint; each alert once, whatever fails; no address in the run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from small_run import build

from relax_hpc.files.errors import RunError
from relax_hpc.files.publish import read_json
from relax_hpc.files.run_dir import RunDir
from relax_hpc.monitor.tracking import alerts as alerts_module
from relax_hpc.monitor.tracking import messages
from relax_hpc.monitor.tracking.alerts import Alert, Alerts, Collapse
from relax_hpc.monitor.tracking.messages import Messenger, addresses, targets
from relax_hpc.recipe.tables.tracking import Notify
from tests.endpoint import SECRET, Endpoint


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    made = Endpoint()
    yield made
    made.close()


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "small")
    run.create()
    return run


def alert(key: str, time: float = 10.0) -> Alert:
    return Alert(key, time, f"text of {key}")


def test_alerts_of_one_look_are_one_message_and_none_is_sent_twice(run: RunDir, endpoint: Endpoint) -> None:
    first = Messenger(run, "small", targets([endpoint.url]), since=5.0)
    for made in (alert("a"), alert("b"), alert("a"), alert("old", 4.0)):
        first.put(made)
    first.send()
    assert endpoint.bodies == ["text of a\ntext of b"]
    again = Messenger(run, "small", targets([endpoint.url]), since=99.0)
    for made in (alert("a"), alert("c"), alert("old", 4.0)):
        again.put(made)
    again.send()
    assert endpoint.bodies[1:] == ["text of c"]
    assert SECRET not in (run.tracking / "sent.json").read_text()


def test_an_address_that_fails_is_tried_again_by_itself_and_given_up(
    run: RunDir, endpoint: Endpoint, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "FIRST_WAIT_S", 0.0)
    monkeypatch.setattr(messages, "LAST_WAIT_S", 0.0)
    other = Endpoint()
    messenger = Messenger(run, "small", targets([endpoint.url, other.url]), since=0.0)
    other.refuse = 2
    messenger.put(alert("a"))
    for _ in range(4):
        messenger.send()
    assert endpoint.bodies == ["text of a"] == other.bodies
    other.close()
    messenger.put(alert("b"))
    for _ in range(messages.TRIES):
        messenger.send()
    assert endpoint.bodies == ["text of a", "text of b"]
    assert "1 addresses did not take: text of b" in caplog.text and SECRET not in caplog.text
    assert set(read_json(run.tracking / "sent.json")["sent"]) == {"a", "b"}
    messenger.put(alert("c"))
    messenger.close()
    assert endpoint.bodies[-1] == "text of c" and "not sent: ['text of c']" in caplog.text


def test_what_was_forgotten_is_not_sent_again(run: RunDir, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "REMEMBERED", 2)
    for _ in range(2):
        messenger = Messenger(run, "small", targets([endpoint.url]), since=0.0)
        for i in range(1, 6):
            messenger.put(alert(f"{i}", float(i)))
        messenger.send()
    assert len(endpoint.bodies) == 1


def test_outcomes_and_losses_are_told_from_the_lines_of_a_run(tmp_path: Path) -> None:
    run = build(tmp_path / "small")
    alerts = Alerts(Notify())
    lines = [json.loads(line) for line in (run.metrics / "supervisor.jsonl").read_text().splitlines()]
    lines.append({"time": 30.0, "kind": "outcome", "outcome": "failed", "reason": "disk full", "step": 7})
    told = [made.text for line in lines for made in alerts.of("supervisor", line)]
    assert told == ["trainer-0 was lost: killed by signal 9", "failed at step 7: disk full"]
    assert [a for line in lines for a in Alerts(Notify(events=["stall"])).of("supervisor", line)] == []


def test_a_stall_is_one_alert_until_the_trainer_says_something_and_none_after_the_end() -> None:
    now, clock_of_lines = 0.0, 5e8  # theirs is nobody's business
    alerts = Alerts(Notify(stall_s=60), clock=lambda: now)

    def hear(kind: str, role: str = "trainer-0", **more: Any) -> None:
        list(alerts.of(role, {"kind": kind, "time": clock_of_lines + now, **more}))

    def stalled(at: float) -> list[Alert]:
        nonlocal now
        now = at
        return list(alerts.stalled())

    now = 100.0
    hear("start", "supervisor")
    assert stalled(150.0) == []
    (first,), (same,) = stalled(161.0), stalled(500.0)
    assert first.key == same.key and "there was none yet" in first.text
    now, clock_of_lines = 600.0, -5e8
    hear("step", **step(3))
    assert stalled(650.0) == []
    (second,) = stalled(900.0)
    assert second.key != first.key and second.text == "no step for 5 minutes; step 3 was the last"
    hear("outcome", "supervisor", outcome="stopped")
    assert stalled(5000.0) == []


def step(
    number: int, reward: float = 0.5, entropy: float | None = 1.0, groups: int = 4, filtered: int = 0
) -> dict[str, Any]:
    made = {"step": number, "generated_reward": reward, "groups": groups, "filtered_groups": filtered}
    return made if entropy is None else made | {"entropy": entropy}


def begun(steps: list[dict[str, Any]]) -> list[tuple[int, str]]:
    """(step, sign) of what begins."""
    collapse = Collapse()
    return [(line["step"], what) for line in steps for what, _ in collapse.of(line)]


def test_collapses_are_told_when_they_begin_and_again_after_they_were_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alerts_module, "WINDOW", 3)
    rewards = [0.8] * 4 + [0.1] * 5 + [0.8] * 3 + [0.0] * 3
    assert begun([step(i, r) for i, r in enumerate(rewards)]) == [(5, "reward"), (13, "reward")]
    assert begun([step(i, r) for i, r in enumerate([-1.0] * 3 + [-5.0] * 3)]) == [], "no share of a best below zero"
    entropies = [1.0] * 3 + [0.001] * 3
    assert begun([step(i, entropy=e) for i, e in enumerate(entropies)]) == [(5, "entropy")]
    empty = [step(i, entropy=None, groups=0 if i > 1 else 4, filtered=4) for i in range(8)]
    assert begun(empty) == [(4, "filtered")]


def test_a_step_that_is_made_again_is_not_judged_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alerts_module, "WINDOW", 2)
    alerts = Alerts(Notify())
    lines = [step(i, r) | {"kind": "step", "time": float(i)} for i, r in enumerate([0.8, 0.8, 0.1, 0.1])]
    told = [made.key for line in [*lines, *lines] for made in alerts.of("trainer-0", line)]
    assert told == ["collapse reward 3"]


def test_addresses_come_from_the_environment_or_a_file_elsewhere_and_errors_do_not_say_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, file = tmp_path / "runs", tmp_path / "addresses"
    monkeypatch.delenv(messages.VARIABLE, raising=False)
    config = Notify()
    with pytest.raises(RunError, match=r"\$RELAX_HPC_NOTIFY, which is not set"):
        addresses(config, root)
    monkeypatch.setenv(messages.VARIABLE, "json://a json://b")
    assert addresses(config, root) == ["json://a", "json://b"]
    config = Notify(file=file)
    with pytest.raises(RunError, match="cannot be read: No such file"):
        addresses(config, root)
    file.write_text(" \n")
    with pytest.raises(RunError, match="is empty"):
        addresses(config, root)
    file.write_text("json://a\n\nmailto://b\n")
    assert addresses(config, root) == ["json://a", "mailto://b"]
    with pytest.raises(RunError, match="lies below run.root"):
        addresses(config, tmp_path)
    with pytest.raises(RunError, match="address 2 of 2, 'nosuch://…'") as caught:
        targets(["json://a", "nosuch://5ec2e7"])
    assert "5ec2e7" not in str(caught.value)
