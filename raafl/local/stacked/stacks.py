"""Stack tensors of several clients, of equal shapes, along a first dimension that the user's code does not see.

`torch.func.vmap` hides the dimension; inside it a tensor stands for a stack. These functions leave vmap temporarily, compute on the
stack or on each client's slice, and return, so that slices are computed by the same kernels that a client alone would use.

Kernels may produce other bits where a tensor starts at another memory alignment: some process their first elements one by one,
up to a multiple of 16 bytes. A slice has the alignment of a client's own tensor, modulo 16 bytes, or is copied to one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch._C._functorch as functorch
from torch import Tensor
from torch._functorch.predispatch import lazy_load_decompositions
from torch.autograd import Function
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten, tree_unflatten

from raafl.exact_key import exact_key

_ALIGN_BYTES = 16
CPU = torch.device("cpu")


class Unstackable(Exception):
    """Raised if tasks cannot be trained as one batch; the message says why."""


class Parted(Unstackable):
    """Raised if the clients of a batch would take different branches of the user's code."""


def stack_of(value: object) -> Tensor | None:
    """Return the stacked tensor, of shape (clients, ...), that ``value`` stands for inside vmap.

    The result is None if ``value`` is not a tensor, or is a tensor that all clients share.
    """
    if not isinstance(value, Tensor) or not functorch.is_batchedtensor(value):
        return None
    stack, dim = functorch.get_unwrapped(value), functorch.maybe_get_bdim(value)
    if functorch.is_batchedtensor(stack):
        raise Unstackable("the training step uses torch.vmap itself: do without it to train clients as one batch")
    return stack if dim == 0 else stack.movedim(dim, 0)


@contextmanager
def outside() -> Iterator[Callable[[Tensor], Tensor]]:
    """Return a context that leaves vmap temporarily, so that code can compute on the clients' stacked tensors.

    The context yields a function that turns a stacked tensor of shape (clients, ...) into one for use inside vmap.
    """
    level = functorch.current_level()
    layer = functorch.pop_dynamic_layer_stack()
    try:
        yield lambda stack: functorch._add_batch_dim(stack, 0, level)
    finally:
        functorch.push_dynamic_layer_stack(layer)


def within(
    num: int, function: Callable[[Callable[[Tensor], Tensor]], tuple[Any, list[Any]]]
) -> tuple[Tensor, list[Tensor]]:
    """Run ``function`` inside vmap, so that one call computes all clients; return the stacked losses and other values.

    `torch.func.vmap` does the same, but its checks take as long as a small model's step.

    `function`: computation of one client, which returns a loss and a list of values. Its argument is a function that
    turns a stacked tensor of shape (clients, ...) into one for use inside vmap.

    Raises:
        Unstackable: the function returns something that is not a tensor.
    """
    lazy_load_decompositions()
    level = functorch._vmap_increment_nesting(num, "error")
    try:
        loss, values = function(lambda stack: functorch._add_batch_dim(stack, 0, level))
        if not all(isinstance(one, Tensor) for one in (loss, *values)):
            raise Unstackable(
                "the training step returns None or a loss that is not a tensor: return a tensor for each batch to train clients "
                "as one batch"
            )
        return (
            functorch._remove_batch_dim(loss, level, num, 0),
            [functorch._remove_batch_dim(one, level, num, 0) for one in values],
        )
    finally:
        functorch._vmap_decrement_nesting()


def apart(stack: Tensor) -> Sequence[Tensor]:
    """Split stacked tensors into one tensor per client, each aligned in memory as if that client trained alone."""
    if stack.dim() == 1 or stack.stride(0) * stack.itemsize % _ALIGN_BYTES == 0:
        return stack.unbind(0)
    if stack.requires_grad and torch.is_grad_enabled():
        parts: Sequence[Tensor] = _Apart.apply(stack)
        return parts
    return [part.clone() for part in stack.unbind(0)]


_WRITING: frozenset[Any] = frozenset((F.batch_norm, F.instance_norm))
"""Functions that write to their arguments: running statistics, without counting that as a change of the tensor."""


def _write_back(stack: Tensor | None, parts: Sequence[Tensor] | None) -> None:
    """Copy what a function has written to clients' aligned copies back to the stacked tensor."""
    if stack is not None and parts is not None and parts[0]._base is None and not parts[0].requires_grad:
        for own, part in zip(stack.unbind(0), parts, strict=True):
            own.copy_(part)


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Stack the clients' tensors."""
    stack: Tensor = _Joined.apply(*parts)
    return stack


