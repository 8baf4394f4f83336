"""Handle sparse gradients, as of `nn.Embedding(sparse=True)`: make them dense unless only the optimiser reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Optimizer, SparseAdam

from raafl.core.local import Local
from raafl.errors import BadInput


def takes_sparse(optimizer: Optimizer) -> bool:
    """Check whether an optimizer accepts sparse gradients."""
    # with weight decay these optimizers add the dense parameter to the gradient
    if isinstance(optimizer, SGD | Adagrad):
        return all(not group["weight_decay"] for group in optimizer.param_groups)
    return isinstance(optimizer, SparseAdam)


def _dense_by(local: Local, clip: float | None) -> str | None:
    """Name the option that reads or changes gradients before the step and so needs dense ones; None if there is none."""
    if local.prox:
        return "the proximal term"
    if clip is not None:
        return "fabric.gradient_clip_val"
    return None if local.steps_are_plain else "the algorithm's own steps"


def check_optimizer(optimizer: Optimizer, local: Local, clip: float | None, num_processes: int = 1) -> None:
    """Raise `BadInput` if `SparseAdam`, which accepts only sparse gradients, would get dense ones.

    `clip`: largest gradient norm; None = no clipping.
    """
    reader = _dense_by(local, clip) or ("a client of several processes" if num_processes > 1 else None)
    if isinstance(optimizer, SparseAdam) and reader is not None:
        raise BadInput(
            f"configure_optimizers gives {type(optimizer).__name__}, which accepts only sparse gradients, but "
            f"{reader} needs dense ones: use torch.optim.Adam"
        )


def backward_of(
    run: Callable[[Tensor, None], None],
    module: nn.Module,
    optimizer: Optimizer,
    local: Local,
    clip: float | None,
    num_processes: int,
) -> Callable[[Tensor], None]:
    """Return a function that runs the backward pass, and makes sparse gradients dense unless only the optimizer reads them.

    `run`: backward pass of Fabric's strategy; its second argument is None.
    `clip`: largest gradient norm; None = no clipping.

    Raises:
        BadInput: the optimizer needs sparse gradients; see `check_optimizer`.
    """
    check_optimizer(optimizer, local, clip, num_processes)
    stays_sparse = _dense_by(local, clip) is None and takes_sparse(optimizer)

    def backward(loss: Tensor) -> None:
        run(loss, None)
        if not stays_sparse:
            make_dense_(module.parameters())

    return backward


@torch.no_grad()
def make_dense_(parameters: Iterable[nn.Parameter]) -> None:
    """Replace sparse gradients by dense ones, in place."""
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.to_dense()
