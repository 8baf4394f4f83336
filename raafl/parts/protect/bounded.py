"""Refuse updates that are finite yet would ruin the model: huge norms, and merges that overflow. Wraps every merge.

Sums, squares and products of a merge overflow far below the largest number that an update may hold, so that one client could turn
the global model into NaN. Which merges overflow depends on the method, so it is tried rather than predicted: an update that is
large enough is merged, the result checked, and the state restored. No honest update of a sane model is that large.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]  # torch names it in no __all__

from raafl.core import rollback
from raafl.core.algorithm import Algorithm
from raafl.core.state import GlobalState
from raafl.core.types import HUGE_NORM, Update
from raafl.parts.merge.mean import chunks
from raafl.parts.merge.wrapped import Wrapped
from raafl.submodel import FULL, Spec, Submodels
from raafl.submodel.flat import reals

MEMORY = "bounded"
"""Key in `GlobalState.memory`."""

WARM_UP = 8
"""Accepted norms of a layout before its median counts."""

WINDOW = 101
"""Accepted norms of a layout that the median is taken of."""

EVERY = 16
"""Of values that are clearly within bounds, one in so many is measured for the median; versions between norms of the model."""

SAFE, SAFE_HALF = 1e15, 100.0
"""Norm up to which no sum, square or product of a merge overflows, and magnitude for half precision (float16).

