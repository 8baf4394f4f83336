"""Evaluate a submodel on the test samples of the client that has trained it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from raafl.data.federated import ClientData, Sized
from raafl.local.evaluate import TEST, begin, end, step
from raafl.local.record import Recorder
from raafl.local.trainable import Buffers


@torch.no_grad()
def measure(
    module: nn.Module,
    recorder: Recorder,
    batches: Iterable[Sized],
    device: torch.device,
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> dict[str, float]:
    """Run the module's ``validation_step`` on all batches, in eval mode; return its metrics over all of them.

    Numbers that the module logs or returns are averaged over samples. A torchmetrics ``Metric`` computes one value from
    all batches. The hooks `on_validation_start`, `..._epoch_start`, `..._batch_start`, `..._batch_end`, `..._epoch_end`
    and `..._end` are called if the module has them. If a metric is both logged and returned, the logged value counts.
    Returned objects of other types are ignored.
    """
    begin(module, recorder)
    step(module, recorder, enumerate(batches), device, context)
    return end(module, recorder)


def measure_part(
    module: nn.Module,
    recorder: Recorder,
    buffers: Buffers,
    data: ClientData,
    batches: Iterable[Sized],
    device: torch.device,
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    on_batch: Iterable[str] = (),
) -> dict[str, float]:
    """Evaluate a submodel on a client's own test samples; return its metrics, named ``test/...``, and ``test/num_samples``.

    The model stays the same: this function restores parameters and buffers that the evaluation changes; attributes are
    restored before the next task.
    """
    trained = (p.detach() for p in module.parameters() if p.requires_grad)
    before = [(tensor, tensor.clone()) for tensor in (*module.buffers(), *trained)]
    try:
        metrics = measure(module, recorder, _with_batch_statistics(module, batches, on_batch), device, context)
    finally:
        buffers.restore()
        for tensor, old in before:
            tensor.copy_(old)
    return {**{TEST + name: value for name, value in metrics.items()}, TEST + "num_samples": float(data.num_samples)}


def _with_batch_statistics(module: nn.Module, batches: Iterable[Sized], paths: Iterable[str]) -> Iterable[Sized]:
    """Yield the batches, with the batch norms at ``paths`` in training mode if a batch has more than one sample."""
    norms = [module.get_submodule(path) for path in paths]
    for batch, num_samples in batches:
        for norm in norms:
            norm.train(num_samples > 1)
        yield batch, num_samples
