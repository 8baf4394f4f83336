"""Define, for each operation of torch, which dimensions it couples: one rule per family of ATen operations.

A rule gets a `Call` and returns the labels of its outputs, after it has united the dimensions that must shrink together and pinned
those that cannot. The criterion is whether results for the remaining units are the same once the dropped ones are zero everywhere:
true for a sum over units, false for a softmax over them. An operation without a rule pins what it reads, and only that. A rule for
another operation can be added from anywhere:

>>> @rule("my_cross")                                              # torch.ops.mine.my_cross(x, y), along the last dimension
... def _my_cross(call):
...     call.labels.unify(call.dims("x")[-1], call.dims("y")[-1])
...     return [call.dims("x")]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from raafl.submodel.find.labels import Dim, Labels, ShapeConflict

Dims = Sequence[Dim]
"""The labels of a tensor, dimension by dimension."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a torch operation with its tensors; the input of a rule, which finds dimensions that must shrink together."""

    name: str  # name of the operation
    arguments: Mapping[str, Any]  # arguments by name, as in the schema of the operation
    ins: Sequence[Tensor]  # input tensors, in their order
    outs: Sequence[Tensor]  # output tensors, in their order
    labels: Labels  # registry that creates and combines the labels of dimensions
    dims_of: Callable[[Tensor], Dims]  # function from a tensor to its dimensions' labels
    is_view: bool = False  # whether outputs share memory with an input

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def has(self, name: str) -> bool:
        """Check whether a named argument of the call is a tensor."""
        return isinstance(self.arguments.get(name), Tensor)

    def dims(self, which: str | int = 0) -> list[Dim]:
        """Return the labels of the dimensions of one of the call's tensors; dimensions with the same label shrink together."""
        return list(self.dims_of(self.ins[which] if isinstance(which, int) else self.arguments[which]))

    def place(self, more: int = 0) -> int:
        """Return the call's argument ``dim`` as an index that is not negative."""
        return (self.arguments.get("dim") or 0) % max(self.ins[0].dim() + more, 1)

    def new(self, sizes: Iterable[int], pinned: str = "") -> list[Dim]:
        """Create labels for new dimensions, which need not shrink together with any others."""
        return [self.labels.new(size, pinned) for size in sizes]

    def others(self, first: Dims) -> list[Dims]:
        """Return labels of the output tensors' dimensions: ``first``, then new ones for other outputs, which cannot shrink."""
        return [first, *(self.new(out.shape, f"'{self.name}' keeps it for its gradient") for out in self.outs[1:])]

    def unify_last(self, dims: Dims, others: Dims) -> None:
        """Record that dimensions in two lists are the same, matched from the last ones, as in broadcasting.

        Dimensions of size 1 are skipped.
        """
        for dim, other in zip(reversed(dims), reversed(others), strict=False):
            if dim.size != 1:
                self.labels.unify(dim, other)

    def unify_named(self, dim: Dim, *names: str) -> None:
        """Record that a dimension is the same as that of 1-D arguments, such as a norm's weight and bias."""
        for name in names:
            if self.has(name):
                self.labels.unify(self.dims(name)[0], dim)


Rule = Callable[[Call], Sequence[Dims]]

MOVING = ("transpose", "t", "squeeze", "unsqueeze")
"""Operations that change a tensor's own shape in place."""

RULES: dict[str, Rule] = {}
"""The rule of each operation; a variant in place has that of its name without the underscore."""

