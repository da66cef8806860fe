"""The [slurm] table: what it takes, what it refuses and with which words, and site profiles under it."""

from __future__ import annotations

from pathlib import Path

import pytest

from relax_hpc.recipe import RecipeError, change_on_resume, differences, dump_recipe, load_recipe, site_file, sources
from relax_hpc.recipe.tables.slurm import time_s

TINY = '[model]\nname = "tiny"\n[rollout]\nmax_new_tokens = 8\n[[source]]\ntask = "basic_arithmetic"\n'


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "r.toml"
    path.write_text(TINY + '[slurm]\npartition = "gpu"\n')
    return path


@pytest.fixture(autouse=True)
def no_site(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("RELAX_HPC_SITE", raising=False)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [(90, 5400), ("90", 5400), ("00:01:30", 90), ("100:00:00", 360000), ("2-00:00:00", 172800), ("1:00", None),
     ("1:60:00", None), ("", None), ("x", None), ("1-2", None)],
)  # fmt: skip
def test_time_limits(value: str | int, seconds: int | None) -> None:
    assert time_s(value) == seconds


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("slurm.partiton=gpu", ["unknown key 'slurm.partiton'", "did you mean 'partition'", "[trainer]"]),
        ("slurm.trainer.tiem=3", ["unknown key 'slurm.trainer.tiem'", "did you mean 'time'"]),
        ("slurm.shape=hetero", ["slurm.shape", "'split' or 'het' or 'single'"]),
        ("slurm.time=1h", ["slurm.time = '1h'", '"HH:MM:SS"', "04:00:00"]),
        ("slurm.time=0", ["slurm.time = '0'", "above 0"]),
        ("slurm.time=2", ["slurm.time = '2'", "signal_lead_s = 120", "60 s"]),
        ("slurm.rollout.time=2", ["slurm.rollout.time = '2'", "signal_lead_s = 120"]),
        ("slurm={gpus_per_node=4, gres='gpu:4'}", ["gpus_per_node = 4", "gres = 'gpu:4'", "give one of"]),
        ("slurm.gpus_per_node=four", ["gpus_per_node = 'four'", "a100:4"]),
        ("slurm.mem=64GB", ["slurm.mem", "text that matches"]),
        ("slurm.options.dependency=x", ["slurm.options.dependency", "set for you", "successors"]),
        ("slurm.options.no_requeue=true", ["slurm.options.no_requeue", "slurm.restart"]),
        ("slurm.options.array=0-3", ["slurm.options.array", "--seeds"]),
        ("slurm.options.signal=x", ["slurm.options.signal", "signal_lead_s"]),
        ("slurm.options.cpus-per-task=4", ["a key of its own", "slurm.cpus_per_task"]),
        ("slurm.options.--nice=4", ["without dashes"]),
        ("slurm.rollout.options={output='x'}", ["options.output", "RUN/logs/slurm"]),
        ("slurm.environment.HF_TOKEN=x", ["slurm.environment.HF_TOKEN", "secret", "export HF_TOKEN"]),
        ("slurm.environment.WANDB_API_KEY=x", ["WANDB_API_KEY", "secret"]),
        ("slurm.environment={'A B'='x'}", ["'A B'", "no name of a variable"]),
        ('slurm.account="a\\n#SBATCH --x"', ["slurm.account", "line break"]),
        ('slurm.setup=["a\\nb"]', ["slurm.setup", "line break"]),
        ("slurm={shape='single', rollout={partition='x'}}", ["slurm.rollout.partition = 'x'", "one job"]),
        ("slurm.container={name='docker', image='x'}", ['slurm.container.name = "docker"', "'apptainer' or 'pyxis'"]),
        ("slurm.container.binds=['/a:/a']", ["'slurm.container.binds': it is called 'mounts' now"]),
        ("slurm.container.name=pyxis", ["'slurm.container.image' is missing"]),
        ("trainer={nodes=2, processes=3}", ["trainer.processes = 3", "trainer.nodes = 2", "use 2 or 4"]),
        ("rollout={nodes=4, workers=2, max_new_tokens=8}", ["rollout.workers = 2", "rollout.nodes = 4", "use 4 or 4"]),
    ],
)
def test_what_is_wrong_is_said_with_what_would_be_right(recipe: Path, override: str, parts: list[str]) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(recipe, [override])
    assert not [part for part in parts if part not in str(caught.value)], caught.value


def test_an_environment_that_is_only_near_a_secret_is_taken(recipe: Path) -> None:
    loaded = load_recipe(recipe, ["slurm.environment={MONKEY='x', NCCL_IB_HCA='y', KEYS='z'}"])
    assert loaded.slurm is not None and loaded.slurm.environment["MONKEY"] == "x"


def test_single_needs_as_many_nodes_for_both(recipe: Path) -> None:
    with pytest.raises(RecipeError, match=r"trainer\.nodes = 2 and rollout\.nodes = 1"):
        load_recipe(recipe, ["slurm.shape=single", "trainer={nodes=2, processes=2}"])


