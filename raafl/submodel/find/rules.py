"""Define the rules of torch's operations: layers, attention, convolutions and norms; along some dimensions; over windows."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from raafl.submodel.find.labels import Dim, ShapeConflict
from raafl.submodel.find.operations import Call, Dims, pointwise, rule

DIVIDED = "scores are divided by the root of its size"
_GROUP = "the channels of a group only go together"

# ---- products: both operands share the dimension that is summed over ----


def _reads(call: Call, one: Dim, weight: Dim, *makes: Dim) -> None:
    """Record a product that sums over dimension ``one`` of its input and ``weight`` of its weight, so both are one axis.

    `makes`: dimensions of the result that the product makes.
    """
    call.labels.unify(one, weight)
    one.is_read = weight.is_read = True
    call.labels.mark(weight, "read")
    for dim in makes:
        dim.is_made = True


@rule("mm", "bmm", "mv", "dot", "vdot", "addmm", "baddbmm", "addmv")
def _product(call: Call) -> list[Dims]:
    """Label the result of ``left @ right``, for matrices or batches of them."""
    left, right = call.dims(-2), call.dims(-1)
    inner, last = right[-2 if len(right) > 1 else -1], right[-1:] if len(right) > 1 else []
    _reads(call, left[-1], inner, *left[-2:-1], *last)
    if len(left) == 3:
        call.labels.unify(left[0], right[0])
        call.labels.mark(left[0], "batch")
        call.labels.mark(inner, "scored")
    found = [*left[:-1], *last]
    call.unify_last(call.dims(0) if len(call.ins) == 3 else [], found)
    return [found]


@rule("linear")
def _linear(call: Call) -> list[Dims]:
    x, weight = call.dims("input"), call.dims("weight")
    _reads(call, x[-1], weight[1], weight[0])
    call.unify_named(weight[0], "bias")
    return [[*x[:-1], weight[0]]]


@rule("_grouped_mm")
def _grouped_mm(call: Call) -> list[Dims]:
    left, right = call.dims(0), call.dims(1)
    _reads(call, left[-1], right[-2], right[-1])
    for dim in right[:-2]:
        call.labels.pin(dim, "they are experts, of which a router chooses")
    for dim in (right[-2], right[-1]):
        if dim.size % 8 == 0:  # torch's kernel needs rows of a multiple of 16 bytes
            call.labels.pin(call.labels.regroup([dim], [dim.size // 8, 8])[1], "torch multiplies by experts in eights")
    return [[left[0], right[-1]]]


@rule("convolution", "_convolution", "mkldnn_convolution", "convolution_overrideable")
def _convolution(call: Call) -> list[Dims]:
    x, weight, groups, out = call.dims("input"), call.dims("weight"), call["groups"], call.outs[0]
    pixels = call.new(out.shape[2:], "they are pixels")
    for i, (dim, width) in enumerate(zip(x[2:], weight[2:], strict=True)):
        if (width.size, *(call[name][i % len(call[name])] for name in ("stride", "padding"))) == (1, 1, 0):
            pixels[i] = dim  # a 1 x 1 kernel without padding leaves pixels their label
        else:
            call.labels.pin(dim, "they are pixels")
            call.labels.pin(width, "they are pixels")
    # Each of the ``groups`` parallel convolutions reads its own channels and makes its own. The weight's shape is
    # (out, in / groups, ...), or (in, out / groups, ...) if the convolution is transposed: its first dimension has all
    # channels of one side, its second those of one group of the other side.
    group = call.labels.new(groups)
    every, part = weight[0], Dim([*group.atoms, *weight[1].atoms]) if groups > 1 else weight[1]
    if groups > 1:
        call.labels.unify(every, Dim([*group.atoms, *call.labels.new(every.size // groups, _GROUP).atoms]))
    inputs, outputs = (every, part) if call["transposed"] else (part, every)
    weight[not call["transposed"]].is_read = weight[call["transposed"]].is_made = True
    call.labels.unify(x[1], inputs)
    call.labels.mark(inputs, "read")
    call.unify_named(outputs, "bias")
    return [[x[0], outputs, *pixels]]


@rule(
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)
def _attention(call: Call) -> list[Dims]:
    q, k, v = call.dims("query"), call.dims("key"), call.dims("value")
    repeats = q[1].size // k[1].size  # number of adjacent query heads that share a key and value head
    call.labels.unify(q[1], Dim([*k[1].atoms, *call.labels.new(repeats).atoms]))
    for one, other in ((q[0], k[0]), (k[0], v[0]), (k[1], v[1]), (k[2], v[2]), (q[3], k[3])):
        call.labels.unify(one, other)
    call.labels.mark(q[1], "batch")
    call.labels.mark(q[3], "scored")
    call.labels.pin(k[2], "a softmax runs along it")
    if call.arguments.get("scale") is None:
        call.labels.pin(q[3], DIVIDED)
    mask = next((name for name in ("attn_mask", "attn_bias") if call.has(name)), None)
    call.unify_last(call.dims(mask) if mask else [], [q[0], q[1], q[2], k[2]])
    return call.others([q[0], q[1], q[2], v[3]])


# ---- norms ----


@rule("native_layer_norm", "_fused_rms_norm")
def _layer_norm(call: Call) -> list[Dims]:
    x, last = call.dims("input"), len(call["normalized_shape"])
    for dim in x[-last:]:
        call.labels.span(dim, "a norm takes statistics across it")
    for name in ("weight", "bias"):
        call.unify_last(call.dims(name) if call.has(name) else [], x)
    return call.others(x)


@rule("native_group_norm")
def _group_norm(call: Call) -> list[Dims]:
    x, groups = call.dims("input"), call["group"]
    inner = call.labels.new(x[1].size // groups, "its channels are one norm group")
    call.labels.unify(x[1], Dim([*call.labels.new(groups).atoms, *inner.atoms]))
    call.unify_named(x[1], "weight", "bias")
    return call.others(x)


@rule(
    "native_batch_norm",
    "_native_batch_norm_legit",
    "_native_batch_norm_legit_no_training",
    "_batch_norm_with_update",
    "_batch_norm_no_update",
    "cudnn_batch_norm",
)
def _batch_norm(call: Call) -> list[Dims]:
    x = call.dims("input")
    call.unify_named(x[1], "weight", "bias", "running_mean", "running_var")
    for dim in (x[0], *x[2:]):  # of an activation: samples and pixels; of a weight that is standardised: inputs
        call.labels.span(dim, "a norm takes statistics across it")
    return call.others(x)


@rule("_weight_norm_interface")
def _weight_norm(call: Call) -> list[Dims]:
    v, g, place = call.dims("v"), call.dims("g"), call["dim"]
    call.labels.unify(v[place], next((dim for dim in g if dim.size != 1), Dim()))
    return call.others(v)


@rule("_trilinear")
def _trilinear(call: Call) -> list[Dims]:
    """Label a product of three broadcast tensors that is summed over some dimensions."""
    rows, summed = [call.dims(name) for name in ("i1", "i2", "i3")], call["sumdim"]
    for row, name in zip(rows, ("expand1", "expand2", "expand3"), strict=True):
        for place in sorted(call[name]):
            row.insert(place, Dim())
    found: list[Dim] = []
    for place, column in enumerate(zip(*rows, strict=True)):
        first, *others = [dim for dim in column if dim.size != 1] or [Dim()]
        for dim in others:
            call.labels.unify(first, dim)
        if place in summed:
            call.labels.mark(first, "read")
        else:
            found.append(first)
        for dim in (first, *others):
            dim.is_read, dim.is_made = place in summed, place not in summed
    return [found]


@rule("linalg_solve_triangular")
def _solve(call: Call) -> list[Dims]:
    one, other = call.dims(0), call.dims(1)
    for dim in (*one[-2:], other[-2 if call["left"] else -1]):
        call.labels.pin(dim, "equations are solved in it")
    call.unify_last(one[:-2], other[:-2])
    return [other]


@rule("_cdist_forward", "_euclidean_dist")
def _distances(call: Call) -> list[Dims]:
    one, other = call.dims(0), call.dims(1)
    _reads(call, one[-1], other[-1])
    call.unify_last(one[:-2], other[:-2])
    return [[*one[:-1], other[-2]]]


# ---- reductions and scans along dimensions ----


class _Along(NamedTuple):
    """Rule of an operation that reduces or scans some dimensions of its input, such as a sum or a softmax."""

    where: str | int  # name of the argument with these dimensions, or a number n for the last n dimensions
    then: str  # their dimensions in the output: "stay", "gone", or "new" with other indices
    why: str  # reason for which these dimensions cannot shrink; "" if they can, as zeros add nothing to a sum
    # whether they can shrink although that changes the results for the remaining indices, as in a norm
    is_span: bool = False

    def __call__(self, call: Call) -> list[Dims]:
        """Label the results, and mark the input dimensions that cannot shrink."""
        if call.name in ("max", "min") and len(call.ins) == 2:
            return pointwise(call)
        places = self.places(call)
        for place in places if self.why else ():
            (call.labels.span if self.is_span else call.labels.pin)(call.dims()[place], self.why.format(call.name))
        for place in () if self.why else places:  # dropped units would add zeros to the sum
            call.labels.mark(call.dims()[place], "read")
        return [self._left(call, out, places) for out in call.outs]

    def places(self, call: Call) -> set[int]:
        """Return the positions of the dimensions that the operation reduces or scans, which are all by default."""
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
    elif dims[place].size == len(taken) * step:  # one element of each group of ``step``, as in rotary embeddings
        dims[place], each = call.labels.regroup([dims[place]], [len(taken), step])
        call.labels.pin(each, "a slice takes every other one")
    else:
        return _Along("dim", "new", "a slice takes every other one")(call)
    return [dims]


# ---- indexing: a dimension whose indices are data cannot shrink ----


@rule("embedding", "_embedding_bag", "_embedding_bag_forward_only")
def _embedding(call: Call) -> list[Dims]:
    weight, out = call.dims("weight"), call.outs[0]
    call.labels.pin(weight[0], "its rows are a vocabulary")
    weight[1].is_made = True
    rows = call.dims("indices") if call.name == "embedding" else call.new(out.shape[:-1], "they are samples")
    return call.others([*rows, weight[1]])


def _indexed(call: Call) -> list[int]:
    """Prevent each dimension from shrinking that is indexed by a tensor; return their positions."""
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
    at = places[0] if together else 0  # torch puts indexed dimensions first if they are not adjacent
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
    by_row = call.name.startswith("index_")  # in `index_...` operations ``index`` has one dimension
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


_PIXELS = "they are pixels"
_WINDOWS = "windows of it are taken"


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
    dims, place, out = call.dims(), call["dimension"] % call.ins[0].dim(), call.outs[0]
    call.labels.pin(dims[place], _WINDOWS)
    dims[place], inside = call.new((out.shape[place], out.shape[-1]), _WINDOWS)
    return [[*dims, inside]]


@rule("im2col")
def _im2col(call: Call) -> list[Dims]:
    (*samples, channels, high, wide), out = call.dims(), call.outs[0]
    for dim in (high, wide):
        call.labels.pin(dim, _PIXELS)
    places, windows = call.new((out.shape[-2] // channels.size, out.shape[-1]), _WINDOWS)
    return [[*samples, Dim([*channels.atoms, *places.atoms]), windows]]


@rule("col2im")
def _col2im(call: Call) -> list[Dims]:
    (*samples, rows, windows), out = call.dims(), call.outs[0]
    channels, places = call.labels.regroup([rows], [out.shape[-3], rows.size // out.shape[-3]])
    for dim in (places, windows):
        call.labels.pin(dim, _WINDOWS)
    return [[*samples, channels, *call.new(out.shape[-2:], _PIXELS)]]


@rule("as_strided")
def _as_strided(call: Call) -> list[Dims]:
    """Label the result of `as_strided`: dimensions of unchanged size and stride keep their label, all others cannot be cut."""
    x, out = call.ins[0], call.outs[0]
    if x.storage_offset() != out.storage_offset():
        raise ShapeConflict
    dims = call.dims()
    known = {laid: dim for laid, dim in zip(_laid(x), dims, strict=True) if laid is not None}
    found: list[Dim] = []
    for laid, size in zip(_laid(out), out.shape, strict=True):
        same = known.pop(laid, None) if laid is not None else None
        found.append(call.labels.new(size, _WINDOWS) if same is None else same)
    for dim in dims:
        if not any(dim is other for other in found):
            call.labels.pin(dim, _WINDOWS)
    return [found]


def _laid(x: Tensor) -> list[tuple[int, int] | None]:
    """Return (size, stride) of each dimension whose index follows from an element's address; None for the others."""
    laid: list[tuple[int, int]] = [(n, step) for n, step in zip(x.shape, x.stride(), strict=True) if n > 1]
    found: list[tuple[int, int] | None] = []
    for size, step in zip(x.shape, x.stride(), strict=True):
        inner = sum((n - 1) * by for n, by in laid if by < step)
        others = [by for n, by in laid if by >= step and (n, by) != (size, step)]
        told = (
            size > 1 and laid.count((size, step)) == 1 and inner < step and not any(by % (size * step) for by in others)
        )
        found.append((size, step) if told else None)
    return found


