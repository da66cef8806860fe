"""The runs in which points are met, and what is asked of each at its end.

plain      trainer, worker, evaluations; at max_staleness 0: the same bits as undisturbed
scored     a scorer, and weights by broadcast
critic     a critic of two processes
partial    requests that are given back partly generated: which ones depends on time, so its bits are its own
"""

from __future__ import annotations

import errno
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from relax_hpc.files.run_dir import RunDir
from relax_hpc.monitor.analysis.audit import audit
from tools.bench.bits import gradient_fraction, same_bits
from tools.faults.command import RECIPE, ROOT, Command
from tools.faults.commits import KINDS
from tools.faults.driver import ZOMBIES, Driver, Point
from tools.faults.faultfs import Caches, FaultFS, Rule
from tools.faults.schedules import Call, Kind, name_of, unknown

ON_POLICY = ("run.checkpoint_every=2", "run.keep_checkpoints=1", "async.max_staleness=0")
PPO = "algorithm={name='ppo', group_size=4, kl_coef=0.01, critic={learning_rate=1e-3}}"
SCENES: dict[str, tuple[str, ...]] = {
    "plain": (*ON_POLICY, "evaluation={every=4, prompts=4, holdout=0.1}"),
    "scored": (
        *ON_POLICY, "algorithm.kl_coef=0.01", "algorithm.old_logprobs=recomputed", "weights.transport=collective",
        "scorer.scores=['recomputed', 'reference']",
    ),
    "critic": (*ON_POLICY, PPO, "scorer.scores=['reference']", "critic.processes=2"),
    "partial": ("run.checkpoint_every=2", "run.keep_checkpoints=1", "async={max_staleness=2, on_stale='mask', partial={}}"),
}  # fmt: skip
WITHOUT_BITS = ("partial",)
SLOW = ("end", "again", "change")
"""Kinds for which the whole command begins anew: of their hidden files' calls, those of other kinds must do."""
TWICE = {
    "link": errno.EEXIST,
    "mkdir": errno.EEXIST,
    "rename": errno.ENOENT,
    "unlink": errno.ENOENT,
    "rmdir": errno.ENOENT,
}
"""What a server answers that carries a call out twice, because its first reply was lost."""
STORM = (errno.EIO, errno.ESTALE, errno.ENOSPC, errno.EDQUOT, errno.ETIMEDOUT)
ODDS = 0.0006
"""Of each error, at each call."""


@dataclass
class Found:
    """What came of a scene."""

    points: int = 0
    errors: int = 0
    steps: int = 0
    lost: list[str] = field(default_factory=list)
    twice: list[str] = field(default_factory=list)
    torn: list[str] = field(default_factory=list)
    bit_identical: bool | None = None
    missed: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    """Exit codes of the command, kills left out."""


def points_of(scene: str) -> list[list[Point]]:
    """The kills and stops of a scene, in the order and the batches in which they are met."""
    kinds = [kind for kind in KINDS if kind.scene == scene and kind.begins not in ("run", "rare")]
    return _batches([point for kind in kinds for call in kind.calls for point in _kills(kind, call)])


def first_points_of(scene: str) -> list[Point]:
    """Kills at what is made once, when a run begins."""
    first = [kind for kind in KINDS if kind.scene in ("plain", scene) and kind.begins == "run"]
    return [Point(kind, call, "kill-after") for kind in first for call in kind.calls]


def lost_replies_of(scene: str) -> list[list[Point]]:
    """Calls that were carried out, and are answered as if they were carried out twice."""
    kinds = [kind for kind in KINDS if kind.scene == scene and kind.begins not in ("run", "rare")]
    points = [Point(k, call, "error-after", TWICE[call.op]) for k in kinds for call in k.calls if call.op in TWICE]
    return _batches(points)


