"""Rendering is pure: whole scripts, whole srun lines, for every shape."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from relax_hpc.files.errors import RunError
from relax_hpc.recipe import load_recipe
from relax_hpc.slurm.plan import Kind, Plan, make_plan
from relax_hpc.slurm.srun import rollout_step, sidecar_step, step_environment, step_python, trainer_step
from relax_hpc.slurm.submission.by_hand import by_hand, write_by_hand
from relax_hpc.slurm.submission.scripts import render

ROOT = Path(__file__).resolve().parents[2]
RECIPE = """\
[run]
name = "toy"
root = "/lustre/me/runs"
[model]
name = "tiny"
[trainer]
nodes = 2
processes = 8
device = "cpu"
[rollout]
nodes = 3
workers = 6
max_new_tokens = 8
[[source]]
task = "basic_arithmetic"
"""
ALL_KEYS = """\
[slurm]
account = "mine"
qos = "normal"
constraint = "a100&nvlink"
exclude = "n[1-2]"
reservation = "course"
time = "1-00:00:00"
cpus_per_task = 4
mem = "64G"
mail_user = "me@site.org"
mail_type = "END,FAIL"
signal_lead_s = 300
options = { comment = "it's mine", nice = true, licenses = "a:1", exclusive = false }
setup = ["module load cuda/12.4", 'source "$HOME/venv/bin/activate"']
environment = { NCCL_DEBUG = "WARN", WORDS = "a 'b' $c" }
python = "/opt/my python/bin/python"
interface = "ib0"
cpu_bind = "cores"
[slurm.trainer]
partition = "train"
gpus_per_node = "a100:4"
[slurm.rollout]
partition = "gen,low"
gpus_per_task = 1
time = 120
options = { nice = 100 }
"""


def plan(tmp_path: Path, slurm: str, *sets: str) -> Plan:
    path = tmp_path / "r.toml"
    path.write_text(RECIPE + slurm)
    return make_plan(load_recipe(path, sets))


LEADER = """\
#!/bin/bash
# toy: the trainer's job, which leads the run.
# Trainer processes are started by: srun --job-name=trainer --nodes=2 --ntasks=8 --ntasks-per-node=4 --cpus-per-task=4 --kill-on-bad-exit=1 --overlap --gpus-per-node=a100:4 --cpu-bind=cores …
#SBATCH --job-name=toy-trainer
#SBATCH --output=/lustre/me/runs/toy/logs/slurm/%x-%j.out
#SBATCH --open-mode=append
#SBATCH --no-requeue
#SBATCH --signal=B:USR2@300
#SBATCH --mail-user=me@site.org
#SBATCH --mail-type=END,FAIL
#SBATCH --time=1-00:00:00
#SBATCH --partition=train
#SBATCH --account=mine
#SBATCH --qos=normal
#SBATCH --constraint='a100&nvlink'
#SBATCH --exclude='n[1-2]'
#SBATCH --reservation=course
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=4
#SBATCH --mem=64G
#SBATCH --gpus-per-node=a100:4
#SBATCH --comment='it'"'"'s mine'
#SBATCH --nice
#SBATCH --licenses=a:1

