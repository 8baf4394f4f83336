"""Handle running statistics of batch norm: merge them exactly, or keep them static and collect them at the end (HeteroFL's sBN).

Diao et al. 2021, section 3.2: clients train with the statistics of their own batches and send none; the server collects them once
the model is trained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from raafl.submodel.cut.layers import norms, statistics_of
from raafl.submodel.flat import FlatTensors


def keep_static(module: nn.Module) -> None:
    """Make all batch norms of ``module`` use the statistics of each batch and leave their running statistics unchanged."""
    for _, norm in norms(module):
        norm.momentum = 0.0


@torch.no_grad()
def collect_statistics(module: nn.Module, batches: Iterable[Any], run: Callable[[nn.Module, Any], object]) -> None:
    """Compute the running statistics of each batch norm as the mean over ``batches``, in place; nothing else changes.

    In a model in train mode, batch norms in eval mode keep their statistics: these did not change in training either.

    Args:
        module: model after training.
        batches: batches of suitable data; more give better statistics.
        run: function that calls the model on a batch, such as ``lambda model, batch: model(batch[0])``.
    """
    layers = [norm for _, norm in norms(module) if norm.training or not module.training]
    modes = [(part, part.training) for part in module.modules()]
    momenta = [norm.momentum for norm in layers]
    means = {n: _Mean(n) for n in layers if n.running_mean is not None and n.running_mean.dtype.itemsize == 2}
    module.eval()
    for norm in layers:
        norm.reset_running_stats()
        # None = a plain mean over batches, which torch computes in the buffers' dtype; for half precision `_Mean`
        # computes it in float32
        norm.momentum = 1.0 if norm in means else None
        norm.train()
    try:
        for batch in batches:
            run(module, batch)
        for mean in means.values():
            mean.store()
    finally:
        for mean in means.values():
            mean.handle.remove()
        for norm, momentum in zip(layers, momenta, strict=True):
            norm.momentum = momentum
        for part, training in modes:
            part.training = training


class _Mean:
    """Mean in float32 of the batch statistics that a batch norm of half precision computes in its calls."""

    def __init__(self, norm: _BatchNorm) -> None:
        self._statistics: list[Any] = [norm.running_mean, norm.running_var]
        self._sums, self._num = [torch.zeros_like(one, dtype=torch.float32) for one in self._statistics], 0
        self.handle = norm.register_forward_hook(self._add)

    def _add(self, norm: nn.Module, args: object, output: object) -> None:
        self._num += 1
        for total, one in zip(self._sums, self._statistics, strict=True):
            total.add_(one)

    def store(self) -> None:
        """Write the mean into the batch norm's running statistics, which rounds it only once."""
        for one, total in zip(self._statistics, self._sums, strict=True):
            one.copy_(total / self._num if self._num else one)


class Pooling:
    """Converter of batch norms' running variances to second moments and back, so that a merge gives exact variances.

    A mean of variances ignores that the clients' means differ. Second moments, ``E[x^2] = var + mean^2``, can be
    averaged. So clients send them in place of variances, and the global state has them during a merge.

    In half precision, ``var + mean^2`` would lose a small variance. Clients then send the variance itself, and the
    merge, which computes in single precision, converts it.
    """

    def __init__(self, module: nn.Module) -> None:
        """Find the batch norms of ``module``, and the names of its half-precision buffers."""
        self.pairs = statistics_of(module)
        self._half = {name for name, buffer in module.named_buffers() if buffer.dtype.itemsize == 2}

    def to_moments_(self, tensors: FlatTensors, half: bool | None = None) -> FlatTensors:
        """Convert the variances in ``tensors`` to second moments, in place.

        `half`: selection of variances to convert: True = those in half precision, False = all others, None = all.
        """
        pairs = [pair for pair in self.pairs if half is None or (pair[1] in self._half) is half]
        means, variances = _of(pairs, tensors)
        if means:
            torch._foreach_add_(variances, torch._foreach_mul(means, means))
        return tensors

    def as_sent(self, tensors: FlatTensors) -> AbstractContextManager[None]:
        """Return a context in which ``tensors`` have second moments in place of variances, as a client sends them."""
        return self.untouched(self.to_moments_(tensors, half=False))

    @contextmanager
    def merging(self, values: FlatTensors) -> Iterator[FlatTensors]:
        """Return a context in which ``values`` have second moments in place of variances, for a merge.

        Afterwards, variances that the merge has not changed have the same bits as before. A variance slightly below 0,
        by rounding, becomes 0.
        """
        means, variances = self.statistics_in(values)
        old_means, old = [mean.clone() for mean in means], [variance.clone() for variance in variances]
        self.to_moments_(values)
        old_moments = [moment.clone() for moment in variances]
        yield values
        for mean, moment, *before in zip(means, variances, old_means, old, old_moments, strict=True):
            # rounding makes (var + mean^2) - mean^2 differ from var, so elements that no update has changed get their
            # old values
            same = (moment == before[2]) & (mean == before[0])
            moment.copy_(torch.where(same, before[1], (moment - mean.square()).clamp_min_(0)))

    @contextmanager
    def untouched(self, tensors: FlatTensors) -> Iterator[None]:
        """Return a context that restores the running statistics in ``tensors`` at its end."""
        statistics = [tensor for group in self.statistics_in(tensors) for tensor in group]
        before = [tensor.clone() for tensor in statistics]
        yield
        for tensor, old in zip(statistics, before, strict=True):
            tensor.copy_(old)

    def statistics_in(self, tensors: FlatTensors) -> tuple[list[Tensor], list[Tensor]]:
        """Return views of the running means and of the variances (or second moments) among ``tensors``."""
        return _of(self.pairs, tensors)


def _of(pairs: Iterable[tuple[str, str]], tensors: FlatTensors) -> tuple[list[Tensor], list[Tensor]]:
    found = [(tensors[mean], tensors[variance]) for mean, variance in pairs if variance in tensors]
    return [mean for mean, _ in found], [variance for _, variance in found]
