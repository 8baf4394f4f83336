"""Select Co-S2P's submodels: consecutive blocks, further up in each round, cut in width by the client's own mask."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from raafl.core.algorithm import Select, SelectContext
from raafl.core.types import ClientInfo, Warn, Work, derive_seed
from raafl.errors import BadInput, fraction, one_of, positive
from raafl.parts.local.distilled import exit_depths
from raafl.parts.local.mask_training import SCORES, best
from raafl.parts.merge.personal import scores_of
from raafl.parts.select.rate_select import Rates, RateSelect, rates_in_words
from raafl.parts.select.segments import Segments, cuts_of, stack_of
from raafl.parts.select.submodels import Choice, Full, OneOf
from raafl.parts.select.units import Budget, count, largest_rate, leading
from raafl.submodel import Spec, Submodels, depth_window

Masks = Literal["trained", "random"]
MAX_MASK_ROUNDS = 10_000
STEPS = 16
"""Number of rates tried for a client whose memory is too small: it gets the largest multiple of rate / STEPS that fits."""


def split_rate(rate: float, ratio: float) -> tuple[float, float]:
    """Split the share of a model into a share r_w of its width and a share r_d of its depth (Co-S2P, Table VIII).

    ``r_w * r_d = rate`` and ``log r_w = ratio * log r_d``. So ratio 1 shrinks both equally, 0 shrinks the depth only,
    and infinity the width only.
    """
    share = 1.0 if ratio == float("inf") else ratio / (1.0 + ratio)
    width: float = rate**share
    depth: float = rate ** (1.0 - share)
    return width, depth


def window_notes(submodels: Submodels) -> list[str]:
    """Return notes if the model cannot have fewer blocks, has no exits (early output heads), or cannot be narrowed."""
    notes: list[str] = []
    if stack_of(submodels) is None:
        what = "several stacks" if submodels.stacks else "no stack"
        notes.append(Warn(f"the model has {what} of blocks: its depth stays whole, only its width is cut"))
    elif not exit_depths(submodels):
        notes.append("the model has no exits: its own last layers end windows of blocks of every depth")
    if not submodels.axes:
        notes.append(Warn(f"the model's width stays whole: {submodels.why_whole()}"))
    return notes


def window_starts(num_blocks: int, rate: float) -> list[int]:
    """Return the first block of each window of ``ceil(rate * num_blocks)`` consecutive blocks.

    Windows follow each other without a gap, and the last one ends with the last block. This trains all blocks as evenly
    as possible, as Co-S2P requires.
    """
    length = count(num_blocks, rate)
    return [min(start, num_blocks - length) for start in range(0, num_blocks, length)]


def first_window(client: int, num: int) -> int:
    """Return the number of the window with which a client starts, so that clients are spread over all windows.

    It is the digit sum of ``client - 1`` to base ``num``, modulo ``num``; client 1 starts with the lowest window. Any
    ``num`` consecutive clients cover all windows, and so do clients at equal distances, such as those of one kind of
    device.
    """
    left, total = client - 1, 0
    while left and num > 1:
        left, digit = divmod(left, num)
        total += digit
    return total % num


@dataclass(frozen=True, slots=True)
class _Size:
    """Size of a client's submodels: share of units that they keep, and windows of consecutive blocks that it trains in turn."""

    width: float  # kept share of each axis, the paper's r_w
    num_blocks: int  # number of blocks in a window
    starts: tuple[int, ...]  # first block of each window, in the client's order
    # by round of the client, until every score was trained: axes whose scores train before the window does
    masks: tuple[tuple[str, ...], ...] = ()

    def next_task(self, merged: int) -> tuple[int, tuple[str, ...]]:
        """Return the client's round after ``merged`` merged tasks, and the axes whose masks its next task trains.

        A mask selects the units of an axis that the client keeps; without such axes the task trains the blocks of the
        client's window.
        """
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


