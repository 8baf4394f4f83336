"""Move elements between a submodel and the full model: gather, scatter, add, mix."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, product

import torch
from torch import Tensor

from raafl.errors import BadInput
from raafl.submodel.flat import FlatTensors, Layout, TensorEntry
from raafl.submodel.spec import Runs, Spec

MAX_VIEWS = 8
"""A tensor kept in at most this many rectangles is reached through strided views; one in more through index lists."""

MAX_CACHED = 32
"""Plans whose views one `FlatTensors` remembers."""

_Side = list[list[tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int]]]
"""Dtype, size, strides and offset of each view, in lists of one kind."""

Update = Callable[[Tensor, Tensor], object]
ListUpdate = Callable[[list[Tensor], list[Tensor]], object]


@dataclass(frozen=True, slots=True)
class _Views:
    """Block of elements that is one strided view in the whole model's storage, and one in the submodel's."""

    dtype: torch.dtype
    size: tuple[int, ...]
    full: tuple[tuple[int, ...], int]
    small: tuple[tuple[int, ...], int]

    @property
    def is_flat(self) -> bool:
        """Whether the elements are contiguous in both storages."""
        return self.full[0] == self.small[0] == (1,)

    @property
    def end(self) -> tuple[torch.dtype, int, int]:
        """Return the dtype, and the offsets after the last element in the whole model's storage and in the submodel's."""
        return self.dtype, self.full[1] + self.size[0], self.small[1] + self.size[0]


class _Indexed:
    """Elements of one tensor that a submodel keeps, with index lists for dimensions in which they are no single range."""

    def __init__(self, full: TensorEntry, small: TensorEntry, selection: Mapping[int, Runs]) -> None:
        self.full, self.small = full, small
        self.narrow = {dim: runs[0] for dim, runs in selection.items() if len(runs) == 1}
        several = {dim: runs for dim, runs in selection.items() if len(runs) > 1}
        self.indices = {dim: torch.tensor([i for run in runs for i in range(*run)]) for dim, runs in several.items()}

    def region(self, full: FlatTensors) -> Tensor:
        """Return a view of the whole model's tensor, narrowed in dimensions with a single kept range."""
        view = full.view(self.full)
        for dim, (start, stop) in self.narrow.items():
            view = view.narrow(dim, start, stop - start)
        return view

    def pick(self, region: Tensor) -> Tensor:
        """Return a copy of the kept elements of ``region``, a view that `region` has returned."""
        for dim in self.indices:
            region = region.index_select(dim, self.index(dim, region.device))
        return region

    def put(self, region: Tensor, values: Tensor, dims: tuple[int, ...] | None = None) -> None:
        """Write ``values``, which have the submodel's shape, into the kept elements of ``region``, one dimension per recursion."""
        dim, *rest = dims if dims is not None else tuple(self.indices)
        index = self.index(dim, region.device)
        if rest:
            slices = region.index_select(dim, index)
            self.put(slices, values, tuple(rest))
            values = slices
        region.index_copy_(dim, index, values)

    def index(self, dim: int, device: torch.device) -> Tensor:
        """Return the kept indices of a dimension as a tensor on ``device``, cached there."""
        index = self.indices[dim]
        if index.device != device:
            index = self.indices[dim] = index.to(device)
        return index


