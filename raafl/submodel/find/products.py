"""Define rules of operations that multiply and sum, and of norms: layers, attention, convolutions; see `operations`."""

from __future__ import annotations

from raafl.submodel.find.labels import Dim
from raafl.submodel.find.operations import Call, Dims, rule

DIVIDED = "scores are divided by the root of its size"
_GROUP = "the channels of a group only go together"

# ---- products: what is summed over is the same on both sides ----


def _reads(call: Call, one: Dim, weight: Dim, *makes: Dim) -> None:
    """Note that a product sums over two dimensions, and makes others."""
    call.labels.unify(one, weight)
    one.is_read = weight.is_read = True
    call.labels.mark(weight, "read")
    for dim in makes:
        dim.is_made = True


@rule("mm", "bmm", "mv", "dot", "vdot", "addmm", "baddbmm", "addmv")
def _product(call: Call) -> list[Dims]:
    """Follow ``left @ right``, both of two dimensions, or of three, the first of them side by side."""
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
        if dim.size % 8 == 0:  # its rows must be multiples of 16 bytes
            call.labels.pin(call.labels.regroup([dim], [dim.size // 8, 8])[1], "torch multiplies by experts in eights")
    return [[left[0], right[-1]]]


@rule("convolution", "_convolution", "mkldnn_convolution", "convolution_overrideable")
def _convolution(call: Call) -> list[Dims]:
    x, weight, groups, out = call.dims("input"), call.dims("weight"), call["groups"], call.outs[0]
    pixels = call.new(out.shape[2:], "they are pixels")
    for i, (dim, width) in enumerate(zip(x[2:], weight[2:], strict=True)):
        if (width.size, *(call[name][i % len(call[name])] for name in ("stride", "padding"))) == (1, 1, 0):
            pixels[i] = dim  # each by itself
        else:
            call.labels.pin(dim, "they are pixels")
            call.labels.pin(width, "they are pixels")
    # Of `groups` convolutions side by side, each reads its own channels and makes its own. The weight has all channels of
    # one side, (out, in / groups, ...) or of a transposed one (in, out / groups, ...), and those of a group of the other.
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
    repeats = q[1].size // k[1].size  # query heads that share a key and a value, next to each other
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
    for dim in (x[0], *x[2:]):  # samples and pixels; of a weight that is standardised, what it reads
        call.labels.span(dim, "a norm takes statistics across it")
    return call.others(x)


@rule("_weight_norm_interface")
def _weight_norm(call: Call) -> list[Dims]:
    v, g, place = call.dims("v"), call.dims("g"), call["dim"]
    call.labels.unify(v[place], next((dim for dim in g if dim.size != 1), Dim()))
    return call.others(v)


@rule("_trilinear")
def _trilinear(call: Call) -> list[Dims]:
    """Follow the product of three tensors, each with dimensions of one index where it has none, summed over some."""
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
