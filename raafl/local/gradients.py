"""Change gradients before a step: the proximal term of FedProx, and sparse gradients, as of `nn.Embedding(sparse=True)`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Optimizer, SparseAdam

from raafl.core.local import Local
from raafl.errors import BadInput
from raafl.submodel import FlatTensors


def takes_sparse(optimizer: Optimizer) -> bool:
    """Check whether an optimizer accepts sparse gradients."""
    # with weight decay these optimizers add a dense tensor to the gradient
    if isinstance(optimizer, SGD | Adagrad):
        return all(not group["weight_decay"] for group in optimizer.param_groups)
    return isinstance(optimizer, SparseAdam)


def _dense_by(local: Local, clip: float | None) -> str | None:
    """Name the option that needs dense gradients, since it reads or changes them before a step; None if no option does."""
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
    parameters: Sequence[nn.Parameter],
    optimizer: Optimizer,
    local: Local,
    clip: float | None,
    num_processes: int,
) -> Callable[[Tensor], None]:
    """Return a function that runs the backward pass, and makes sparse gradients dense unless only the optimizer reads them.

    `run`: backward pass of Fabric's strategy; its second argument is None.
    `parameters`: all parameters of the module.
    `clip`: largest gradient norm; None = no clipping.

    Raises:
        BadInput: the optimizer needs sparse gradients; see `check_optimizer`.
    """
    check_optimizer(optimizer, local, clip, num_processes)
    stays_sparse = _dense_by(local, clip) is None and takes_sparse(optimizer)

    def backward(loss: Tensor) -> None:
        run(loss, None)
        if not stays_sparse:
            make_dense_(parameters)

    return backward


@torch.no_grad()
def make_dense_(parameters: Iterable[nn.Parameter]) -> None:
    """Replace sparse gradients by dense ones, in place."""
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.to_dense()


class ProximalTerm:
    """Proximal term ``prox/2 * ||theta - theta_received||^2``, which keeps local values close to the received ones.

    Here theta are the trained parameters.
    """

    def __init__(self, parameters: list[nn.Parameter], anchors: list[Tensor]) -> None:
        """Create the term that pulls ``parameters`` towards ``anchors``, tensors of the same shapes."""
        self.parameters, self.anchors = parameters, anchors

    @classmethod
    def towards(cls, received: FlatTensors, module: nn.Module) -> ProximalTerm:
        """Return the proximal term for a module's trained parameters."""
        trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        return cls([p for _, p in trained], [received[name].to(p.device) for name, p in trained])

    @torch.no_grad()
    def add_to_gradients(self, prox: float) -> None:
        """Add the term's gradient to each parameter's: ``prox`` times the parameter's difference from the received value."""
        used = [(p, a) for p, a in zip(self.parameters, self.anchors, strict=True) if p.grad is not None]
        grads: list[Tensor] = [p.grad for p, _ in used if p.grad is not None]
        # in half precision, small gradients would be lost beside prox * theta, so the difference is computed first
        if any(grad.dtype.itemsize == 2 for grad in grads):
            torch._foreach_add_(grads, torch._foreach_sub([p for p, _ in used], [a for _, a in used]), alpha=prox)
            return
        torch._foreach_add_(grads, [p for p, _ in used], alpha=prox)
        torch._foreach_sub_(grads, [a for _, a in used], alpha=prox)
