"""The order of the prompts: an endless, seeded, shuffled stream of (source, index, epoch) that resumes exactly.

    position ──next_source──► source ──order(seed, source, epoch)──► index ──held out, dropped? the next one──► PromptRef

The stream depends on the seed, the position and the weights that it was asked with. Its state is a few counters a
source, so resuming costs the same wherever the stream stands.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_hpc.data.shuffle import order
from relax_hpc.data.sources import PromptSources, next_source
from relax_hpc.files.errors import RunError


@dataclass(frozen=True, slots=True)
class PromptRef:
    """The name of a prompt; `epoch` counts how often its source was gone through before."""

    source: int
    index: int
    epoch: int


class PromptCursor:
    """A checkpointable stream of prompts, without held-out and dropped ones.

    `stream` names a sequence of its own for the same seed ("train", "sft_warm_start").
    """

    def __init__(self, sources: PromptSources, seed: int, stream: str = "train") -> None:
        self._sources, self._name = sources, (seed, stream)
        self.taken = [0] * len(sources.sizes)
        """Prompts given so far, by source."""
        self._drawn = [0] * len(sources.sizes)
        """Prompts drawn so far by source, skipped ones included: the position in the source's shuffled epochs."""
        self._orders: dict[int, tuple[int, NDArray[np.int64]]] = {}
        self._weights: Sequence[float] | None = None
        """Weights of the sources for the next prompts; None means those of the recipe."""
        self._due = [0.0] * len(sources.sizes)
        """With weights that change: how many prompts each source is behind its share."""

    @property
    def position(self) -> int:
        """Prompts taken since the beginning."""
        return sum(self.taken)

    def draw(self, count: int, weights: Sequence[float] | None = None) -> list[PromptRef]:
        """Draw the next `count` prompts. weights: of the sources, for a curriculum; None means those of the recipe,
        always.

        Raises RunError where a source holds all of its prompts out.
        """
        self._weights = weights
        return list(islice(self, count))

    def __iter__(self) -> Iterator[PromptRef]:
        return self

    def __next__(self) -> PromptRef:
        source = self._next_source()
        ref = self._draw(source)
        self.taken[source] += 1
        return ref

    def _next_source(self) -> int:
        """Choose the next prompt's source. With fixed weights all prompts since the beginning count; with weights that
        change, how far each source is behind the shares of their time."""
        if self._weights is None:
            return next_source(self.taken, self._sources.weights, range(len(self.taken)))
        total = sum(self._weights)
        self._due = [due + weight / total for due, weight in zip(self._due, self._weights, strict=True)]
        source = max(range(len(self._due)), key=lambda i: (self._due[i], -i))
        self._due[source] -= 1
        return source

    def state_dict(self) -> dict[str, Any]:
        """The state, JSON-like; `load_state_dict` continues from it, given the same sources and seed."""
        return {
            "name": list(self._name), "sizes": self._sources.sizes, "taken": [*self.taken], "drawn": [*self._drawn],
            "due": [*self._due],
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where the state was taken. Raises RunError for the state of another seed or of other sources."""
        for key, now, fix in (
            ("name", list(self._name), "the run's seed and the stream's name cannot change"),
            ("sizes", self._sources.sizes, "the prompt files were changed since; give the run the ones it began with"),
        ):
            if state[key] != now:
                raise RunError(f"the prompt cursor was saved with {key} = {state[key]}, now it is {now}: {fix}")
        self.taken, self._drawn = [*state["taken"]], [*state["drawn"]]
        self._due = [*state["due"]]

    def _draw(self, source: int) -> PromptRef:
        size = self._sources.sizes[source]
        for _ in range(2 * size):  # from anywhere in an epoch, this goes through the whole of the next one
            epoch, place = divmod(self._drawn[source], size)
            self._drawn[source] += 1
            index = int(self._order(source, epoch)[place])
            if self._sources.is_trained(source, index):
                return PromptRef(source, index, epoch)
        raise RunError(
            f"source {source} has {size} prompts, and all of them are held out or dropped: lower evaluation.holdout, change its too_long or missing_answer, or leave out the [[evaluation.source]] with the same texts"
        )

    def _order(self, source: int, epoch: int) -> NDArray[np.int64]:
        at, permutation = self._orders.get(source, (-1, np.empty(0, np.int64)))
        if at != epoch:
            permutation = order(self._sources.sizes[source], *self._name, source, epoch)
            self._orders[source] = (epoch, permutation)
        return permutation
