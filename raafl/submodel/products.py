"""Rules of operations that multiply and sum, and of norms: layers, attention, convolutions; see `operations`."""

from __future__ import annotations

from raafl.submodel.labels import Dim
from raafl.submodel.operations import Call, Dims, rule

_GROUP = "the channels of a group only go together"

# ---- products: what is summed over is the same on both sides ----


def _product(call: Call, left: Dims, right: Dims) -> list[Dim]:
    """Label ``left @ right``, both of two dimensions, or of three, the first of them side by side."""
    inner = right[-2] if len(right) > 1 else right[-1]
    call.labels.unify(left[-1], inner)
    left[-1].is_read = inner.is_read = True
    call.labels.mark(inner, "read")
    for dim in (*left[-2:-1], *(right[-1:] if len(right) > 1 else ())):
        dim.is_made = True
    if len(left) == 3:
        call.labels.unify(left[0], right[0])
        call.labels.mark(left[0], "batch")
        call.labels.mark(inner, "scored")
    return [*left[:-1], *right[-1:]] if len(right) > 1 else [*left[:-1]]


@rule("mm", "bmm", "mv", "dot", "vdot")
def _mm(call: Call) -> list[Dims]:
    return [_product(call, call.dims(0), call.dims(1))]


@rule("addmm", "baddbmm", "addmv")
def _addmm(call: Call) -> list[Dims]:
    found = _product(call, call.dims(1), call.dims(2))
    for dim, other in zip(reversed(call.dims(0)), reversed(found), strict=False):
        if dim.size != 1:
            call.labels.unify(dim, other)
    return [found]


@rule("linear")
def _linear(call: Call) -> list[Dims]:
    x, weight = call.dims("input"), call.dims("weight")
    call.labels.unify(x[-1], weight[1])
    weight[1].is_read = weight[0].is_made = True
    call.labels.mark(weight[1], "read")
    if call.has("bias"):
        call.labels.unify(call.dims("bias")[0], weight[0])
    return [[*x[:-1], weight[0]]]


@rule("_grouped_mm")
def _grouped_mm(call: Call) -> list[Dims]:
    left, right = call.dims(0), call.dims(1)
    call.labels.unify(left[-1], right[-2])
    right[-2].is_read = right[-1].is_made = True
    call.labels.mark(right[-2], "read")
    for dim in right[:-2]:
        call.labels.pin(dim, "they are experts, of which a router chooses")
    for dim in (right[-2], right[-1]):
        if dim.size % 8 == 0:  # its rows must be multiples of 16 bytes
            call.labels.pin(call.labels.regroup([dim], [dim.size // 8, 8])[1], "torch multiplies by experts in eights")
    return [[left[0], right[-1]]]


@rule("convolution", "_convolution", "mkldnn_convolution", "convolution_overrideable")
def _convolution(call: Call) -> list[Dims]:
    x, weight, groups, out = call.dims("input"), call.dims("weight"), call["groups"], call.outs[0]
    for dim in (*x[2:], *weight[2:]):
        call.labels.pin(dim, "they are pixels")
    # of `groups` convolutions side by side, each reads its own channels and makes its own
    group = call.labels.new(groups)
    if call["transposed"]:  # weight: (in, out / groups, ...)
        inputs, outputs = weight[0], Dim([*group.atoms, *weight[1].atoms]) if groups > 1 else weight[1]
        weight[0].is_read = weight[1].is_made = True
        if groups > 1:
            call.labels.unify(inputs, Dim([*group.atoms, *call.labels.new(inputs.size // groups, _GROUP).atoms]))
    else:  # weight: (out, in / groups, ...)
        inputs, outputs = Dim([*group.atoms, *weight[1].atoms]) if groups > 1 else weight[1], weight[0]
        weight[1].is_read = weight[0].is_made = True
        if groups > 1:
            call.labels.unify(outputs, Dim([*group.atoms, *call.labels.new(outputs.size // groups, _GROUP).atoms]))
    call.labels.unify(x[1], inputs)
    call.labels.mark(inputs, "read")
    if call.has("bias"):
        call.labels.unify(call.dims("bias")[0], outputs)
    return [[x[0], outputs, *call.new(out.shape[2:], "they are pixels")]]


@rule(
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)  # fmt: skip
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
        call.labels.pin(q[3], "scores are divided by the root of its size")
    mask = next((name for name in ("attn_mask", "attn_bias") if call.has(name)), None)
    for dim, other in zip(reversed(call.dims(mask) if mask else []), (k[2], q[2], q[1], q[0]), strict=False):
        if dim.size != 1:
            call.labels.unify(dim, other)
    return call.others([q[0], q[1], q[2], v[3]])


# ---- norms ----


@rule("native_layer_norm", "_fused_rms_norm", "rms_norm")
def _layer_norm(call: Call) -> list[Dims]:
    x, last = call.dims("input"), len(call["normalized_shape"])
    for dim in x[-last:]:
        call.labels.span(dim, "a norm takes statistics across it")
    for name in ("weight", "bias"):
        for dim, other in zip(call.dims(name) if call.has(name) else [], x[-last:], strict=False):
            call.labels.unify(dim, other)
    return call.others(x)


@rule("native_group_norm")
def _group_norm(call: Call) -> list[Dims]:
    x, groups = call.dims("input"), call["group"]
    inner = call.labels.new(x[1].size // groups, "its channels are one norm group")
    call.labels.unify(x[1], Dim([*call.labels.new(groups).atoms, *inner.atoms]))
    for name in ("weight", "bias"):
        if call.has(name):
            call.labels.unify(call.dims(name)[0], x[1])
    return call.others(x)


@rule(
    "native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training", "_batch_norm_with_update",
    "_batch_norm_no_update", "cudnn_batch_norm",
)  # fmt: skip
def _batch_norm(call: Call) -> list[Dims]:
    x = call.dims("input")
    for name in ("weight", "bias", "running_mean", "running_var"):
        if call.has(name):
            call.labels.unify(call.dims(name)[0], x[1])
    return call.others(x)


@rule("_weight_norm_interface", "_weight_norm")
def _weight_norm(call: Call) -> list[Dims]:
    v, g, place = call.dims("v"), call.dims("g"), call["dim"]
    call.labels.unify(v[place], next((dim for dim in g if dim.size != 1), Dim()))
    return call.others(v)
