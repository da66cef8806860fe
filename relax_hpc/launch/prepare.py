"""Prepare a run before it begins: build the model's folder, and check all of a recipe that needs heavy imports.

This is done in a child of the fork server, so that the supervisor, which lives as long as the run, never imports torch.
What is wrong goes through a pipe to whoever makes the run: its folder may lie on a disk that is full.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from importlib.util import find_spec
from typing import NoReturn

from transformers import AutoConfig, AutoTokenizer

from relax_hpc.algorithms import make_algorithm
from relax_hpc.algorithms.base import TEACHER
from relax_hpc.algorithms.filters import make_filters
from relax_hpc.data import PromptSources
from relax_hpc.engines.model_folder import context_of
from relax_hpc.environments.tools.schemas import with_tools
from relax_hpc.files.errors import RunError, explain_os
from relax_hpc.files.publish import to_json, write_file
from relax_hpc.files.run_dir import RunDir
from relax_hpc.launch import making
from relax_hpc.monitor.tracking import LIBRARIES
from relax_hpc.monitor.tracking.messages import addresses, targets
from relax_hpc.recipe import RecipeError, load_recipe
from relax_hpc.recipe.schema import TEACHER_KEY, Recipe
from relax_hpc.registry import RegistryError
from relax_hpc.rewards import make_rewards
from relax_hpc.roles.common.process import is_full
from relax_hpc.trainers import fit
from relax_hpc.trainers.build import check_beside, materialise

SAID_BYTES = 60_000
"""Bytes that a pipe takes while nobody reads."""


def prepare(run: RunDir, recipe: Recipe) -> None:
    """Build RUN/model and check algorithm, filters, rewards, environments and prompts. Raises RunError or RegistryError."""
    making.say(run, "checking algorithm, filters, rewards and environments")
    check_code(recipe)
    making.say(run, "preparing the model's folder")
    materialise(recipe.model, run.model, recipe.run.seed)
    check_beside(recipe, run.model)
    fit.check(recipe, run.model)
    need_libraries(recipe)
    context = context_of(AutoConfig.from_pretrained(run.model))
    if recipe.generates and recipe.rollout.max_new_tokens >= context:
        raise RunError(
            f"rollout.max_new_tokens = {recipe.rollout.max_new_tokens} leaves no room for a prompt in the context of {context} tokens that "
            f"the model's config.json allows: lower it, to {context // 2} for instance, or take a model with a longer one"
        )
    making.say(run, "reading and checking the prompts")
    sources = check_rows(run, recipe, context)
    if recipe.evaluation:
        sources.evaluated(recipe.evaluation.prompts)


def check_rows(run: RunDir, recipe: Recipe, context: int) -> PromptSources:
    """Return the recipe's sources, all of whose rows can be used; how many rows they leave out goes to RUN/rows.json.
    Raises RunError."""
    sources = PromptSources.of(with_tools(recipe), AutoTokenizer.from_pretrained(run.model), context, run.model)
    if counts := sources.check(answers=recipe.supervised or recipe.sft_warm_start is not None):
        write_file(run.rows, to_json(counts))
    return sources


def count_rows(run: RunDir, recipe: Recipe) -> None:
    """Build RUN/model, for its tokenizer, and check the rows alone."""
    materialise(recipe.model, run.model, recipe.run.seed)
    check_rows(run, recipe, context_of(AutoConfig.from_pretrained(run.model)))


def check_code(recipe: Recipe) -> None:
    """Raise RunError or RegistryError for an algorithm, filter, reward or environment that does not load, or does not
    fit."""
    check_scores(recipe)
    make_filters(recipe.algorithm.filters)
    if recipe.generates:
        make_rewards(recipe.sources)
        with_tools(recipe)


def check_scores(recipe: Recipe) -> None:
    """Raise RunError if a scorer would hold a model that the algorithm, which may be the user's own, does not need."""
    needs = make_algorithm(recipe.algorithm).needs
    for name in recipe.scored:
        if name not in needs:
            raise RunError(
                f"scorer.scores has '{name}', and the algorithm '{recipe.algorithm.name}' needs {sorted(needs) or 'nothing'} only: leave "
                "it out"
            )
        if name == TEACHER and TEACHER_KEY not in recipe.models_beside:
            raise RunError(
                f"scorer.scores has '{TEACHER}', and no {TEACHER_KEY} says which model that is: the algorithm '{recipe.algorithm.name}' "
                "has no such key; leave it out"
            )


def check_fork(old: RunDir, recipe: Recipe) -> None:
    """Raise RunError if a fork of `old` would have the reference elsewhere: algorithms of both need it, one scorer has
    it."""
    before = load_recipe(old.recipe)
    moves = ("reference" in before.scored) != ("reference" in recipe.scored)
    if moves and all("reference" in make_algorithm(of.algorithm).needs for of in (before, recipe)):
        raise RunError(
            f"'{old.root}' has scorer.scores = {list(before.scored)}, the fork {list(recipe.scored)}: the reference does not move "
            "between trainer and scorer; leave [scorer] as it is there"
        )


def need_libraries(recipe: Recipe) -> None:
    """Raise RunError if [[tracking]] or [notify] lacks a library or an address: it would be missed when the run is
    over."""
    wanted = [tracking.name for tracking in recipe.tracking] + ["notify"] * (recipe.notify is not None)
    missing = [name for name in wanted if find_spec(LIBRARIES[name]) is None]
    if missing:
        raise RunError(
            f"the recipe asks for {missing}, for which this Python cannot import {[LIBRARIES[name] for name in missing]}: "
            "pip install 'relax-hpc[tracking]', or leave it out"
        )
    if recipe.notify is not None:
        targets(addresses(recipe.notify, recipe.run.root))


def main(final_message: int, root: str, what: str, fork_of: str | None = None) -> NoReturn:
    """final_message: the file descriptor for an error, as JSON: [true if a person can mend it, its text]. fork_of: the
    run that this one is a fork of."""
    run = RunDir(root)
    try:
        recipe = load_recipe(run.recipe)
        match what:
            case "code":
                check_code(recipe)
            case "rows":
                count_rows(run, recipe)
            case _:
                if fork_of:
                    check_fork(RunDir(fork_of), recipe)
                prepare(run, recipe)
    except (RunError, RegistryError, RecipeError) as error:
        said = True, str(error)
    except Exception as error:
        if isinstance(error, OSError):
            said = True, explain_os(error)
        elif is_full(error):
            said = True, f"no room for the model's folder in '{run.root.parent}' ({error}): make room"
        else:
            said = False, traceback.format_exc()
    else:
        sys.exit(0)
    os.write(
        final_message, json.dumps([said[0], said[1][-SAID_BYTES // 2 :]], ensure_ascii=False).encode()[:SAID_BYTES]
    )
    sys.exit(1)
