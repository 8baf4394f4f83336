"""Wrap an algorithm's trigger and merge in the options that any algorithm takes: rounds, guard, privacy, and sound numbers.

Each wrapper's module is imported where a run needs it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from raafl.core.algorithm import Algorithm
from raafl.core.options import Guard, Privacy, Rounds
from raafl.core.state import GlobalState, MergeMemory
from raafl.core.types import HUGE_NORM, Update
from raafl.parts.merge.wrapped import Wrapped
from raafl.submodel import FULL, Spec, Submodels
from raafl.submodel.flat import chunks, reals


def with_options(
    algorithm: Algorithm, rounds: Rounds, guard: Guard, privacy: Privacy, num_clients: int, seed: int | None = None
) -> Algorithm:
    """Add the options that any algorithm takes: early closing of rounds, protection from bad updates, and privacy.

    `seed`: the run's, from which the noise follows unless privacy names a file; None = check only, without noise.

    Raises:
        BadInput: an option does not work with the algorithm or with another option.
    """
    if rounds.is_on:
        from raafl.parts.trigger import with_rounds

        algorithm = with_rounds(algorithm, rounds)
    if guard.is_on:
        from raafl.parts.protect.robust import guarded

        algorithm = guarded(algorithm, guard)
    if not privacy.is_on:
        return algorithm
    from raafl.parts.protect.privacy import noise_key, private

    return private(algorithm, privacy, num_clients, *((b"",) if seed is None else noise_key(privacy, seed)))


def sound(algorithm: Algorithm, submodels: Submodels, max_norm_ratio: float | None) -> Algorithm:
    """Return ``algorithm`` with a merge that computes in at least single precision, and whose result is always finite.

    From the inside: pooled statistics of batch norm; conversion of half-precision updates; and the limit on the norm of an
    update, which is checked before anything else.
    """
    algorithm = widened(pooled(algorithm, submodels), submodels)
    return replace(algorithm, merge=Bounded(algorithm.merge, max_norm_ratio))


def pooled(algorithm: Algorithm, submodels: Submodels) -> Algorithm:
    """Return ``algorithm`` with exact merging of batch norm's running statistics; unchanged if the model has none."""
    pooling = submodels.pooling()
    if pooling is None:
        return algorithm
    from raafl.parts.merge.pooled import Pooled

    return replace(algorithm, merge=Pooled(algorithm.merge, pooling))


def widened(algorithm: Algorithm, submodels: Submodels) -> Algorithm:
    """Return ``algorithm`` with its merge computed in at least single precision; unchanged if all trained parameters have it."""
    trained = submodels.layout(part="trained")
    if trained.wide is trained:
        return algorithm
    from raafl.parts.merge.wide import WideMerge, WideSubmodels

    return replace(algorithm, merge=WideMerge(algorithm.merge, WideSubmodels(submodels)))


# Refuse updates that are finite but would ruin the model: huge norms, and merges that overflow. Wraps every merge.
#
# Sums, squares and products in a merge overflow far below the largest number that an update may contain, so that one
# client could turn the global model into NaN. Which merges overflow depends on the method; so an update that is large
# enough is merged on trial, the result is checked, and the state is restored. No honest update of a sound model is that
# large.

MEMORY = "bounded"
"""Key in `GlobalState.memory` of norms and flags; excluded from rollbacks."""

WARM_UP = 8
"""Number of accepted norms of a layout before its median is used."""

WINDOW = 101
"""Number of the latest accepted norms of a layout whose median is taken."""

EVERY = 16
"""Interval of exact measurements: of updates that are clearly within bounds, and, in versions, of the model's norm."""

SAFE, SAFE_HALF = 1e15, 100.0
"""Norm up to which no sum, square or product of a merge overflows; for float16 the absolute value of each element.

1e15 in float32 leaves room for 1e8 squares of it, or for a sum of 1e9 updates that weigh 1e14 each.
"""

PIECE = 1 << 20
"""Number of elements whose squares are summed in their own precision; the sums of pieces are added in double precision."""