def _kills(kind: Kind, call: Call) -> Iterator[Point]:
    if kind.begins in SLOW and call.op in ("create", "write"):
        return
    yield Point(kind, call, "kill-after")
    if call.op == "write":
        yield Point(kind, call, "kill-half")
    if call.op in ("rename", "link"):
        yield Point(kind, call, "kill-before")
    if kind.role in ZOMBIES and not kind.begins and call == _last_before_commit(kind):
        yield Point(kind, call, "stop-after")


def _last_before_commit(kind: Kind) -> Call:
    """The call after which the next one would be seen by others: who wakes up there commits late. Else the first call."""
    return next((call for call in reversed(kind.calls) if call.op == "write"), kind.calls[0])


def _batches(points: Sequence[Point]) -> list[list[Point]]:
    """Points that need something to begin are met together, one at each beginning."""
    alone: Callable[[Point], bool] = lambda point: not point.kind.begins or point.action.startswith("stop")
    made: list[list[Point]] = [[point] for point in points if alone(point)]
    together: Callable[[Point], tuple[str, str]] = lambda point: (point.kind.begins, point.action)
    waiting = sorted((point for point in points if not alone(point)), key=together)
    return made + [[*batch] for _, batch in groupby(waiting, key=together)]


def play(
    scene: str,
    folder: Path,
    kills: Sequence[Sequence[Point]],
    replies: Sequence[Sequence[Point]] = (),
    storm: int = 0,
    done: Callable[[], None] = lambda: None,
) -> Found:
    """Have a run meet these points and a storm of so many errors, and judge it. Raises Stuck."""
    found = Found()
    with FaultFS(folder / "backing", folder / "mount", Caches(entries_s=1.0)) as disk:
        driver = Driver(Command(disk, scene, [*SCENES[scene]]), done=done)
        try:
            driver.begin(first_points_of(scene))
            for batch in kills:
                driver.meet(batch)
            found.points = len(driver.met)
            for batch in replies:
                driver.meet(batch)
            found.errors = len(driver.met) - found.points
            if storm:
                found.errors += driver.storm(storm_rules(), storm, 2.0 * storm)
            found.steps = driver.command.end()
        finally:
            if driver.command.process is not None and driver.command.process.poll() is None:
                disk.rules()
                driver.command.process.terminate()
                driver.command.process.wait(60)
        found.unknown = sorted(
            {re.sub(r"\d{2,}", "{n}", f"{hit.op} {name_of(hit)}") for hit in unknown(disk.hits(), KINDS)}
        )
    found.missed, found.ends = [str(point) for point in driver.missed], driver.command.ends
    _judge(driver.command.seen, scene, folder, found)
    return found


def storm_rules() -> list[Rule]:
    """Errors by chance: before any call, and after those that change something."""
    before = [Rule("*", "", "error-before", ODDS, error=each) for each in STORM]
    return [*before, *(Rule(op, "", "error-after", 2 * ODDS, error=each) for op, each in TWICE.items())]


def _judge(run: RunDir, scene: str, folder: Path, found: Found) -> None:
    """Audit a run, and compare its bits with those of an undisturbed one of as many steps."""
    about = audit(run.root)
    found.lost, found.twice, found.torn = about.lost, about.twice, about.torn
    if scene not in WITHOUT_BITS:
        calm = calm_run(scene, folder / "calm", found.steps)
        assert gradient_fraction(calm) > 0
        found.bit_identical = same_bits(calm, run, found.steps)


def calm_run(scene: str, folder: Path, steps: int) -> RunDir:
    """Make the same run on the disk itself, undisturbed."""
    sets = [f"run.root={folder}", "run.name=calm", f"run.steps={steps}", *SCENES[scene]]
    words = [word for each in sets for word in ("--set", each)]
    done = subprocess.run(
        [sys.executable, "-m", "relax_hpc", "run", str(RECIPE), *words], capture_output=True, text=True, check=False, cwd=ROOT
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"the undisturbed run failed:\n{done.stderr}")
    return RunDir(folder / "calm")
