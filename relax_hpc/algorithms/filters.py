"""Filters: groups that are generated and kept, but not trained on."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from relax_hpc.records import Group
from relax_hpc.registry import MEND, check_call, resolve, shown, users_code
from relax_hpc.run_dir import RunError

Filter = Callable[[Group], str | None]
"""filter(group) -> why the group is kept out of training, or None."""


def zero_std(group: Group) -> str | None:
    """Every sample has the same reward, so that every group-relative advantage is 0 (DAPO, arXiv 2503.14476, section 3.2)."""
    rewards = {sample.reward for sample in group.samples}
    if len(rewards) > 1:
        return None
    return f"all {len(group.samples)} rewards are {rewards.pop()}" if rewards else "no samples"


BUILTIN: dict[str, Filter] = {"zero_std": zero_std}


def make_filters(names: Sequence[str]) -> list[Filter]:
    """The recipe's filters, in its order. Raises RegistryError for one that is unknown or takes other arguments."""
    filters: list[Filter] = []
    for name in names:
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