@rule("pixel_shuffle")
def _pixel_shuffle(call: Call) -> list[Dims]:
    dims, factor = call.dims(), call["upscale_factor"]
    channels, *inner = call.labels.regroup([dims[-3]], [dims[-3].size // factor**2, factor, factor])
    for dim in (*inner, *dims[-2:]):
        call.labels.pin(dim, _PIXELS)
    return [[*dims[:-3], channels, *call.new(call.outs[0].shape[-2:], _PIXELS)]]


@rule("pixel_unshuffle")
def _pixel_unshuffle(call: Call) -> list[Dims]:
    (*samples, channels, high, wide), factor = call.dims(), call["downscale_factor"]
    for dim in (high, wide):
        call.labels.pin(dim, _PIXELS)
    inner = call.new((factor, factor), _PIXELS)
    channels = Dim([*channels.atoms, *(atom for dim in inner for atom in dim.atoms)])
    return [[*samples, channels, *call.new(call.outs[0].shape[-2:], _PIXELS)]]


@rule("channel_shuffle", "native_channel_shuffle")
def _channel_shuffle(call: Call) -> list[Dims]:
    dims, groups = call.dims(), call["groups"]
    outer, inner = call.labels.regroup([dims[1]], [groups, dims[1].size // groups])
    call.labels.pin(outer, "channels are shuffled by their groups")
    return [[dims[0], Dim([*inner.atoms, *outer.atoms]), *dims[2:]]]


@rule("grid_sampler_2d", "grid_sampler_3d")
def _grid_sampler(call: Call) -> list[Dims]:
    x, grid, out = call.dims("input"), call.dims("grid"), call.outs[0]
    call.labels.unify(x[0], grid[0])
    for dim in (*x[2:], *grid[1:]):
        call.labels.pin(dim, _PIXELS)
    return [[*x[:2], *call.new(out.shape[2:], _PIXELS)]]


@rule("max_unpool2d", "max_unpool3d")
def _max_unpool(call: Call) -> list[Dims]:
    x, indices, out = call.dims("self"), call.dims("indices"), call.outs[0]
    pixels = 2 if call.name == "max_unpool2d" else 3
    for dim, index in zip(x[:-pixels], indices, strict=False):
        call.labels.unify(dim, index)
    for dim in x[-pixels:]:
        call.labels.pin(dim, _PIXELS)
    return [[*x[:-pixels], *call.new(out.shape[-pixels:], _PIXELS)]]
