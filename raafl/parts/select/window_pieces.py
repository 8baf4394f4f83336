"""Select pieces of width and depth, cut like Co-S2P's submodels and assigned by Gre-RAA like Fed-RAA's fragments."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from raafl.core.algorithm import SelectContext
from raafl.errors import BadInput, fraction
from raafl.parts.select.segments import Segments, cuts_of, stack_of
from raafl.parts.select.submodels import Choice, OneOf
from raafl.parts.select.units import count
from raafl.parts.select.windows import RollingWindows, split_rate, window_notes
from raafl.submodel import Spec, Submodels


# No slots: with them dataclass creates the class twice, and jsonargparse could not find it by its short name.
@dataclass(frozen=True)
class WindowPieces(OneOf):
    """Select part (choice of submodels) among pieces of the model: some consecutive blocks, and a slice of their width.

    A share r of the model is divided into a share r_d of its L blocks and a share r_w of their width. A window has
    ``ceil(r_d L)`` consecutive blocks, and each window is cut into ``ceil(1 / r_w)`` slices that together cover the
    width. A client gets the piece that was merged least often so far, among those that it finishes within the time
    limit K (Gre-RAA, from Fed-RAA).

    Attributes:
        rates: shares r of the model that a piece has, one for each set of pieces.
        ratio: division of the share r between width and depth; see `raafl.parts.select.windows.split_rate`.
        segments: number of equal segments into which an axis without attention heads is divided.
        distils: whether to keep the exits inside a window, so that they are trained, too.
        how: rule for choosing: gre_raa (merged least often among those that finish in time), random, or fewest_updates.
        bound_s: time limit K in seconds; None = computed from the present clients.
    """

    rates: list[float] = field(default_factory=lambda: [1.0, 0.5625, 0.25, 0.0625])
    ratio: float = 1.0
    segments: int = 16
    distils: bool = True
    how: Choice = "gre_raa"
    bound_s: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.rates:
            raise BadInput("rates is empty: give at least one number above 0, at most 1")
        for rate in self.rates:
            fraction("a rate in rates", rate)
        self._windows()

    def _windows(self) -> RollingWindows:
        return RollingWindows(ratio=self.ratio, segments=self.segments, mask_rounds=0, distils=self.distils)

    def pieces(self, submodels: Submodels) -> tuple[Spec, ...]:
        """Return all pieces of the model, those of the largest of ``rates`` first.

        A piece is a window (some consecutive blocks) in which each layer has a part of its units. Pieces of a smaller
        rate have fewer blocks, fewer units, or both.
        """
        windows, stack, cuts = self._windows(), stack_of(submodels), cuts_of(submodels, self.segments)
        pieces: dict[Spec, None] = {}
        for rate in sorted(self.rates, reverse=True):
            width, depth = split_rate(rate, self.ratio)
            num_blocks = 1 if stack is None else count(len(stack), depth)
            for start in windows.starts(submodels, num_blocks, depth):
                stop = start + num_blocks
                present = {name: cut for name, cut in cuts.items() if cut.block is None or cut.block < stop}
                for part in range(math.ceil(1.0 / width - 1e-9)):
                    units = _units_of(present, width, part)
                    pieces[windows.window(submodels, start, stop, units, distils=self.distils)] = None
        return tuple(pieces)

    def notes(self, fleet: SelectContext) -> list[str]:
        """Return notes for the user: what Co-S2P does and this does not, and whether the model cannot be shortened or narrowed."""
        return [
            "these are Co-S2P's windows without its training: slices of the width are fixed, no masks are trained, "
            "exits have no loss, and there is no distillation",
            *window_notes(fleet.state.submodels),
        ]

    def what(self) -> str:
        """Describe in a few words, for logs, which shares of the model its pieces (consecutive blocks, narrowed) have."""
        return (
            f"windows of blocks and slices of their width, {', '.join(f'{rate:g}' for rate in self.rates)} of the model"
        )


def _units_of(cuts: Mapping[str, Segments], width: float, part: int) -> dict[str, list[int]]:
    """Return the units of slice ``part`` of each cut that has more than the slice."""
    numbers = {name: count(len(cut), width) for name, cut in cuts.items()}
    return {
        name: cut.units([(part * numbers[name] + i) % len(cut) for i in range(numbers[name])])
        for name, cut in cuts.items()
        if numbers[name] < len(cut)
    }
