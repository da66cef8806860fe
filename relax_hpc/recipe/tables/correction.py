"""Off-policy corrections of a recipe's algorithm, with their papers' bounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, Union

from pydantic import PositiveFloat, Tag, model_validator

from relax_hpc.recipe.tables.table import Key, Table, conflict, named

GEOMETRIC = (0.999, 1.001)
"""Bounds of a geometric mean of weights: those that veRL recommends for it."""


def _bound(which: int, of_product: float) -> Callable[[dict[str, Any]], float]:
    """The default of a bound of `mis`, from what is bounded: a mean over tokens lies much nearer 1 than their product."""
    return lambda keys: GEOMETRIC[which] if keys.get("weight") == "geometric" else of_product


class Correction(Table):
    """Bounds of an importance weight."""

    low: float = Key(0.0, "The least weight.", ge=0)
    high: PositiveFloat = Key(2.0, "The greatest weight.")

    @model_validator(mode="after")
    def _order(self) -> Correction:
        if self.low >= self.high:
            raise conflict(
                f"algorithm.correction.low = {self.low} must be below algorithm.correction.high = {self.high}"
            )
        return self


class Tis(Correction):
    """Truncated importance sampling (Yao et al. 2025): a token's loss times its weight, held within bounds."""

    name: Literal["tis"] = Key("tis", "Truncate the weights of tokens.")


class IcePop(Correction):
    """IcePop (arXiv 2510.18855): a token's loss times its weight, and 0 where the weight is out of bounds."""

    name: Literal["icepop"] = Key("icepop", "Mask tokens by their weights.")
    low: float = Key(0.5, "The least weight.", ge=0)
    high: PositiveFloat = Key(5.0, "The greatest weight.")


class OfSample(Table):
    """How a sample's weight is made of its tokens'. A table before the bounds, which depend on it."""

    weight: Literal["product", "geometric"] = Key(
        "product",
        "Of the weights of a sample's tokens: their product (exact; where answers are long it is near 0 or above any bound) or their "
        "geometric mean.",
    )


class Mis(Correction, OfSample):
    """Masked importance sampling (Liu et al. 2025): a sample's loss times its weight, and 0 where that is out of bounds."""

    name: Literal["mis"] = Key("mis", "Mask samples by their weights.")
    low: float = Key(
        decided=_bound(0, 0.0), help=f"The least weight. Absent: 0, of a geometric mean {GEOMETRIC[0]}.", ge=0
    )
    high: PositiveFloat = Key(
        decided=_bound(1, 2.0), help=f"The greatest weight. Absent: 2, of a geometric mean {GEOMETRIC[1]}."
    )


AnyCorrection = Annotated[
    Union[Annotated[Tis, Tag("tis")], Annotated[IcePop, Tag("icepop")], Annotated[Mis, Tag("mis")]],
    named(default=lambda v: "?"),
]