# No slots: with slots dataclass creates the class twice, and jsonargparse could not find it by its short name.
@dataclass(frozen=True)
class RollingWindows(Select):
    """Select part (choice of submodels) of Co-S2P: a window (consecutive blocks) that moves up each round, cut in width by a mask.

    A client's share of the model is divided into a share r_d of the depth and r_w of the width. The window has ``ceil(r_d
    L)`` of L blocks. Blocks below the window are frozen and equally narrow; blocks above it are absent, and an exit
    (output head) at its top ends the submodel. Clients start with different windows (`first_window`).

    A mask keeps, on each axis (dimension that can be cut), the ``ceil(r_w S)`` of S segments with the largest scores.
    The first ``mask_rounds`` times that the window reaches a block, the client has two tasks: the first trains only the
    scores of the block's segments, the second the window. Afterwards the scores stay constant. Axes outside all blocks
    count as reached by every window.

    Attributes:
        rates: rate r of a client: one number for all; a list that clients 1, 2, ... take in turn, repeating; or a
            mapping from device name.
        ratio: division of the rate r between width and depth; see `split_rate`.
        linear: origin of the masks on axes without heads: trained, or random, drawn anew for each task.
        attention: origin of the masks on attention heads: trained or random.
        segments: number S of segments of an axis without heads.
        mask_rounds: number of visits to a block in which a client first trains the block's mask scores.
        mask_epochs: number of local epochs in a task that trains mask scores.
        mask_steps: number of local steps in such a task, instead of epochs; None = use epochs.
        distils: whether to keep the exits inside the window, so that they are trained, too.
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

    # ---- the client's work ----

    def below(self) -> Select:
        """Return `Full`, so that clients train the window that was sent, since theirs may be others; see `Select.below`."""
        return Full()

    def __call__(self, client: ClientInfo, fleet: SelectContext) -> Work:
        """Return the client's work, with its id as the ``region``; raises `BadInput` if no submodel fits its memory."""
        size, submodels = self._size(client, fleet), fleet.state.submodels
        round, wanted = size.next_task(fleet.state.counts.get(client.id, 0))
        start = size.starts[round % len(size.starts)]
        stop = start + size.num_blocks
        seed = derive_seed(fleet.seed, "masks", client.id, round)
        units = self._kept(submodels, stop, size.width, scores_of(fleet.state, client.id), seed)
        if not wanted:
            return Work(self.window(submodels, start, stop, units, distils=self.distils), region=client.id)
        spec = self._frozen_window(submodels, start, stop, {a: k for a, k in units.items() if a not in wanted})
        extra = {"masks": list(wanted), "rate": size.width}
        return Work(spec, client.id, self.mask_epochs, self.mask_steps, extra)

    # ---- width ----

    def _cuts(self, submodels: Submodels) -> dict[str, Segments]:
        return cuts_of(submodels, self.segments)

    def _is_trained(self, cut: Segments) -> bool:
        return cut.can_train and (self.attention if cut.is_heads else self.linear) == "trained"

    def _trained_axes(self, submodels: Submodels, start: int, stop: int, width: float) -> list[str]:
        """Return the axes whose scores a window trains: those in its blocks, and those in no block."""
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
        """Return the axes whose scores train in each of the client's rounds, until all were trained often enough."""
        cuts, visits, masks = self._cuts(submodels), Counter[int | None](), []
        wanted = [self._trained_axes(submodels, start, start + num_blocks, width) for start in starts]
        for round in range(self.mask_rounds * len(starts) if any(wanted) else 0):
            start = starts[round % len(starts)]
            masks.append(tuple(a for a in wanted[round % len(starts)] if visits[cuts[a].block] < self.mask_rounds))
            visits.update([None, *range(start, start + num_blocks)])
        return tuple(masks)

    def _kept(
        self, submodels: Submodels, stop: int, width: float, scores: Mapping[str, list[float]], seed: int
    ) -> dict[str, list[int]]:
        """Return the kept units of each axis in blocks before ``stop``, or in no block: the best by score, else random ones."""
        units = {}
        for name, cut in self._cuts(submodels).items():
            number = count(len(cut), width)
            if number == len(cut) or (cut.block is not None and cut.block >= stop):
                continue
            if name in scores and self._is_trained(cut):
                chosen = best(scores[name], number)
            else:
                chosen = random.Random(derive_seed(seed, name)).sample(range(len(cut)), number)
            units[name] = cut.units(chosen)
        return units

    # ---- depth ----

    def window(
        self, submodels: Submodels, start: int, stop: int, kept: Mapping[str, Sequence[int]], *, distils: bool
    ) -> Spec:
        """Return the submodel that trains consecutive blocks (a window), with the exit (output head) at its top.

        Args:
            submodels: submodels of the model.
            start: index of the window's first block.
            stop: index after the window's last block.
            kept: indices of the kept units, for each narrowed axis.
            distils: whether to keep also the exits inside the window.
        """
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
        # naming exits in the spec would drop the model's own last layers: all exits stay, those in the window train
        heads = [path for name in inside for path in submodels.exits[name].paths]
        return Spec(top.kept, top.blocks, (*(top.trained or ()), *heads), None)

    def _frozen_window(self, submodels: Submodels, start: int, stop: int, kept: Mapping[str, Sequence[int]]) -> Spec:
        """Return the submodel in which scores are trained: all its values are frozen, and its only exit is at the top."""
        spec = self.window(submodels, start, stop, kept, distils=False)
        return Spec(spec.kept, spec.blocks, (), spec.exits)

    def starts(self, submodels: Submodels, num_blocks: int, depth: float) -> tuple[int, ...]:
        """Return the first block of each window, such that every window ends at an exit or with the model itself.

        Args:
            submodels: submodels of the model.
            num_blocks: number of blocks in a window.
            depth: share r_d of the blocks that a window has.
        """
        stack = stack_of(submodels)
        if stack is None:
            return (0,)
        ends = [*exit_depths(submodels), len(stack)]
        tops = [start + num_blocks for start in window_starts(len(stack), depth)]
        if len(ends) > 1:  # with exits, a window must end at one of them
            tops = [
                max((e for e in ends if num_blocks <= e <= top), default=min(e for e in ends if e >= num_blocks))
                for top in tops
            ]
        return tuple(dict.fromkeys(top - num_blocks for top in tops))

    # ---- size ----

    def _size(self, client: ClientInfo, fleet: SelectContext) -> _Size:
        key = ("size", client.id)
        if key not in fleet.cache:
            fleet.cache[key] = self._largest_size(client, fleet)
        size: _Size = fleet.cache[key]
        return size

    def _shape(self, submodels: Submodels, rate: float) -> tuple[float, int, float]:
        stack = stack_of(submodels)
        width, depth = split_rate(rate, self.ratio)
        return width, 1 if stack is None else count(len(stack), depth), depth

    def _largest_size(self, client: ClientInfo, fleet: SelectContext) -> _Size:
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
            # later windows cost more, since frozen blocks are below them; the first is known to fit
            starts = starts[:1] + tuple(s for s in starts[1:] if not budget.over(fleet.cost(spec(rate, s))))
            fit = self.mask_rounds == 0 or all(self._mask_fits(s, width, num_blocks, budget, fleet) for s in starts)
        first = first_window(client.id, len(starts))
        starts = starts[first:] + starts[:first]
        return _Size(width, num_blocks, starts, self._masks(submodels, starts, num_blocks, width) if fit else ())

    def _mask_fits(self, start: int, width: float, num_blocks: int, budget: Budget, fleet: SelectContext) -> bool:
        submodels, stop = fleet.state.submodels, start + num_blocks
        wanted = self._trained_axes(submodels, start, stop, width)
        units = {a: k for a, k in self._kept(submodels, stop, width, {}, 0).items() if a not in wanted}
        extra = {"masks": wanted, "rate": width}
        return not budget.over(fleet.cost(self._frozen_window(submodels, start, stop, units), extra))

    # ---- the fleet ----

    def check(self, fleet: SelectContext) -> list[str]:
        """Return a problem for each client without a rate or a submodel that fits, or if nobody would train the masks."""
        problems = fleet.problems(lambda client: self._size(client, fleet))
        if (
            not problems
            and SCORES not in fleet.local.down
            and any(self._size(c, fleet).masks for c in fleet.clients.values())
        ):
            return [
                f"submodel.mask_rounds is {self.mask_rounds}, and the algorithm trains no masks: set it to 0 (masks are drawn "
                "at random), or take algorithm co_s2p"
            ]
        return problems

    def forget(self, client: ClientInfo, fleet: SelectContext) -> None:
        """Delete the cached size of the client's submodel; other clients' submodels do not depend on it."""
        fleet.cache.pop(("size", client.id), None)

    def notes(self, fleet: SelectContext) -> list[str]:
        """Return notes if the model cannot be shortened or narrowed, or if some masks are drawn instead of trained."""
        submodels, notes = fleet.state.submodels, window_notes(fleet.state.submodels)
        stack = stack_of(submodels)
        random_ones = [name for name, cut in self._cuts(submodels).items() if len(cut) > 1 and not cut.can_train]
        if random_ones and "trained" in (self.linear, self.attention):
            notes.append(f"masks of {', '.join(random_ones[:3])} cannot be trained, so they are drawn at random")
        wanted = any(self._trained_axes(submodels, 0, len(stack) if stack else 1, 0.5)) and self.mask_rounds > 0
        small = [
            str(c.id)
            for c in fleet.clients.values()
            if wanted and self._size(c, fleet).width < 1 and not any(self._size(c, fleet).masks)
        ]
        if small:
            notes.append(
                f"client {', '.join(small[:8])}: too little memory to train masks, so they are drawn at random"
            )
        return notes

    def __str__(self) -> str:
        words = f"rolling windows of blocks, {self.linear} masks of segments and {self.attention} ones of heads"
        return words if self.ratio == 1 else f"{words}, width:depth {self.ratio:g}"


