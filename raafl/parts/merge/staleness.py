"""Compute staleness factors s(t - tau), by which a late update counts less (Xie et al. 2019, section 5.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from raafl.errors import BadInput, one_of

Kind = Literal["constant", "polynomial", "hinge"]


@dataclass(frozen=True, slots=True)
class Staleness:
    """Function s(x) by which an update that is x merges late counts less.

    The forms are those of FedAsync: constant 1; polynomial (x+1)^-a; hinge 1 if x <= b, else 1/(a(x-b)+1).

    Attributes:
        kind: form of the function: constant, polynomial or hinge.
        a: exponent of the polynomial, or slope of the hinge.
        b: largest staleness that the hinge does not discount.
    """

    kind: Kind = "constant"
    a: float = 0.5
    b: float = 4.0

    def __post_init__(self) -> None:
        one_of("staleness", self.kind, Kind)
        if self.a < 0 or self.b < 0:
            raise BadInput(f"staleness_a is {self.a}, staleness_b is {self.b}: give numbers of 0 or more")
        if self.a != 0.5 and self.kind == "constant":
            raise BadInput(
                f"staleness_a is {self.a}, but staleness is constant: leave it out, or use polynomial or hinge"
            )
        if self.b != 4.0 and self.kind != "hinge":
            raise BadInput(f"staleness_b is {self.b}, but staleness is {self.kind}: leave it out, or use hinge")

    def __call__(self, staleness: float) -> float:
        """Return the factor for an update ``staleness`` merges late; 1 for a fresh one."""
        if self.kind == "constant":
            return 1.0
        if self.kind == "polynomial":
            return float((staleness + 1.0) ** -self.a)
        return 1.0 if staleness <= self.b else 1.0 / (self.a * (staleness - self.b) + 1.0)

    def __str__(self) -> str:
        words = {"constant": "", "polynomial": f"(s+1)^-{self.a:g}", "hinge": f"hinge({self.a:g}, {self.b:g})"}
        return words[self.kind]