Buffers = Mapping[torch.dtype, Tensor]
"""Flat buffers by dtype, as `FlatTensors` has them."""


@dataclass(slots=True)
class Norms:
    """Norms of the latest accepted updates, and the largest median that they have had."""

    recent: list[float] = field(default_factory=list)
    median: float = 0.0

    def add(self, norm: float) -> None:
        """Record the norm of one more accepted update."""
        self.recent = [*self.recent, norm][-WINDOW:]
        if len(self.recent) >= WARM_UP:
            self.median = max(self.median, statistics.median(self.recent))


@dataclass(slots=True)
class _Accepted:
    """Number of accepted updates of one layout, and norms of what they contain."""

    num: int = 0
    of: dict[str, Norms] = field(default_factory=dict)

    def add(self, norms: Mapping[str, float]) -> None:
        """Count an accepted update, and record the norm of each kind of its content, such as parameters."""
        self.num += 1
        for name, norm in norms.items():
            self.of.setdefault(name, Norms()).add(norm)


@dataclass
class BoundedMemory(MergeMemory):
    """State of `Bounded` on the server: norms of accepted updates and of the model."""

    key = MEMORY
    # by fingerprint of a layout: the accepted updates
    norms: dict[str, _Accepted] = field(default_factory=dict)
    # the update checked last: its assignment id, its norms, and whether it is large (above `SAFE`); None once the
    # wrapped merge has it
    measured: tuple[int, dict[str, float], bool] | None = None
    large: bool = False  # whether a large update waits to be merged
    # version at which the norm of the model's parameters was measured, and this norm; None = not measured
    model: tuple[int, float] | None = None

    def to_plain(self) -> dict[str, object]:
        """Return the recorded norms and other fields as plain data, by the field's name."""
        return {**super().to_plain(), "norms": {layout: asdict(one) for layout, one in self.norms.items()}}

    @classmethod
    def from_plain(cls, data: dict[str, Any]) -> BoundedMemory:
        """Restore the recorded norms and other fields from the result of `to_plain`."""
        norms = {
            layout: _Accepted(one["num"], {name: Norms(**norms) for name, norms in one["of"].items()})
            for layout, one in data["norms"].items()
        }
        return cls(**{**data, "norms": norms})


