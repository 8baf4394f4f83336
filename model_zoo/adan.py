"""Adan: adaptive Nesterov momentum, with which the Co-S2P paper trains."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class Adan(torch.optim.Optimizer):
    """Optimizer Adan: Adam with an adaptive Nesterov momentum (Xie et al. 2022, arXiv:2208.06677, Algorithm 1).

    g_k is the gradient of step k, ``d_k = g_k - g_{k-1}`` its change (0 in the first step), and ``b_i = 1 - beta_i`` of
    the paper:

        m <- b1 m + (1 - b1) g          v <- b2 v + (1 - b2) d          n <- b3 n + (1 - b3) (g + b2 d)^2
        theta <- (theta - lr (m + b2 v) / (sqrt(n) + eps)) / (1 + lr lambda)

    m, v and n begin at 0 and are divided by ``1 - b_i^k``, as in Adam; in the paper they begin at their first values.
    The weight decay lambda is in the proximal form.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float, float] = (0.98, 0.92, 0.99),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        """Set up the groups.

        Args:
            params: parameters, or groups of them.
            lr: learning rate.
            betas: b1, b2, b3.
            eps: added to the root.
            weight_decay: lambda.

        Raises:
            ValueError: a number out of range.
        """
        if lr < 0 or eps < 0 or weight_decay < 0 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(
                f"Adan: lr {lr}, eps {eps}, weight_decay {weight_decay}, betas {betas}: give numbers of 0 or more, betas below 1"
            )
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step.

        Args:
            closure: function that computes the loss and its gradients again; None = gradients are already there.

        Returns:
            The closure's loss; None without a closure.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            for parameter in parameters:
                state = self.state[parameter]
                if not state:
                    state["step"], state["previous"] = 0, parameter.grad.clone()
                    state |= {name: torch.zeros_like(parameter) for name in ("m", "v", "n")}
                state["step"] += 1
            steps = [self.state[p]["step"] for p in parameters]
            for k in dict.fromkeys(steps):  # as a rule all alike
                self._update([p for p, step in zip(parameters, steps, strict=True) if step == k], k, group)
        return loss

    def _update(self, parameters: list[Tensor], k: int, group: dict[str, Any]) -> None:
        """Make step ``k`` of these parameters, all at once."""
        gradients: list[Tensor] = [p.grad for p in parameters if p.grad is not None]
        previous, m, v, n = ([self.state[p][name] for p in parameters] for name in ("previous", "m", "v", "n"))
        b1, b2, b3 = group["betas"]
        differences = torch._foreach_sub(gradients, previous)
        torch._foreach_lerp_(m, gradients, 1 - b1)
        torch._foreach_lerp_(v, differences, 1 - b2)
        ahead = torch._foreach_add(gradients, differences, alpha=b2)
        torch._foreach_mul_(n, b3)
        torch._foreach_addcmul_(n, ahead, ahead, value=1 - b3)
        torch._foreach_copy_(previous, gradients)
        moves = torch._foreach_div(m, 1 - b1**k)
        torch._foreach_add_(moves, v, alpha=b2 / (1 - b2**k))
        roots = torch._foreach_div(n, 1 - b3**k)
        torch._foreach_sqrt_(roots)
        torch._foreach_add_(roots, group["eps"])
        torch._foreach_addcdiv_(parameters, moves, roots, value=-group["lr"])
        if group["weight_decay"]:
            torch._foreach_div_(parameters, 1 + group["lr"] * group["weight_decay"])
