"""Evaluate a submodel on the test samples of the client that has trained it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from raafl.core.types import derive_seed
from raafl.data.federated import ClientData, Sized
from raafl.local.context import Stopped
from raafl.local.evaluate import TEST, begin, end, step
from raafl.local.record import Recorder
from raafl.rng import seed_everything
from raafl.submodel.cut.layers import statistics_of


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


def measure_part(trainer: Any, task: Any, data: ClientData) -> dict[str, float]:
    """Evaluate a trained submodel on a client's own test samples; return ``test/...`` and ``test/num_samples``.

    The model stays the same: parameters and buffers that the evaluation changes are restored here, attributes before the
    next task. Random numbers are drawn that training does not use.

    `trainer`: the `LocalTrainer` that has trained `task`, a `PreparedTask`; `data`: the test part of the client's data.
    """
    assignment, context, module = task.assignment, task.context, task.built.module
    if trainer.submodels.rules.seeds_own_tests:
        seed_everything(derive_seed(assignment.seed, "own test", assignment.version), trainer.fabric.device)

    def batches() -> Iterator[Sized]:
        context.progress.place = "batch 0 of its test part"
        for index, sized in enumerate(data.in_order(trainer.training.batch_size), start=1):
            # with shards all processes evaluate together, so none may stop alone
            if context.is_stopped and trainer.shards is None:
                raise Stopped
            yield sized
            context.progress.place = f"batch {index} of its test part"

    static = trainer.submodels.batch_norm == "static"  # static batch norm has no running statistics
    norms = [mean.rpartition(".")[0] for mean, _ in statistics_of(module)] if static else []
    # batch norms that the model keeps in eval mode use their stored statistics
    norms = [path for path in norms if trainer.submodels.module.get_submodule(path).training]
    shown = _with_batch_statistics(module, batches(), norms)
    trained = (p.detach() for p in module.parameters() if p.requires_grad)
    before = [(tensor, tensor.clone()) for tensor in (*module.buffers(), *trained)]
    try:
        metrics = measure(module, task.built.recorder, shown, trainer.fabric.device, trainer.forward_context)
    finally:
        task.built.buffers.restore()
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