@dataclass(frozen=True)
class Bounded(Wrapped):
    """Outermost wrapper of a merge: refuses updates whose norm is far too large, or whose merge would overflow.

    A norm is far too large above ``max_norm_ratio`` times the largest median that the latest accepted norms ever had.
    The current median would not do: norms shrink as training converges, and a late client with other data must not be
    refused for that. Updates of one layout are compared, separately for each kind of content, such as parameters and
    running statistics. Before enough norms are known, parameters are compared with the model's norm.

    Overflow is found by trial. A large update is scaled up (`raafl.parts.protect.trial`) and merged with all waiting updates; the
    result is checked, and the merge is undone. The same is done, unscaled, for each update that arrives while a large
    one waits. So the actual merge, which computes the same result, stays finite.

    Attributes:
        max_norm_ratio: multiple of the usual norm above which an update is refused; None = no bound.
    """

    merges_means: ClassVar[bool] = True

    max_norm_ratio: float | None

    def reject_reason(self, state: GlobalState, update: Update, spec: Spec, staleness: int) -> str | None:
        """Return the wrapped merge's reason to refuse the update, or "huge-norm" if its norm is far too large."""
        reason = self.inner.reject_reason(state, update, spec, staleness)
        if reason is not None:
            return reason
        memory = state.memory.of(BoundedMemory)
        norms, is_large = self._measure(state, memory, update, spec)
        memory.measured = (update.assignment, norms, is_large)
        if not norms:  # `_measure` has found this update to be within all limits
            return None
        accepted = _accepted(state, memory, spec)
        most = {name: self._most(state, memory, accepted, name) for name in norms}
        return HUGE_NORM if any(norm > most[name] for name, norm in norms.items()) else None

    def overflows(self, state: GlobalState, update: Update, spec: Spec, staleness: int) -> bool:
        """Check by a trial merge whether this update and the waiting ones overflow; done only if one of them is large.

        There are two trials, since `detach` may change the order of sums: one calls it before the merge, one does not.
        """
        memory = state.memory.of(BoundedMemory)
        _, is_large = self._measured(state, memory, update, spec)
        if not is_large and not memory.large:
            return False
        from raafl.parts.protect.trial import HEADROOM, is_sound_merge

        scale = HEADROOM if is_large else 1.0
        trial = partial(is_sound_merge, self.inner, state, update, spec, staleness, scale=scale, but=MEMORY)
        return not all(trial(detaches=detaches) for detaches in (False, True))

    def receive(self, state: GlobalState, update: Update, spec: Spec, staleness: int) -> None:
        """Record the update's norms, and pass the update to the wrapped merge."""
        memory = state.memory.of(BoundedMemory)
        norms, is_large = self._measured(state, memory, update, spec)
        memory.measured = None
        if self.max_norm_ratio is not None:
            _accepted(state, memory, spec).add(norms)
        if is_large:
            memory.large = True
        self.inner.receive(state, update, spec, staleness)

    def apply(self, state: GlobalState) -> None:
        """Apply the wrapped merge; `overflows` has already checked that its result is finite."""
        state.memory.of(BoundedMemory).large = False
        self.inner.apply(state)

    # ---- norms ----

    def _measured(
        self, state: GlobalState, memory: BoundedMemory, update: Update, spec: Spec
    ) -> tuple[dict[str, float], bool]:
        """Return an update's norms and whether it is large, which are cached until the wrapped merge gets the update."""
        if memory.measured is None or memory.measured[0] != update.assignment:
            memory.measured = (update.assignment, *self._measure(state, memory, update, spec))
        return memory.measured[1:]

    def _measure(
        self, state: GlobalState, memory: BoundedMemory, update: Update, spec: Spec
    ) -> tuple[dict[str, float], bool]:
        """Return the norms by which an update is judged, and whether it is large.

        If clients send values, the norm of their difference from the model takes two passes over memory. So it is
        computed for one update in `EVERY`, and for those that their own norm and the model's do not prove to be within
        limits.
        """
        buffers, parts = update.tensors.buffers, _parts(state, spec)[1]
        norms = {name: _norm(flat.buffers) for name, flat in update.bundles.items()}
        if numbers := self.innermost.numbers(update):
            norms["numbers"] = math.hypot(*numbers)
        for name, part in parts.items():
            norms[name] = _norm(buffers, None, part)
        is_large = any(norm > SAFE for norm in norms.values()) or _is_near_half(state, update)
        if self.max_norm_ratio is None or self.sends == "delta":
            return norms, is_large
        accepted = _accepted(state, memory, spec)
        if self._are_within(state, memory, accepted, norms, parts) and accepted.num % EVERY:
            return {name: norm for name, norm in norms.items() if name not in parts}, is_large
        before = _before(state, spec)
        return norms | {name: _norm(buffers, before, part) for name, part in parts.items()}, is_large

    def _are_within(
        self,
        state: GlobalState,
        memory: BoundedMemory,
        accepted: _Accepted,
        norms: Mapping[str, float],
        parts: Iterable[str],
    ) -> bool:
        """Check whether the norms of an update's values prove that their difference from the model is accepted."""
        # twice the norm, since the model may have grown since it was measured
        grown = 2 * _norm_of_model(state, memory)
        for name in parts:
            most = self._most(state, memory, accepted, name)
            if most == math.inf or norms[name] + grown > most:
                return False
        return True

    def _most(self, state: GlobalState, memory: BoundedMemory, accepted: _Accepted, name: str) -> float:
        """Return the largest norm that is accepted for one kind of content of an update; infinity = any.

        `accepted`: updates of its layout that were accepted.
        """
        if self.max_norm_ratio is None:
            return math.inf
        known = accepted.of.get(name)
        if known is not None and len(known.recent) >= WARM_UP:
            usual = known.median
        elif name in ("parameters", "numbers"):
            norm = _norm_of_model(state, memory)
            usual = max(norm, 1.0) if norm else 0.0
        else:
            return math.inf
        return self.max_norm_ratio * usual if usual > 0 else math.inf


