"""Evaluate the global model on the server's test data."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from raafl.core.types import derive_seed
from raafl.data.federated import Sized
from raafl.errors import BadInput
from raafl.local.record import Recorder
from raafl.local.trainable import Buffers, to_device
from raafl.module_hooks import move_batch, overrides
from raafl.rng import RngStream
from raafl.submodel import FULL, FlatTensors, Submodels
from raafl.submodel.flat import is_merged

TURN_S = 0.01
"""Seconds after which an evaluation lets other threads use random streams of theirs; switching takes 0.1 ms."""


class Evaluator:
    """Evaluator that runs the module's ``validation_step`` over all test batches, for given values of the model.

    Several processes can share the batches (`raafl.runtime.executors.rank_worker`), between `begin` and `end`.

    `num_batches`: number of batches in the test set, known after a complete evaluation; 0 before.
    `is_alone`: whether an evaluation has drawn random numbers or changed a buffer, so that no other process may share it.
    `living`: states of metrics after the last complete evaluation, as plain data and tensors, by path and name.
    """

    def __init__(
        self,
        submodels: Submodels,
        batches: Callable[..., Iterable[Sized]],
        device: torch.device | str = "cpu",
        prepare: Callable[[FlatTensors], None] = lambda values: None,
        *,
        seed: int | None,
        metrics_live: bool = True,
    ) -> None:
        """Build the whole model's module, which all evaluations use.

        `seed`: run's seed, from which each evaluation derives its random numbers; None = the global generators are
        used. Raises BadInput if the module has no ``validation_step``.
        """
        shrunk = submodels.shrink(FULL, device=device)
        self.module, self._present = shrunk.module, shrunk.present
        self._buffers = Buffers(self.module, self._present)
        self._batches, self.device, self._prepare = batches, torch.device(device), prepare
        self._seed, self.is_alone = seed, False
        self._versions: list[tuple[int, int]] = []
        with self._stream("test data"):
            next(iter(batches()), None)  # the first access to a data set may draw random numbers
        self.num_batches = 0
        self.recorder = Recorder()
        self.recorder.attach(self.module)
        from raafl.submodel.module_state import ModuleState

        self.state = ModuleState(self.module, submodels)
        self.metrics, self._lives = LivingMetrics(self.module), metrics_live
        self.living: dict[str, dict[str, Any]] = {}
        if not overrides(self.module, "validation_step"):
            raise BadInput(
                f"{type(self.module).__name__} has no validation_step: define one that logs or returns its metrics, so "
                "that the global model can be measured"
            )

    @torch.no_grad()
    def fill(self, values: FlatTensors, *, metrics: bool = True) -> None:
        """Load ``values`` into the module and reset its other state; must be called before the first evaluation."""
        self.state.restore(metrics=metrics)
        self._buffers.restore()
        self._present.copy_(values)

    def revive(self, living: dict[str, dict[str, Any]]) -> None:
        """Set the metrics to a state that `living` had, such as that of a checkpoint."""
        if self._lives:
            self.state.restore()
            self.metrics.load(living)
            self.living = self.metrics.state()

    def restarted(self, values: FlatTensors) -> list[str]:
        """Return the names of attributes and integer buffers that have changed since `fill`; each task resets these.

        Counters of batches in batch norms are left out.

        Raises:
            BadInput: a step has changed state that cannot be reset.
        """
        self.state.check()
        counts = [
            name
            for name, buffer in self.module.named_buffers()
            if name in self._present and not is_merged(buffer.dtype)
            if not name.endswith("num_batches_tracked") and not torch.equal(buffer, values[name].to(buffer.device))
        ]
        return sorted([*self.state.changed(metrics=False), *counts])

    def __call__(self, values: FlatTensors, version: int) -> dict[str, float]:
        """Evaluate the global model ``values`` on all test samples; return the metrics of its ``validation_step``."""
        self.begin(values, version)
        self.num_batches = self.measure(0, None)
        return self.end()

    def on_other(self, batches: Callable[..., Iterable[Sized]], values: FlatTensors, version: int) -> dict[str, float]:
        """Return the metrics over other batches, such as those of the test set; metrics of the module begin anew.

        Called when the run has ended: no further evaluation may follow.
        """
        self._batches, self._lives = batches, False
        return self(values, version)

    def begin(self, values: FlatTensors, version: int) -> FlatTensors:
        """Load the model to evaluate into the module; return its values, which stay valid until the next evaluation.

        The function ``prepare``, an argument of the evaluator's constructor, may change the values first.
        """
        self.fill(values, metrics=not self._lives)
        with torch.no_grad(), self._stream("prepare", version):
            self._prepare(self._present)
        self._versions = self.buffer_versions()
        self._draws = self._stream("evaluation", version)
        with self._draws:
            begin(self.module, self.recorder)
        return self._present

    def _stream(self, *what: str | int) -> AbstractContextManager[None]:
        """Return a context with a random state derived from the seed and ``what``, which one thread at a time may enter."""
        return nullcontext() if self._seed is None else RngStream(self.device, derive_seed(self._seed, *what))

    def measure(self, start: int, stop: int | None) -> int:
        """Evaluate the batches from ``start`` up to, not including, ``stop``; return their number.

        `stop`: number after the last batch; None = up to the end.
        """
        numbered, num = iter(self.numbered(start, stop)), 0
        while True:
            with self._draws:
                done = step(self.module, self.recorder, _for_a_turn(numbered), self.device)
            if not done:
                return num
            num += done

    def end(self) -> dict[str, float]:
        """Finish the evaluation; return the metrics over all batches."""
        with self._draws:
            metrics = end(self.module, self.recorder)
        has_drawn = isinstance(self._draws, RngStream) and self._draws.has_drawn
        self.is_alone = self.is_alone or has_drawn or self.buffer_versions() != self._versions
        self.state.check()
        if self._lives:
            self.living = self.metrics.state()
        return metrics

    def buffer_versions(self) -> list[tuple[int, int]]:
        """Return identity and version of each buffer, which change when a buffer is replaced or written to."""
        return [(id(buffer), buffer._version) for buffer in self.module.buffers()]

    def numbered(self, start: int, stop: int | None) -> Iterable[tuple[int, Sized]]:
        """Return the batches from ``start`` up to, not including, ``stop``, each with its number."""
        batches = self._batches(first=start) if start else self._batches()
        return enumerate(islice(batches, None if stop is None else stop - start), start)


def _for_a_turn(batches: Iterator[tuple[int, Sized]]) -> Iterator[tuple[int, Sized]]:
    """Yield one batch, and more until `TURN_S` seconds have passed."""
    end = time.perf_counter() + TURN_S
    for batch in batches:
        yield batch
        if time.perf_counter() > end:
            return


# Carry the state of a module's torchmetrics from one evaluation to the next, also through checkpoints. A metric that is
# logged as an object is reset after each evaluation. Others continue, as under Lightning's Trainer: a `MaxMetric`
# updated after each evaluation holds the best value of the run.

_PLAIN = (type(None), bool, int, float, str)
_OF_ITSELF = ("training", "_computed")


class LivingMetrics:
    """Reader and writer of the states of the metrics in one module."""

    def __init__(self, module: nn.Module) -> None:
        """Save the initial attributes of the module's metrics, before any evaluation changes them."""
        self.metrics = dict(_metrics_in(module))
        self._first = {path: dict(vars(metric)) for path, metric in self.metrics.items()}

    def state(self) -> dict[str, dict[str, Any]]:
        """Return copies of all values that differ from the first ones, by path of the metric and name, tensors on the CPU."""
        return {path: values for path in self.metrics if (values := self._changed(path))}

    def _changed(self, path: str) -> dict[str, Any]:
        metric, first = self.metrics[path], self._first[path]
        is_updated = getattr(metric, "_update_count", 0) > 0
        names = [name for name, value in vars(metric).items() if value is not first.get(name, value)]
        names += [name for name in getattr(metric, "_defaults", {}) if is_updated and name not in names]
        found = {name: getattr(metric, name) for name in names if name not in _OF_ITSELF}
        return {name: _copied(value, torch.device("cpu")) for name, value in found.items() if _is_plain(value)}

    def load(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Set the metrics to the result of `state`; what names no metric or attribute of this module is left out."""
        for path, values in state.items():
            metric = self.metrics.get(path)
            known = {} if metric is None else vars(metric)
            for name, value in values.items():
                if name in known and _is_plain(value) and _is_plain(known[name]):
                    setattr(metric, name, _copied(value, getattr(metric, "device", torch.device("cpu"))))


def _metrics_in(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for path, part in module.named_modules():
        if callable(getattr(part, "compute", None)) and callable(getattr(part, "reset", None)):
            yield path, part


def _is_plain(value: object) -> bool:
    return type(value) in (*_PLAIN, Tensor) or (type(value) is list and all(map(_is_plain, value)))


def _copied(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.detach().to(device, copy=True)
    return [_copied(item, device) for item in value] if isinstance(value, list) else deepcopy(value)


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


def peak_bytes(device: torch.device, *, anew: bool = False) -> int:
    """Return the peak memory in bytes: of tensors on a GPU, or of this whole process with its libraries on a CPU.

    On a GPU it is the peak since the last call with ``anew=True``, on a CPU since the process started.
    """
    if device.type == "cuda":
        if anew:
            torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.max_memory_allocated(device)
    # in bytes on macOS, in kibibytes elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def begin(module: nn.Module, recorder: Recorder) -> None:
    """Start an evaluation: switch the module to eval mode and call its start hooks."""
    from raafl.trainer_stand_in import stage

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
        returned = answer if isinstance(answer, Mapping) else {}
        for name in [name for name, value in returned.items() if _is_number(value)]:
            recorder.log(_RETURNED + name, returned[name])
        if end:
            module.on_validation_batch_end(answer, batch, index)  # type: ignore[operator]
    return num


def end(module: nn.Module, recorder: Recorder) -> dict[str, float]:
    """End an evaluation: call the module's end hooks; return the metrics over all batches."""
    _call(module, "on_validation_epoch_end")
    _call(module, "on_validation_end")
    found = recorder.means()  # read in one call: a metric that is both logged and returned is reset when it is read
    returned = {name.removeprefix(_RETURNED): value for name, value in found.items() if name.startswith(_RETURNED)}
    return {**returned, **{name: value for name, value in found.items() if not name.startswith(_RETURNED)}}


def _call(module: object, hook: str, *args: object) -> None:
    if overrides(module, hook):
        getattr(module, hook)(*args)


def _is_number(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1
    return isinstance(value, int | float) or callable(getattr(value, "compute", None))
