"""Define the options of how submodels are cut; importing this module does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from raafl.errors import BadInput, positive


@dataclass(frozen=True, slots=True)
class SubmodelOptions:
    """Options for cutting submodels from the model, and for batch norm statistics; null = the default of the model.

    Attributes:
        residual_width: whether the width of the residual stream, over which norm layers compute statistics, may shrink.
        batch_norm: handling of running statistics: merged = clients send them and the server averages them; static =
            they are not sent, and the server computes them when the model is evaluated or saved.
        static_batches: number of training batches for computing static statistics.
        exits: depths, in blocks, at which a transformer gets an additional output head (early exit): [2, 4] adds one
            after block 2 and one after block 4.
    """

    residual_width: bool | None = None
    batch_norm: Literal["merged", "static"] | None = None
    static_batches: int = 20
    exits: list[int] | None = None

    def __post_init__(self) -> None:
        if self.residual_width not in (True, False, None):
            raise BadInput(f"submodels.residual_width is {self.residual_width!r}: give true, false or null")
        if self.batch_norm not in ("merged", "static", None):
            raise BadInput(f"submodels.batch_norm is '{self.batch_norm}': give merged, static or null")
        positive("submodels.static_batches", self.static_batches)
        if not all(type(depth) is int and depth > 0 for depth in self.exits or ()):
            raise BadInput(f"submodels.exits is {self.exits}: give depths in blocks, from 1, such as [2, 4]")