1e15 in float32 leaves room for 1e8 squares of it, or for a sum of 1e9 updates that weigh 1e14 each.
"""

PIECE = 1 << 20
"""Elements whose squares are summed in their own precision, before they are added up in double."""

HEADROOM = 16.0
"""Factor by which a large update is tried, so that those which are merged beside it cannot make it overflow."""


Buffers = Mapping[torch.dtype, Tensor]
"""Flat buffers by dtype, as `FlatTensors` has them."""


def bounded(algorithm: Algorithm, max_norm_ratio: float | None) -> Algorithm:
    """Return ``algorithm`` with a merge that leaves finite numbers, whatever clients send; see `Bounded`."""
    return replace(algorithm, merge=Bounded(algorithm.merge, max_norm_ratio))


@dataclass(frozen=True)
class Bounded(Wrapped):
    """Refuses an update that is far too large, or whose merge would overflow; the outermost wrapper.

    Norms: of an update's parameters and of its running statistics (as differences, see `raafl.parts.protect.robust`), of each
    bundle, and of the numbers that stand for tensors, each compared with updates of the same layout. "Far too large" means above
    ``max_norm_ratio`` times the largest median that the last `WINDOW` accepted ones have ever had: norms shrink as training
    converges, and a late client with other data must not be refused for that. Until `WARM_UP` are accepted, parameters and numbers
    are compared with the model's norm (at least 1, unless it is 0).

    Overflow: an update above `SAFE` is merged with all that waits, at `HEADROOM` times its size, the result is checked, and the
    merge is undone. The same is done, at its own size, with each update that arrives while such a one waits: the merge that
    follows then computes the same, and is finite.

    Attributes:
        max_norm_ratio: multiple of the median; None = norms are not bounded.
    """

    max_norm_ratio: float | None

    def reject_reason(self, state: GlobalState, update: Update, spec: Spec, staleness: int) -> str | None:
        """Return the inner merge's reason, or `HUGE_NORM`."""
        found = super().reject_reason(state, update, spec, staleness)
        if found is not None:
            return found
        norms, is_large = self._measure(state, update, spec)
        self._memory(state)["measured"] = [update.assignment, norms, is_large]
        most = self._most(state, spec, norms)
        return HUGE_NORM if any(norm > most.get(name, math.inf) for name, norm in norms.items()) else None

    def overflows(self, state: GlobalState, update: Update, spec: Spec, staleness: int) -> bool:
        """Try to merge a large update, or one that arrives beside it, with all that waits: at once, and after `detach`."""
        _, is_large = self._measured(state, update, spec)
        if not is_large and not self._memory(state).get("large"):
            return False
        return not all(self._is_sound(state, update, spec, staleness, is_large, keep) for keep in (False, True))

    def receive(self, state: GlobalState, update: Update, spec: Spec, staleness: int) -> None:
        """Record the norms, and pass the update on."""
        memory = self._memory(state)
        norms, is_large = self._measured(state, update, spec)
        del memory["measured"]
        if self.max_norm_ratio is not None:
            _remember(self._accepted(state, spec), norms)
        if is_large:
            memory["large"] = True
        super().receive(state, update, spec, staleness)

    def apply(self, state: GlobalState) -> None:
        """Apply the inner merge, whose result is known to be finite."""
        self._memory(state).pop("large", None)
        super().apply(state)

    def _is_sound(
        self, state: GlobalState, update: Update, spec: Spec, staleness: int, is_large: bool, keep: bool
    ) -> bool:
        """Merge a copy of the update as it would be merged, check what is left, and undo it."""
        saved = rollback.copied(state, MEMORY)
        bundles = {name: bundle.clone() for name, bundle in update.bundles.items()}
        tried = replace(update, tensors=update.tensors.clone(), bundles=bundles)
        for flat in (tried.tensors, *bundles.values()) if is_large else ():
            for dtype, buffer in flat.buffers.items():
                if dtype != torch.float16:  # sums of it are taken in float32, where they have the room
                    buffer.mul_(HEADROOM)
        try:
            with state.clients.recording(saved["clients"]):
                super().receive(state, tried, spec, staleness)
                if keep:
                    super().detach(state)
                super().apply(state)
            return rollback.is_sound(state, saved, MEMORY)
        except (ArithmeticError, LinAlgError):
            return False
        finally:
            rollback.restore(state, saved, MEMORY)

    # ---- norms ----

    def _measured(self, state: GlobalState, update: Update, spec: Spec) -> tuple[dict[str, float], bool]:
        """Return the norms of an update and whether it is large, measured once."""
        memory = self._memory(state)
        if memory.get("measured", [None])[0] != update.assignment:
            memory["measured"] = [update.assignment, *self._measure(state, update, spec)]
        _, norms, is_large = memory["measured"]
        return norms, is_large

    def _measure(self, state: GlobalState, update: Update, spec: Spec) -> tuple[dict[str, float], bool]:
        """Return the norms by which an update is judged, and whether it is large.

        Of values the difference is worked out for one in `EVERY`, and where their norm and the model's do not show that it is
        within bounds: to read both costs two more passes over memory.
        """
        buffers, parts = update.tensors.buffers, _parts(state, spec)
        norms = {name: _norm(flat.buffers) for name, flat in update.bundles.items()}
        if numbers := self.numbers(update):
            norms["numbers"] = math.hypot(*numbers)
        norms |= {name: _norm(buffers, None, part) for name, part in parts.items()}
        is_large = any(norm > SAFE for norm in norms.values()) or _is_near_half(state, update)
        if self.max_norm_ratio is None or self.sends == "delta":
            return norms, is_large
        most, model = self._most(state, spec, parts), self._norm_of_model(state)
        # twice: the model may have grown since
        are_within = all(norms[name] + 2 * model <= most.get(name, 0.0) for name in parts)
        if are_within and self._accepted(state, spec)["num"] % EVERY:
            return {name: norm for name, norm in norms.items() if name not in parts}, is_large
        before = _before(state, spec)
        return norms | {name: _norm(buffers, before, part) for name, part in parts.items()}, is_large

    def _most(self, state: GlobalState, spec: Spec, names: Iterable[str]) -> dict[str, float]:
        """Return the norms above which updates of ``spec`` are refused, of what ``names`` names."""
        if self.max_norm_ratio is None:
            return {}
        known = self._accepted(state, spec)["of"]
        most = {name: one["median"] for name, one in known.items() if len(one["recent"]) >= WARM_UP}
        for name in {"parameters", "numbers"}.intersection(names) - most.keys():
            norm = self._norm_of_model(state)
            most[name] = max(norm, 1.0) if norm else 0.0
        return {name: self.max_norm_ratio * norm for name, norm in most.items() if norm > 0}

    def _norm_of_model(self, state: GlobalState) -> float:
        """Return the norm of all that trains of the global model, as it was at most `EVERY` versions ago."""
        memory = self._memory(state)
        if "model" not in memory or state.version >= memory["model"][0] + EVERY:
            memory["model"] = [state.version, _norm(_before(state, FULL))]
        return float(memory["model"][1])

    def _accepted(self, state: GlobalState, spec: Spec) -> dict[str, Any]:
        """Look up how many updates of the layout of ``spec`` were accepted, "num", and the norms "of" each part of them."""
        layout = state.submodels.layout(spec, "trained")
        accepted: dict[str, Any] = self._memory(state)["norms"].setdefault(layout.fingerprint, {"num": 0, "of": {}})
        return accepted

    def _memory(self, state: GlobalState) -> dict[str, Any]:
        memory: dict[str, Any] = state.memory.setdefault(MEMORY, {"norms": {}})
        return memory


