"""The small columns of a shard that locate all others: read together, and refused together where they contradict each
other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_hpc.records import Finish, offsets_of

LAST_FINISH = int(max(Finish))


@dataclass(frozen=True, slots=True)
class Index:
    """Where samples, groups and spans of a shard begin. Raises ValueError naming the column that cannot be right."""

    samples: NDArray[Any]  # [N] of SAMPLE
    groups: NDArray[Any]  # [G] of GROUP
    offsets: NDArray[np.int64]  # [N + 1] where each sample's tokens begin
    prompt_offsets: NDArray[np.int64]  # [G + 1] where each group's prompt tokens begin
    span_start: NDArray[np.int64]  # [S] flat index of the token at which a span begins; from there on …
    span_version: NDArray[np.int32]  # [S] … the weights had this version

    @classmethod
    def read(cls, column: Callable[[str], NDArray[Any]]) -> Index:
        """Read the index; `column` returns a column by its name."""
        return cls(**{field.name: column(field.name) for field in fields(cls)})

    def __post_init__(self) -> None:
        self._check_offsets("offsets", self.offsets, len(self.samples))
        self._check_offsets("prompt_offsets", self.prompt_offsets, len(self.groups))
        of_group = self.samples["group"]
        if len(of_group) and not (of_group[0] >= 0 and of_group[-1] < len(self.groups) and _rises(of_group)):
            raise ValueError(f"column 'samples' names groups that do not rise from 0 to {len(self.groups) - 1}")
        if np.count_nonzero(self.samples["finish"] > LAST_FINISH):
            raise ValueError(
                f"column 'samples' has a finish of {self.samples['finish'].max()}, the last is {LAST_FINISH}"
            )
        self._check_spans()

    def _check_offsets(self, name: str, offsets: NDArray[np.int64], count: int) -> None:
        if len(offsets) != count + 1 or offsets[0] != 0 or not _rises(offsets):
            raise ValueError(f"column '{name}' is not {count + 1} numbers that rise from 0")

    def _check_spans(self) -> None:
        """Raise ValueError unless every token has a version: each sample that has tokens begins a span."""
        starts, tokens = self.span_start, self.offsets[-1]
        if len(starts) != len(self.span_version) or np.count_nonzero(self.span_version < 0):
            raise ValueError(f"columns 'span_start' and 'span_version' are not {len(starts)} starts and versions")
        if len(starts) and not (starts[0] >= 0 and starts[-1] <= tokens and _rises(starts)):
            raise ValueError(f"column 'span_start' does not rise from 0 to {tokens}")
        begins = self.offsets[:-1][self.offsets[1:] > self.offsets[:-1]]
        at = starts.searchsorted(begins)
        if len(at) and (at[-1] >= len(starts) or np.count_nonzero(starts[at] != begins)):
            raise ValueError("column 'span_start' lacks the beginning of a sample")

    def rows(self, routed: tuple[int, int] | None) -> Mapping[str, int]:
        """Return how many rows each other column must have. routed: (layers, k), where routed experts were kept."""
        tokens, prompt_tokens = int(self.offsets[-1]), int(self.prompt_offsets[-1])
        rows = {
            "tokens": tokens,
            "loss_mask": tokens,
            "logprobs": tokens,
            "turn_rewards": tokens,
            "prompt_tokens": prompt_tokens,
        }
        if routed is not None:
            rows["routed_experts"] = int(self.routed_rows()[-1]) * routed[0] * routed[1]
        return rows

    def routed_rows(self) -> NDArray[np.int64]:
        """[N + 1] where each sample's rows begin in `routed_experts`: a sample has one row for each token of prompt and
        answer, less one."""
        of_sample = np.diff(self.prompt_offsets)[self.samples["group"]] + np.diff(self.offsets) - 1
        return offsets_of(of_sample)


def _rises(numbers: NDArray[Any]) -> bool:
    return not np.count_nonzero(numbers[1:] < numbers[:-1])  # for small arrays twice as fast as all()
