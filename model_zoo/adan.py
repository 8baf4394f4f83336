"""Adan: adaptive Nesterov momentum, with which the Co-S2P paper trains."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class Adan(torch.optim.Optimizer):
    """Xie et al. 2022 (arXiv:2208.06677), Algorithm 1, with decay lambda in the proximal form.

    With the difference of gradients ``d_k = g_k - g_{k-1}`` (0 in the first step) and ``b_i = 1 - beta_i`` of the paper:

        m <- b1 m + (1 - b1) g          v <- b2 v + (1 - b2) d          n <- b3 n + (1 - b3) (g + b2 d)^2
        theta <- (theta - lr (m + b2 v) / (sqrt(n) + eps)) / (1 + lr lambda)

    m, v and n begin at 0 and are divided by ``1 - b_i^k``, as Adam's are; the paper begins at their first values.
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
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Make one step; return what ``closure``, which computes the loss anew, returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"], state["previous"] = 0, gradient.clone()
            state |= {name: torch.zeros_like(parameter) for name in ("m", "v", "n")}
        b1, b2, b3 = group["betas"]
        state["step"] += 1
        k, difference = state["step"], gradient - state["previous"]
        state["m"].lerp_(gradient, 1 - b1)
        state["v"].lerp_(difference, 1 - b2)
        ahead = torch.add(gradient, difference, alpha=b2)
        state["n"].mul_(b3).addcmul_(ahead, ahead, value=1 - b3)
        state["previous"].copy_(gradient)
        move = (state["m"] / (1 - b1**k)).add_(state["v"], alpha=b2 / (1 - b2**k))
        parameter.addcdiv_(move, (state["n"] / (1 - b3**k)).sqrt_().add_(group["eps"]), value=-group["lr"])
        parameter.div_(1 + group["lr"] * group["weight_decay"])
