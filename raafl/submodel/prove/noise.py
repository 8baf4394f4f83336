"""Replace dropout and noise while axes are proven by values that do not depend on the number of units."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

DRAWN = ("rand", "rand_like", "uniform_", "randn", "randn_like", "normal_", "exponential_")
"""Functions whose answer code takes for noise: one number stands for all of it, so that all units have the same."""

NOISE = (0.5, 0.9)
"""What stands for it where axes are cut to one unit, and where to a half: ``rand_like(x) > 0.75`` hides all from the first."""


class Quiet(TorchFunctionMode):
    """Context for comparing a small model with the whole one: dropout, noise and casts to half precision are disabled.

    It records whether any of them occurred.

    `noisy`: whether the code has drawn any random number.
    `forced`: whether the code has cast double-precision values to single precision.
    """

    forced = noisy = False

    def __init__(
        self, noise: float, halves: frozenset[torch.dtype] = frozenset(), wide: torch.dtype = torch.float64
    ) -> None:
        """Use ``noise`` for everything that is drawn, and ``wide`` in place of ``halves``, the model's own dtypes, in casts."""
        super().__init__()
        self.noise, self.halves, self.wide = noise, halves, wide

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        if "dropout" in name and args:
            return args[0]
        if name == "scaled_dot_product_attention":
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            else:
                kwargs["dropout_p"] = 0.0
        answer = func(*args, **kwargs)
        if name in ("to", "type", "bfloat16", "half") and isinstance(answer, Tensor) and answer.dtype in self.halves:
            return args[0].to(answer.device, self.wide)  # the layers are proven in it
        if name in DRAWN:  # of another size, it would have others for the same units
            answer.fill_(self.noise)
            self.noisy = True
        elif name in ("bernoulli", "bernoulli_"):
            chance = kwargs.get("p", args[1] if len(args) > 1 else args[0] if name == "bernoulli" else 0.5)
            answer.copy_(torch.as_tensor(chance) >= 0.5)  # the likelier
        if name in ("to", "float", "type") and isinstance(answer, Tensor) and answer.dtype == torch.float32:
            self.forced |= args[0].dtype == torch.float64
        return answer