set -eo pipefail
setup_failed() { case "$?:$BASH_COMMAND" in 14[03]:*) ;; 0:exit*|[!0]*) printf 'exit code %s: %s\\n' "$?" "$BASH_COMMAND" >/lustre/me/runs/toy/slurm/jobs/"$SLURM_JOB_ID".setup-failed ;; esac; }
trap setup_failed EXIT
module load cuda/12.4
source "$HOME/venv/bin/activate"
trap - EXIT
set -u
export NCCL_SOCKET_IFNAME=ib0
export GLOO_SOCKET_IFNAME=ib0
export FI_TCP_IFACE=ib0
export OMPI_MCA_btl_tcp_if_include=ib0
export OMPI_MCA_oob_tcp_if_include=ib0
export NCCL_DEBUG=WARN
export WORDS='a '"'"'b'"'"' $c'
export PYTHONPATH=/lustre/me/runs/toy/snapshot/code"${PYTHONPATH:+:$PYTHONPATH}"
exec '/opt/my python/bin/python' -P -m relax_hpc.slurm.batch leader /lustre/me/runs/toy
"""

ROLLOUT_PART = """\
#SBATCH --time=120
#SBATCH --partition=gen,low
#SBATCH --account=mine
#SBATCH --qos=normal
#SBATCH --constraint='a100&nvlink'
#SBATCH --exclude='n[1-2]'
#SBATCH --reservation=course
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=4
#SBATCH --mem=64G
#SBATCH --gpus-per-task=1
#SBATCH --comment='it'"'"'s mine'
#SBATCH --nice=100
#SBATCH --licenses=a:1
"""


def test_the_leader_of_the_split_shape_whole(tmp_path: Path) -> None:
    assert render(plan(tmp_path, ALL_KEYS), "leader") == LEADER


def test_het_has_both_components_and_one_command(tmp_path: Path) -> None:
    p = plan(tmp_path, ALL_KEYS, "slurm.shape=het")
    head, rest = LEADER.split("\n#SBATCH", 1)
    head = head.replace("srun --job", "srun --het-group=0 --job")
    rollout = shlex.join(rollout_step(p))
    second = "#SBATCH hetjob\n#SBATCH --job-name=toy-rollout\n#SBATCH --no-requeue\n" + ROLLOUT_PART
    rest = rest.replace("licenses=a:1\n", "licenses=a:1\n" + second)
    assert render(p, "leader") == f"{head}\n# Rollout node agents are started by: {rollout} …\n#SBATCH{rest}"
    assert p.jobs == ("leader",)


def test_the_second_component_takes_over_nothing_from_the_first(tmp_path: Path) -> None:
    asks = "exclude='t2', mem='8G', options={nice=100, comment='x', licenses='a:1'}"
    slurm = f"[slurm]\nshape='het'\ntrainer={{{asks}}}\n"
    second = render(plan(tmp_path, slurm), "leader").split("#SBATCH hetjob\n")[1]
    assert second.split("\n\n")[0].splitlines()[-4:] == [
        "#SBATCH --exclude=''", "#SBATCH --mem=0", "#SBATCH --nice=0", "#SBATCH --comment=/lustre/me/runs/toy",
    ]  # fmt: skip
    own = "rollout={exclude='r1', mem='4G', options={nice=5, comment='y'}}\n"
    second = render(plan(tmp_path, slurm + own), "leader").split("#SBATCH hetjob\n")[1]
    assert [second.count(f"--{name}=") for name in ("exclude", "mem", "nice", "comment")] == [1, 1, 1, 1]
    assert "--nice=5\n" in second and "licenses" not in second


@pytest.mark.parametrize(
    ("kind", "end"), [("rollout", "rollout /lustre/me/runs/toy"), ("elastic", "rollout /lustre/me/runs/toy --elastic")]
)
def test_rollout_jobs_are_not_requeued_whatever_the_leader_is(tmp_path: Path, kind: Kind, end: str) -> None:
    p = plan(tmp_path, ALL_KEYS, "slurm.restart=requeue")
    text = render(p, kind)
    asked = ROLLOUT_PART if kind == "rollout" else ROLLOUT_PART.replace("nodes=3", "nodes=1", 1)
    assert f"#SBATCH --job-name=toy-{kind}\n" in text and asked in text
    assert "#SBATCH --no-requeue\n#SBATCH --signal=B:USR2@300\n#SBATCH --time" in text and "mail" not in text
    assert text.endswith(f"python' -P -m relax_hpc.slurm.batch {end}\n")
    assert "#SBATCH --requeue\n" in render(p, "leader")
    assert render(plan(tmp_path, ALL_KEYS, "slurm.restart=none"), "leader") == LEADER


SINGLE = """\
#!/bin/bash
# toy: the trainer's job, which leads the run.
# Trainer processes are started by: srun --job-name=trainer --nodes=2 --ntasks=8 --ntasks-per-node=4 --cpus-per-task=3 --kill-on-bad-exit=1 --exact --mem=0 --gpus-per-task=1 …
# Rollout node agents are started by: srun --job-name=rollout --nodes=2 --ntasks=2 --ntasks-per-node=1 --cpus-per-task=2 --kill-on-bad-exit=0 --wait=0 --exact --mem=0 --gres=gpu:2 …
#SBATCH --job-name=toy-trainer
#SBATCH --output=/lustre/me/runs/toy/logs/slurm/%x-%j.out
#SBATCH --open-mode=append
#SBATCH --no-requeue
#SBATCH --signal=B:USR2@120
#SBATCH --comment=/lustre/me/runs/toy
#SBATCH --time=01:00:00
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=14
#SBATCH --mem=8G
#SBATCH --gres=gpu:6