POINTWISE = {
    "copy",
    "masked_fill",
    "_prelu_kernel",
    "hardswish",
    "hardsigmoid",
    "hardtanh",
    "leaky_relu",
    "elu",
    "lerp",
    "where",
}
"""Operations element by element that torch does not tag as such."""


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register the decorated function as the rule of some operations.

    A rule tells which dimensions of an operation's tensors belong together, so that they must shrink together.
    """

    def add(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return add


def rule_of(func: torch._ops.OpOverload) -> Rule | None:
    """Return the rule of an ATen operation; None if there is none."""
    name = func._schema.name.split("::")[1]
    plain = name.rstrip("_")
    if found := RULES.get(name) or RULES.get(plain):
        return found
    if torch.Tag.pointwise in func.tags or plain in POINTWISE:
        return pointwise
    # torch tags not every in-place variant, so the operation without the underscore is checked, too
    packet = getattr(torch.ops.aten, plain, None) if plain != name else None
    if packet is not None and any(torch.Tag.pointwise in getattr(packet, o).tags for o in packet.overloads()):
        return pointwise
    return None


def follow(rule: Rule | None, call: Call) -> list[Dims]:
    """Apply the rule by which an operation links dimensions; return the labels of its outputs' dimensions.

    Dimensions with the same label shrink together. Without a rule, the operation's dimensions cannot shrink.

    `rule`: rule of the operation; None = there is none.
    """
    if not any(x.numel() for x in call.outs):  # all results are empty
        return [call.new(out.shape) for out in call.outs]
    if all(x.numel() for x in (*(() if call.name == "cat" else call.ins), call.outs[0])):
        try:
            found = list(rule(call)) if rule is not None else []
        except (ShapeConflict, IndexError, KeyError):
            found = []
        fits = [[dim.size for dim in dims] == list(out.shape) for dims, out in zip(found, call.outs, strict=False)]
        if len(fits) == len(call.outs) and all(fits):
            # only a view passes on the label object itself, by which a parameter's dimension is known
            return found if call.is_view else [[Dim(dim.atoms) for dim in dims] for dims in found]
    for tensor in call.ins:
        for dim in call.dims_of(tensor):
            call.labels.pin(dim, f"operation '{call.name}' is not followed")
    return [call.new(out.shape, f"operation '{call.name}' is not followed") for out in call.outs]


# ---- elementwise operations ----


def pointwise(call: Call) -> list[Dims]:
    """Rule of elementwise operations: dimensions that broadcasting aligns shrink together; return the output's labels."""
    return [_broadcast(call, out) for out in call.outs]


def _broadcast(call: Call, out: Tensor) -> Dims:
    """Label the dimensions of a broadcast result."""
    dims: list[Dim | None] = [None] * out.dim()
    is_gate = call.name == "mul" and len(call.ins) > 1 and call.ins[0].shape == call.ins[1].shape
    for back, dim in (pair for tensor in call.ins for pair in enumerate(reversed(call.dims_of(tensor)), 1)):
        if back > out.dim() or dim.size == 1 or dim.size != out.shape[-back]:
            continue  # a broadcast dimension has no label to pass on
        known = dims[-back]
        if known is None:
            dims[-back] = dim
            continue
        call.labels.unify(known, dim)
        if is_gate:
            call.labels.mark(known, "gated")
    return [Dim() if dim is None else dim for dim in dims]


@rule(
    "clone",
    "detach",
    "alias",
    "_to_copy",
    "lift_fresh",
    "lift",
    "lift_fresh_copy",
    "native_dropout",
    "bernoulli",
    "zeros_like",
    "ones_like",
    "empty_like",
    "full_like",
    "rand_like",
    "randn_like",
    "fill",
    "zero",
    "uniform",
    "normal",
    "_conj",
    "view_as_real_copy",
    "log_sigmoid_forward",
    "rrelu_with_noise",
)
def _same(call: Call) -> list[Dims]:
    return [call.dims()] * len(call.outs)


@rule(
    "zeros",
    "ones",
    "full",
    "empty",
    "new_zeros",
    "new_ones",
    "new_full",
    "new_empty",
    "empty_permuted",
    "empty_strided",
    "new_empty_strided",
    "rand",
    "randn",
)
def _filled(call: Call) -> list[Dims]:
    # all values are equal, or drawn from one distribution, so no unit differs
    return [call.new(out.shape) for out in call.outs]


