"""Select Co-S2P's submodels: a window of blocks that moves up each round, cut in width by the client's own mask."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from raafl.core.algorithm import Select, SelectContext
from raafl.core.types import ClientInfo, Warn, Work, derive_seed
from raafl.errors import BadInput, one_of, positive
from raafl.parts.local.distilled import exit_depths
from raafl.parts.local.mask_training import best
from raafl.parts.merge.personal import scores_of
from raafl.parts.select import Budget, largest_rate
from raafl.parts.select.rate_select import Rates, RateSelect
from raafl.parts.select.segments import Segments, cuts_of, stack_of
from raafl.parts.select.units import count
from raafl.submodel import Spec, Submodels, depth_window

Masks = Literal["trained", "random"]
MAX_MASK_ROUNDS = 10_000
STEPS = 16
"""A client whose memory is too small for its rate gets the largest multiple of rate / STEPS that fits."""


def split_rate(rate: float, ratio: float) -> tuple[float, float]:
    """Return r_w and r_d with ``r_w * r_d = rate`` and ``log r_w = ratio * log r_d`` (Table VIII).

    Ratio 1 cuts width and depth alike, ``sqrt(rate)`` each; 0 cuts depth alone, infinity width alone.
    """
    share = 1.0 if ratio == float("inf") else ratio / (1.0 + ratio)
    width: float = rate**share
    depth: float = rate ** (1.0 - share)
    return width, depth


def window_notes(submodels: Submodels) -> list[str]:
    """Return which cuts of depth and width this model does not allow."""
    found: list[str] = []
    if stack_of(submodels) is None:
        what = "several stacks" if submodels.stacks else "no stack"
        found.append(Warn(f"the model has {what} of blocks: its depth stays whole, only its width is cut"))
    elif not exit_depths(submodels):
        found.append("the model has no exits: its own last layers end windows of blocks of every depth")
    if not submodels.axes:
        found.append(Warn(f"the model's width stays whole: {submodels.why_whole()}"))
    return found


def window_starts(num_blocks: int, rate: float) -> list[int]:
    """Return the first blocks of all windows of ``ceil(rate * num_blocks)`` blocks.

    They follow each other, and the last ends with the last block: of all rolling windows these train the blocks most evenly, as
    Co-S2P asks for.
    """
    length = count(num_blocks, rate)
    return [min(start, num_blocks - length) for start in range(0, num_blocks, length)]


def first_window(client: int, num: int) -> int:
    """Return which of ``num`` windows a client begins with, so that clients are spread over all of them from the start.

    The sum of the digits of ``client - 1`` to base ``num``: client 1 begins with the lowest; any ``num`` neighbours cover all
    windows, and so do clients of one kind at equal distances.
    """
    left, total = client - 1, 0
    while left and num > 1:
        left, digit = divmod(left, num)
        total += digit
    return total % num


@dataclass(frozen=True, slots=True)
class _Size:
    """What one client gets: r_w, the number of blocks that train, where windows begin, first its first, and its masks.

    Attributes:
        masks: for each of its rounds until every score has trained, the axes whose scores train before the window does.
    """

    width: float
    num_blocks: int
    starts: tuple[int, ...]
    masks: tuple[tuple[str, ...], ...] = ()

    def turn(self, merged: int) -> tuple[int, tuple[str, ...]]:
        """Count the rounds of a client after so many merged tasks, and name the axes whose scores train now."""
        for round, axes in enumerate(self.masks):
            if not axes or merged == 0:
                if merged == 0:
                    return round, axes
                merged -= 1
            elif merged == 1:
                return round, ()
            else:
                merged -= 2
        return len(self.masks) + merged, ()


# No slots: with them dataclass creates the class twice, and jsonargparse could not find it by its short name.
@dataclass(frozen=True)
class RollingWindows(Select):
    """A window of ``ceil(r_d L)`` blocks that moves up with each of a client's rounds, r_w of the segments of each axis.

    Blocks below the window are frozen and as narrow as the client's mask makes them, blocks above absent; the exit at the
    window's top ends the submodel. Clients begin with different windows (`first_window`). In a client's first ``mask_rounds``
    visits of a block (of any window: for what lies outside of all blocks) a task that trains the block's scores comes before the
    one that trains the window; after these the scores stay as they are. Of each axis the ``ceil(r_w S)`` segments with the
    largest scores are kept.

    Attributes:
        rates: r for all clients; a list dealt to clients 1, 2, ... and again from its beginning; or by name of device.
        ratio: how width and depth share r, see `split_rate`.
        linear: trained or random masks of axes that are not heads; random ones are drawn anew for each task.
        attention: the same of heads.
        segments: S of an axis that is not heads.
        mask_rounds: a client's visits of each block before which the block's scores train.
        mask_epochs: local epochs of a task that trains scores.
        mask_steps: local steps instead of epochs.
        distils: keep the exits inside the window, to be trained as well.
    """

    rates: Rates = 1.0
    ratio: float = 1.0
    linear: Masks = "trained"
    attention: Masks = "trained"
    segments: int = 16
    mask_rounds: int = 5
    mask_epochs: int | None = 5
    mask_steps: int | None = None
    distils: bool = True

    def __post_init__(self) -> None:
        RateSelect(rates=self.rates)
        if not self.ratio >= 0:
            raise BadInput(f"ratio is {self.ratio}: give 0 (depth alone is cut) or more, inf for width alone")
        for name in ("linear", "attention"):
            one_of(name, getattr(self, name), Masks)
        positive("segments", self.segments)
        positive("mask_epochs", self.mask_epochs, optional=True)
        positive("mask_steps", self.mask_steps, optional=True)
        if not 0 <= self.mask_rounds <= MAX_MASK_ROUNDS:
            raise BadInput(f"mask_rounds is {self.mask_rounds}: give 0 (masks stay random) to {MAX_MASK_ROUNDS:,}")

    # ---- the work ----

    def __call__(self, client: ClientInfo, fleet: SelectContext) -> Work:
        """Return the task of ``client``, which counts as region ``client.id``; raises `BadInput` when nothing fits."""
        size, submodels = self._size(client, fleet), fleet.state.submodels
        round, wanted = size.turn(fleet.state.counts.get(client.id, 0))
        start = size.starts[round % len(size.starts)]
        stop = start + size.num_blocks
        seed = derive_seed(fleet.seed, "masks", client.id, round)
        kept = self._kept(submodels, stop, size.width, scores_of(fleet.state, client.id), seed)
        if not wanted:
            return Work(self.window(submodels, start, stop, kept, distils=self.distils), region=client.id)
        spec = self._frozen_window(submodels, start, stop, {a: k for a, k in kept.items() if a not in wanted})
        extra = {"masks": list(wanted), "rate": size.width}
        return Work(spec, client.id, self.mask_epochs, self.mask_steps, extra)

    # ---- width ----

    def _cuts(self, submodels: Submodels) -> dict[str, Segments]:
        return cuts_of(submodels, self.segments)

    def _is_trained(self, cut: Segments) -> bool:
        return cut.can_train and (self.attention if cut.is_heads else self.linear) == "trained"

    def _trained_axes(self, submodels: Submodels, start: int, stop: int, width: float) -> list[str]:
        """Return the axes of a window whose scores train: those of its blocks, and those outside of all blocks."""
        return [
            name
            for name, cut in self._cuts(submodels).items()
            if (cut.block is None or start <= cut.block < stop)
            and count(len(cut), width) < len(cut)
            and self._is_trained(cut)
        ]

    def _masks(
        self, submodels: Submodels, starts: Sequence[int], num_blocks: int, width: float
    ) -> tuple[tuple[str, ...], ...]:
        """Return for each round the axes whose scores train before the window does, until all are trained."""
        cuts, visits, found = self._cuts(submodels), Counter[int | None](), []
        wanted = [self._trained_axes(submodels, start, start + num_blocks, width) for start in starts]
        for round in range(self.mask_rounds * len(starts) if any(wanted) else 0):
            start = starts[round % len(starts)]
            found.append(tuple(a for a in wanted[round % len(starts)] if visits[cuts[a].block] < self.mask_rounds))
            visits.update([None, *range(start, start + num_blocks)])
        return tuple(found)

    def _kept(
        self, submodels: Submodels, stop: int, width: float, scores: Mapping[str, list[float]], seed: int
    ) -> dict[str, list[int]]:
        """Return the units kept of each axis below ``stop`` and outside of all blocks."""
        kept = {}
        for name, cut in self._cuts(submodels).items():
            number = count(len(cut), width)
            if number == len(cut) or (cut.block is not None and cut.block >= stop):
                continue
            if name in scores and self._is_trained(cut):
                chosen = best(scores[name], number)
            else:
                chosen = random.Random(derive_seed(seed, name)).sample(range(len(cut)), number)
            kept[name] = cut.units(chosen)
        return kept

    # ---- depth ----

    def window(
        self, submodels: Submodels, start: int, stop: int, kept: Mapping[str, Sequence[int]], *, distils: bool
    ) -> Spec:
        """Return the submodel that trains a window with the exit at its top and, for distillation, those inside."""
        stack, exits = stack_of(submodels), exit_depths(submodels)
        none = () if exits else None
        if stack is None or (start, stop) == (0, len(stack)):
            return Spec.select(kept, exits=None if distils else none)
        inside = [exits[depth] for depth in sorted(exits) if start < depth < stop and distils]
        if stop < len(stack):
            return depth_window(submodels, start, stop, exit=[*inside, exits[stop]] if stop in exits else (), kept=kept)
        top = depth_window(submodels, start, stop, kept=kept)
        if not inside:
            return top
        # an exit that is named takes the place of the model's own last layers: they all stay, and these train
        heads = [path for name in inside for path in submodels.exits[name].paths]
        return Spec(top.kept, top.blocks, (*(top.trained or ()), *heads), None)

    def _frozen_window(self, submodels: Submodels, start: int, stop: int, kept: Mapping[str, Sequence[int]]) -> Spec:
        """Return the submodel in which scores train: its values are frozen, and of the exits it has the one at the top."""
        spec = self.window(submodels, start, stop, kept, distils=False)
        return Spec(spec.kept, spec.blocks, (), spec.exits)

    def starts(self, submodels: Submodels, num_blocks: int, depth: float) -> tuple[int, ...]:
        """Return the first blocks of windows, such that each window ends at an exit or at the model's own end."""
        stack = stack_of(submodels)
        if stack is None:
            return (0,)
        ends = [*exit_depths(submodels), len(stack)]
        tops = [start + num_blocks for start in window_starts(len(stack), depth)]
        if len(ends) > 1:  # without any exit, the model's own last layers end each window
            tops = [
                max((e for e in ends if num_blocks <= e <= top), default=min(e for e in ends if e >= num_blocks))
                for top in tops
            ]
        return tuple(dict.fromkeys(top - num_blocks for top in tops))

    # ---- how much ----

    def _size(self, client: ClientInfo, fleet: SelectContext) -> _Size:
        key = ("size", client.id)
        if key not in fleet.cache:
            fleet.cache[key] = self._found(client, fleet)
        size: _Size = fleet.cache[key]
        return size

    def _shape(self, submodels: Submodels, rate: float) -> tuple[float, int, float]:
        stack = stack_of(submodels)
        width, depth = split_rate(rate, self.ratio)
        return width, 1 if stack is None else count(len(stack), depth), depth

    def _found(self, client: ClientInfo, fleet: SelectContext) -> _Size:
        submodels, rate = fleet.state.submodels, RateSelect(rates=self.rates).rate(client)
        budget = Budget(client.profile.memory_bytes)

        def spec(rate: float, start: int | None = None) -> Spec:
            width, num_blocks, depth = self._shape(submodels, rate)
            start = self.starts(submodels, num_blocks, depth)[0] if start is None else start
            kept = self._kept(submodels, start + num_blocks, width, {}, 0)
            return self.window(submodels, start, start + num_blocks, kept, distils=self.distils)

        if budget.memory_bytes < float("inf"):
            rates = [rate * i / STEPS for i in range(1, STEPS + 1)]
            rate = largest_rate(spec, fleet.cost, budget, rates=rates, who=f"client {client.id}")
        width, num_blocks, depth = self._shape(submodels, rate)
        starts, fit = self.starts(submodels, num_blocks, depth), True
        if budget.memory_bytes < float("inf"):
            # frozen blocks below make windows dearer: the first fits
            starts = starts[:1] + tuple(s for s in starts[1:] if not budget.over(fleet.cost(spec(rate, s))))
            fit = self.mask_rounds == 0 or all(self._mask_fits(s, width, num_blocks, budget, fleet) for s in starts)
        first = first_window(client.id, len(starts))
        starts = starts[first:] + starts[:first]
        return _Size(width, num_blocks, starts, self._masks(submodels, starts, num_blocks, width) if fit else ())

    def _mask_fits(self, start: int, width: float, num_blocks: int, budget: Budget, fleet: SelectContext) -> bool:
        submodels, stop = fleet.state.submodels, start + num_blocks
        wanted = self._trained_axes(submodels, start, stop, width)
        kept = {a: k for a, k in self._kept(submodels, stop, width, {}, 0).items() if a not in wanted}
        extra = {"masks": wanted, "rate": width}
        return not budget.over(fleet.cost(self._frozen_window(submodels, start, stop, kept), extra))

    # ---- the fleet ----

    def check(self, fleet: SelectContext) -> list[str]:
        """Return each client that has no rate, or that no submodel fits."""
        return fleet.problems(lambda client: self._size(client, fleet))

    def forget(self, client: ClientInfo, fleet: SelectContext) -> None:
        """Delete what was computed for the client; other clients do not depend on it."""
        fleet.cache.pop(("size", client.id), None)

    def notes(self, fleet: SelectContext) -> list[str]:
        """List the cuts that this model or a client does not allow."""
        submodels, found = fleet.state.submodels, window_notes(fleet.state.submodels)
        stack = stack_of(submodels)
        random_ones = [name for name, cut in self._cuts(submodels).items() if len(cut) > 1 and not cut.can_train]
        if random_ones and "trained" in (self.linear, self.attention):
            found.append(f"masks of {', '.join(random_ones[:3])} cannot be trained: they are drawn at random")
        wanted = any(self._trained_axes(submodels, 0, len(stack) if stack else 1, 0.5)) and self.mask_rounds > 0
        small = [
            str(c.id)
            for c in fleet.clients.values()
            if wanted and self._size(c, fleet).width < 1 and not any(self._size(c, fleet).masks)
        ]
        if small:
            found.append(
                f"client {', '.join(small[:8])}: too little memory to train masks in, they are drawn at random"
            )
        return found

    def __str__(self) -> str:
        words = f"rolling windows of blocks, {self.linear} masks of segments and {self.attention} ones of heads"
        return words if self.ratio == 1 else f"{words}, width:depth {self.ratio:g}"
