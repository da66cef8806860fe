"""Scores of a checkpoint or a model, outside of its run: an engine of this process generates the evaluation requests of a recipe.

    RUN's checkpoint │ MODEL ──► engine;   evaluation requests ──RolloutRunner──► OUTPUT/evals/REQUEST.h5 ──► scores

OUTPUT is laid out like a run, so that whatever reads runs reads it. The same evaluation again generates only what is
missing.
"""

from __future__ import annotations

import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer

import relax_hpc
from relax_hpc.data import PromptSources
from relax_hpc.engines import EngineError, EngineRestarted
from relax_hpc.engines.model_folder import context_of
from relax_hpc.environments.tools.schemas import with_tools
from relax_hpc.files.errors import RunError
from relax_hpc.files.permissions import keep_private, make_private
from relax_hpc.files.publish import publish, read_json, to_json, write_file
from relax_hpc.files.run_dir import RunDir, drafted, open_existing
from relax_hpc.launch import adapters
from relax_hpc.recipe import dump_recipe, load_recipe, site_file
from relax_hpc.recipe.describe import toml
from relax_hpc.recipe.schema import Recipe
from relax_hpc.recipe.tables.source import AnyPrompts, labels
from relax_hpc.records import Group
from relax_hpc.roles.rollout.runner import RolloutRunner
from relax_hpc.roles.training.evaluation import Score, evaluation_requests, read_score
from relax_hpc.spool.request import Request
from relax_hpc.spool.shard_writer import encode
from relax_hpc.telemetry import Telemetry
from relax_hpc.trainers.build import materialise
from relax_hpc.trainers.export import DISTRIBUTED, compare_weights

INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class Subject:
    """The model under evaluation: a run's checkpoint, or a model directory."""

    target: Path
    run: RunDir | None
    step: int
    """The checkpoint's step; 0 for a model."""
    weights: Path
    """The folder with the weights: the checkpoint, or the model's."""

    @property
    def config(self) -> Path:
        """The folder with config.json and the tokenizer: of an adapter, its base's."""
        return self.run.model if self.run else adapters.base_folder(self.weights)

    def identity(self) -> dict[str, Any]:
        """Return what tells the subject from others: its path and step, and its files' names, sizes and times of
        change."""
        files = [
            (p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in sorted(self.weights.iterdir()) if p.is_file()
        ]
        return {"target": str(self.target), "step": self.step, "files": [list(file) for file in files]}


@dataclass(frozen=True, slots=True)
class Evaluated:
    """A complete evaluation: the subject and its scores."""

    folder: Path
    step: int | None
    """The checkpoint's step; None for a model."""
    score: Score
    seen: str
    """Why some of the prompts may have been trained on; empty if none was."""


def evaluate(
    target: Path,
    recipe_path: Path | None,
    overrides: list[str],
    *,
    step: int | None = None,
    output: Path | None = None,
    site: Path | None = None,
    begin: Callable[[int, int], None] = lambda done, requests: None,
    advance: Callable[[], None] = lambda: None,
) -> Evaluated:
    """Evaluate a run's checkpoint (the newest, or that of `step`) or a model. Raises RunError, RecipeError,
    RegistryError.

    begin: called with how many requests were generated before, and of how many; advance: called after each further
    request.
    """
    subject = find(target.absolute(), step)
    recipe = recipe_for(subject, recipe_path, overrides, site)
    name = f"step-{subject.step:08d}" if subject.run else f"eval-{subject.target.name}"
    folder = output or ((subject.run.root / "evaluated" if subject.run else recipe.run.root) / name)
    place = prepare(folder, subject, recipe)
    assert recipe.evaluation is not None
    sources = PromptSources.of(
        with_tools(recipe),
        AutoTokenizer.from_pretrained(place.model),
        context_of(AutoConfig.from_pretrained(place.model)),
        place.model,
    )
    requests = evaluation_requests(recipe, sources.evaluated(recipe.evaluation.prompts), subject.step)
    missing = [request for request in requests if not place.shard(request.id).exists()]
    begin(len(requests) - len(missing), len(requests))
    if missing:
        generate(place, subject, recipe, missing, advance)
    score = read_score(place, recipe, [request.id for request in requests])
    if missing:
        Telemetry(place, "trainer-0", 0).metrics("eval", **score.to_json())
    publish(
        place.outcome, to_json({"outcome": "done", "reason": "evaluated", "step": subject.step, "time": time.time()})
    )
    return Evaluated(place.root, subject.step if subject.run else None, score, seen_in_training(subject, recipe))


def find(target: Path, step: int | None) -> Subject:
    """Find the subject that `target` names. Raises RunError if there is nothing to evaluate."""
    if (target / "run.json").is_file():
        run = open_existing(target)
        steps = run.checkpoint_steps()
        if not steps:
            raise RunError(f"'{target}' has no checkpoint: nothing was trained yet")
        chosen = steps[-1] if step is None else step
        if chosen not in steps:
            raise RunError(f"'{target}' has no checkpoint of step {chosen}: it has {steps}")
        return Subject(target, run, chosen, run.checkpoint(chosen))
    if not (target / "config.json").is_file() and not adapters.is_adapter(target):
        raise RunError(
            f"'{target}' is neither a run (no run.json in it) nor a model (no config.json): give a run's directory, or a "
            "Hugging Face model's such as `relax-hpc export` makes"
        )
    if step is not None:
        raise RunError(f"--step {step}: '{target}' is a model; only runs have checkpoints of steps")
    return Subject(target, None, 0, target)


def recipe_for(subject: Subject, path: Path | None, overrides: list[str], site: Path | None) -> Recipe:
    """Return the recipe that says which prompts are asked and how answers are generated, with the subject as its
    model."""
    if path is None and subject.run is None:
        raise RunError(f"'{subject.target}' is a model: say by a RECIPE what it is asked (relax-hpc eval MODEL RECIPE)")
    if path is None:
        assert subject.run is not None
        path, profile = subject.run.recipe, None
    else:
        profile = site_file(site)
    recipe = load_recipe(path, [*overrides, f"model={toml({'path': str(subject.config)})}"], profile)
    recipe = recipe.model_copy(update={"trainer": recipe.trainer.model_copy(update={"lora": None})})  # it is merged
    if recipe.evaluation is None:
        raise RunError(
            f"'{path}' has no [evaluation] table, so there are no prompts to ask: add one with an [[evaluation.source]], "
            "give a RECIPE that has one, or say which share is held out (--set evaluation.holdout=0.1)"
        )
    return recipe


def seen_in_training(subject: Subject, recipe: Recipe) -> str:
    """Return why the run may have been trained on these prompts; empty if it was not."""
    if subject.run is None or recipe.evaluation is None:
        return ""
    own = load_recipe(subject.run.recipe).evaluation
    held, asked = own.holdout if own else 0.0, recipe.evaluation.holdout
    if asked > held:
        return f"evaluation.holdout is {asked} here and {held} in the run: it was trained on some of these prompts"
    kept = [_what(source) for source in own.source] if own else []
    new = [
        name for name, source in zip(_names(recipe), recipe.evaluation.source, strict=True) if _what(source) not in kept
    ]
    return f"the run did not keep the texts of {', '.join(new)} out of its training" if new else ""


def _names(recipe: Recipe) -> list[str]:
    return labels(recipe.sources)[len(recipe.source) :]


def _what(source: AnyPrompts) -> dict[str, Any]:
    """Return the keys of a source that say which prompts it has, without rewards, environments and limit."""
    return source.model_dump(
        exclude={"reward", "reward_options", "environment", "environment_options", "answer_key", "limit"}
    )


def prepare(folder: Path, subject: Subject, recipe: Recipe) -> RunDir:
    """Make or find the directory of the evaluation. Raises RunError if it belongs to something else."""
    place, about = RunDir(folder), subject.identity()
    text = dump_recipe(recipe)
    if place.exists and read_json(place.identity).get("evaluates") == about and place.recipe.read_text() == text:
        return place
    if place.root.exists():
        raise RunError(
            f"'{place.root}' holds something else (another recipe, other settings, or weights that have changed since): "
            "choose another directory with --output, or remove it"
        )
    place.root.parent.mkdir(parents=True, exist_ok=True)
    keep_private(recipe.run.group_access)
    with drafted(place.root) as draft:
        if subject.run is None:
            materialise(recipe.model, draft.model, recipe.run.seed)
        else:
            shutil.copytree(subject.config, draft.model, ignore=shutil.ignore_patterns("*.safetensors"))
        write_file(draft.recipe, text.encode())
        identity = {
            "name": place.root.name, "id": uuid.uuid4().hex, "created": time.time(), "version": relax_hpc.__version__,
            "debug": "evaluate", "shards_from": None, "fork_of": None, "evaluates": about,
        }  # fmt: skip
        write_file(draft.identity, to_json(identity))
        make_private(draft.root, recipe.run.group_access)
    return place


def generate(
    place: RunDir, subject: Subject, recipe: Recipe, requests: list[Request], advance: Callable[[], None]
) -> None:
    """Generate `requests` with the subject's weights; each becomes a shard in `place`."""
    with ExitStack() as opened:
        runner = RolloutRunner(recipe, place.model)
        opened.callback(runner.close)
        folder = opened.enter_context(hugging_face(subject))
        load(runner, folder, subject, recipe)
        own = place.read_id()
        for request in requests:
            began = time.perf_counter()
            groups = groups_of(runner, request, lambda: load(runner, folder, subject, recipe))
            meta = {
                "run": own, "version": subject.step, "lineage": 0, "attempt": 0, "worker": "eval", "seed": request.seed,
                "samples_per_prompt": request.samples_per_prompt, "created": time.time(), "generate_s": time.perf_counter() - began,
            }  # fmt: skip
            publish(place.shard(request.id), encode(request.id, groups, meta, recipe.spool.compression, "digest"))
            advance()


def groups_of(runner: RolloutRunner, request: Request, load_again: Callable[[], None]) -> list[Group]:
    """Generate the request's groups, once more if the engine was lost and came back. Raises RunError if the engine
    stays lost."""
    prompts = runner.prompts(request)
    try:
        try:
            return runner.groups(request, prompts, lambda state: None)
        except EngineRestarted:
            load_again()
            return runner.groups(request, prompts, lambda state: None)
    except EngineError as error:
        raise RunError(
            f"the engine was lost while it generated {request.id}: {error}; the same command goes on from there"
        ) from error


def load(runner: RolloutRunner, folder: Path, subject: Subject, recipe: Recipe) -> None:
    """Load the weights in `folder` into the engine. Raises RunError for weights of another model, or damaged ones."""
    dtype = getattr(torch, recipe.trainer.dtype)
    try:
        try:
            runner.engine.load(subject.step, tensors(subject, folder, dtype))
        except EngineRestarted:
            runner.engine.load(subject.step, tensors(subject, folder, dtype))
    except (ValueError, SafetensorError, FileNotFoundError) as error:
        raise RunError(f"the weights in '{folder}' do not fit its config.json, or are damaged: {error}") from error
    except EngineError as error:
        raise RunError(
            f"the engine was lost while it took the weights in '{folder}': {error}; the same command goes on from there"
        ) from error


def tensors(subject: Subject, folder: Path, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in the subject's `folder` in the type that a run would publish them in, one at a time; an
    adapter's merged with its base."""
    if adapters.is_adapter(folder):
        for key, tensor in adapters.merged_with_base(folder, subject.config, subject.run).items():
            yield key, tensor.to(dtype) if tensor.is_floating_point() else tensor
        return
    index = folder / INDEX
    files = sorted(set(read_json(index)["weight_map"].values())) if index.is_file() else ["model.safetensors"]
    for name in files:
        with safe_open(folder / name, "pt") as file:
            for key in list(file.keys()):
                tensor = file.get_tensor(key)
                yield key, tensor.to(dtype) if tensor.is_floating_point() else tensor


@contextmanager
def hugging_face(subject: Subject) -> Iterator[Path]:
    """Yield the folder with the subject's weights under Hugging Face's names; Megatron's are converted, for the length
    of the block."""
    if subject.run is not None:
        compare_weights(subject.weights)
    if not (subject.weights / DISTRIBUTED).exists():
        yield subject.weights
        return
    from relax_hpc.trainers.megatron.export.convert import to_hugging

    with tempfile.TemporaryDirectory(prefix="relax-hpc-eval-") as folder:
        to_hugging(subject.weights, subject.config, Path(folder))
        yield Path(folder)