class _Apart(Function):
    @staticmethod
    def forward(ctx: object, stack: Tensor) -> tuple[Tensor, ...]:
        return tuple(part.clone() for part in stack.unbind(0))

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> Tensor:
        return torch.stack(gradients)


class _Joined(Function):
    """`torch.stack` with a backward pass that splits the gradient into aligned slices."""

    @staticmethod
    def forward(ctx: object, *parts: Tensor) -> Tensor:
        return torch.stack(parts)

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return tuple(apart(gradient))


def by_slices(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    num: int,
    states: list[Tensor | int] | None = None,
    device: torch.device = CPU,
) -> object:
    """Call a torch function once for each client, inside vmap; return its results as stacked tensors.

    `states`: state of torch's generator for each client, or its seed, which the call advances; None = the function draws
    no random numbers.
    `device`: device of that generator.
    """
    leaves, form = tree_flatten((tuple(args), dict(kwargs)))
    with outside() as inside:
        stacks = [stack_of(leaf) for leaf in leaves]
        columns = [None if stack is None else apart(stack) for stack in stacks]
        results, before = [], None if states is None else torch_state(device)
        for client in range(num):
            mine = [leaf if column is None else column[client] for leaf, column in zip(leaves, columns, strict=True)]
            own_args, own_kwargs = tree_unflatten(mine, form)
            if states is not None:
                set_torch_state(device, states[client])
            results.append(function(*own_args, **own_kwargs))
            if states is not None:
                states[client] = torch_state(device)
        if before is not None:
            set_torch_state(device, before)
        for stack, column in zip(stacks, columns, strict=True) if function in _WRITING else ():
            _write_back(stack, column)
        flat = [tree_flatten(result) for result in results]
        together = [
            inside(joined(parts)) if isinstance(parts[0], Tensor) else parts[0]
            for parts in zip(*(values for values, _ in flat), strict=True)
        ]
    return tree_unflatten(together, flat[0][1])


# Compute linear layers and embeddings of several clients in one product where its bits equal those of separate
# products.
#
# That depends only on shapes and memory alignment. So each kind is first tried on random numbers, and computed
# separately if any result differs. The clients' own numbers would not do: three equal results may be chance.

CACHE_LINE_BYTES = 64
_ENOUGH = 1024  # number of results to compare: some products differ in one result of a hundred only

Known = dict[Hashable, bool]
"""Whether a batched product has the bits of the clients' own, by shapes and places."""


def linear(known: Known | None, num: int, x: object, weight: object, bias: object = None) -> object:
    """Compute `F.linear` for all clients' stacked tensors, inside vmap.

    `known`: record of whether one call on stacked tensors gives the same bits as one call per client, by operation
    and shapes; None = one call is made whatever its bits.
    `weight`: stacked weights, (clients, out, in).
    `bias`: stacked biases, (clients, out); None = no bias.
    """
    stacks = [stack_of(one) for one in (x, weight, bias)]
    if any(stack is None for stack, one in zip(stacks, (x, weight, bias), strict=True) if one is not None):
        return by_slices(F.linear, (x, weight, bias), {}, num)
    xs, weights, biases = stacks
    assert xs is not None and weights is not None
    # torch uses other kernels for other layouts
    usual = xs.dim() in (3, 4) and weights.dim() == 3 and xs[0].is_contiguous()
    if not usual or min(xs.shape[1:]) < 1 or min(weights.shape[1:]) < 2:
        return by_slices(F.linear, (x, weight, bias), {}, num)
    with outside() as inside:
        y = _Linear.apply(known, xs.flatten(1, -2), weights, biases)
        return inside(y.view(*xs.shape[:-1], weights.shape[1]))


