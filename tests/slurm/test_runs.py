"""Runs on a real Slurm: submitted, disturbed, and done with nobody touching them."""

from __future__ import annotations

import json

import pytest

from relax_hpc import open_run
from relax_hpc.files.publish import read_json
from relax_hpc.monitor.analysis.report import restarts
from relax_hpc.slurm.submission.sbatch import jobs, read_leaders
from tests.runs import SMALL, step_now, steps_of, wait_for
from tests.slurm.cluster import SlurmCluster
from tests.slurm.runs import GROUPS, SLURM, array, sent, sound, submit, undisturbed
from tools.bench.common import SIDES


@pytest.mark.parametrize(("shape", "transport"), [("split", "collective"), ("het", "mpi"), ("single", "file")])
def test_every_shape_reaches_its_end(cluster: SlurmCluster, shape: str, transport: str) -> None:
    # UCX takes nodes with one kernel for one host, whose memory they share; these nodes see none of each other's.
    sets = (
        f"slurm.shape={shape}",
        f"weights.transport={transport}",
        "run.steps=20",
        'slurm.environment.UCX_TLS="tcp,self"',
        *(("algorithm.kl_coef=0.05", "scorer.scores=['reference']") if shape == "het" else ()),
        *(("algorithm={name='ppo', group_size=4}", "critic.processes=2") if shape == "split" else ()),
    )
    if shape == "single":
        sets += ("run.placement=colocate", "async.max_staleness=0")
    ours = submit(cluster, shape, *sets, slurm=SLURM + ("" if shape == "single" else GROUPS))
    assert ours.wait_for_end()["outcome"] == "done"
    sound(ours, 20)
    undisturbed(ours)
    columns = {"het": "reference", "split": "values"}
    assert len(list(ours.run.columns.rglob(f"*.{columns.get(shape, '*')}.h5"))) == (40 if shape in columns else 0)
    broadcast = "weights are broadcast to ['rollout-" in (ours.run.logs / "trainer-0.0000.log").read_text()
    assert broadcast == (transport != "file"), "between nodes, each with a host name and an address of its own"
    assert cluster.state(ours.leaders()[0]) == "COMPLETED"
    assert {cluster.fields(job["id"])["Comment"] for job in jobs(ours.run)} == {str(ours.run.root)}
    out = "".join(path.read_text() for path in (ours.run.logs / "slurm").glob(f"{shape}-rollout-*.out"))
    assert shape != "split" or "workers to rollout-*.log there\nits node agents have left\n" in out
    assert not any("nanobind" in path.read_text() for path in ours.run.logs.glob("*.log"))
    assert cluster.state(ours.leaders()[1]) == "CANCELLED", "the successor of a finished run was not cancelled"


@pytest.mark.quick
def test_a_leader_that_a_person_cancelled_is_not_run_again(cluster: SlurmCluster) -> None:
    ours = submit(cluster, "cancelled", "run.steps=100000")
    ours.wait_for_step(2)
    cluster.cancel(ours.job_of("leader"))
    wait_for(lambda: not cluster.exec("squeue", "--noheader").stdout)
    assert read_json(ours.run.outcome)["outcome"] == "stopped"
    assert not any(cluster.state(job) in ("PENDING", "RUNNING") for job in ours.leaders())
    assert step_now(ours.run) in ours.run.checkpoint_steps(), "it did not checkpoint when it was cancelled"
    ours.relax_hpc("submit", ours.run.root, "--local-root-ok", "--set", f"run.steps={step_now(ours.run) + 3}")
    assert ours.wait_for_end()["outcome"] == "done", "a person may go on with it"
    sound(ours, step_now(ours.run))


def test_a_het_job_ends_with_its_rollout_component_its_successor_goes_on_and_stop_ends_all_jobs(
    cluster: SlurmCluster,
) -> None:
    asks = 'trainer={partition="trainer", mem="1000M", options={nice=100, comment="mine"}}'
    ours = submit(cluster, "stopped", "run.steps=100000", "slurm.shape=het", f"slurm.{asks}")
    ours.wait_for_step(2)
    leader, successor = ours.leaders()[:2]
    rollout = cluster.fields(f"{leader}+1")
    asked = [rollout.get(key, "") for key in ("JobName", "Nice", "MinMemoryNode", "Comment")]
    assert asked == ["stopped-rollout", "0", "0", str(ours.run.root)], "what the trainer asks for was taken over"
    cluster.cancel(f"{leader}+1")
    cluster.wait_for_state(leader, "FAILED", "COMPLETED")
    assert f"the rollout component of this job ended ({leader}+1 " in ours.log_of(leader)
    reached = ours.run.checkpoint_steps()[-1]
    ours.wait_for_step(reached + 2)
    assert ours.job_of("leader") == successor
    ours.relax_hpc("stop", ours.run.root)
    assert ours.wait_for_end()["outcome"] == "stopped"
    sound(ours, step_now(ours.run))


def test_a_run_that_is_stopped_has_lost_nothing(cluster: SlurmCluster) -> None:
    """Also where its last step ends long after its rollout nodes were told."""
    paced = f'{{name="own", factory="{SIDES / "paced.py"}:paced", options={{seconds=3.0}}, group_size=4}}'
    ours = submit(cluster, "quiet", "run.steps=100000", f"algorithm={paced}", "slurm.ask_every_s=0.5")
    ours.wait_for_step(1)
    ours.relax_hpc("stop", ours.run.root)
    assert ours.wait_for_end()["outcome"] == "stopped"
    undisturbed(ours)
    said = ours.relax_hpc("status", ours.run.root)
    assert "restarts so far: 0" in said and "lost" not in said and "silent" not in said, said
    assert restarts(list(open_run(ours.run.root).events())) == 0


