"""Which blocks train: a window of consecutive ones that moves over the rounds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from raafl.parts.select.units import count
from raafl.submodel import Spec, depth_window
from raafl.submodel.depth.windows import stack_of as stack_of

if TYPE_CHECKING:
    from raafl.submodel import Submodels


def window_starts(num_blocks: int, rate: float) -> list[int]:
    """Return where windows of ``ceil(rate * num_blocks)`` blocks may begin.

    They follow each other, and the last ends with the last block: of all rolling windows these train the blocks most
    evenly, as Co-S2P asks for.
    """
    length = count(num_blocks, rate)
    return [min(start, num_blocks - length) for start in range(0, num_blocks, length)]


def window(
    submodels: Submodels,
    rate: float,
    *,
    kept: Mapping[str, Iterable[int]] | None = None,
    starts: Sequence[int] | None = None,
    round: int = 0,
) -> Spec:
    """Return the window of this round; blocks below it are present and frozen, those above absent (see `depth_window`).

    Args:
        submodels: of the model.
        rate: share of the blocks that train (r_d in Co-S2P).
        kept: units of axes of width to keep as well.
        starts: where windows may begin, to be taken in turn; None = `window_starts`.
        round: of the client or the server.

    Raises:
        BadInput: the model has no such stack, or several.
    """
    blocks = stack_of(submodels)
    places = window_starts(len(blocks), rate) if starts is None else starts
    start = places[round % len(places)]
    stop = start + count(len(blocks), rate)
    return depth_window(submodels, start, stop, kept=kept)
