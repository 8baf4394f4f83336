"""Time small workloads from which the speeds of a machine are computed."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from raafl.submodel.cost.ledger import Ledger

_TINY_DEPTH, _TINY_CALLS = 5, 20


class Probes:
    """Timer of three workloads, from whose times a machine's speeds are computed.

    The workloads are a matrix product (bound by FLOP/s); a layer of elementwise operations, forward and backward (bound
    by memory traffic); and many operations on a single row (bound by the time to launch a kernel).

    `best_s`: shortest time of each workload so far, in seconds.
    `product`: counts of the FLOPs, bytes and kernels of the matrix product.
    `layer`: the same counts for the layer.
    `tiny`: the same counts for the operations on a single row.
    """

    def __init__(
        self,
        device: str | torch.device = "cpu",
        clock: Callable[[], float] = time.perf_counter,
        num_samples: int | None = None,
        num_calls: int = 1,
    ) -> None:
        """Allocate the workloads.

        `num_samples`: rows of 512 values in the layer; None = 4096; on a GPU, where that would be launch-bound, 32
        times as many and a product 64 times as large.
        """
        self._device = torch.device(device)
        wide = 4 if self._device.type == "cuda" else 1
        a, b = (torch.randn(rows * wide, 512 * wide, device=device) for rows in (2048, 512))
        rows = num_samples or 4096 * (32 if wide > 1 else 1)
        self.product, self.layer, self.tiny = Ledger(), Ledger(), Ledger()
        self._work: list[Callable[[], object]] = [lambda: a @ b, self._layer(rows), self._tiny()]
        for ledger, work in zip((self.product, self.layer, self.tiny), self._work, strict=True):
            with ledger:
                work()
        self._clock, self._calls = clock, (num_calls, num_calls, max(num_calls, _TINY_CALLS))
        self.best_s = [math.inf] * 3

    def _layer(self, num_samples: int) -> Callable[[], object]:
        x, gradient = (torch.randn(num_samples, 512, device=self._device) for _ in range(2))
        x.requires_grad_()
        return lambda: torch.autograd.grad(F.layer_norm(F.gelu(x), (512,)) + x, x, gradient)

    def _tiny(self) -> Callable[[], object]:
        blocks = [(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU()) for _ in range(_TINY_DEPTH)]
        model = nn.Sequential(*itertools.chain(*blocks)).to(self._device)
        x = torch.randn(1, 64, device=self._device)

        def passes() -> None:
            model.zero_grad()
            model(x).square().mean().backward()

        return passes

    def take(self) -> None:
        """Time each workload once, and keep the shortest time so far."""
        for place, (work, num_calls) in enumerate(zip(self._work, self._calls, strict=True)):
            begin_s = self._clock()
            for _ in range(num_calls):
                work()
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            self.best_s[place] = min(self.best_s[place], (self._clock() - begin_s) / num_calls)

    def speeds(self) -> tuple[float, float, float]:
        """Compute FLOP/s, bytes/s of memory traffic and seconds per kernel launch from the shortest time of each workload."""
        product_s, layer_s, tiny_s = self.best_s
        product, layer, tiny = (one.kernels.total() for one in (self.product, self.layer, self.tiny))
        many, few = self.layer.moved_bytes, self.tiny.moved_bytes
        # of seconds = launches * launch_s + bytes / bytes_per_s, twice
        launch_s = max(tiny_s * many - layer_s * few, 0.0) / (tiny * many - layer * few)
        bytes_per_s = many / max(layer_s - layer * launch_s, layer_s / 10)
        other_s = self.product.moved_bytes / bytes_per_s + product * launch_s
        return self.product.flops / max(product_s - other_s, product_s / 10), bytes_per_s, launch_s
