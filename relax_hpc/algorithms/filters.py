"""Filters: groups that are generated and kept, but not trained on."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from relax_hpc.files.errors import RunError
from relax_hpc.records import Group
from relax_hpc.registry import MEND, check_call, resolve, shown, users_code

Filter = Callable[[Group], str | None]
"""filter(group) -> the reason why the group is kept out of training, or None."""


ZERO_STD = "zero_std"


def zero_std(group: Group, column: str = "reward") -> str | None:
    """Filter out groups in which every sample has the same reward: every group-relative advantage is 0 (DAPO, arXiv
    2503.14476, section 3.2).

    column: compare `raw_reward`, or a number that rewards or the environment added, in place of the whole reward;
    samples without it are left out. Raises RunError where no sample has it.
    """
    numbers = [{**s.extra, "reward": s.reward, "raw_reward": s.raw_reward} for s in group.samples]
    values = {own[column] for own in numbers if column in own}
    if len(values) > 1:
        return None
    if numbers and not values:
        raise RunError(
            f"filter '{ZERO_STD}:{column}': no sample of source {group.prompt.source}, prompt {group.prompt.index} has a '{column}', they have "
            f"{sorted(set().union(*numbers))}: name one of those, in a new run or with `relax-hpc run RUN_DIR --fork NAME --set algorithm.filters=…`"
        )
    what = "rewards" if column == "reward" else f"values of '{column}'"
    return f"all {len(numbers)} {what} are {values.pop()}" if values else "no samples"


BUILTIN: dict[str, Filter] = {ZERO_STD: zero_std}


def make_filters(names: Sequence[str]) -> list[Filter]:
    """Load the recipe's filters, in its order. Raises RegistryError for one that is unknown or takes other arguments."""
    filters: list[Filter] = []
    for name in names:
        builtin, colon, column = name.partition(":")
        if builtin == ZERO_STD and colon:
            filters.append(functools.partial(zero_std, column=column))
            continue
        function = resolve("filter", name, BUILTIN)
        check_call("filter", name, function, "group")
        filters.append(function if name in BUILTIN else functools.partial(_own, name, function))
    return filters


def _own(name: str, function: Filter, group: Group) -> str | None:
    with users_code("filter", name):
        found: object = function(group)
    if found is None or (isinstance(found, str) and found.isprintable()):
        return found or None
    raise RunError(
        f"filter '{name}' returned {shown(found)} for source {group.prompt.source}, prompt {group.prompt.index}: expected a line of "
        f"text that says why the group is kept out of training, or None where it is not; {MEND}"
    )
