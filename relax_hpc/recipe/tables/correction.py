"""Off-policy corrections of a recipe's algorithm, with their papers' bounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, Union

from pydantic import PositiveFloat, Tag, model_validator

from relax_hpc.recipe.tables.table import Key, Table, conflict, named

GEOMETRIC = (0.999, 1.001)
"""Bounds that veRL recommends for a geometric mean of weights."""


def _bound(which: int, of_product: float) -> Callable[[dict[str, Any]], float]:
    """Make the default of a bound of `mis`, which depends on `weight`: a mean over tokens lies much nearer 1 than their
    product."""
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
    """The kind of a sample's weight. It is a table that stands before the bounds, since their defaults depend on it."""

    weight: Literal["product", "geometric"] = Key(
        "product",
        "A sample's weight from those of its tokens: their product (exact; where answers are long it is near 0 or above any bound) or their "
        "geometric mean.",
    )


class Mis(Correction, OfSample):
    """Masked importance sampling (Liu et al. 2025): a sample's loss times its weight, and 0 where that is out of bounds."""

    name: Literal["mis"] = Key("mis", "Mask samples by their weights.")
    low: float = Key(
        decided=_bound(0, 0.0), help=f"The least weight. Absent: 0, or {GEOMETRIC[0]} for a geometric mean.", ge=0
    )
    high: PositiveFloat = Key(
        decided=_bound(1, 2.0), help=f"The greatest weight. Absent: 2, or {GEOMETRIC[1]} for a geometric mean."
    )


Bounds = tuple[PositiveFloat, PositiveFloat]


class Rejection(Table):
    """Bounds on a sample's distance of trainer from engine, with w = exp(recomputed - engine) of its tokens; one that breaks any of those
    given stays out of the policy's loss. At least one is given."""

    geometric: Bounds | None = Key(None, f"[low, high] of the geometric mean of w; veRL's band is {list(GEOMETRIC)}.")
    product: Bounds | None = Key(None, "[low, high] of the product of w, such as [0.5, 2.0].")
    mean_kl: PositiveFloat | None = Key(
        None, "The most of the mean of w - 1 - log w (trust region masking, arXiv 2512.23075), such as 0.01."
    )
    max_kl: PositiveFloat | None = Key(
        None, "The most of w - 1 - log w at any one token (the same paper), such as 0.05."
    )
    veto: float | None = Key(None, "The least w at any one token, such as 1e-4.", gt=0, lt=1)

    @model_validator(mode="after")
    def _bounds(self) -> Rejection:
        given = {name: value for name in type(self).model_fields if (value := getattr(self, name)) is not None}
        if not given:
            raise conflict(
                f"algorithm.rejection is empty: give at least one of {list(type(self).model_fields)}, or leave it out"
            )
        for name, value in given.items():
            if isinstance(value, tuple) and not value[0] < 1 < value[1]:
                raise conflict(
                    f"algorithm.rejection.{name} = {list(value)}: expected [low, high] with low below 1 and high above it"
                )
        return self


AnyCorrection = Annotated[
    Union[Annotated[Tis, Tag("tis")], Annotated[IcePop, Tag("icepop")], Annotated[Mis, Tag("mis")]],
    named(default=lambda v: "?"),
]
