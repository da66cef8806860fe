"""Process groups that are kept running: started, judged and ended as one. The processes are stand-ins."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from relax_hpc.files.run_dir import RunDir
from relax_hpc.recipe.tables.run import Supervision
from relax_hpc.roles.common.process import Exit
from relax_hpc.supervise import heartbeat_monitor
from relax_hpc.supervise.fork_server import ForkServer
from relax_hpc.supervise.processes import LocalProcesses
from relax_hpc.supervise.restarts import KeptGroup
from relax_hpc.supervise.rollout_workers import RolloutWorker
from relax_hpc.supervise.tracker import Follower
from tests.runs import wait_for

LIMITS = Supervision(max_restarts=1, backoff_s=1e-6)


class Still:
    """A process that does nothing until it is killed, or `code` is set."""

    def __init__(self) -> None:
        self.code: int | None = None
        self.final_message = ""
        self.signals = list[signal.Signals]()

    def poll(self) -> int | None:
        return self.code

    def wait(self, timeout: float | None = None) -> int:
        assert self.code is not None
        return self.code

    def send_signal(self, number: signal.Signals) -> None:
        self.signals.append(number)

    def kill(self) -> None:
        self.code = -signal.SIGKILL


class Server(ForkServer):
    """Spawns stand-ins, as many as it may."""

    def __init__(self, run: RunDir) -> None:
        super().__init__(run)
        self.spawned = list[tuple[str, Still]]()
        self.may = 100

    def spawn(
        self, arguments: Any, log: Path, environment: Mapping[str, str] = MappingProxyType({})
    ) -> Any:  # fmt: skip
        if len(self.spawned) == self.may:
            raise OSError("no room for its log")
        self.spawned.append((log.name, Still()))
        return self.spawned[-1][1]


@pytest.fixture
def server(tmp_path: Path) -> Server:
    run = RunDir(tmp_path / "run")
    run.create()
    return Server(run)


def critic(server: Server, said: list[tuple[str, str]]) -> KeptGroup:
    group = LocalProcesses(server._run, LIMITS, "critic", "critic", ["critic-0", "critic-1"], server)
    return KeptGroup(group, lambda kind, **about: said.append((kind, about.get("reason", about["role"]))))


def test_a_lost_rank_ends_its_group_which_starts_again_as_one(server: Server) -> None:
    said = list[tuple[str, str]]()
    kept = critic(server, said)
    kept.look_after()
    (_, first), (_, second) = server.spawned
    second.kill()
    kept.look_after()
    assert first.code == -signal.SIGKILL and not kept.group.started
    kept.look_after()
    assert [log for log, _ in server.spawned[2:]] == ["critic-0.0001.log", "critic-1.0001.log"]
    assert said == [("restart", "critic"), ("lost", "critic-1: killed by SIGKILL"), ("restart", "critic")]
    server.spawned[2][1].code = Exit.CRASHED
    kept.look_after()
    assert kept.failure.startswith("critic was lost 2 times without progress") and not kept.fatal
    kept.look_after()
    assert len(server.spawned) == 4, "it is not started again"


def test_a_rank_that_a_person_must_mend_fails_the_group_with_its_reason(server: Server) -> None:
    kept = critic(server, [])
    kept.look_after()
    _, broken = server.spawned[1]
    broken.final_message, broken.code = "no model can be loaded", Exit.FATAL
    kept.look_after()
    assert kept.fatal and kept.failure == "critic-1: no model can be loaded"


def test_a_group_that_is_asked_to_stop_has_the_time_that_its_end_gives(server: Server) -> None:
    kept = critic(server, [])
    kept.look_after()
    (_, first), (_, second) = server.spawned
    kept.ask_to_stop()
    kept.ask_to_stop()
    assert first.signals == second.signals == [signal.SIGTERM], "it is asked once"
    first.code = Exit.STOPPED
    kept.look_after()
    assert second.code is None and not kept.failure
    second.code = Exit.STOPPED
    kept.end(5.0)
    assert len(server.spawned) == 2


def test_a_group_that_cannot_be_started_whole_leaves_nothing_behind(server: Server) -> None:
    kept, server.may = critic(server, []), 1
    with pytest.raises(OSError, match="no room"):
        kept.look_after()
    assert server.spawned[0][1].code == -signal.SIGKILL and not kept.group.started
    server.may = 100
    kept.look_after()
    assert [log for log, _ in server.spawned[1:]] == ["critic-0.0001.log", "critic-1.0001.log"]


def test_the_claims_of_a_silent_worker_are_given_back_once_it_is_dead(server: Server) -> None:
    given, said = list[tuple[str, bool, int | None]](), list[tuple[str, str]]()
    limits = LIMITS.model_copy(update={"start_s": 0.05, "hang_s": 0.05})

    def give_back(claim_dir: str, lost: bool) -> list[str]:
        given.append((claim_dir, lost, server.spawned[0][1].code))
        return ["r000000-000"]

    group = LocalProcesses(server._run, limits, "rollout", "rollout-0", ["rollout-0"], server)
    worker = RolloutWorker(group, lambda kind, **about: said.append((kind, str(about))), "tag", give_back)
    wait_for(lambda: worker.look_after() or given)
    assert given == [("rollout-0-tag-0000", True, -signal.SIGKILL)]
    assert (
        said[1][0] == "lost"
        and "'rollout-0: no heartbeat for 0 s', 'requests_given_back': ['r000000-000']" in said[1][1]
    )
    worker.end(0)
    assert len(given) == 1 or given[1][:2] == ("rollout-0-tag-0001", False)


def test_nobody_waits_for_a_heartbeat_of_the_follower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDir(tmp_path / "run")
    run.create()
    follower = Follower(run, LIMITS.model_copy(update={"start_s": 1e-9, "hang_s": 1e-9}), "tracking", ["tracking"])
    follower.processes.append(Still())  # type: ignore[arg-type]
    monkeypatch.setattr(heartbeat_monitor, "BLIND_S", 100.0)
    assert [follower.poll() for _ in range(3)] == [None] * 3
