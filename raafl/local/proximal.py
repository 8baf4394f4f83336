"""Add a proximal term that pulls a local model towards its received values (FedProx, Li et al. 2020; Fed-RAA)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from raafl.submodel import FlatTensors


class ProximalTerm:
    """Proximal term ``prox/2 * ||theta - theta_received||^2``, which keeps local values close to the received ones.

    Here theta are the trained parameters.
    """

    def __init__(self, parameters: list[nn.Parameter], anchors: list[Tensor]) -> None:
        """Pull ``parameters`` towards ``anchors``, tensors of the same shapes."""
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
        # in half precision, adding prox * theta would round small gradients away
        if any(grad.dtype.itemsize == 2 for grad in grads):
            torch._foreach_add_(grads, torch._foreach_sub([p for p, _ in used], [a for _, a in used]), alpha=prox)
            return
        torch._foreach_add_(grads, [p for p, _ in used], alpha=prox)
        torch._foreach_sub_(grads, [a for _, a in used], alpha=prox)