set -euo pipefail
export PYTHONPATH=/lustre/me/runs/toy/snapshot/code"${PYTHONPATH:+:$PYTHONPATH}"
exec python3 -P -m relax_hpc.slurm.batch leader /lustre/me/runs/toy
"""


@pytest.mark.parametrize(
    ("line", "said", "code"),
    [
        ("no_such_module load x", "exit code 127: no_such_module load x\n", 127),
        ("true; exit 3", "exit code 3: exit 3\n", 3),
        ("exit 0", "exit code 0: exit 0\n", 0),
        ('sh -c "exit 137"', 'exit code 137: sh -c "exit 137"\n', 137),  # as out of memory
        ("echo fine", None, 0),
        # a cancellation or preemption, of the shell or of all that it runs
        ("kill -TERM $$", None, -signal.SIGTERM),
        ("kill -USR2 $$", None, -signal.SIGUSR2),
        ('sh -c "kill -TERM \\$\\$"', None, 128 + signal.SIGTERM),
    ],
)
def test_a_line_of_setup_that_ends_the_script_is_written_down(
    tmp_path: Path, line: str, said: str | None, code: int
) -> None:
    folder = tmp_path / "it's" / "toy" / "slurm" / "jobs"
    folder.mkdir(parents=True)
    slurm = f"[slurm]\npython = 'true'\nsetup = ['echo $NOT_SET', '{line}']\n"
    text = render(plan(tmp_path, slurm, f"run.root={tmp_path}/it's"), "leader")
    environment = {"PATH": "/usr/bin:/bin", "SLURM_JOB_ID": "12"}
    done = subprocess.run(["bash"], input=text, text=True, capture_output=True, env=environment, check=False)
    assert {path.name: path.read_text() for path in folder.iterdir()} == ({"12.setup-failed": said} if said else {})
    assert done.returncode == code


def test_single_asks_for_what_both_groups_need_together(tmp_path: Path) -> None:
    slurm = "[slurm]\nshape = 'single'\nmem = '8G'\npython = 'python3'\n[slurm.trainer]\ncpus_per_task = 3\ngpus_per_task = 1\n[slurm.rollout]\ngpus_per_node = 2\n"
    p = plan(tmp_path, slurm, "rollout.nodes=2", "rollout.workers=4")
    assert render(p, "leader") == SINGLE


def test_single_with_the_nodes_gpus_shares_them(tmp_path: Path) -> None:
    p = plan(
        tmp_path,
        "[slurm]\nshape = 'single'\ngpus_per_node = 'a100:1'\n",
        "rollout={nodes=2, workers=2, max_new_tokens=8}",
    )
    assert "#SBATCH --ntasks-per-node=5\n#SBATCH --gres=gpu:a100:1\n" in render(p, "leader")
    for step in (trainer_step(p), rollout_step(p)):
        assert step[-3:] == ["--overlap", "--gpus-per-node=a100:1", "--cpu-bind=none"]


def test_groups_that_take_turns_share_cpus_too(tmp_path: Path) -> None:
    slurm = "[slurm]\nshape = 'single'\ncpus_per_task = 3\n"
    sets = ("rollout={nodes=2, workers=2, max_new_tokens=8}", "run.placement=colocate", "async.max_staleness=0")
    p = plan(tmp_path, slurm, *sets)
    assert "#SBATCH --cpus-per-task=12\n" in render(p, "leader"), "of the four trainer processes; a worker needs less"
    for step, cpus in ((trainer_step(p), 3), (rollout_step(p), 3)):
        assert f"--cpus-per-task={cpus}" in step and step[-2:] == ["--overlap", "--cpu-bind=none"]


def test_single_gives_a_group_without_gpus_none(tmp_path: Path) -> None:
    slurm = "[slurm]\nshape = 'single'\n[slurm.trainer]\ngres = 'gpu:l4:2,shard:1'\n"
    p = plan(tmp_path, slurm, "rollout={nodes=2, workers=2, max_new_tokens=8}")
    assert trainer_step(p)[-1] == "--gres=gpu:l4:2,shard:1" and rollout_step(p)[-1] == "--gres=none"
    assert "#SBATCH --gres=gpu:l4:2,shard:1\n" in render(p, "leader")


def test_a_scorer_shares_the_trainers_nodes(tmp_path: Path) -> None:
    sets = ("algorithm.kl_coef=0.1", "scorer={scores=['reference']}", "trainer.threads=20", "trainer.device=auto")
    p = plan(tmp_path, "", *sets, "slurm.shape=het", "slurm.cpus_per_task=4", "slurm.gpus_per_node=4")
    words = "--job-name=scorer --nodes=1 --ntasks=1 --cpus-per-task=16 --overlap"
    assert " ".join(sidecar_step(p, "scorer")) == f"srun --het-group=0 {words} --gres=gpu:4 --cpu-bind=none"
    assert f"# A scorer is started by: {' '.join(sidecar_step(p, 'scorer'))} …" in render(p, "leader").splitlines()
    p = plan(
        tmp_path,
        "",
        *sets,
        "slurm.shape=single",
        "rollout.nodes=2",
        "trainer.device=cpu",
        "slurm.gpus_per_node=2",
        "slurm.cpu_bind=cores",
    )
    words = "--job-name=scorer --nodes=1 --ntasks=1 --cpus-per-task=20 --overlap"
    assert " ".join(sidecar_step(p, "scorer")) == f"srun {words} --mem=0 --gres=none --cpu-bind=cores"


def test_a_critics_processes_are_one_step_on_a_node_of_the_trainers(tmp_path: Path) -> None:
    sets = ("algorithm={name='ppo'}", "critic={processes=2}", "trainer.threads=20", "trainer.device=auto")
    p = plan(tmp_path, "", *sets, "slurm.shape=het", "slurm.cpus_per_task=4", "slurm.gpus_per_node=4")
    words = "--job-name=critic --nodes=1 --ntasks=2 --cpus-per-task=8 --kill-on-bad-exit=1 --overcommit --overlap"
    assert " ".join(sidecar_step(p, "critic")) == f"srun --het-group=0 {words} --gres=gpu:4 --cpu-bind=none"
    said = f"# The critic's processes are started by: {' '.join(sidecar_step(p, 'critic'))} …"
    assert said in render(p, "leader").splitlines()
    sets = (
        "algorithm.kl_coef=0.1",
        "scorer={scores=['reference'], processes=4}",
        "trainer.backend=megatron",
        "slurm.shape=split",
    )
    p = plan(tmp_path, "", *sets)
    words = "--job-name=scorer --nodes=1 --ntasks=4 --cpus-per-task=1 --kill-on-bad-exit=1 --overcommit --overlap"
    assert " ".join(sidecar_step(p, "scorer")) == f"srun {words} --cpu-bind=none", (
        "under megatron they are one group too"
    )
    assert "# The scorer's processes are started by: srun" in render(p, "leader")


def test_steps_of_het_and_elastic(tmp_path: Path) -> None:
    p = plan(tmp_path, ALL_KEYS, "slurm.shape=het")
    assert trainer_step(p) == [
        "srun", "--het-group=0", "--job-name=trainer", "--nodes=2", "--ntasks=8", "--ntasks-per-node=4", "--cpus-per-task=4",
        "--kill-on-bad-exit=1", "--overlap", "--gpus-per-node=a100:4", "--cpu-bind=cores",
    ]  # fmt: skip
    assert rollout_step(p) == [
        "srun", "--het-group=1", "--job-name=rollout", "--nodes=3", "--ntasks=3", "--ntasks-per-node=1", "--cpus-per-task=8",
        "--kill-on-bad-exit=0", "--wait=0", "--overlap", "--gpus-per-node=2", "--cpu-bind=cores",
    ]  # fmt: skip
    elastic = [*rollout_step(p)[:1], *rollout_step(p)[2:]]
    elastic[2:4] = ["--nodes=1", "--ntasks=1"]
    assert rollout_step(p, elastic=True) == elastic
    assert step_python(p) == "/opt/my python/bin/python"


def test_processes_are_not_bound_to_cpus_that_nobody_counted(tmp_path: Path) -> None:
    assert trainer_step(plan(tmp_path, "[slurm]\n"))[-2:] == ["--overlap", "--cpu-bind=none"]
    assert rollout_step(plan(tmp_path, "[slurm]\ncpus_per_task = 2\n"))[-1] == "--overlap"
    assert step_python(plan(tmp_path, "[slurm]\n")) == sys.executable


def test_containers_see_the_run(tmp_path: Path) -> None:
    p = plan(
        tmp_path,
        "[slurm]\ngpus_per_node=1\n[slurm.container]\nimage='a b.sif'\nmounts=['/d:/d:ro']\noptions=['--cleanenv']\n",
    )
    assert trainer_step(p)[-8:] == [
        "apptainer", "exec", "--nv", "--bind", "/lustre/me/runs", "--bind", "/d:/d:ro", "--cleanenv", "a b.sif",
    ][-8:]  # fmt: skip
    assert step_python(p) == "python3"
    rocm = plan(tmp_path, "[slurm]\ngpus_per_node=1\n[slurm.container]\nimage='a.sif'\noptions=['--rocm']\n")
    assert "--nv" not in rollout_step(rocm)
    p = plan(tmp_path, "[slurm]\n[slurm.container]\nname='pyxis'\nimage='x#y:1'\nmounts=['/d:/d']\npython='py'\n")
    assert rollout_step(p)[-2:] == [
        "--container-image=x#y:1",
        "--container-mounts=/lustre/me/runs:/lustre/me/runs,/d:/d",
    ]
    assert step_python(p) == "py"


def test_what_sbatch_asked_for_is_taken_out_of_a_steps_environment() -> None:
    asked = ["SLURM_NTASKS", "SLURM_NTASKS_PER_NODE_HET_GROUP_0", "SLURM_NNODES", "SLURM_CPUS_PER_TASK", "SLURM_MEM_PER_NODE",
             "SLURM_GPUS_PER_NODE", "SLURM_GPUS", "SLURM_TRES_PER_TASK", "SLURM_CPU_BIND_TYPE", "SRUN_CPUS_PER_TASK", "SLURM_EXPORT_ENV"]  # fmt: skip
    kept = ["SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_JOB_NODELIST_HET_GROUP_0", "SLURM_HET_SIZE", "SLURM_CONF",
            "SLURM_JOB_NUM_NODES", "SLURM_MPI_TYPE", "PATH"]  # fmt: skip
    assert sorted(step_environment(dict.fromkeys(asked + kept, "1"))) == sorted(kept)


def test_odd_names_stay_one_word(tmp_path: Path) -> None:
    p = plan(tmp_path, "[slurm]\npython='python3'\n", "run.root=/lustre/my runs/100%/$x")
    text = render(p, "leader")
    assert "#SBATCH --output='/lustre/my runs/100%%/$x/toy/logs/slurm/%x-%j.out'\n" in text
    assert text.endswith("batch leader '/lustre/my runs/100%/$x/toy'\n")
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


# --- scripts to send by hand --------------------------------------------------------------------------------------


def test_by_hand_makes_the_run_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("RELAX_HPC_SITE", raising=False)
    Path("r.toml").write_text(RECIPE + "[slurm]\npython='python3'\n")
    paths = write_by_hand(Path("r.toml"), ["run.root=out", "run.name=b"], Path("jobs"))
    assert [p.name for p in paths] == ["b-leader.sbatch", "b-rollout.sbatch", "b-elastic.sbatch"]
    lines = paths[1].read_text().splitlines()
    assert "#SBATCH --output=%x-%j.out" in lines
    assert lines[-4:] == [
        "set -euo pipefail",
        "python3 -P -m relax_hpc.slurm.submission.make_run rollout r.toml --set run.root=out --set run.name=b",
        'export PYTHONPATH="$PWD"/out/b/snapshot/code"${PYTHONPATH:+:$PYTHONPATH}"',
        'exec python3 -P -m relax_hpc.slurm.batch rollout "$PWD"/out/b',
    ]
    assert {p.name for p in tmp_path.iterdir()} == {"jobs", "r.toml"}, "nothing else is made"


def test_a_line_break_in_a_name_does_not_become_a_line_of_the_script(tmp_path: Path) -> None:
    path = tmp_path / "r.toml\ntouch owned #.toml"
    path.write_text(RECIPE + "[slurm]\n")
    with pytest.raises(RunError, match=r"\\ntouch owned.*rename the file"):
        by_hand(path)
    with pytest.raises(RunError, match=r"--output=.*\\ntouch owned.*run\.root"):
        render(plan(tmp_path, "[slurm]\n", "run.root='/lustre/a\ntouch owned'"), "rollout")


def test_an_array_of_seeds_is_one_run_a_task(tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    path.write_text(RECIPE + "[slurm]\nshape='single'\npython='python3'\n")
    sets = ["rollout={nodes=2, workers=2, max_new_tokens=8}"]
    (name, text), *others = by_hand(path, sets, seeds=3, site=None).items()
    assert name == "toy-seeds.sbatch" and not others
    assert "#SBATCH --array=0-2\n#SBATCH --output=%x-%A_%a.out\n" in text
    assert '--set run.name=toy-"$SLURM_ARRAY_TASK_ID" --set run.seed="$SLURM_ARRAY_TASK_ID"\n' in text
    assert text.endswith('leader /lustre/me/runs/toy-"$SLURM_ARRAY_TASK_ID"\n')
    with pytest.raises(RunError, match="--seeds 3.*slurm.shape=single"):
        by_hand(path, ["slurm.shape=split"], seeds=3)


@pytest.mark.parametrize("shape", ["split", "het", "single"])
def test_where_nothing_is_generated_the_trainers_job_is_all_of_the_run(tmp_path: Path, shape: str) -> None:
    path = tmp_path / "r.toml"
    path.write_text(RECIPE + f"[slurm]\nshape='{shape}'\npython='python3'\n")
    ((name, text),) = by_hand(path, ["algorithm={name='sft'}"]).items()
    assert name == "toy-leader.sbatch" and "rollout" not in text and "hetjob" not in text
    assert "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=4\n" in text
    generated = by_hand(path, ["algorithm={name='sft'}", "evaluation={}", "rollout.nodes=2"])
    assert len(generated) == 2 + (shape == "split")


def test_shipped_scripts_are_current() -> None:
    check = [sys.executable, str(ROOT / "tools" / "render_examples.py"), "--check"]
    ended = subprocess.run(check, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, check=False)
    assert ended.returncode == 0, "run: python tools/render_examples.py"


@pytest.mark.parametrize("path", sorted((ROOT / "slurm").glob("*.sbatch")), ids=lambda p: p.name)
def test_shipped_scripts_are_straight_lines_of_bash(path: Path) -> None:
    subprocess.run(["bash", "-n", path], check=True)
    body = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    assert not [line for line in body if line.startswith(("if", "for", "while")) or "$((" in line or "`" in line]
    assert body[-1].startswith("exec python3 -P -m relax_hpc.slurm.batch ")