@rule("arange", "scalar_tensor", "randint", "linspace", "eye", "randperm", "tril_indices")
def _made(call: Call) -> list[Dims]:
    return [call.new(out.shape, "code makes values for each of its places") for out in call.outs]


# ---- the same elements in another order or shape ----

FORMS: dict[str, Callable[[Call, list[Dim]], Dims]] = {
    "t": lambda call, dims: dims[::-1],
    "permute": lambda call, dims: [dims[i] for i in call["dims"]],
    "unsqueeze": lambda call, dims: [*dims[: call.place(1)], Dim(), *dims[call.place(1) :]],
    **dict.fromkeys(("view", "_unsafe_view", "_reshape_alias"), lambda call, dims: _viewed(call, dims)),
}
"""Functions that compute the labels of the output from those of the input, by name of the operation."""


def _viewed(call: Call, dims: list[Dim]) -> Dims:
    """Label the dimensions of a view: match groups of equal product in both shapes, and regroup each group."""
    rest, wanted, found = list(dims), list(call.outs[0].shape), list[Dim]()
    while rest or wanted:
        ours, sizes = [rest.pop(0)] if rest else [], [wanted.pop(0)] if wanted else []
        while (n := math.prod(dim.size for dim in ours)) != (m := math.prod(sizes)):
            if n < m:
                ours.append(rest.pop(0))
            else:
                sizes.append(wanted.pop(0))
        if [dim.size for dim in ours] == sizes:
            found += ours
            continue
        try:
            found += call.labels.regroup(ours, sizes)
        except ShapeConflict:
            for dim in ours:
                call.labels.pin(dim, "a view cuts through it")
            found += call.new(sizes, "a view cuts through it")
    return found


@rule(*FORMS)
def _form(call: Call) -> list[Dims]:
    return [FORMS[call.name](call, call.dims())]


@rule("view_as_complex")
def _complex(call: Call) -> list[Dims]:
    *dims, pair = call.dims()
    call.labels.pin(pair, "they are real and imaginary parts")
    return [dims]


@rule("view_as_real")
def _real(call: Call) -> list[Dims]:
    return [[*call.dims(), call.labels.new(2, "they are real and imaginary parts")]]


@rule("transpose")
def _transpose(call: Call) -> list[Dims]:
    dims, one, other = call.dims(), call["dim0"], call["dim1"]
    if dims:
        dims[one], dims[other] = dims[other], dims[one]
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


@rule("split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes", "split_copy", "split_with_sizes_copy")
def _split(call: Call) -> list[Dims]:
    place, start, whole = call.place(), 0, call.dims()
    found: list[Dims] = []
    for out in call.outs:
        part = call.labels.take(whole[place], start, out.shape[place])
        start += out.shape[place]
        found.append([*whole[:place], part, *whole[place + 1 :]])
    return found


@rule("cat")
def _cat(call: Call) -> list[Dims]:
    place = call["dim"] % call.outs[0].dim()
    rows = [call.dims(i) for i, tensor in enumerate(call.ins) if tensor.numel()]
    for row in rows[1:]:
        for i, dim in enumerate(row):
            if i != place:
                call.labels.unify(rows[0][i], dim)
    rows[0][place] = call.labels.join([row[place] for row in rows])
    return [rows[0]]


@rule("stack")
def _stack(call: Call) -> list[Dims]:
    found, place = list(pointwise(replace(call, outs=call.ins[:1]))[0]), call.place(1)
    return [[*found[:place], call.labels.new(len(call.ins), "values are stacked in it"), *found[place:]]]


@rule("glu")
def _glu(call: Call) -> list[Dims]:
    dims, place = call.dims(), call["dim"]
    half = dims[place].size // 2
    one, other = (call.labels.take(dims[place], start, half) for start in (0, half))
    call.labels.unify(one, other)
    dims[place] = one
    return [dims]
