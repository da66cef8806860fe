"""A fork: a new run that begins at the newest whole checkpoint of another one."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Sequence

from relax_hpc.files import folder_checksums
from relax_hpc.files.errors import RunError
from relax_hpc.files.publish import replace, to_json
from relax_hpc.files.run_dir import RunDir
from relax_hpc.recipe import load_recipe
from relax_hpc.recipe.schema import Recipe


def refuse_misfit(old: RunDir, new: RunDir, recipe: Recipe) -> None:
    """Raise RunError if `recipe`, to be the run `new`, cannot go on with what `old` has; `launch.prepare` looks at
    the algorithms' needs."""
    before = load_recipe(old.recipe)
    if recipe.supervised != before.supervised:
        raise RunError(
            f"--fork goes on where '{old.root}' is, but supervised fine-tuning and reinforcement do not count prompts alike: "
            f"`relax-hpc export {old.root} DIR`, and begin a new run with --set model.path=DIR"
        )
    if before.trainer.lora != recipe.trainer.lora:
        raise RunError(
            f"--fork goes on with the adapter of '{old.root}', but [trainer.lora] differs: leave the table as it is there, or "
            f"`relax-hpc export {old.root} DIR`, and begin a new run with --set model.path=DIR"
        )
    if new.root.exists():
        raise RunError(f"'{new.root}' exists: choose another name for --fork")
    if before.trains_critic != recipe.trains_critic and (before.critic or recipe.critic):
        has, gets = ("with" if of.critic else "without" for of in (before, recipe))
        raise RunError(
            f"'{old.root}' is a run {has} [critic], the fork one {gets}: the critic does not move between the trainer and processes of "
            "its own; leave the table as it is there"
        )
    if not old.checkpoint_steps():
        raise RunError(
            f"'{old.root}' has no checkpoint to fork from: let it train until one is written (run.checkpoint_every)"
        )


def copy_state(old: RunDir, new: RunDir, recipe: Recipe) -> int:
    """Copy the newest checkpoint of `old`, its scorers' reference and its critic of that time, into `new`; return the
    step."""
    before = load_recipe(old.recipe)
    step = _copied(old, new, old.checkpoint_steps()[::-1])
    if ("reference" in before.scored and "reference" in recipe.scored) or before.trainer.lora:
        shutil.copytree(old.reference, new.reference)
    if before.critic and recipe.critic:
        _fork_critic(RunDir(old.critic), RunDir(new.critic), step)
    return step


def _copied(old: RunDir, new: RunDir, steps: Sequence[int], to: int | None = None) -> int:
    """Copy the first whole checkpoint of these steps, as that of step `to` or of its own; return its step. Raises
    RunError if none is whole."""
    damage = []
    for step in steps:
        copy = new.checkpoint(step if to is None else to)
        shutil.copytree(old.checkpoint(step), copy)
        try:
            folder_checksums.compare_all(copy)
        except folder_checksums.DamagedCheckpoint as error:
            shutil.rmtree(copy)
            damage.append(str(error).replace(str(copy), str(old.checkpoint(step))))
            logging.getLogger("fork").warning("an older checkpoint is taken: %s", damage[-1])
            continue
        return step
    raise RunError(f"no checkpoint of '{old.root}' is whole: {'; '.join(damage)}; put one back from a copy")


def _fork_critic(old: RunDir, new: RunDir, step: int) -> None:
    """Copy the critic's checkpoint nearest to `step`, as that of `step`. If there is none yet, the fork's critic begins
    anew."""
    nearest = sorted(old.checkpoint_steps(), key=lambda one: abs(one - step))
    if nearest:
        _copied(old, new, nearest, to=step)
        copy = new.checkpoint(step)
        known = folder_checksums.expected(copy)
        replace(copy / "state.json", to_json({"step": step}))
        (copy / folder_checksums.SEAL).unlink()
        folder_checksums.write(copy, {name: checksum for name, checksum in known.items() if name != "state.json"})
