"""What each operation of torch says of the dimensions that it combines: one rule for each family of ATen operations.

A rule gets a `Call` and returns the labels of its outputs, after it has made those dimensions the same that only go together,
and pinned those that cannot go. What counts is whether the result for the units that stay is the same once the others are
zero everywhere: a sum over units is, a softmax over them is not. An operation without a rule pins what it reads, and that
alone. A rule for another operation is added from anywhere:

>>> @rule("my_cross")                                              # torch.ops.mine.my_cross(x, y), along the last dimension
... def _my_cross(call):
...     call.labels.unify(call.dims("x")[-1], call.dims("y")[-1])
...     return [call.dims("x")]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from raafl.submodel.labels import Dim, Labels, Misfit

Dims = Sequence[Dim]
"""The labels of a tensor, dimension by dimension."""


@dataclass(frozen=True, slots=True)
class Call:
    """One operation that has run.

    Attributes:
        name: without the namespace.
        arguments: by name, as the operation's schema has them.
        ins: its tensors, in order.
        outs: the tensors it has given.
        labels: to combine dimensions with.
        dims_of: finds the labels of a tensor.
        is_view: whether the outputs share their elements with an input.
    """

    name: str
    arguments: Mapping[str, Any]
    ins: Sequence[Tensor]
    outs: Sequence[Tensor]
    labels: Labels
    dims_of: Callable[[Tensor], Dims]
    is_view: bool = False

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def has(self, name: str) -> bool:
        """Check whether a tensor was given for this argument."""
        return isinstance(self.arguments.get(name), Tensor)

    def dims(self, which: str | int = 0) -> list[Dim]:
        """Return the labels of an argument, or of the input at this place."""
        return list(self.dims_of(self.ins[which] if isinstance(which, int) else self.arguments[which]))

    def place(self, argument: str = "dim", default: int = 0, ndim: int | None = None) -> int:
        """Return the dimension that an argument names, from 0."""
        value = self.arguments.get(argument)
        ndim = self.ins[0].dim() if ndim is None else ndim
        return (default if value is None else value) % max(ndim, 1)

    def new(self, sizes: Iterable[int], pinned: str = "") -> list[Dim]:
        """Return labels of which nothing is known, or that are pinned."""
        return [self.labels.new(size, pinned) for size in sizes]

    def others(self, first: Dims) -> list[Dims]:
        """Return the labels of all outputs, of which those after the first carry nothing on."""
        return [first, *(self.new(out.shape, f"'{self.name}' keeps it for its gradient") for out in self.outs[1:])]


Rule = Callable[[Call], Sequence[Dims]]

MOVING = ("transpose", "t", "squeeze", "unsqueeze")
"""Operations that, in place, change the form of the tensor itself."""

RULES: dict[str, Rule] = {}
"""The rule of each operation; a variant in place has that of its name without the underscore."""

POINTWISE = set("""
    copy masked_fill _prelu_kernel hardswish hardsigmoid hardtanh leaky_relu elu lerp where
    """.split())  # fmt: skip
"""Operations element by element that torch does not tag as such."""


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register the decorated function as the rule of these operations."""

    def add(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return add


def rule_of(func: Any) -> Rule | None:
    """Return the rule of an ATen operation; None = there is none."""
    name = func._schema.name.split("::")[1]
    plain = name.rstrip("_")
    if found := RULES.get(name) or RULES.get(plain):
        return found
    if torch.Tag.pointwise in func.tags or plain in POINTWISE:
        return pointwise
    # variants in place are not always tagged themselves
    packet = getattr(torch.ops.aten, plain, None) if plain != name else None
    if packet is not None and any(torch.Tag.pointwise in getattr(packet, o).tags for o in packet.overloads()):
        return pointwise
    return None


def follow(rule: Rule | None, call: Call) -> list[Dims]:
    """Return labels for the outputs of an operation; without a rule that fits, pin what it reads."""
    if call.outs and all(x.numel() for x in (*(() if rule is _cat else call.ins), call.outs[0])):
        try:
            found = list(rule(call)) if rule is not None else []
        except (Misfit, IndexError, KeyError):
            found = []
        fits = [[dim.size for dim in dims] == list(out.shape) for dims, out in zip(found, call.outs, strict=False)]
        if len(fits) == len(call.outs) and all(fits):
            # only views hand on the very object, by which a parameter's dimension is known
            return found if call.is_view else [[Dim(dim.atoms) for dim in dims] for dims in found]
    if call.outs:
        for tensor in call.ins:
            for dim in call.dims_of(tensor):
                call.labels.pin(dim, f"operation '{call.name}' is not followed")
    return [call.new(out.shape, f"operation '{call.name}' is not followed") for out in call.outs]


# ---- element by element ----


def pointwise(call: Call) -> list[Dims]:
    """Make the dimensions that are broadcast together the same."""
    found: list[Dims] = []
    for out in call.outs:
        dims: list[Dim | None] = [None] * out.dim()
        for tensor in call.ins:
            for back, (dim, size) in enumerate(zip(reversed(call.dims_of(tensor)), reversed(tensor.shape)), 1):
                if back > out.dim() or size == 1 or size != out.shape[-back]:
                    continue  # a scalar, or one index for all
                known = dims[-back]
                if known is None:
                    dims[-back] = dim
                else:
                    call.labels.unify(known, dim)
        found.append([Dim() if dim is None else dim for dim in dims])
    return found


@rule(
    "clone", "detach", "alias", "_to_copy", "contiguous", "lift_fresh", "lift", "lift_fresh_copy", "native_dropout",
    "bernoulli", "zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "fill", "zero", "uniform",
    "normal", "dropout", "_conj", "resolve_conj", "resolve_neg", "view_as_real_copy",
)  # fmt: skip
def _same(call: Call) -> list[Dims]:
    return [call.dims()] * len(call.outs)


@rule(
    "zeros", "ones", "full", "empty", "new_zeros", "new_ones", "new_full", "new_empty", "empty_permuted", "empty_strided",
    "new_empty_strided",
)  # fmt: skip
def _filled(call: Call) -> list[Dims]:
    return [call.new(out.shape) for out in call.outs]  # all values are alike


@rule("arange", "randn", "rand", "scalar_tensor", "randint", "linspace", "eye", "randperm", "tril_indices")
def _made(call: Call) -> list[Dims]:
    return [call.new(out.shape, "code makes values for each of its places") for out in call.outs]


# ---- the same elements, in another order or form ----


@rule("view", "_unsafe_view", "reshape", "_reshape_alias")
def _view(call: Call) -> list[Dims]:
    before, after = list(call.ins[0].shape), list(call.outs[0].shape)
    return [call.dims() if before == after else call.labels.regroup(call.dims(), after)]


@rule("permute")
def _permute(call: Call) -> list[Dims]:
    dims = call.dims()
    return [[dims[i] for i in call["dims"]]]


@rule("transpose")
def _transpose(call: Call) -> list[Dims]:
    dims = call.dims()
    if dims:
        one, other = call.place("dim0"), call.place("dim1")
        dims[one], dims[other] = dims[other], dims[one]
    return [dims]


@rule("t", "numpy_T", "mT")
def _t(call: Call) -> list[Dims]:
    return [call.dims()[::-1]]


@rule("unsqueeze")
def _unsqueeze(call: Call) -> list[Dims]:
    dims = call.dims()
    dims.insert(call.place(ndim=len(dims) + 1), Dim())
    return [dims]


@rule("squeeze")
def _squeeze(call: Call) -> list[Dims]:
    dims, which = call.dims(), call.arguments.get("dim")
    places = range(len(dims)) if which is None else [which] if isinstance(which, int) else which
    gone = {i % max(len(dims), 1) for i in places}
    return [[dim for i, dim in enumerate(dims) if not (i in gone and dim.size == 1)]]


@rule("expand")
def _expand(call: Call) -> list[Dims]:
    sizes, dims = list(call.outs[0].shape), call.dims()
    ahead = len(sizes) - len(dims)
    kept = [d if d.size == size else call.labels.new(size) for d, size in zip(dims, sizes[ahead:], strict=True)]
    return [[*call.new(sizes[:ahead]), *kept]]


@rule("repeat")
def _repeat(call: Call) -> list[Dims]:
    times, dims = list(call["repeats"]), call.dims()
    dims = [Dim()] * (len(times) - len(dims)) + dims
    return [[Dim([*call.labels.new(n).atoms, *dim.atoms]) for n, dim in zip(times, dims, strict=True)]]


@rule("slice")
def _slice(call: Call) -> list[Dims]:
    dims, place, step = call.dims(), call.place(), call["step"] or 1
    size = call.ins[0].shape[place]
    taken = range(*slice(call["start"], call["end"], step).indices(size))
    if step == 1:
        dims[place] = call.labels.take(dims[place], taken.start, len(taken))
    else:
        call.labels.pin(dims[place], "a slice takes every other one")
        dims[place] = call.labels.new(len(taken), "a slice takes every other one")
    return [dims]


@rule("narrow")
def _narrow(call: Call) -> list[Dims]:
    dims, place = call.dims(), call.place()
    dims[place] = call.labels.take(dims[place], call["start"] % call.ins[0].shape[place], call["length"])
    return [dims]


@rule("select", "unbind")
def _select(call: Call) -> list[Dims]:
    dims, place = call.dims(), call.place()
    call.labels.pin(dims[place], "one place of it is taken")
    del dims[place]
    return [dims] * len(call.outs)


@rule(
    "split", "split_with_sizes", "chunk", "unsafe_split", "unsafe_chunk", "unsafe_split_with_sizes", "tensor_split",
    "split_copy", "split_with_sizes_copy",
)  # fmt: skip
def _split(call: Call) -> list[Dims]:
    place, start = call.place(), 0
    whole, found = call.dims(), []
    for out in call.outs:
        dims = list(whole)
        dims[place] = call.labels.take(whole[place], start, out.shape[place])
        start += out.shape[place]
        found.append(dims)
    return found


@rule("cat", "concat")
def _cat(call: Call) -> list[Dims]:
    place = call.place(ndim=call.outs[0].dim())
    rows = [call.dims(i) for i, tensor in enumerate(call.ins) if tensor.numel()]
    found = list(rows[0])
    for row in rows[1:]:
        for i, dim in enumerate(row):
            if i != place:
                call.labels.unify(found[i], dim)
    found[place] = call.labels.join([row[place] for row in rows])
    return [found]


@rule("stack")
def _stack(call: Call) -> list[Dims]:
    found = call.dims()
    for i in range(1, len(call.ins)):
        for one, other in zip(found, call.dims(i), strict=True):
            call.labels.unify(one, other)
    found.insert(call.place(ndim=len(found) + 1), call.labels.new(len(call.ins), "values are stacked in it"))
    return [found]


@rule("glu")
def _glu(call: Call) -> list[Dims]:
    dims, place = call.dims(), call.place(default=-1)
    half = dims[place].size // 2
    one, other = (call.labels.take(dims[place], start, half) for start in (0, half))
    call.labels.unify(one, other)
    dims[place] = one
    return [dims]


@rule("pixel_shuffle")
def _pixel_shuffle(call: Call) -> list[Dims]:
    dims, factor = call.dims(), call["upscale_factor"]
    channels, *inner = call.labels.regroup([dims[-3]], [dims[-3].size // factor**2, factor, factor])
    for dim in (*inner, *dims[-2:]):
        call.labels.pin(dim, "they are pixels")
    return [[*dims[:-3], channels, *call.new(call.outs[0].shape[-2:], "they are pixels")]]


# ---- products: what is summed over is the same on both sides ----


def _product(call: Call, left: Dims, right: Dims) -> list[Dim]:
    """Label ``left @ right``, both of two dimensions, or of three, the first of them side by side."""
    inner = right[-2] if len(right) > 1 else right[-1]
    call.labels.unify(left[-1], inner)
    left[-1].is_read = inner.is_read = True
    for dim in (*left[-2:-1], *(right[-1:] if len(right) > 1 else ())):
        dim.is_made = True
    if len(left) == 3:
        call.labels.unify(left[0], right[0])
        call.labels.mark_batch(left[0])
    return [*left[:-1], *right[-1:]] if len(right) > 1 else left[:-1]


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
    if call.has("bias"):
        call.labels.unify(call.dims("bias")[0], weight[0])
    return [[*x[:-1], weight[0]]]


@rule("_grouped_mm")
def _grouped_mm(call: Call) -> list[Dims]:
    left, right = call.dims(0), call.dims(1)
    call.labels.unify(left[-1], right[-2])
    right[-2].is_read = right[-1].is_made = True
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
            call.labels.unify(inputs, Dim([*group.atoms, *call.labels.new(inputs.size // groups).atoms]))
    else:  # weight: (out, in / groups, ...)
        inputs, outputs = Dim([*group.atoms, *weight[1].atoms]) if groups > 1 else weight[1], weight[0]
        weight[1].is_read = weight[0].is_made = True
        if groups > 1:
            call.labels.unify(outputs, Dim([*group.atoms, *call.labels.new(outputs.size // groups).atoms]))
    call.labels.unify(x[1], inputs)
    if call.has("bias"):
        call.labels.unify(call.dims("bias")[0], outputs)
    return [[x[0], outputs, *call.new(out.shape[2:], "they are pixels")]]


@rule(
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_fused_attention_overrideable",
)  # fmt: skip
def _attention(call: Call) -> list[Dims]:
    q, k, v = call.dims("query"), call.dims("key"), call.dims("value")
    repeats = q[1].size // k[1].size  # query heads that share a key and a value, next to each other
    call.labels.unify(q[1], Dim([*k[1].atoms, *call.labels.new(repeats).atoms]))
    for one, other in ((q[0], k[0]), (k[0], v[0]), (k[1], v[1]), (k[2], v[2]), (q[3], k[3])):
        call.labels.unify(one, other)
    call.labels.mark_batch(q[1])
    call.labels.pin(k[2], "a softmax runs along it")
    if call.arguments.get("scale") is None:
        call.labels.pin(q[3], "scores are divided by the root of its size")
    mask = next((name for name in ("attn_mask", "attn_bias") if call.has(name)), None)
    for dim, other in zip(reversed(call.dims(mask) if mask else []), (k[2], q[2], q[1], q[0]), strict=False):
        if dim.size != 1:
            call.labels.unify(dim, other)
    return call.others([q[0], q[1], q[2], v[3]])


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


@rule("sum", "nansum", "linalg_vector_norm", "norm", "count_nonzero")
def _sum(call: Call) -> list[Dims]:
    return _left(call, _places(call))  # zeros add nothing


@rule("mean", "var", "std", "var_mean", "std_mean")
def _mean(call: Call) -> list[Dims]:
    for place in _places(call):
        call.labels.span(call.dims()[place], "statistics are taken across it")
    return _left(call, _places(call))


@rule(
    "amax", "amin", "aminmax", "max", "min", "argmax", "argmin", "prod", "logsumexp", "any", "all", "median", "mode",
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
    place, found = call.place(default=-1), []
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
    place, found = 0, []
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