class CopyPlan:
    """Plan that copies a submodel's tensors between the whole model's storage and the submodel's own.

    Contiguous ranges are copied through views, a whole model by one copy per dtype. Elements at other indices are
    gathered, changed and written back. A plan is immutable, except for its caches.

    `spec`: spec of the submodel.
    `full_layout`: layout of the whole model's tensors.
    `layout`: layout of the submodel's tensors.
    """

    def __init__(
        self, spec: Spec, full_layout: Layout, layout: Layout, selections: Mapping[str, Mapping[int, Runs]]
    ) -> None:
        """Compute which elements to copy; ``selections`` are the kept index ranges by tensor and dimension."""
        self.spec, self.full_layout, self.layout = spec, full_layout, layout
        self._views: list[_Views] = []
        self._indexed: list[_Indexed] = []
        for small in layout.entries:
            full = full_layout.by_name[small.name]
            selection = selections.get(small.name, {})
            if math.prod(len(runs) for runs in selection.values()) > MAX_VIEWS:
                self._indexed.append(_Indexed(full, small, selection))
            else:
                self._add_rectangles(full, small, selection)
        self._views = _repeated(self._views)
        # On a GPU one kernel copies a whole list of contiguous views of one dtype; in a mixed list each view takes a
        # kernel.
        lists = [list(views) for _, views in groupby(sorted(self._views, key=_kind), _kind)]
        self._full_side = [[(view.dtype, view.size, *view.full) for view in views] for views in lists]
        self._small_side = [[(view.dtype, view.size, *view.small) for view in views] for views in lists]

    def _add_rectangles(self, full: TensorEntry, small: TensorEntry, selection: Mapping[int, Runs]) -> None:
        whole = [(0, size) for size in full.shape]
        choices = [selection.get(dim, [whole[dim]]) for dim in range(len(full.shape))]
        starts = [_starts(runs) for runs in choices]
        for places in product(*(range(len(runs)) for runs in choices)):
            chosen = [choices[dim][place] for dim, place in enumerate(places)]
            size = tuple(stop - start for start, stop in chosen)
            if math.prod(size) == 0:
                continue
            full_at = full.offset + sum(s * run[0] for s, run in zip(full.stride, chosen, strict=True))
            small_at = small.offset + sum(
                s * starts[dim][place] for dim, (s, place) in enumerate(zip(small.stride, places, strict=True))
            )
            self._join(_flattened(_Views(full.dtype, size, (full.stride, full_at), (small.stride, small_at))))

    def _join(self, piece: _Views) -> None:
        last = self._views[-1] if self._views else None
        follows = last is not None and last.is_flat and last.end == (piece.dtype, piece.full[1], piece.small[1])
        if last is not None and follows and piece.is_flat:
            self._views[-1] = _Views(last.dtype, (last.size[0] + piece.size[0],), last.full, last.small)
        else:
            self._views.append(piece)

    def _cached(self, flat: FlatTensors, side: _Side) -> list[list[Tensor]]:
        key = (id(side), self)
        views = flat.views.get(key)
        if views is None:
            if len(flat.views) >= MAX_CACHED:
                flat.views.clear()
            start = {dtype: buffer.storage_offset() for dtype, buffer in flat.buffers.items()}
            views = [
                [flat.buffers[d].as_strided(size, stride, start[d] + at) for d, size, stride, at in each]
                for each in side
            ]
            flat.views[key] = views
        return views

    def _check(self, full: FlatTensors, small: FlatTensors | None = None) -> None:
        for given, wanted, what in ((full, self.full_layout, "full"), (small, self.layout, "small")):
            if given is not None and given.layout is not wanted and given.layout.fingerprint != wanted.fingerprint:
                raise BadInput(
                    f"the {what} tensors have another layout than this plan: make both from the same Submodels, "
                    "spec and part"
                )

    def _pairs(self, full: FlatTensors, small: FlatTensors) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
        """Yield pairs of lists of views: elements of the whole model, and the same elements in the submodel."""
        self._check(full, small)
        return zip(self._cached(full, self._full_side), self._cached(small, self._small_side), strict=True)

    def apply_(self, full: FlatTensors, small: FlatTensors, fn: Update, lists: ListUpdate | None = None) -> None:
        """Call ``fn(target, source)`` on each block of elements of the whole model and the same block of the submodel.

        `lists`: function that does the same to lists of blocks, which is faster for several; None = ``fn`` for each.
        """
        for targets, sources in self._pairs(full, small):
            _call(fn, lists, targets, sources)
        for piece in self._indexed:
            region = piece.region(full)
            target = piece.pick(region)
            fn(target, small.view(piece.small))
            piece.put(region, target)

    def gather(self, full: FlatTensors, out: FlatTensors | None = None) -> FlatTensors:
        """Copy the submodel's values out of the whole model, and return them.

        `out`: storage for the result; None = new storage on the same device.
        """
        if out is None:
            out = FlatTensors.empty(self.layout, full.device)
        for sources, targets in self._pairs(full, out):
            _call(Tensor.copy_, torch._foreach_copy_, targets, sources)
        for piece in self._indexed:
            out.view(piece.small).copy_(piece.pick(piece.region(full)))
        return out

    def scatter_(self, full: FlatTensors, small: FlatTensors) -> None:
        """Write the submodel's values into the whole model, in place; all other values stay unchanged."""
        for targets, sources in self._pairs(full, small):
            _call(Tensor.copy_, torch._foreach_copy_, targets, sources)
        for piece in self._indexed:
            piece.put(piece.region(full), small.view(piece.small).to(full.device))

    def add_(self, full: FlatTensors, small: FlatTensors, alpha: float = 1.0) -> None:
        """Add ``alpha * small`` to the whole model, in place."""
        one, several = partial(Tensor.add_, alpha=alpha), partial(torch._foreach_add_, alpha=alpha)
        self.apply_(full, small, one, several)

    def lerp_(self, full: FlatTensors, small: FlatTensors, weight: float) -> None:
        """Move the whole model's values, in place, part of the way to the submodel's values."""
        one, several = partial(Tensor.lerp_, weight=weight), partial(torch._foreach_lerp_, weight=weight)
        self.apply_(full, small, one, several)

    def cover_(self, count: FlatTensors, weight: float = 1.0) -> None:
        """Add ``weight`` to every element that the submodel has, to count how often elements are trained."""
        self._check(count)
        for targets in self._cached(count, self._full_side):
            _call(lambda one: one.add_(weight), lambda several: torch._foreach_add_(several, weight), targets)
        for piece in self._indexed:
            region = piece.region(count)
            piece.put(region, piece.pick(region).add_(weight))


