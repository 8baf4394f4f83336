"""Options of how the model is cut; importing them costs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from raafl.errors import BadInput, positive


@dataclass(frozen=True, slots=True)
class SubmodelOptions:
    """Options of cutting submodels and of running statistics; null = as the model declares.

    Attributes:
        residual_width: whether widths that norms take statistics across may shrink, too.
        batch_norm: treatment of running statistics: merged = clients send them, and the server pools them exactly;
            static = nobody sends them, and the server collects them when the model is measured, or saved at the end.
        static_batches: number of training batches from which static statistics are collected.
        exits: numbers of blocks after each of which a transformer gets an exit head of its own; see `add_exits`.
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
            raise BadInput(f"submodels.exits is {self.exits}: give numbers of blocks from 1, such as [2, 4]")
