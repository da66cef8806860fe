"""Real runs on three hosts whose clients cache: each step is made, within the stated wait; nothing is lost, twice, torn, nothing is quarantined."""

from __future__ import annotations

import contextlib
import errno
import itertools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

import pytest

from relax_hpc.telemetry import read_metrics
from tests.runs import audited, step_now
from tools.faults import faultfs
from tools.faults.faultfs import Rule
from tools.faults.hosts import BEGINNING, PROFILES, WORKERS, Hosts

LOCAL_S = 0.5
"""The wait without caches, on a machine that has other things to do."""
LIMIT_S = 100.0


@pytest.fixture(autouse=True)
def mountable() -> None:
    if reason := faultfs.why_not():
        pytest.skip(reason)


def driven(
    folder: Path, profile: str, steps: int, staleness: int, look: Callable[[Hosts], None] = lambda hosts: None
) -> tuple[Hosts, list[float]]:
    """A run that is over, and its waits. It lost nothing, nobody was started twice, nothing was put aside."""
    hosts = Hosts(folder, PROFILES[profile], {"run.steps": steps, "async.max_staleness": staleness})
    hosts.drive(LIMIT_S, look)
    assert audited(hosts.run).steps == steps
    assert [*hosts.run.quarantine.iterdir()] == []
    events, _ = read_metrics(hosts.run.metrics / "supervisor.jsonl")
    assert [event for event in events if event["kind"] == "lost"] == []
    waits = hosts.waits_s()
    assert len(waits) == steps - BEGINNING
    return hosts, waits


def test_whole_seconds_caches_of_one_and_files_that_stay_open_while_they_are_removed(tmp_path: Path) -> None:
    held = dict[Path, IO[bytes]]()

    def hold(hosts: Hosts) -> None:
        """Hold all of versions and checkpoints open on the trainer's host, as an export or a worker there would."""
        root = hosts.mounts["trainer"].mount / hosts.run.root.name
        with contextlib.suppress(FileNotFoundError):  # a folder, or file, that was removed since it was listed
            for path in itertools.chain(root.glob("weights/v*/*"), root.glob("checkpoints/*/*")):
                if path not in held:
                    held[path] = path.open("rb")

    hosts, waits = driven(tmp_path, "cache_1s", 16, 1, hold)
    for file in held.values():
        with contextlib.suppress(OSError):  # its host is gone
            file.close()
    assert statistics.median(waits) <= LOCAL_S + 2.0 and max(waits) <= LOCAL_S + 6.0, waits
    assert len({path.parent for path in held if not path.exists()}) > 5, (
        "versions and checkpoints went while they were open"
    )


STALE = Rule("open", "weights/latest.json", "error-before", 1.0, errno.ESTALE)
STALE_S = 2.0


def test_caches_of_three_seconds_and_a_handle_that_stays_stale(tmp_path: Path) -> None:
    told = list[float]()  # when a worker was told that the handle is stale, for the first time

    def spoil(hosts: Hosts) -> None:
        """From step 3 on, the workers' clients have a stale handle of latest.json, until some time after one met it."""
        disks, now = [hosts.mounts[name] for name in WORKERS], time.monotonic()
        if step_now(hosts.run) >= 3 and not told:
            for disk in disks:
                disk.rules(STALE) if not disk.counts() else told.extend([now] * bool(disk.hits()))
        elif told and now - told[0] > STALE_S:
            for disk in disks:
                disk.rules()
            told[:] = [float("inf")]

    hosts, waits = driven(tmp_path, "cache_3s", 9, 0, spoil)
    assert sum(len(hosts.mounts[name].hits()) for name in WORKERS) > 5, "it was read again and again"
    assert statistics.median(waits) <= LOCAL_S + 4.0 and max(waits) <= LOCAL_S + 8.0, waits