def _remember(accepted: dict[str, Any], norms: dict[str, float]) -> None:
    """Remember the norms of an accepted update, and the largest median so far."""
    accepted["num"] += 1
    for name, norm in norms.items():
        one = accepted["of"].setdefault(name, {"recent": [], "median": 0.0})
        one["recent"] = [*one["recent"], norm][-WINDOW:]
        if len(one["recent"]) >= WARM_UP:
            one["median"] = max(one["median"], statistics.median(one["recent"]))


def _is_near_half(state: GlobalState, update: Update) -> bool:
    """Check for half precision above `SAFE_HALF`, also in the model: small steps from a large value overflow, too."""
    flats = (state.values, update.tensors, *update.bundles.values())
    buffers = [flat.buffers[torch.float16] for flat in flats if torch.float16 in flat.buffers]
    return any(bool((buffer.abs() > SAFE_HALF).any()) for buffer in buffers)


def _before(state: GlobalState, spec: Spec) -> Buffers:
    """Return the global values of what ``spec`` trains; of the whole model without a copy."""
    if spec.is_full:
        sizes = state.submodels.layout(part="trained").numel
        return {dtype: state.values.buffers[dtype][:size] for dtype, size in sizes.items()}
    return state.submodels.plan(spec).gather(state.values).buffers


def _parts(state: GlobalState, spec: Spec) -> dict[str, dict[torch.dtype, slice]]:
    """Return the slices of each buffer that hold the parameters of ``spec``, and the running statistics behind them."""
    return state.submodels.cached("parts", spec, lambda: _find_parts(state.submodels, spec))


def _find_parts(submodels: Submodels, spec: Spec) -> dict[str, dict[torch.dtype, slice]]:
    layout = submodels.layout(spec, "trained")
    sizes = dict.fromkeys(layout.dtypes, 0)
    for entry in layout.entries:
        sizes[entry.dtype] += entry.numel if entry.name in submodels.parameter_names else 0
    parts = {"parameters": {dtype: slice(size) for dtype, size in sizes.items()}} if any(sizes.values()) else {}
    if sizes != layout.numel:
        parts["buffers"] = {dtype: slice(size, None) for dtype, size in sizes.items()}
    return parts


def _norm(buffers: Buffers, before: Buffers | None = None, part: Mapping[torch.dtype, slice] | None = None) -> float:
    """Return the L2 norm of flat buffers, or of their difference from ``before``, over a part of each.

    One pass: the difference of a piece stays in the cache. A piece whose square overflows is squared in double precision.
    """
    squares: list[float] = []
    for dtype, buffer in buffers.items():
        where = slice(None) if part is None else part[dtype]
        mine = reals(buffer[where])
        if not mine.is_floating_point() or not mine.numel():
            continue
        if before is None:
            flat = mine.flatten()
            squares += map(_square, torch.split(flat, PIECE) if flat.numel() > PIECE else (flat,))
        else:
            squares += (_square(one - other) for one, other in chunks(mine, reals(before[dtype][where])))
    return math.sqrt(math.fsum(squares))


def _square(piece: Tensor) -> float:
    single = piece.float() if piece.dtype.itemsize == 2 else piece
    square = torch.dot(single, single).item()
    return square if math.isfinite(square) else piece.double().square().sum().item()