def _call(fn: Callable[..., object], lists: Callable[..., object] | None, *views: list[Tensor]) -> None:
    """Call the foreach function ``lists`` once on all views, or ``fn`` on each if there is only one view or no ``lists``."""
    if lists is not None and len(views[0]) > 1:
        lists(*views)
        return
    for each in zip(*views, strict=True):
        fn(*each)


def _repeated(views: list[_Views]) -> list[_Views]:
    """Join views that recur at equal distances, as in the blocks of a transformer, to copy them by one kernel."""
    joined = [view for view in views if view.is_flat]
    alike: defaultdict[tuple[object, ...], list[_Views]] = defaultdict(list)
    for view in views:
        if not view.is_flat:
            alike[view.dtype, view.size, view.full[0], view.small[0]].append(view)
    for some in alike.values():
        run: list[_Views] = []
        for view in sorted(some, key=lambda one: one.full[1]):
            if run and not _goes_on(run, view):
                joined.append(_with_repeats(run))
                run = []
            run.append(view)
        joined.append(_with_repeats(run))
    return joined


def _goes_on(run: Sequence[_Views], view: _Views) -> bool:
    distance = _distance(run[-1], view)
    # distances must be positive: tensors may have another order in the submodel than in the whole model
    return distance == _distance(run[0], run[1]) if len(run) > 1 else min(distance) > 0


def _distance(one: _Views, other: _Views) -> tuple[int, int]:
    return other.full[1] - one.full[1], other.small[1] - one.small[1]


def _with_repeats(run: list[_Views]) -> _Views:
    first = run[0]
    if len(run) == 1:
        return first
    full, small = _distance(first, run[1])
    size = len(run), *first.size
    return _Views(
        first.dtype, size, ((full, *first.full[0]), first.full[1]), ((small, *first.small[0]), first.small[1])
    )


def _kind(view: _Views) -> tuple[bool, str]:
    return not view.is_flat, str(view.dtype)


def _starts(runs: Runs) -> list[int]:
    starts = [0]
    for start, stop in runs[:-1]:
        starts.append(starts[-1] + stop - start)
    return starts


def _flattened(piece: _Views) -> _Views:
    """Return the elements as a view of one dimension if they are contiguous in both storages, else unchanged."""
    step = 1
    for size, full, small in zip(reversed(piece.size), reversed(piece.full[0]), reversed(piece.small[0]), strict=True):
        if size != 1 and not full == small == step:
            return piece
        step *= size
    return _Views(piece.dtype, (step,), ((1,), piece.full[1]), ((1,), piece.small[1]))