def _norm_of_model(state: GlobalState, memory: BoundedMemory) -> float:
    """Return the L2 norm of the global model's trained parameters, which is measured anew every `EVERY` versions."""
    if memory.model is None or state.version >= memory.model[0] + EVERY:
        memory.model = (state.version, _norm(_before(state, FULL)))
    return memory.model[1]


def _accepted(state: GlobalState, memory: BoundedMemory, spec: Spec) -> _Accepted:
    """Return the record of accepted updates that have the layout of ``spec``, or create it."""
    fingerprint, _ = _parts(state, spec)
    found = memory.norms.get(fingerprint)
    if found is None:
        found = memory.norms[fingerprint] = _Accepted()
    return found


def _is_near_half(state: GlobalState, update: Update) -> bool:
    """Check whether the model or an update has float16 values above `SAFE_HALF`, from which a small step may overflow."""
    flats = (state.values, update.tensors, *update.bundles.values())
    buffers = [flat.buffers[torch.float16] for flat in flats if torch.float16 in flat.buffers]
    return bool(buffers) and any(bool((buffer.abs() > SAFE_HALF).any()) for buffer in buffers)


def _before(state: GlobalState, spec: Spec) -> Buffers:
    """Return the global model's values of the tensors that a submodel trains; for the whole model they are views."""
    if spec.is_full:
        sizes = state.submodels.layout(part="trained").numel
        return {dtype: state.values.buffers[dtype][:size] for dtype, size in sizes.items()}
    return state.submodels.plan(spec).gather(state.values).buffers


def _parts(state: GlobalState, spec: Spec) -> tuple[str, dict[str, dict[torch.dtype, slice]]]:
    """Return the fingerprint of an update's layout, and the slices of its buffers: parameters, and running statistics."""
    return state.submodels.cached("parts", spec, lambda: _find_parts(state.submodels, spec))


def _find_parts(submodels: Submodels, spec: Spec) -> tuple[str, dict[str, dict[torch.dtype, slice]]]:
    layout = submodels.layout(spec, "trained")
    sizes = dict.fromkeys(layout.dtypes, 0)
    for entry in layout.entries:
        sizes[entry.dtype] += entry.numel if entry.name in submodels.parameter_names else 0
    parts = {"parameters": {dtype: slice(size) for dtype, size in sizes.items()}} if any(sizes.values()) else {}
    if sizes != layout.numel:
        parts["buffers"] = {dtype: slice(size, None) for dtype, size in sizes.items()}
    return layout.fingerprint, parts


_ALL = slice(None)


def _norm(buffers: Buffers, before: Buffers | None = None, part: Mapping[torch.dtype, slice] | None = None) -> float:
    """Return the L2 norm of the slices ``part`` (None = all) of flat buffers, or of their difference from ``before``."""
    squares: list[float] = []
    for dtype, buffer in buffers.items():
        where = _ALL if part is None else part[dtype]
        values = buffer if where is _ALL or (where.stop == buffer.numel() and not where.start) else buffer[where]
        if before is None and dtype is torch.float32 and values.numel() <= PIECE:
            squares.append(_square(values))
            continue
        values = reals(values)
        if not values.is_floating_point() or not values.numel():
            continue
        if before is None:
            squares += map(_square, torch.split(values.view(-1), PIECE))
        else:
            squares += (_square(piece - old) for piece, old in chunks(values, reals(before[dtype][where])))
    return math.sqrt(math.fsum(squares))


def _square(piece: Tensor) -> float:
    # dot is the fastest sum of squares; only if it overflows, a second pass uses double precision
    single = piece.float() if piece.dtype.itemsize == 2 else piece
    square = torch.dot(single, single).item()
    return square if math.isfinite(square) else piece.double().square().sum().item()
