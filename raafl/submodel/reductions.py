"""Rules of operations along a dimension: sums, sorting, pixels, look-ups by index; see `operations`."""

from __future__ import annotations

import torch

from raafl.submodel.labels import Dim, Misfit
from raafl.submodel.operations import Call, Dims, pointwise, rule

# ---- along a dimension ----


def _places(call: Call, argument: str = "dim") -> set[int]:
    """Return the dimensions that are reduced; none named = all."""
    ndim, value = call.ins[0].dim(), call.arguments.get(argument)
    if value is None or value == []:
        return set(range(ndim))
    return {i % max(ndim, 1) for i in ([value] if isinstance(value, int) else value)}


def _left(call: Call, places: set[int]) -> list[Dims]:
    keep = bool(call.arguments.get("keepdim"))
    dims = [Dim() if i in places else dim for i, dim in enumerate(call.dims()) if keep or i not in places]
    return [dims] * len(call.outs)


@rule("sum", "nansum", "linalg_vector_norm", "norm", "count_nonzero", "any")
def _sum(call: Call) -> list[Dims]:
    return _left(call, _places(call))  # zeros add nothing


@rule("mean", "var", "std", "var_mean", "std_mean")
def _mean(call: Call) -> list[Dims]:
    for place in _places(call):
        call.labels.span(call.dims()[place], "statistics are taken across it")
    return _left(call, _places(call))


@rule(
    "amax", "amin", "aminmax", "max", "min", "argmax", "argmin", "prod", "logsumexp", "all", "median", "mode",
)  # fmt: skip
def _reduce(call: Call) -> list[Dims]:
    if len(call.ins) == 2:
        return pointwise(call)
    for place in _places(call):
        call.labels.pin(call.dims()[place], f"'{call.name}' goes over all of it")
    return _left(call, _places(call))


@rule(
    "_softmax", "_log_softmax", "_safe_softmax", "softmax", "log_softmax", "cumsum", "cumprod", "logcumsumexp", "cummax",
    "cummin",
)  # fmt: skip
def _along(call: Call) -> list[Dims]:
    dims = call.dims()
    if dims:
        call.labels.pin(dims[call.place()], f"'{call.name.strip('_')}' runs along it")
    return [dims] * len(call.outs)


@rule("flip", "roll")
def _moved(call: Call) -> list[Dims]:
    dims = call.dims()
    for place in _places(call, "dims"):
        call.labels.pin(dims[place], "its places are moved")
    return [dims]


@rule("tril", "triu")
def _triangle(call: Call) -> list[Dims]:
    dims = call.dims()
    for dim in dims[-2:]:
        call.labels.pin(dim, "a triangle of it is taken")
    return [dims]


@rule("sort", "topk", "argsort", "kthvalue")
def _sorted(call: Call) -> list[Dims]:
    place = call.place(default=-1)
    found: list[Dims] = []
    for out in call.outs:
        dims = call.dims()
        call.labels.pin(dims[place], "it is sorted")
        dims[place] = call.labels.new(out.shape[place], "it is sorted")
        found.append(dims)
    return found


@rule("_fft_r2c", "_fft_c2r", "_fft_c2c")
def _transformed(call: Call) -> list[Dims]:
    dims = call.dims()
    for place in _places(call):
        call.labels.pin(dims[place], "it is transformed to frequencies")
        dims[place] = call.labels.new(call.outs[0].shape[place], "it is transformed to frequencies")
    return [dims]


# ---- pixels ----


@rule(*(
    f"{kind}{ndim}d{ending}"
    for ndim in (1, 2, 3)
    for kind in ("max_pool", "avg_pool", "adaptive_avg_pool", "_adaptive_avg_pool", "adaptive_max_pool", "upsample_nearest",
                 "_upsample_nearest_exact", "upsample_linear", "upsample_bilinear", "upsample_bicubic", "upsample_trilinear",
                 "_upsample_bilinear", "_upsample_bicubic", "reflection_pad", "replication_pad")
    for ending in ("", "_with_indices", "_aa")
))  # fmt: skip
def _pool(call: Call) -> list[Dims]:
    pixels = next(n for n in (1, 2, 3) if f"{n}d" in call.name)
    dims = call.dims()
    for dim in dims[-pixels:]:
        call.labels.pin(dim, "they are pixels")
    return [[*dims[:-pixels], *call.new(out.shape[-pixels:], "they are pixels")] for out in call.outs]


@rule("constant_pad_nd")
def _pad(call: Call) -> list[Dims]:
    dims, pad = call.dims(), call["pad"]
    for back in range(len(pad) // 2):
        if pad[2 * back] or pad[2 * back + 1]:
            call.labels.pin(dims[-1 - back], "it is padded")
            dims[-1 - back] = call.labels.new(call.outs[0].shape[-1 - back], "it is padded")
    return [dims]


@rule("unfold")
def _unfold(call: Call) -> list[Dims]:
    dims, place, out = call.dims(), call.place("dimension"), call.outs[0]
    call.labels.pin(dims[place], "windows of it are taken")
    dims[place] = call.labels.new(out.shape[place], "windows of it are taken")
    return [[*dims, call.labels.new(out.shape[-1], "windows of it are taken")]]


# ---- by index: what is looked up by number keeps its numbers ----


@rule("embedding")
def _embedding(call: Call) -> list[Dims]:
    weight = call.dims("weight")
    call.labels.pin(weight[0], "its rows are a vocabulary")
    weight[1].is_made = True
    return [[*call.dims("indices"), weight[1]]]


@rule("_embedding_bag", "_embedding_bag_forward_only")
def _embedding_bag(call: Call) -> list[Dims]:
    weight = call.dims("weight")
    call.labels.pin(weight[0], "its rows are a vocabulary")
    weight[1].is_made = True
    return call.others([call.labels.new(call.outs[0].shape[0], "they are samples"), weight[1]])


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
    dims, places, values = call.dims("self"), _indexed(call), call.dims("values")
    after = dims[max(places, default=-1) + 1 :]
    if len(after) + len(places) != len(dims):
        raise Misfit
    for dim, other in zip(reversed(values), reversed(after), strict=False):
        if dim.size != 1:
            call.labels.unify(dim, other)
    return [dims]


@rule("gather", "scatter", "scatter_add", "scatter_reduce")
def _gather(call: Call) -> list[Dims]:
    dims, place = call.dims("self"), call.place()
    others = [call.dims(name) for name in ("index", "src") if call.has(name)]
    for row in (dims, *others):
        call.labels.pin(row[place], "it is indexed")
    for row in others:
        for i, (dim, other) in enumerate(zip(dims, row, strict=True)):
            if i != place and dim.size == other.size:
                call.labels.unify(dim, other)
            elif i != place:
                call.labels.pin(dim, "it is indexed")
                call.labels.pin(other, "it is indexed")
    return [others[0] if call.name == "gather" else dims]


@rule("index_select", "index_add", "index_copy")
def _index_select(call: Call) -> list[Dims]:
    dims, place = call.dims("self"), call.place()
    call.labels.pin(dims[place], "it is indexed")
    if call.has("source"):
        for i, (dim, other) in enumerate(zip(dims, call.dims("source"), strict=True)):
            if i == place:
                call.labels.pin(other, "it is indexed")
            else:
                call.labels.unify(dim, other)
    else:
        dims[place] = call.labels.new(call.outs[0].shape[place], "it is looked up by an index")
    return [dims]
