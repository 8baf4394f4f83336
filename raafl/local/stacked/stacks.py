"""Stack tensors of several clients, of equal shapes, along a first dimension that the user's code does not see.

`torch.func.vmap` hides the dimension; inside it a tensor stands for a stack. These functions leave vmap temporarily, compute on the
stack or on each client's slice, and return, so that slices are computed by the same kernels that a client alone would use.

Kernels may produce other bits where a tensor starts at another memory alignment: some process their first elements one by one,
up to a multiple of 16 bytes. A slice has the alignment of a client's own tensor, modulo 16 bytes, or is copied to one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch._C._functorch as functorch
from torch import Tensor
from torch._functorch.predispatch import lazy_load_decompositions
from torch.autograd import Function
from torch.utils._pytree import tree_flatten, tree_unflatten

_ALIGN_BYTES = 16


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
    """`torch.stack` whose backward splits the gradient into aligned slices."""

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
    states: list[Tensor] | None = None,
) -> object:
    """Call a torch function once for each client, inside vmap; return its results as stacked tensors.

    `states`: state of torch's generator for each client, which the call advances; None = the function draws no random
    numbers.
    """
    leaves, form = tree_flatten((tuple(args), dict(kwargs)))
    generator = torch.default_generator
    with outside() as inside:
        columns = [None if (stack := stack_of(leaf)) is None else apart(stack) for leaf in leaves]
        results, before = [], None if states is None else generator.get_state()
        for client in range(num):
            mine = [leaf if column is None else column[client] for leaf, column in zip(leaves, columns, strict=True)]
            own_args, own_kwargs = tree_unflatten(mine, form)
            if states is not None:
                generator.set_state(states[client])
            results.append(function(*own_args, **own_kwargs))
            if states is not None:
                states[client] = generator.get_state()
        if before is not None:
            generator.set_state(before)
        flat = [tree_flatten(result) for result in results]
        together = [
            inside(joined(parts)) if isinstance(parts[0], Tensor) else parts[0]
            for parts in zip(*(values for values, _ in flat), strict=True)
        ]
    return tree_unflatten(together, flat[0][1])
