"""Bits that flip in a run's files between being written and being used: the run mends what can be mended, and says the rest."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import h5py
import pytest

from relax_hpc.files.publish import read_json
from relax_hpc.files.run_dir import RunDir
from relax_hpc.spool.ledger import Ledger
from relax_hpc.spool.queue import RequestQueue
from relax_hpc.telemetry import read_metrics
from tests.runs import audited, outcome, pid_of, relax_hpc, start, steps_of, wait_for, write_recipe

ON_POLICY = ("--set", "async.max_staleness=0", "--set", "run.checkpoint_every=50")


def flip(path: Path) -> None:
    """The lowest bit of a shard's first token."""
    with h5py.File(path, "r", locking=False) as file:
        where = file["tokens"].id.get_offset()
    with path.open("r+b") as raw:
        raw.seek(where)
        byte = raw.read(1)[0]
        raw.seek(where)
        raw.write(bytes([byte ^ 1]))


def trained(run: RunDir) -> set[str]:
    """Requests in the ledger."""
    entries = (Ledger(run).find(step) for step in range(6))
    return {taken.request for entry in entries if entry for taken in entry.take}


def frozen_with_untaken_shards(run: RunDir) -> tuple[int, list[Path]]:
    """The trainer, stopped at a moment when no request is in progress and there are shards after step 0 that no step has taken."""

    def found() -> tuple[int, list[Path]] | None:
        trainer = pid_of(run, "trainer-0")
        if trainer is None or Ledger(run).find(0) is None:
            return None
        os.kill(trainer, signal.SIGSTOP)
        wait_for(lambda: not RequestQueue(run).in_progress())
        taken = trained(run)
        untaken = [path for path in run.shards.glob("*/*.h5") if path.stem not in taken]
        if not untaken:
            os.kill(trainer, signal.SIGCONT)
        return (trainer, untaken) if untaken else None

    pid, shards = wait_for(found)
    return pid, shards


@pytest.mark.timeout(400)
def test_shards_damaged_before_they_are_trained_on_are_generated_again_to_the_same_bits(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    calm, hurt = (RunDir(tmp_path / name) for name in ("calm", "hurt"))
    relax_hpc("run", recipe, *ON_POLICY, "--set", "run.name=calm")
    process = start("run", recipe, *ON_POLICY, "--set", "run.name=hurt")
    try:
        trainer, shards = frozen_with_untaken_shards(hurt)
        for shard in shards:
            flip(shard)
        os.kill(trainer, signal.SIGKILL)
        output, _ = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 0, output
    assert {path.name for path in hurt.quarantine.glob("*.damaged")} == {f"{shard.stem}.0.damaged" for shard in shards}
    said = [
        line["request"] for line in read_metrics(hurt.metrics / "trainer-0.jsonl")[0] if line["kind"] == "damaged_shard"
    ]
    assert sorted(said) == sorted(shard.stem for shard in shards)
    assert any(step["grad_norm"] > 0 for step in steps_of(calm))
    last = [read_json(run.weights / "v00000006.l0.json")["checksum"] for run in (calm, hurt)]
    assert last[0] == last[1] and audited(hurt).trained == audited(calm).trained


@pytest.mark.timeout(400)
def test_a_shard_damaged_after_it_was_trained_on_stops_the_run_once_and_names_it(tmp_path: Path) -> None:
    """Two trainer processes, both of which read it at the replay."""
    run = RunDir(tmp_path / "small")
    process = start("run", write_recipe(tmp_path), *ON_POLICY, "--set", "trainer.processes=2")
    try:
        trainer, _ = frozen_with_untaken_shards(run)
        victim = run.shard(sorted(trained(run))[0])
        flip(victim)
        os.kill(trainer, signal.SIGKILL)
        output, _ = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode != 0 and outcome(run)["outcome"] == "failed", output
    words = f"step 0 trains on a shard that is damaged: '{victim}': column 'tokens'"
    assert words in outcome(run)["reason"] and "--fork NAME" in outcome(run)["reason"]
    starts = [event for event in read_metrics(run.metrics / "supervisor.jsonl")[0] if event["kind"] == "lost"]
    assert len(starts) <= 3 and victim.exists(), "it was not tried again and again"


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", ["model.safetensors", "optimizer-0.safetensors", "rng.safetensors"])
def test_one_byte_of_the_newest_checkpoint_costs_steps_and_no_bits(tmp_path: Path, name: str) -> None:
    """The older checkpoint is taken, the ledger's steps are replayed from there, and the run says so."""
    recipe, run = write_recipe(tmp_path), RunDir(tmp_path / "small")
    relax_hpc("run", recipe, "--set", "async.max_staleness=0")
    victim = run.checkpoint(6) / name
    data = bytearray(victim.read_bytes())
    data[-1] ^= 1
    victim.write_bytes(data)
    before = read_json(run.weights / "v00000006.l0.json")["checksum"]
    done = relax_hpc("run", run.root, "--set", "run.steps=7")
    assert (
        read_json(run.weights / "v00000007.l0.json")
        and read_json(run.weights / "v00000006.l0.json")["checksum"] == before
    )
    log = "".join(path.read_text() for path in run.logs.glob("trainer-0.*.log"))
    assert "the next older one is taken" in log and str(victim) in log
    shown = " ".join(relax_hpc("status", run.root).stdout.split())
    assert "checkpoint of step 6" in shown, done.stdout
    audited(run)
