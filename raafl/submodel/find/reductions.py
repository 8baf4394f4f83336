"""Define rules of operations along some dimensions, as a table, and of look-ups by index; see `operations`."""

from __future__ import annotations

from typing import NamedTuple

import torch

from raafl.submodel.find.labels import Dim, ShapeConflict
from raafl.submodel.find.operations import Call, Dims, pointwise, rule

# ---- along dimensions ----


class _Along(NamedTuple):
    """Rule for an operation that reduces or scans some dimensions of its input, such as a sum or a softmax."""

    where: str | int  # name of the argument that lists these dimensions; or a number n, for the last n dimensions
    then: str  # effect on these dimensions in the output: "stay", "gone", or "new" with other indices
    why: str  # reason for which these dimensions cannot shrink; "" = they can, since zeros add nothing to a sum
    # whether they can shrink, although this changes the results of the remaining indices, as in a norm
    is_span: bool = False

    def __call__(self, call: Call) -> list[Dims]:
        """Follow the operation."""
        if call.name in ("max", "min") and len(call.ins) == 2:
            return pointwise(call)
        places = self.places(call)
        for place in places if self.why else ():
            (call.labels.span if self.is_span else call.labels.pin)(call.dims()[place], self.why.format(call.name))
        for place in () if self.why else places:  # a sum, to which zeros add nothing
            call.labels.mark(call.dims()[place], "read")
        return [self._left(call, out, places) for out in call.outs]

    def places(self, call: Call) -> set[int]:
        """Return the indices of the dimensions that the operation reduces or scans; all of them if it names none."""
        ndim = call.ins[0].dim()
        if isinstance(self.where, int):
            return set(range(ndim - self.where, ndim))
        value = call.arguments.get(self.where)
        if value is None or value == []:
            return set(range(ndim))
        return {i % max(ndim, 1) for i in ([value] if isinstance(value, int) else value)}

    def _left(self, call: Call, out: torch.Tensor, places: set[int]) -> Dims:
        if self.then == "stay":
            return call.dims()
        if self.then == "new":
            return [call.labels.new(out.shape[i], self.why) if i in places else d for i, d in enumerate(call.dims())]
        keep = bool(call.arguments.get("keepdim"))
        return [Dim() if i in places else d for i, d in enumerate(call.dims()) if keep or i not in places]


ALONG = {
    "sum nansum linalg_vector_norm norm count_nonzero any": _Along("dim", "gone", ""),
    "mean var std var_mean std_mean": _Along("dim", "gone", "statistics are taken across it", is_span=True),
    "amax amin aminmax max min argmax argmin prod logsumexp all median mode": _Along(
        "dim", "gone", "'{}' goes over all of it"
    ),
    "select unbind": _Along("dim", "gone", "one place of it is taken"),
    "_softmax _log_softmax _safe_softmax": _Along("dim", "stay", "a softmax runs along it"),
    "cumsum cumprod logcumsumexp cummax cummin": _Along("dim", "stay", "'{}' runs along it"),
    "flip roll": _Along("dims", "stay", "its places are moved"),
    "tril triu": _Along(2, "stay", "a triangle of it is taken"),
    "sort topk kthvalue": _Along("dim", "new", "it is sorted"),
    "_fft_r2c _fft_c2r _fft_c2c": _Along("dim", "new", "it is transformed to frequencies"),
    "avg_pool1d adaptive_avg_pool1d reflection_pad1d replication_pad1d upsample_nearest1d _upsample_nearest_exact1d "
    "upsample_linear1d": _Along(1, "new", "they are pixels"),
    "max_pool2d_with_indices avg_pool2d _adaptive_avg_pool2d adaptive_max_pool2d reflection_pad2d replication_pad2d "
    "upsample_nearest2d _upsample_nearest_exact2d upsample_bilinear2d upsample_bicubic2d _upsample_bilinear2d_aa "
    "_upsample_bicubic2d_aa": _Along(2, "new", "they are pixels"),
    "max_pool3d_with_indices avg_pool3d _adaptive_avg_pool3d adaptive_max_pool3d reflection_pad3d replication_pad3d "
    "upsample_nearest3d _upsample_nearest_exact3d upsample_trilinear3d": _Along(3, "new", "they are pixels"),
}
for _names, _along in ALONG.items():
    rule(*_names.split())(_along.__call__)


@rule("slice")
def _slice(call: Call) -> list[Dims]:
    dims, place, step = call.dims(), call.place(), call["step"] or 1
    taken = range(*slice(call["start"], call["end"], step).indices(dims[place].size))
    if step == 1:
        dims[place] = call.labels.take(dims[place], taken.start, len(taken))
    elif dims[place].size == len(taken) * step:  # the same one of each pair, as of rotated features
        dims[place], each = call.labels.regroup([dims[place]], [len(taken), step])
        call.labels.pin(each, "a slice takes every other one")
    else:
        return _Along("dim", "new", "a slice takes every other one")(call)
    return [dims]


# ---- by index: what is looked up by number keeps its numbers ----


@rule("embedding", "_embedding_bag", "_embedding_bag_forward_only")
def _embedding(call: Call) -> list[Dims]:
    weight, out = call.dims("weight"), call.outs[0]
    call.labels.pin(weight[0], "its rows are a vocabulary")
    weight[1].is_made = True
    rows = call.dims("indices") if call.name == "embedding" else call.new(out.shape[:-1], "they are samples")
    return call.others([*rows, weight[1]])


def _indexed(call: Call) -> list[int]:
    """Pin the dimensions that are indexed, and return them."""
    place = 0
    found: list[int] = []
    for index in call["indices"]:
        wide = 1 if index is None or index.dtype not in (torch.bool, torch.uint8) else index.dim()
        if index is not None:
            found += range(place, place + wide)
            for dim in call.dims_of(index):
                call.labels.pin(dim, "it is an index")
        place += wide
    for i in found:
        call.labels.pin(call.dims("self")[i], "it is indexed")
    return found


@rule("index")
def _index(call: Call) -> list[Dims]:
    dims, places, out = call.dims("self"), _indexed(call), call.outs[0]
    rest = [dim for i, dim in enumerate(dims) if i not in places]
    together = places == list(range(places[0], places[0] + len(places)))
    at = places[0] if together else 0  # else what is looked up comes first
    looked_up = call.new(out.shape[at : at + out.dim() - len(rest)], "it is looked up by an index")
    return [[*rest[:at], *looked_up, *rest[at:]]]


@rule("index_put", "_index_put_impl")
def _index_put(call: Call) -> list[Dims]:
    dims, places = call.dims("self"), _indexed(call)
    after = dims[max(places, default=-1) + 1 :]
    if len(after) + len(places) != len(dims):
        raise ShapeConflict
    call.unify_last(call.dims("values"), after)
    return [dims]


@rule("gather", "scatter", "scatter_add", "scatter_reduce", "index_select", "index_add", "index_copy")
def _gather(call: Call) -> list[Dims]:
    dims, place = call.dims("self"), call.place()
    by_row = call.name.startswith("index_")  # the index itself has one dimension
    others = [call.dims(name) for name in ("index", "src", "source") if call.has(name)][by_row:]
    for i, dim in enumerate(dims):
        for other in (row[i] for row in others):
            if i != place and dim.size == other.size:
                call.labels.unify(dim, other)
            else:
                call.labels.pin(dim, "it is indexed")
                call.labels.pin(other, "it is indexed")
    call.labels.pin(dims[place], "it is indexed")
    if call.name == "index_select":
        dims[place] = call.labels.new(call.outs[0].shape[place], "it is looked up by an index")
    return [others[0] if call.name == "gather" else dims]
