"""The two speeds of a machine by which the time of a step is predicted."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch
from torch.nn import functional as F

from raafl.submodel.cost.ledger import Ledger


class Probes:
    """Two pieces of work that belong to no model: a matrix product, and a layer of elementwise operations.

    The layer is an activation, a normalisation and an addition, forward and backward: memory taken, read and written as in a
    training step.

    ``best_s`` is the shortest that each has taken, ``product`` and ``layer`` are what a ledger says of them.
    """

    def __init__(
        self,
        device: str | torch.device = "cpu",
        clock: Callable[[], float] = time.perf_counter,
        num_samples: int = 4096,
        num_calls: int = 1,
    ) -> None:
        """Prepare both.

        The layer has ``num_samples`` rows of 512 values. ``num_calls`` of each are timed together: a single one may
        fall between two disturbances, which a step does not.
        """
        shapes = (2048, 512), (512, 512), (num_samples, 512), (num_samples, 512)
        a, b, x, gradient = (torch.randn(shape, device=device) for shape in shapes)
        x.requires_grad_()

        def layer() -> None:
            torch.autograd.grad(F.layer_norm(F.gelu(x), (512,)) + x, x, gradient)

        def product() -> None:
            a @ b

        self.product, self.layer = Ledger(), Ledger()
        with self.product:
            product()
        with self.layer:
            layer()
        self._device, self._clock, self._num_calls = torch.device(device), clock, num_calls
        self._work = product, layer
        self.best_s = [math.inf, math.inf]

    def take(self) -> None:
        """Time each once more."""
        for place, work in enumerate(self._work):
            begin_s = self._clock()
            for _ in range(self._num_calls):
                work()
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            self.best_s[place] = min(self.best_s[place], (self._clock() - begin_s) / self._num_calls)

    def speeds(self) -> tuple[float, float]:
        """Return FLOP/s and bytes/s with which FLOPs and bytes moved, added up, explain both."""
        product_s, layer_s = self.best_s
        bytes_per_s = self.layer.moved_bytes / layer_s
        return self.product.flops / max(product_s - self.product.moved_bytes / bytes_per_s, product_s / 10), bytes_per_s