class _Linear(Function):
    """Linear layer x W^T + b on x (clients, n, in), W (clients, out, in), b (clients, out), by torch's own products."""

    @staticmethod
    def forward(ctx: Any, known: Known | None, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.known, ctx.has_bias = known, bias is not None
        ctx.save_for_backward(x, weight)
        if bias is None:
            return product(known, "x W", lambda a, w: torch.bmm(a, w.mT), lambda a, w: torch.mm(a, w.t()), x, weight)
        return product(
            known,
            "x W + b",
            lambda a, w, b: torch.baddbmm(b.unsqueeze(1), a, w.mT),
            lambda a, w, b: torch.addmm(b, a, w.t()),
            x,
            weight,
            bias,
        )

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        known, (x, weight), needs = ctx.known, ctx.saved_tensors, ctx.needs_input_grad
        of_x = product(known, "g W", torch.bmm, torch.mm, g, weight) if needs[1] else None
        of_weight = None
        if needs[2]:
            of_weight = product(known, "g x", lambda a, b: torch.bmm(a.mT, b), lambda a, b: torch.mm(a.t(), b), g, x)
        of_bias = None
        if ctx.has_bias and needs[3]:
            of_bias = product(known, "sum g", lambda a: a.sum(1), lambda a: a.sum(0), g)
        return None, of_x, of_weight, of_bias


def product(
    known: Known | None, name: str, together: Callable[..., Tensor], alone: Callable[..., Tensor], *operands: Tensor
) -> Tensor:
    """Compute an operation for all clients at once if that gives the same bits as one by one, else one by one.

    The first use with given shapes compares both on random numbers.

    `known`: record of whether one call on stacked tensors gives the same bits as one call per client, by operation
    and shapes; changed in place. None = one call is made whatever its bits.
    `operands`: stacked tensors of shape (clients, ...).
    """
    if known is None:
        return together(*operands)
    places = ((*one.shape[1:], *one.stride(), one.data_ptr() % CACHE_LINE_BYTES) for one in operands)
    num, device = len(operands[0]), operands[0].device
    # a GPU's library may choose its kernel by the number of products
    key = (name, num.bit_length() if device.type == "cpu" else (num, device), *places)
    equal = known.get(key)
    if equal is None:
        equal = known[key] = _is_equal(together, alone, operands)
    return together(*operands) if equal else _one_by_one(alone, operands)


def _one_by_one(alone: Callable[..., Tensor], operands: Sequence[Tensor]) -> Tensor:
    return torch.stack([alone(*own) for own in zip(*map(apart, operands), strict=True)])


def _is_equal(together: Callable[..., Tensor], alone: Callable[..., Tensor], operands: Sequence[Tensor]) -> bool:
    """Check whether batched and separate products have equal bits on random operands with the layout of ``operands``."""
    generator, num = torch.Generator().manual_seed(1), 0
    while num < _ENOUGH:
        drawn = [_drawn_like(one, generator) for one in operands]
        result = together(*drawn)
        if not same_bits(result, _one_by_one(alone, drawn)):
            return False
        num += max(result.numel(), _ENOUGH // 64)
    return True


def _drawn_like(one: Tensor, generator: torch.Generator) -> Tensor:
    """Draw a random tensor with the shape, strides and memory alignment of ``one``."""
    start = one.data_ptr() % CACHE_LINE_BYTES // one.itemsize
    length = start + 1 + sum((size - 1) * step for size, step in zip(one.shape, one.stride(), strict=True))
    drawn = torch.randn(length, dtype=one.dtype, generator=generator).to(one.device)
    return drawn.as_strided(one.shape, one.stride(), start)


def together_is_equal(known: Known, function: Callable[..., Any], args: Any, kwargs: Any, num: int) -> bool:
    """Check, once for each form of the arguments, whether vmap's rule for a function has the bits of one call per client.

    Results and gradients are compared on random numbers; whole numbers and what is no tensor are taken as given. What cannot
    be tried, such as a function whose result is not one tensor, counts as different.
    """
    leaves, form = tree_flatten((tuple(args), dict(kwargs)))
    stacks = [stack_of(leaf) for leaf in leaves]
    if any(
        stack is None and isinstance(leaf, Tensor) and leaf.requires_grad
        for leaf, stack in zip(leaves, stacks, strict=True)
    ):
        return False  # a trial would add a gradient to this tensor
    key = (function, num, form, *(_form_of(leaf, stack) for leaf, stack in zip(leaves, stacks, strict=True)))
    equal = known.get(key)
    if equal is None:
        with outside(), torch.enable_grad():
            equal = known[key] = _try(function, leaves, stacks, form)
    return equal


def _form_of(leaf: object, stack: Tensor | None) -> Hashable:
    tensor = leaf if stack is None else stack
    if not isinstance(tensor, Tensor):
        return exact_key(leaf)
    place = tensor.data_ptr() % CACHE_LINE_BYTES
    return stack is None, tensor.dtype, tensor.shape, tensor.stride(), place, tensor.requires_grad, tensor.device


def _try(function: Callable[..., Any], leaves: list[Any], stacks: list[Tensor | None], form: Any) -> bool:
    generator, count = torch.Generator().manual_seed(1), 0
    while count < _ENOUGH:
        drawn = [_drawn(leaf, stack, generator) for leaf, stack in zip(leaves, stacks, strict=True)]
        moving = [place for place, stack in enumerate(stacks) if stack is not None]

        def call(*own: Any, drawn: list[Any] = drawn, moving: list[int] = moving) -> Any:
            given = dict(zip(moving, own, strict=True))
            args, kwargs = tree_unflatten([given.get(place, one) for place, one in enumerate(drawn)], form)
            return function(*args, **kwargs)

        try:
            result = torch.func.vmap(call)(*(drawn[place] for place in moving))
            parts = [
                [one.requires_grad_(drawn[place].requires_grad) for one in apart(drawn[place].detach())]
                for place in moving
            ]
            alone = [call(*own) for own in zip(*parts, strict=True)]
            upstream = torch.randn(result.shape, dtype=result.dtype, generator=generator).to(result.device)
            pairs = [(result, torch.stack(alone))]
            if result.requires_grad:
                of = [place for place in moving if drawn[place].requires_grad]
                (result * upstream).sum().backward()
                sum((one * own).sum() for one, own in zip(alone, upstream, strict=True)).backward()
                pairs += [
                    (drawn[place].grad, torch.stack([cast(Tensor, one.grad) for one in parts[moving.index(place)]]))
                    for place in of
                ]
            if not all(same_bits(one.detach(), other.detach()) for one, other in pairs):
                return False
        except (RuntimeError, TypeError, ValueError, AttributeError, IndexError, NotImplementedError):
            return False
        count += max(result.numel(), _ENOUGH // 16)
    return True


def _drawn(leaf: object, stack: Tensor | None, generator: torch.Generator) -> Any:
    """Replace a stack of floats by random numbers; return any other argument as it is."""
    if stack is None or not stack.is_floating_point():
        return leaf if stack is None else stack
    return _drawn_like(stack, generator).requires_grad_(stack.requires_grad)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Check whether two floating-point tensors are equal to the bit, including NaN and signed zeros."""
    as_int = {2: torch.int16, 4: torch.int32, 8: torch.int64}[one.itemsize]
    return torch.equal(one.contiguous().view(as_int), other.contiguous().view(as_int))


def embedding(num: int, args: Sequence[Any], kwargs: dict[str, Any]) -> object:
    """Compute `F.embedding` for all clients, inside vmap; a matrix that all clients share is not copied."""
    if stack_of(args[1]) is None:
        return F.embedding(*args, **kwargs)
    return _embedding(num, *args, **kwargs)


def _embedding(
    num: int,
    ids: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> object:
    if max_norm is not None or scale_grad_by_freq or sparse:
        given = (ids, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
        return by_slices(F.embedding, given, {}, num)
    rows, tables = stack_of(ids), stack_of(weight)
    assert tables is not None
    with outside() as inside:
        rows = ids.expand(num, *ids.shape) if rows is None else rows
        padding = -1 if padding_idx is None else padding_idx % tables.shape[1]
        return inside(_Embedding.apply(rows, tables, padding))


class _Embedding(Function):
    """Embedding of several clients: look up rows of each one's table, and sum gradients as for one table that joins all."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, tables: Tensor, padding: int) -> Tensor:
        num = tables.shape[0]
        ctx.save_for_backward(ids)
        ctx.shape, ctx.padding = tables.shape, padding
        clients = torch.arange(num, device=ids.device).view(num, *(1,) * (ids.dim() - 1))
        return tables[clients, ids]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (ids,), (num, length, width) = ctx.saved_tensors, ctx.shape
        starts = torch.arange(0, num * length, length, device=ids.device)
        rows = (ids.reshape(num, -1) + starts.unsqueeze(1)).flatten()
        # -1 = no padding row, since each client's table has one, which is cleared below
        found = torch.ops.aten.embedding_dense_backward(g.reshape(-1, width), rows, num * length, -1, False)
        found = found.view(num, length, width)
        if ctx.padding >= 0:
            found[:, ctx.padding] = 0
        return None, found, None


def torch_state(device: torch.device) -> torch.Tensor:
    """Return the state of torch's generator of a device."""
    is_cuda = device.type == "cuda"
    return torch.cuda.get_rng_state(device) if is_cuda else torch.default_generator.get_state()


def set_torch_state(device: torch.device, state: torch.Tensor | int) -> None:
    """Set torch's generator of a device to a state, or to that of a new generator with a seed."""
    if isinstance(state, int):
        state = torch.Generator(device).manual_seed(state).get_state()
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.default_generator.set_state(state)
