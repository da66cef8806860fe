"""Off-policy corrections of a recipe's algorithm, with their papers' bounds."""

from __future__ import annotations

from typing import Annotated, Literal, Union

from pydantic import PositiveFloat, Tag, model_validator

from relax_hpc.recipe.table import Key, Table, conflict, named


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


class Mis(Correction):
    """Masked importance sampling (Liu et al. 2025): a sample's loss times its weight, and 0 where that is out of bounds."""

    name: Literal["mis"] = Key("mis", "Mask samples by their weights.")
    weight: Literal["product", "geometric"] = Key(
        "product",
        "Of the weights of a sample's tokens: their product (exact, of great variance where answers are long) or their "
        "geometric mean.",
    )


AnyCorrection = Annotated[
    Union[Annotated[Tis, Tag("tis")], Annotated[IcePop, Tag("icepop")], Annotated[Mis, Tag("mis")]],
    named(default=lambda v: "?"),
]
