"""The speeds of this machine by which the time of a step is predicted."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch.nn import functional as F

from raafl.submodel.ledger import Ledger

CALLS = 20


class Probes:
    """Two pieces of work that belong to no model: a matrix product, and a layer of elementwise operations.

    The layer is an activation, a normalisation and an addition of 8192 x 512 values, forward and backward: memory taken,
    read and written as in a training step.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """Prepare both; ``clock`` returns seconds."""
        a, b, x = torch.randn(2048, 512), torch.randn(512, 512), torch.randn(8192, 512, requires_grad=True)

        def layer() -> None:
            torch.autograd.grad((F.layer_norm(F.gelu(x), (512,)) + x).sum(), x)

        def product() -> None:
            a @ b

        self.product, self.layer = Ledger(), Ledger()
        with self.product:
            product()
        with self.layer:
            layer()
        self.clock, self.calls = clock, (product, layer)
        self.best = [math.inf, math.inf]

    def take(self) -> None:
        """Time each for as long as a step takes: a single call may fall between two disturbances, a step does not."""
        for place, call in enumerate(self.calls):
            begin = self.clock()
            for _ in range(CALLS):
                call()
            self.best[place] = min(self.best[place], (self.clock() - begin) / CALLS)

    def speed(self) -> tuple[float, float]:
        """Return FLOP/s and bytes/s with which FLOPs and bytes moved, added up, explain both."""
        product_s, layer_s = self.best
        bytes_per_s = self.layer.moved_bytes / layer_s
        return self.product.flops / (product_s - self.product.moved_bytes / bytes_per_s), bytes_per_s
