"""Recipes: TOML and --set in, a checked Recipe or a helpful error out."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_origin

import pytest

from relax_hpc.recipe import (
    Recipe,
    RecipeError,
    change_on_resume,
    differences,
    dump_recipe,
    load_recipe,
    resumable,
    sources,
)
from relax_hpc.recipe.describe import alias, keys, member_key, member_name, tables
from relax_hpc.recipe.tables.algorithm import Grpo
from relax_hpc.recipe.tables.model import TinyModel
from relax_hpc.recipe.tables.source import FileSource, ReasoningGymSource
from relax_hpc.recipe.tables.table import Table

REPOSITORY = Path(__file__).resolve().parents[2]

TINY = """\
[model]
name = "tiny"

[rollout]
max_new_tokens = 8

[[source]]
task = "basic_arithmetic"
config = { operators = ["+"], max_terms = 2 }
"""


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return path


def problem(path: Path, *overrides: str) -> str:
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, overrides)
    return str(caught.value)


def test_loads_defaults_and_union_members_by_their_keys(tiny: Path) -> None:
    recipe = load_recipe(tiny)
    assert isinstance(recipe.model, TinyModel) and isinstance(recipe.algorithm, Grpo)
    assert isinstance(recipe.source[0], ReasoningGymSource)
    assert recipe.source[0].config == {"operators": ["+"], "max_terms": 2}
    assert recipe.async_.max_staleness == 1


def test_overrides_are_toml_or_text_and_index_lists(tiny: Path) -> None:
    recipe = load_recipe(
        tiny,
        ["run.steps=7", "run.name=a-b", "source.0.task=chain_sum", "source.0.config.max_terms=3",
         "algorithm.clip=[0.1, 0.3]", "async.on_stale=drop", "evaluation.every=5", "trainer.learning_rate=1"],
    )  # fmt: skip
    assert (recipe.run.steps, recipe.run.name) == (7, "a-b")
    assert isinstance(recipe.source[0], ReasoningGymSource)
    assert recipe.source[0].task == "chain_sum"
    assert recipe.source[0].config == {"operators": ["+"], "max_terms": 3}
    assert isinstance(recipe.algorithm, Grpo) and recipe.algorithm.clip == (0.1, 0.3)
    assert recipe.async_.on_stale == "drop" and recipe.trainer.learning_rate == 1.0
    assert recipe.evaluation is not None and recipe.evaluation.every == 5


def test_a_text_value_cannot_smuggle_in_more_keys(tiny: Path) -> None:
    assert load_recipe(tiny, ["source.0.template=1\nw = 2"]).source[0].template == "1\nw = 2"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("trainer.procesess=2", ["unknown key 'trainer.procesess'", "did you mean 'processes'", 'backend ("torch")']),
        ("trianer.processes=2", ["unknown key 'trianer'", "did you mean 'trainer'", "[rollout]"]),
        ("source.0.rewrd=x", ["'source.0.rewrd'", "did you mean 'reward'", "size (10000)"]),
        ("async_.max_staleness=2", ["unknown key 'async_'", "[async]"]),
        ("run.steps=many", ['run.steps = "many"', "integer > 0", "Training steps"]),
        ("run.steps=0", ["run.steps = 0", "integer > 0"]),
        ("run.steps=true", ["run.steps = true", "integer > 0"]),
        ("run.steps=1.5", ["run.steps = 1.5", "integer > 0"]),
        ("run.name=7", ["run.name = 7", "text", '"7"']),
        ("trainer.learning_rate=inf", ["trainer.learning_rate = inf", "number > 0"]),
        ("trainer.betas=[2, 0.9]", ["trainer.betas.0 = 2", "from 0 to below 1"]),
        ("async.on_stale=later", ["async.on_stale", "'wait' or 'drop' or 'mask'"]),
        ("run.placement=colocate", ["async.max_staleness = 1", "set it to 0, or run.placement to 'split'"]),
        ("evaluation.samples=4", ["evaluation.samples = 4 greedy answers", "set evaluation.temperature"]),
        ("evaluation.holdout=0", ["evaluation.holdout = 0", "[[evaluation.source]]"]),
        ("evaluation.source=[{task = 'chain_sum', weight = 2}]", ["unknown key 'evaluation.source.0.weight'", "limit"]),
        (
            "async.on_stale=mask",
            ["async.on_stale = 'mask'", "rollout.engine = 'torch'", "use rollout.engine = 'sglang'", "[async.partial]"],
        ),
        (
            "async={on_stale='mask',partial={abort_at_publish=false}}",
            ["rollout.engine = 'torch'", "abort_at_publish = true"],
        ),
        (
            "async={partial={abort_after_s=2}}",
            ["[async.partial]", "async.on_stale = 'wait'", "set async.on_stale = 'mask'"],
        ),
        ("rollout.sglang.max_running=4", ["[rollout.sglang]", "the engine is 'torch'"]),
        ("rollout.sglang.expert_parallel=2", ["expert_parallel = 2", "tensor_parallel = 1"]),
        ("rollout.sglang.args={api_key = 'x'}", ["may not have ['api_key']"]),
        ("rollout.sglang.router={policy = 'random'}", ["router = {'policy': 'random'}", "servers = 1"]),
        ("rollout.sglang={servers=2, router={worker-urls=['x']}}", ["router may not have ['worker-urls']"]),
        ("rollout.sglang={servers=2, args={tp_size=4}}", ["args may not have ['tp_size']"]),
        ("rollout.sglang={servers=2, address='http://a:1', folder='/x'}", ["one server", "servers = 2"]),
        ("rollout={engine='sglang', routed_experts=true, sglang={servers=2}}", ["servers = 2", "more rollout.workers"]),
        ("rollout.sglang.address=node7:30000", ["address", "https?"]),
        ("rollout.sglang.folder=/x", ["rollout.sglang.folder = '/x'", "set rollout.sglang.address"]),
        ("algorithm.clip=[0.1]", ["algorithm.clip.1", "[number, number]"]),
        ("model.name=tny", ["model.name = 'tny'", "did you mean 'tiny'", "['path', 'tiny']"]),
        ("source.0.name=fil", ["source.0.name = 'fil'", "['file', 'reasoning_gym']"]),
        ("model=3", ["model = 3", "expected a table"]),
        ("sft_warm_start=3", ["sft_warm_start = 3", "expected a table with steps (400)"]),
        ("source.2.task=x", ["--set 'source.2.task=x'", "0 … 0"]),
        ("run.steps", ["KEY=VALUE"]),
        (
            "trainer.prompts_per_step=30",
            ["rollout.groups_per_request = 8", "prompts_per_step = 30", "[1, 2, 3, 5, 6, 10"],
        ),
        ("algorithm.group_size=1", ["algorithm.group_size = 1", "use 2 or more"]),
        ("algorithm.name=gsop", ["did you mean 'gspo'", "'reinforce_plus_plus_baseline'"]),
        ("algorithm={name='cispo', dual_clip=3}", ["unknown key 'algorithm.dual_clip'", "(name = 'cispo')"]),
        ("algorithm.dual_clip=1.0", ["algorithm.dual_clip = 1.0", "more than 1"]),
        ("algorithm.clip=[1.0, 0.2]", ["algorithm.clip = [1.0, 0.2]", "[0, 1)"]),
        ("algorithm={name='cispo', clip=[1.1, 2]}", ["algorithm.clip = [1.1, 2.0]", "[0, 1]"]),
        ("algorithm={name='sapo', tau=[0, 1]}", ["algorithm.tau.0 = 0", "number > 0"]),
        ("algorithm.overlong=[9, 3]", ["algorithm.overlong = [9, 3]", "from < to"]),
        (
            "algorithm={kl_coef=1, kl_estimator='k1'}",
            ["kl_estimator = 'k1' with kl_in = 'loss'", "set kl_estimator to 'k2' or 'k3'"],
        ),
        (
            "algorithm={kl_coef=1, kl_estimator='k3', kl_in='reward'}",
            ["kl_estimator = 'k3' with kl_in = 'reward'", "'k1', or kl_in = 'loss'"],
        ),
        ("algorithm.kl_unbiased=true", ["kl_unbiased = true", "kl_coef = 0.0", "set kl_coef above 0"]),
        ("algorithm={correction={name='tis'}}", ["algorithm.correction = 'tis'", "set old_logprobs = 'recomputed'"]),
        (
            "algorithm={old_logprobs='recomputed', correction={name='mis', low=3}}",
            ["correction.low = 3.0", "correction.high = 2.0"],
        ),
        (
            "algorithm={old_logprobs='recomputed', correction={high=3}}",
            ["algorithm.correction.name", "['tis', 'icepop', 'mis']"],
        ),
        (
            "algorithm={name='reinforce_plus_plus', group_size=1, filters=['zero_std']}",
            ["'zero_std'", "algorithm.group_size = 1"],
        ),
        ("algorithm.name=rloo", ["on-policy only", "async.max_staleness = 1", "such as 'grpo'"]),
        (
            "algorithm={name='ppo', critic={warmup_steps=100}}",
            ["critic.warmup_steps = 100", "run.steps = 100", "lower the one"],
        ),
        ("algorithm.reference_refresh_steps=5", ["reference_refresh_steps = 5", "set kl_coef above 0"]),
        ("algorithm={name='opd', teacher='t', overlong=[1, 2]}", ["algorithm.overlong changes a reward", "'grpo'"]),
        ("algorithm={name='opd', teacher='t', kl_coef=1, kl_in='reward'}", ["algorithm.kl_in = 'reward' changes"]),
        ("algorithm={name='opd'}", ["'algorithm.teacher' is missing", "same vocabulary"]),
        ("algorithm={name='ppo', gae_lambda=1.5}", ["algorithm.gae_lambda = 1.5", "<= 1"]),
        ("algorithm={name='ppo', critic={rate=1}}", ["unknown key 'algorithm.critic.rate'", "learning_rate"]),
        ("scorer={scores=['teacher']}", ["scorer.scores has 'teacher'", "algorithm.teacher", "leave [scorer] out"]),
        ("scorer={scores=['reference', 'reference']}", ["names one model twice"]),
        ("scorer={scores=['values']}", ["scorer.scores.0", "'recomputed' or 'reference' or 'teacher'"]),
        (
            "scorer={scores=['recomputed']}",
            ["of which algorithm.name = 'grpo' makes nothing", "old_logprobs = 'recomputed'"],
        ),
        ("scorer.processes=2", ["'scorer.scores' is missing", "the algorithm must need each of them"]),
        ("critic={}", ["[critic] is for algorithm.name = 'ppo'", "it is 'grpo'", "leave the table out"]),
        ("algorithm={name='sft', group_size=4}", ["unknown key 'algorithm.group_size'", "aggregate"]),
        ("trainer.updates_per_step=33", ["trainer.updates_per_step = 33", "prompts_per_step = 32"]),
    ],
)
def test_a_wrong_key_or_value_says_what_would_be_right(tiny: Path, override: str, parts: list[str]) -> None:
    message = problem(tiny, override)
    assert not [part for part in parts if part not in message], message


@pytest.mark.parametrize("key", ["trainer.device", "rollout.device"])
def test_nccl_is_for_gpus(tiny: Path, key: str) -> None:
    by_nccl = "weights={transport='collective', backend='nccl'}"
    assert load_recipe(tiny, [by_nccl]).weights.speaks == "nccl"  # type: ignore[union-attr]
    with pytest.raises(RecipeError, match=f"weights.backend = 'nccl' goes from GPU to GPU, but {key} = 'cpu'"):
        load_recipe(tiny, [by_nccl, f"{key}=cpu"])


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("weights={transport='mpi'}", ["weights.transport = 'mpi'", "use 'file'"]),
        ("slurm={shape='het'}", ["slurm.shape = 'het'", "slurm.shape = 'single'"]),
        ("slurm={shape='single',trainer={gpus_per_node=2}}", ["slurm.trainer.gpus_per_node = 2", "in [slurm] alone"]),
        ("slurm={shape='single',gpus_per_task=1}", ["slurm.gpus_per_task = 1", "in [slurm] alone"]),
    ],
)
def test_who_takes_turns_has_the_same_devices_at_another_time(tiny: Path, override: str, parts: list[str]) -> None:
    message = problem(tiny, "run.placement=colocate", "async.max_staleness=0", override)
    assert not [part for part in parts if part not in message], message


def test_a_critic_of_its_own_has_what_it_needs(tiny: Path) -> None:
    critic = "critic={processes=3}"
    message = problem(tiny, critic, "algorithm={name='ppo', kl_coef=0.1}")
    assert "kl_coef = 0.1" in message and "set scorer.scores = ['reference']" in message
    split = "trainer={backend='megatron', processes=2, parallel={tensor=2}}"
    message = problem(tiny, critic, "algorithm={name='ppo'}", split)
    assert "divide critic.processes = 3: use a multiple of 2" in message
    message = problem(tiny, "scorer={scores=['reference'], processes=3}", "algorithm={kl_coef=0.1}", split)
    assert "divide scorer.processes = 3: use a multiple of 2" in message


def test_an_outside_server_is_for_one_worker(tiny: Path) -> None:
    sets = [
        "rollout.engine=sglang", "rollout.sglang.address=http://node7:30000", "rollout.sglang.folder=/lustre/x",
        "rollout.workers=2",
    ]  # fmt: skip
    assert "rollout.workers = 2: use 1" in problem(tiny, *sets)


def test_sample_reuse_needs_a_step_before_that_is_within_the_bound(tiny: Path) -> None:
    assert "raise that, or leave sample_reuse out" in problem(tiny, "algorithm.sample_reuse=2", "async.max_staleness=0")


def test_a_curriculum_needs_several_sources(tiny: Path) -> None:
    assert "split it by difficulty into several" in problem(tiny, "curriculum={}")


def test_all_problems_come_at_once(tiny: Path) -> None:
    message = problem(tiny, "run.steps=0", "trainer.procesess=2")
    assert "2 problems" in message and "run.steps" in message and "trainer.procesess" in message
    assert str(tiny) in message


def test_missing_tables_are_named(tmp_path: Path) -> None:
    path = tmp_path / "empty.toml"
    path.write_text("")
    message = problem(path)
    assert "no [model] table" in message and "no [[source]] table" in message
    path.write_text("[model]\n[[source]]\nname = 'file'\n")
    assert "'source.0.prompts' is missing" in problem(path)


def test_a_file_that_is_not_toml_names_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "broken.toml"
    path.write_text("[run]\nsteps = 3\nname 'x'\n")
    assert str(path) in problem(path) and "line 3" in problem(path)
    path.write_text("[run]\nsteps =")
    assert "line 2" in problem(path)
    path.write_bytes(b"\xff\xfe[run]")
    assert "UTF-8" in problem(path)
    assert "absent.toml" in problem(tmp_path / "absent.toml")


def test_dump_loads_back_equal(tiny: Path, tmp_path: Path) -> None:
    recipe = load_recipe(tiny, ["evaluation.every=3", "sft_warm_start.steps=2", "spool.quota_gb=2.5"])
    copy = tmp_path / "elsewhere" / "recipe.toml"
    copy.parent.mkdir()
    copy.write_text(dump_recipe(recipe))
    assert load_recipe(copy) == recipe

    prompts = tmp_path / "p.jsonl"
    prompts.touch()
    own = load_recipe(
        tiny, [f"source=[{{prompts='{prompts}', answer_key=''}}]", "algorithm={factory='m:f', options={a=[1,2]}}"]
    )
    copy.write_text(dump_recipe(own))
    assert load_recipe(copy) == own
    assert isinstance(own.source[0], FileSource) and own.source[0].answer_key == ""


def test_paths_are_absolute_and_looked_up_beside_the_recipe_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside, here = tmp_path / "recipes", tmp_path / "here"
    for folder in (beside, here):
        folder.mkdir()
        for name in ("both.jsonl", "mine.py", f"{folder.name}.jsonl"):
            (folder / name).touch()
    monkeypatch.chdir(here)
    recipe_file = beside / "r.toml"

    def prompts(text: str, *overrides: str) -> str:
        recipe_file.write_text(f"[model]\npath = 'm'\n[[source]]\nprompts = '{text}'\nreward = 'mine.py:f'\n")
        source = load_recipe(Path("../recipes/r.toml"), overrides).source[0]
        assert isinstance(source, FileSource)
        assert source.reward == f"{beside / 'mine.py'}:f"
        return str(source.prompts)

    assert prompts("both.jsonl") == str(beside / "both.jsonl")
    assert prompts("here.jsonl") == str(here / "here.jsonl")
    assert prompts("x.jsonl", "source.0.prompts=both.jsonl") == str(here / "both.jsonl")
    assert prompts("x.jsonl", "source.0.prompts=recipes.jsonl") == str(beside / "recipes.jsonl")
    assert prompts("none.jsonl") == str(here / "none.jsonl")
    assert load_recipe(recipe_file).run.root == here / "runs"
    models = load_recipe(recipe_file, ["algorithm={name='ppo', teacher='../recipes', critic={model='../here'}}"])
    assert models.models_beside == {
        "algorithm.critic.model": here / ".." / "here", "algorithm.teacher": here / ".." / "recipes"
    }  # fmt: skip
    assert load_recipe(recipe_file, ["source.0.reward=package.module:f"]).source[0].reward == "package.module:f"


def test_sources_say_where_each_value_comes_from(tiny: Path) -> None:
    overrides = ["run.seed=3", "source.0.config.max_terms=4", "spool={keep='needed'}"]
    rows = {row.key: row for row in sources(load_recipe(tiny, overrides), tiny, overrides)}
    assert (rows["run.seed"].value, rows["run.seed"].where) == ("3", "--set")
    assert rows["source.0.config.max_terms"].where == "--set"
    assert rows["source.0.config.operators"] == ("source.0.config.operators", '["+"]', "file")
    assert rows["rollout.max_new_tokens"].where == "file"
    assert rows["rollout.workers"] == ("rollout.workers", "1", "default")
    assert rows["spool.keep"].where == "--set" and rows["spool.compression"].where == "default"
    assert rows["sft_warm_start"].value == "(absent)"


def test_a_resumed_run_may_change_marked_keys_only(tiny: Path) -> None:
    recipe = load_recipe(tiny)
    changed = change_on_resume(
        recipe, ["run.steps=500", "rollout.workers=3", "run.seed=0", "source.0.task=basic_arithmetic"]
    )
    assert [(c.key, c.old, c.new) for c in differences(recipe, changed)] == [
        ("run.steps", 100, 500),
        ("rollout.workers", 1, 3),
    ]
    ppo = load_recipe(tiny, ["algorithm={name='ppo'}"])
    faster = change_on_resume(ppo, ["trainer.learning_rate=1e-5", "algorithm.critic.learning_rate=1e-4"])
    assert {c.key for c in differences(ppo, faster)} == {"trainer.learning_rate", "algorithm.critic.learning_rate"}
    for override in ("run.seed=1", "source.0.task=chain_sum", "evaluation.every=3", "algorithm={group_size=4}"):
        with pytest.raises(RecipeError, match=r"(?s)--fork.*run\.steps") as caught:
            change_on_resume(recipe, [override])
        assert override.split("=")[0] in str(caught.value)
    with pytest.raises(RecipeError, match="did you mean 'steps'"):
        change_on_resume(recipe, ["run.stps=3"])
    assert "run.steps" in resumable(recipe) and "run.seed" not in resumable(recipe)


@pytest.mark.parametrize("package", ["recipe", "rewards", "environments", "data"])
def test_importing_it_does_not_import_torch(package: str) -> None:
    code = f"import relax_hpc.{package}, sys; print('torch' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=REPOSITORY)
    assert ended.stdout == "False\n"


def test_a_tiny_model_and_the_rollouts_defaults_fit(tiny: Path) -> None:
    tiny.write_text(tiny.read_text().replace("max_new_tokens = 8", ""))
    recipe = load_recipe(tiny)
    assert isinstance(recipe.model, TinyModel) and recipe.rollout.max_new_tokens < recipe.model.context


def test_ratios_that_are_1_by_construction_are_warned_of(tiny: Path) -> None:
    recomputed = "algorithm.old_logprobs=recomputed"
    [warning] = load_recipe(tiny, [recomputed]).warnings
    assert "every importance ratio is 1" in warning and "max_staleness = 1" in warning and "correction = {" in warning
    for more in (
        "async.max_staleness=0",
        "trainer.updates_per_step=2",
        "algorithm.correction={name='tis'}",
        "scorer={scores=['recomputed']}",
    ):
        assert not load_recipe(tiny, [recomputed, more]).warnings
    assert not load_recipe(tiny).warnings


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("async={late='drop'}", "'async.late': it is called 'on_stale' now"),
        ("algorithm.oversample=2", "'algorithm.oversample': it is called 'dynamic_sampling.oversample' now"),
        ("rollout.reward_processes=2", "'rollout.reward_processes': it is called 'code_processes' now"),
        ("warmup={steps=3}", "'warmup': it is called 'sft_warm_start' now"),
        (
            "algorithm={name='dapo',refill=2}",
            "'algorithm.refill': it is called 'dynamic_sampling.max_extra_batches' now",
        ),
    ],
)
def test_a_key_of_an_older_recipe_is_refused_with_its_new_name(tiny: Path, old: str, new: str) -> None:
    said = problem(tiny, old)
    assert new in said and "\n" not in said


def every_key(
    table: type[Table] = Recipe, prefix: str = "", member: tuple[str, ...] = ()
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Each key, tables too, as --set takes it, with what chooses the members of unions on the way."""
    for name, field in table.model_fields.items():
        key, inner = prefix + alias(name, field), tables(field.annotation)
        yield key, member
        place = f"{key}.0" if get_origin(field.annotation) is list else key
        for one in inner:
            choice = (f"{place}={{{member_key(one)} = '{member_name(one)}'}}",) if member_name(one) else ()
            yield from every_key(one, f"{place}.", choice or member)


@pytest.mark.slow
@pytest.mark.parametrize("value", ["[[{a = nan}]]", "-1e999", "{b = 2024-01-01}"])
def test_no_wrong_value_of_any_key_is_more_than_a_recipe_error(tiny: Path, value: str) -> None:
    found = list(every_key())
    assert len(found) > 200
    for key, member in found:
        try:
            load_recipe(tiny, [*member, f"{key}={value}"])
        except RecipeError as error:
            assert key.partition(".")[0] in str(error)


def test_every_key_has_a_sentence() -> None:
    def check(table: type[Table]) -> list[str]:
        inner = [key for field in table.model_fields.values() for t in tables(field.annotation) for key in check(t)]
        return inner + [f"{table.__name__}.{key.name}" for key in keys(table) if len(key.help) < 8]

    assert check(Recipe) == []


def test_defaults_hold_their_own_constraints(tiny: Path) -> None:
    loaded = load_recipe(tiny)
    assert Recipe.model_validate(loaded.model_dump(by_alias=True)) == loaded
