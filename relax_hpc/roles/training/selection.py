"""Selection of groups: which groups of a step's requests enter its loss, and why the others do not.

shard ──failed? ──filters──► passing groups ──as many as wanted──► the loss; all others: REQUEST/GROUP → reason
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from relax_hpc.algorithms.filters import Filter
from relax_hpc.files.errors import RunError
from relax_hpc.records import Finish, Group
from relax_hpc.spool.ledger import FAILED, SURPLUS
from relax_hpc.spool.shard import Shard


@dataclass(slots=True)
class GroupSelection:
    """The recipe's rules on groups. Shards are read once; `forget` those that are settled."""

    filters: list[Filter]
    wanted: int = 0
    """Groups that must pass in each step (dynamic sampling); 0: a step has as many as pass."""
    solved_at: float | None = None
    """The raw reward of a solved prompt, if solved prompts are counted."""
    max_failed: float = 1.0
    """The share of a step's groups that may have failed."""
    _out: dict[str, dict[int, str]] = field(default_factory=dict)

    def out(self, shard: Shard) -> dict[int, str]:
        """Return the groups of a shard that do not pass, and why."""
        if shard.request not in self._out:
            out = self._out[shard.request] = dict[int, str]()
            for group in range(len(shard.groups)):
                reason = f"{FAILED}{shard.failure(group)[0]}" if shard.groups["failed"][group] else None
                for own in self.filters:
                    reason = reason or own(without_failed(shard.group(group, media=False)))
                if reason:
                    out[group] = reason
        return self._out[shard.request]

    def forget(self, requests: Iterable[str]) -> None:
        for request in requests:
            self._out.pop(request, None)

    def passing(self, shards: Mapping[str, Shard]) -> dict[str, int]:
        """Return how many groups of each request pass, if it matters: each shard is read for it."""
        return {i: len(shard.groups) - len(self.out(shard)) for i, shard in shards.items() if self.wanted}

    def filtered(self, taken: Mapping[str, Shard]) -> dict[str, str]:
        """Return REQUEST/GROUP -> why the group stays out of the loss: it failed, does not pass, or the batch is
        full."""
        filtered: dict[str, str] = {}
        passed = 0
        for request_id, shard in taken.items():
            out = self.out(shard)
            for group in range(len(shard.groups)):
                reason = out.get(group)
                if reason is None and passed == self.wanted > 0:
                    reason = f"{SURPLUS}the batch has its {self.wanted} groups"
                if reason is None:
                    passed += 1
                else:
                    filtered[f"{request_id}/{group}"] = reason
        return filtered

    def solved(self, taken: Mapping[str, Shard]) -> dict[str, tuple[int, int]]:
        """Return source -> (samples that solved their prompts, samples scored); those that a filter keeps out count
        too."""
        counts: dict[str, tuple[int, int]] = {}
        for shard in taken.values() if self.solved_at is not None else ():
            right = shard.samples["raw_reward"] >= self.solved_at
            generated = shard.samples["finish"] != Finish.FAILED
            for group, row in enumerate(shard.groups):
                mine = right[(shard.samples["group"] == group) & generated]
                if len(mine) and not row["failed"]:
                    before = counts.get(source := str(row["source"]), (0, 0))
                    counts[source] = (before[0] + int(mine.sum()), before[1] + len(mine))
        return counts

    def check_failures(self, step: int, taken: Mapping[str, Shard], filtered: Mapping[str, str]) -> None:
        """Raise RunError if too many groups failed: they can be scored or generated again."""
        groups = sum(len(shard.groups) for shard in taken.values())
        failed = [(name, reason) for name, reason in filtered.items() if reason.startswith(FAILED)]
        if len(failed) > self.max_failed * groups:
            name, reason = failed[0]
            request, _, group = name.rpartition("/")
            _, detail = taken[request].failure(int(group))
            raise RunError(
                f"step {step}: {len(failed)} of {groups} groups failed, more than rollout.max_failed_fraction = {self.max_failed}; "
                f"the first is {name}: {reason.removeprefix(FAILED)}{f' ({detail})' if detail else ''}; mend the cause and go on with `relax-hpc run RUN_DIR --code new`, "
                "which takes edited files into the run and scores these groups again; where the cause was not in your files, with --redo "
                "score (again by the same code), or --redo generate (new answers too); or raise the limit with --set "
                "rollout.max_failed_fraction=…"
            )


def without_failed(group: Group) -> Group:
    """Return a group as filters see it: of the samples that did not fail."""
    return replace(group, samples=group.generated)