# No slots: with slots dataclass creates the class twice, and jsonargparse could not find it by its short name.
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
        return RollingWindows(ratio=self.ratio, segments=self.segments)

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
    """Return the units of each axis in slice number ``part``, which has a share ``width`` of them; omit axes that stay whole."""
    numbers = {name: count(len(cut), width) for name, cut in cuts.items()}
    return {
        name: cut.units([(part * numbers[name] + i) % len(cut) for i in range(numbers[name])])
        for name, cut in cuts.items()
        if numbers[name] < len(cut)
    }


@dataclass(frozen=True)
class LeadingBlocks(Select):
    """Select part (choice of submodels): each client gets the lowest blocks of the model, and the first units of each layer.

    The exits (output heads after a block) among these blocks are part of the submodel. Submodels are nested, since
    every client trains the lowest blocks. A client gets fewer blocks if its share does not fit its memory. A model
    without a stack of blocks keeps its depth; one without exits ends with its own last layers.

    Attributes:
        depths: share of the blocks that a client gets: one number for all; a list that clients 1, 2, ... take in turn;
            or a mapping from device name.
        widths: share of each axis's units that a client gets, in the same form.
    """

    depths: Rates = 1.0
    widths: Rates = 1.0

    def __post_init__(self) -> None:
        for rates in (self.depths, self.widths):
            RateSelect(rates=rates)

    def __call__(self, client: ClientInfo, fleet: SelectContext) -> Work:
        """Return the client's work, with its id as the ``region``; raises `BadInput` if no block fits its memory."""
        if client.id not in fleet.cache:
            fleet.cache[client.id] = self._largest(client, fleet)
        return Work(fleet.cache[client.id], region=client.id)

    def _largest(self, client: ClientInfo, fleet: SelectContext) -> Spec:
        submodels, stack = fleet.state.submodels, stack_of(fleet.state.submodels)
        most = 1 if stack is None else count(len(stack), RateSelect(rates=self.depths).rate(client))
        width = RateSelect(rates=self.widths).rate(client)
        specs = [self.spec(submodels, num, width) for num in range(most, 0, -1)]
        found = next((spec for spec in specs if fleet.fits(client, spec)), None)
        if found is None:
            need = fleet.cost(specs[-1]).peak_bytes
            raise BadInput(
                f"client {client.id}: memory_bytes is {client.profile.memory_bytes:.4g}, its smallest submodel needs {need:.4g} to "
                "train: raise memory_bytes, lower widths, or use a smaller batch or model"
            )
        return found

    def spec(self, submodels: Submodels, num_blocks: int, width: float) -> Spec:
        """Return the submodel of the lowest blocks with the first units of each axis.

        Args:
            submodels: submodels of the model.
            num_blocks: number of blocks; fewer are used if no exit follows the last of them.
            width: share of each axis's units to keep.
        """
        stack, exits = stack_of(submodels), exit_depths(submodels)
        kept = dict(leading(submodels.axes, width).kept)
        if stack is None:
            return Spec.select(kept)
        if exits and num_blocks < len(stack) and num_blocks not in exits:
            num_blocks = max((depth for depth in exits if depth < num_blocks), default=min(exits))
        above = [f"{stack.block(i)}." for i in range(num_blocks, len(stack))]
        kept = {
            name: units
            for name, units in kept.items()
            if not all(m.name.startswith(tuple(above)) for m in submodels.axes[name].members) or not above
        }
        return RollingWindows().window(submodels, 0, num_blocks, kept, distils=True)

    def check(self, fleet: SelectContext) -> list[str]:
        """Return a problem for each client that has no rate, or whose memory is too small for any submodel."""
        return fleet.problems(lambda client: self._largest(client, fleet))

    def forget(self, client: ClientInfo, fleet: SelectContext) -> None:
        """Delete the client's cached submodel; other clients' submodels do not depend on it."""
        fleet.cache.pop(client.id, None)

    def notes(self, fleet: SelectContext) -> list[str]:
        """Return notes if the model cannot have fewer blocks, has no exits, or cannot be narrowed as requested."""
        notes = window_notes(fleet.state.submodels)
        return notes if self.widths != 1.0 else [note for note in notes if not note.startswith("the model's width")]

    def __str__(self) -> str:
        width = "" if self.widths == 1.0 else f", {rates_in_words(self.widths)} of the width"
        return f"lowest blocks, at most {rates_in_words(self.depths)} of them{width}"