def test_a_group_has_its_own_keys_over_the_common_ones(recipe: Path) -> None:
    sets = ["slurm.gpus_per_node=8", "slurm.options={nice=1, comment='a'}", "slurm.rollout={gres='gpu:l4:2', time=90}"]
    slurm = load_recipe(recipe, [*sets, "slurm.rollout.options={comment='b'}"]).slurm
    assert slurm is not None
    trainer, rollout = slurm.group("trainer"), slurm.group("rollout")
    assert (trainer.gpus_per_node, trainer.gres, trainer.time, trainer.partition) == (8, None, "01:00:00", "gpu")
    assert (rollout.gpus_per_node, rollout.gres, rollout.time, rollout.partition) == (None, "gpu:l4:2", 90, "gpu")
    assert trainer.options == {"nice": 1, "comment": "a"} and rollout.options == {"nice": 1, "comment": "b"}


def test_a_container_is_kept_and_only_apptainer_takes_options(recipe: Path, tmp_path: Path) -> None:
    sets = ["slurm.container={name='pyxis', image='a.sqsh', mounts=['/a:/a']}", "slurm.trainer={mem='4G'}"]
    other = load_recipe(recipe, sets)
    copy = tmp_path / "copy.toml"
    copy.write_text(dump_recipe(other))
    assert load_recipe(copy) == other
    with pytest.raises(RecipeError, match=r"container.options = \['--rocm'\] are for `apptainer exec`.*leave them out"):
        load_recipe(recipe, [*sets, "slurm.container.options=['--rocm']"])


def test_all_of_it_may_change_on_resume(recipe: Path) -> None:
    before = load_recipe(recipe)
    sets = ["slurm.shape=het", "slurm.time=04:00:00", "slurm.options.nice=3", "slurm.trainer.mem=4G", "slurm.container={image='x'}",
            "slurm.environment.A=b"]  # fmt: skip
    changed = {change.key for change in differences(before, change_on_resume(before, sets))}
    assert {"slurm.shape", "slurm.time", "slurm.options.nice", "slurm.trainer.mem", "slurm.environment.A"} <= changed
    with pytest.raises(RecipeError, match=r"run\.seed.*What can change on resume: run\.steps, .*, \[slurm\]$"):
        change_on_resume(before, ["run.seed=7"])


def test_a_run_without_the_table_may_be_given_one(tmp_path: Path) -> None:
    path = tmp_path / "plain.toml"
    path.write_text(TINY)
    after = change_on_resume(load_recipe(path), ["slurm={shape='het', partition='gpu'}"])
    assert after.slurm is not None and after.slurm.shape == "het"


def test_a_site_profile_lies_under_the_recipe(recipe: Path, tmp_path: Path) -> None:
    site = tmp_path / "site.toml"
    site.write_text('[slurm]\naccount = "mine"\npartition = "other"\nmem = "1G"\n[slurm.environment]\nA = "b"\n')
    sets = ["slurm.mem=2G"]
    loaded = load_recipe(recipe, sets, site)
    assert loaded.slurm is not None
    assert (loaded.slurm.account, loaded.slurm.partition, loaded.slurm.mem) == ("mine", "gpu", "2G")
    where = {row.key: row.where for row in sources(loaded, recipe, sets, site)}
    assert where["slurm.account"] == "site" and where["slurm.environment.A"] == "site"
    assert (where["slurm.partition"], where["slurm.mem"], where["slurm.qos"]) == ("file", "--set", "default")
    plain = tmp_path / "plain.toml"
    plain.write_text(TINY)
    assert load_recipe(plain, (), site).slurm is not None and load_recipe(plain).slurm is None


def test_a_mistake_in_the_site_profile_names_its_file(recipe: Path, tmp_path: Path) -> None:
    site = tmp_path / "site.toml"
    site.write_text("[slurm]\nacount = 'x'\n")
    with pytest.raises(RecipeError, match=r"site\.toml.*slurm\.acount"):
        load_recipe(recipe, (), site)


def test_where_the_site_profile_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert site_file() is None
    home = tmp_path / "home" / ".config" / "relax_hpc" / "site.toml"
    home.parent.mkdir(parents=True)
    home.touch()
    assert site_file() == home
    named = tmp_path / "named.toml"
    named.touch()
    monkeypatch.setenv("RELAX_HPC_SITE", str(named))
    assert site_file() == named
    assert site_file(home) == home
    monkeypatch.setenv("RELAX_HPC_SITE", str(tmp_path / "absent.toml"))
    with pytest.raises(RecipeError, match=r"RELAX_HPC_SITE: no site profile at '.*absent\.toml'"):
        site_file()
    with pytest.raises(RecipeError, match="--site"):
        site_file(tmp_path / "absent.toml")
