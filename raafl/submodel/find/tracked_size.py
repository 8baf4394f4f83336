"""Make integers that remember which attribute or dimension they were read from, also after sums, products and quotients."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

Origin = Any
"""Where a number comes from: an `Attribute` key, a `Dim`, (operator, origin, origin), or a plain number."""

OPERATORS: dict[str, Callable[[int, int], int]] = {
    name: getattr(operator, name) for name in ("add", "sub", "mul", "floordiv", "mod")
}


class NonTorchUses:
    """Record of what the code does with sizes beside passing them to torch.

    `numbers`: line of code that has computed something else from a size, such as a scaling factor, by origin and
    size.
    `was_key`: whether a size was looked up in a dictionary or set, as a cache over sizes does.
    """

    def __init__(self, place: Callable[[], str], *, are_keys_plain: bool = False) -> None:
        """Locate uses by ``place()``; with ``are_keys_plain``, a dictionary finds a size by any equal number."""
        self.numbers: dict[tuple[Origin, int], str] = {}
        self.was_key, self.are_keys_plain = False, are_keys_plain
        self._place = place

    def number(self, size: Size) -> None:
        """Record that the code computes a number from a size that is no size itself."""
        self.numbers.setdefault((size.origin, int(size)), self._place())


class Size(int):
    """An integer that remembers where it was read, also after sums, products and quotients.

    Attributes:
        origin: attribute or tensor dimension from which the number was read.
        uses: record of what the code does with the number, and with all others of the same step.
    """

    origin: Origin
    uses: NonTorchUses

    def __new__(cls, value: int, origin: Origin, uses: NonTorchUses) -> Size:
        """Make the number ``value`` that comes from ``origin``."""
        size = super().__new__(cls, value)
        size.origin, size.uses = origin, uses
        return size

    def __hash__(self) -> int:
        # A cache over sizes would answer with what it computed from an equal number that was read at another place, or in
        # an earlier step that nobody traced: the origins would be wrong, or lost. So a dictionary or `lru_cache` finds a size
        # only by one of the same origin.
        self.uses.was_key = True
        return hash(int(self) if self.uses.are_keys_plain else (Size, int(self), self.origin))

    def __float__(self) -> float:
        self.uses.number(self)
        return float(int(self))

    def __neg__(self) -> Size:
        return Size(-int(self), ("sub", 0, self.origin), self.uses)

    def __deepcopy__(self, memo: object) -> Size:
        return self

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)


def _arithmetic(name: str, swapped: bool) -> Callable[[Size, Any], Any]:
    plain = getattr(int, f"__{'r' if swapped else ''}{name}__")

    def work(self: Size, other: Any) -> object:
        if isinstance(other, float):
            return getattr(float(self), plain.__name__)(other)
        value = plain(int(self), int(other) if isinstance(other, Size) else other)
        for size in (self, other) if type(value) is float else ():
            float(size)  # records it
        if type(value) is not int or name not in OPERATORS:
            return value
        origins = (self.origin, origin_of(other))
        return Size(value, (name, *(reversed(origins) if swapped else origins)), self.uses)

    return work


for _name in (*OPERATORS, "truediv", "pow"):
    setattr(Size, f"__{_name}__", _arithmetic(_name, swapped=False))
    setattr(Size, f"__r{_name}__", _arithmetic(_name, swapped=True))


def origin_of(value: int) -> Origin:
    """Return the origin of a number; a plain number is its own origin."""
    return value.origin if isinstance(value, Size) else int(value)