def test_a_held_successor_is_waited_for_and_all_jobs_cancelled_leave_no_fresh_one(cluster: SlurmCluster) -> None:
    ours = submit(cluster, "held", "run.steps=100000")
    ours.wait_for_step(2)
    leader, successor = ours.leaders()
    cluster.exec("scontrol", "uhold", successor)
    cluster.exec("scancel", "--batch", "--signal=USR2", leader)
    cluster.wait_for_state(leader, "FAILED")  # 75: the run goes on
    said = ours.relax_hpc("status", ours.run.root)
    assert "waiting for a successor" in said and "held by its owner" in said
    assert ours.leaders() == [leader, successor]
    reached = step_now(ours.run)
    cluster.exec("scontrol", "release", successor)
    ours.wait_for_step(reached + 1)
    wait_for(lambda: len(ours.leaders()) == 3)
    cluster.cancel("--me")
    assert ours.wait_for_end()["outcome"] == "stopped"
    fresh = ours.leaders()[-1]
    assert fresh in str(read_json(ours.run.outcome)["reason"]) and len(ours.leaders()) == 3, (
        "a fresh successor was sent"
    )
    assert [cluster.state(job) for job in ours.leaders()] == ["FAILED", "CANCELLED", "CANCELLED"]
    sound(ours, step_now(ours.run))


def test_a_mended_reward_is_taken_by_the_jobs_that_are_sent_next_and_rows_left_out_are_told(
    cluster: SlurmCluster,
) -> None:
    reward, prompts = cluster.shared / "mended.py", cluster.shared / "mended.jsonl"
    rows = [{"prompt": f"{i} + 1 = ", "answer": str(i + 1) if i else None} for i in range(50)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    reward.write_text("def judge(prompt, answer):\n    raise KeyError('no rubric')\n")
    own = f'[[source]]\nprompts = "{prompts}"\nmissing_answer = "drop"\nreward = "{reward}:judge"\n'
    ours, said = sent(cluster, "mended", recipe=SMALL[: SMALL.index("[[source]]")] + own)
    assert "source.0: of 50 rows 1 left out without an answer" in said
    ended = ours.wait_for_end()
    assert ended["outcome"] == "failed" and "no rubric" in str(ended["reason"]) and "--code new" in str(ended["reason"])
    failed = {path.stem for path in ours.run.shards.rglob("*.h5")}
    reward.write_text("def judge(prompt, answer):\n    return float(answer == prompt.answer)\n")
    again = ours.relax_hpc("submit", ours.run.root, "--local-root-ok", "--code", "new")
    assert "changed since" not in again and "1 left out without an answer" in again
    assert ours.wait_for_end()["outcome"] == "done"
    assert sum(s["failed_groups"] for s in steps_of(ours.run)) == 0
    [code, redo] = [json.loads(line) for line in ours.run.changes.read_text().splitlines()]
    assert (code["key"], code["file"], set(redo["requests"])) == ("code", str(reward), failed)
    sound(ours, 6)


def test_each_seed_of_an_array_is_requeued_and_cancelled_alone(cluster: SlurmCluster) -> None:
    seeds = array(cluster, "seeds", 3, 'slurm.restart="requeue"', "run.steps=100000")
    for seed in seeds:
        seed.wait_for_step(2)
    jobs_of = [seed.leaders() for seed in seeds]
    (array_id,) = {job.partition("_")[0] for (job,) in jobs_of}
    assert jobs_of == [[f"{array_id}_{i}"] for i in range(3)]
    raw = {cluster.fields(job)["JobId"]: seed for (job,), seed in zip(jobs_of, seeds, strict=True)}
    shared = raw.pop(array_id)  # what is said of its raw number is said of all of them
    cancelled, spared = raw.values()
    cluster.exec("scancel", "--batch", "--signal=USR2", shared.leaders()[0])
    cluster.cancel(cancelled.leaders()[0])
    cluster.wait_for_state(cancelled.leaders()[0], "CANCELLED")
    wait_for(lambda: cluster.fields(shared.leaders()[0])["Restarts"] == "1")
    reached = step_now(shared.run)
    shared.wait_for_step(reached + 1)
    assert cluster.state(cancelled.leaders()[0]) == "CANCELLED", "scancel was taken for a warning"
    fields = cluster.fields(spared.leaders()[0])
    assert (fields["JobState"], fields["Restarts"]) == ("RUNNING", "0")
    assert len(read_leaders(spared.run)) == 1 and len(read_leaders(shared.run)) == 2
    said = spared.relax_hpc("status", spared.run.root)
    assert spared.leaders()[0] in said and shared.leaders()[0] not in said and fields["NodeList"] in said
    for seed in (shared, spared):
        seed.relax_hpc("stop", seed.run.root)
    wait_for(lambda: not cluster.exec("squeue", "--noheader").stdout)
    assert [read_json(seed.run.outcome)["outcome"] for seed in (shared, spared)] == ["stopped", "stopped"]
    for seed in seeds:
        sound(seed, seed.run.checkpoint_steps()[-1])
