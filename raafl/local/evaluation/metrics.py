"""Evaluate a module by its own ``validation_step``, on the server's test set or on a client's own test part."""

from __future__ import annotations

import math
import resource
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from raafl.data.federated import ClientData, Sized
from raafl.local.evaluation.record import Recorder
from raafl.local.trainable import Buffers
from raafl.module_hooks import move_batch, overrides
from raafl.submodel.nested_batch import to_device
from raafl.trainer_stand_in import stage

TEST = "test/"
"""Begins the names of what a client measured on its own test part, in `Update.metrics` and clients.csv."""
LOSS = "loss"
"""Name, in `Update.metrics`, of the mean training loss of a task's steps."""
MAX_LOGGED = 50
"""Largest number of values logged by `training_step` that a task sends: the first ones."""
MAX_METRIC = 3.5e38
"""Largest magnitude of a metric that a client says: slightly above the largest single-precision number, which is what clients
measure in, so that sums of these are finite."""
PEAK = "memory/peak_bytes"
"""Name, in `Update.metrics`, of what `peak_bytes` says."""
_RETURNED = "validation_step: "


def logged_not_finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the values logged by ``training_step`` that are NaN or infinite, which no file of the run folder records."""
    return {
        name: value
        for name, value in metrics.items()
        if name not in (LOSS, PEAK) and not name.startswith(TEST) and not math.isfinite(value)
    }


def left_out(client: int, values: Mapping[str, float]) -> str:
    """Return the warning about the result of `logged_not_finite`, if there is any, for a client."""
    named = ", ".join(f"'{name}' is {value}" for name, value in values.items())
    return f"client {client}: training_step logs values that are not recorded, {named}: log finite numbers"


def peak_bytes(device: torch.device, *, anew: bool = False) -> int:
    """Return the peak memory in bytes: of tensors on a GPU, or of this whole process with its libraries on a CPU.

    On a GPU it is the peak since the last call with ``anew=True``, on a CPU since the process started.
    """
    if device.type == "cuda":
        if anew:
            torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


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


def begin(module: nn.Module, recorder: Recorder) -> None:
    """Start an evaluation: switch the module to eval mode and call its start hooks."""
    recorder.clear()
    module.eval()
    stage(module, "validating")
    _call(module, "on_validation_start")
    _call(module, "on_validation_epoch_start")


@torch.no_grad()
def step(
    module: nn.Module,
    recorder: Recorder,
    batches: Iterable[tuple[int, Sized]],
    device: torch.device,
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> int:
    """Evaluate some batches, each given with its index; return the number of batches."""
    num = 0
    start, end = (overrides(module, name) for name in ("on_validation_batch_start", "on_validation_batch_end"))
    for index, (batch, num_samples) in batches:
        num += 1
        recorder.weight = float(num_samples)
        batch = move_batch(module, batch, device, to_device)
        if start:
            module.on_validation_batch_start(batch, index)  # type: ignore[operator]
        with context():
            answer = module.validation_step(batch, index)  # type: ignore[operator]
        if isinstance(answer, Mapping):
            recorder.log_dict({_RETURNED + name: value for name, value in answer.items() if _is_number(value)})
        if end:
            module.on_validation_batch_end(answer, batch, index)  # type: ignore[operator]
    return num


def end(module: nn.Module, recorder: Recorder) -> dict[str, float]:
    """End an evaluation: call the module's end hooks; return the metrics over all batches."""
    _call(module, "on_validation_epoch_end")
    _call(module, "on_validation_end")
    found = recorder.means()  # all at once, since a metric that is both logged and returned is reset by reading it
    returned = {name.removeprefix(_RETURNED): value for name, value in found.items() if name.startswith(_RETURNED)}
    return {**returned, **{name: value for name, value in found.items() if not name.startswith(_RETURNED)}}


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
    """Yield the batches with the batch norms at ``paths`` in training mode, except batches of one sample, which has no variance."""
    norms = [module.get_submodule(path) for path in paths]
    for batch, num_samples in batches:
        for norm in norms:
            norm.train(num_samples > 1)
        yield batch, num_samples


def _call(module: object, hook: str, *args: object) -> None:
    if overrides(module, hook):
        getattr(module, hook)(*args)


def _is_number(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1
    return isinstance(value, int | float) or callable(getattr(value, "compute", None))
