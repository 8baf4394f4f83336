"""Evaluate the global model on the server's test data."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any

import torch

from raafl.core.types import derive_seed
from raafl.data.federated import Sized
from raafl.errors import BadInput
from raafl.local.buffers import Buffers
from raafl.local.evaluation.living_metrics import LivingMetrics
from raafl.local.evaluation.metric_partials import NotMergeable, PartialRecorder, add
from raafl.local.evaluation.metrics import begin, end, step
from raafl.local.evaluation.record import Recorder
from raafl.module_hooks import overrides
from raafl.rng import RngStream, generators, same_generators
from raafl.submodel import FULL, FlatTensors, Submodels
from raafl.submodel.flat import is_merged
from raafl.submodel.module_state import ModuleState

TURN_S = 0.01
"""Seconds after which an evaluation lets other threads use random streams of theirs; switching takes 0.1 ms."""


class Evaluator:
    """Evaluator that runs the module's ``validation_step`` over all test batches, for given values of the model.

    Several processes can share the batches. Another process evaluates some of them and returns partial sums
    (`partials`); this one adds these (`add`) in the order of batches, between `begin` and `end`.

    `num_batches`: number of batches in the test set, known after a complete evaluation; 0 before.
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
        """Build the full module once.

        `seed`: seed of the run, from which each evaluation derives its random numbers; None = it draws from the
        global generators as they are.

        Raises:
            BadInput: the module has no ``validation_step``.
        """
        shrunk = submodels.shrink(FULL, device=device)
        self.module, self._present = shrunk.module, shrunk.present
        self._buffers = Buffers(self.module, self._present)
        self._batches, self.device, self._prepare = batches, torch.device(device), prepare
        self._seed, self._has_drawn = seed, False
        with self._stream("test data"):
            next(iter(batches()), None)  # reads the data set for the first time, which may draw
        self.num_batches = 0
        self._recorder = Recorder()
        self._recorder.attach(self.module)
        self._state = ModuleState(self.module, submodels)
        self._metrics, self._lives = LivingMetrics(self.module), metrics_live
        self.living: dict[str, dict[str, Any]] = {}
        if not overrides(self.module, "validation_step"):
            raise BadInput(
                f"{type(self.module).__name__} has no validation_step: define one that logs or returns its metrics, so "
                "that the global model can be measured"
            )

    @torch.no_grad()
    def fill(self, values: FlatTensors, *, metrics: bool = True) -> None:
        """Load ``values`` into the module and reset its other state; must be called before the first evaluation."""
        self._state.restore(metrics=metrics)
        self._buffers.restore()
        self._present.copy_(values)

    def revive(self, living: dict[str, dict[str, Any]]) -> None:
        """Set the metrics to a state that `living` had, such as that of a checkpoint."""
        if self._lives:
            self._state.restore()
            self._metrics.load(living)
            self.living = self._metrics.state()

    def restarted(self, values: FlatTensors) -> list[str]:
        """Return the names of attributes and integer buffers that have changed since `fill`; each task resets these.

        Counters of batches in batch norms are left out.

        Raises:
            BadInput: a step has changed state that cannot be reset.
        """
        self._state.check()
        counts = [
            name
            for name, buffer in self.module.named_buffers()
            if name in self._present and not is_merged(buffer.dtype)
            if not name.endswith("num_batches_tracked") and not torch.equal(buffer, values[name].to(buffer.device))
        ]
        return sorted([*self._state.changed(metrics=False), *counts])

    def __call__(self, values: FlatTensors, version: int) -> dict[str, float]:
        """Return the metrics that ``validation_step`` logs or returns, over all samples.

        `raafl.local.evaluation.metrics.measure` computes them.
        """
        self.begin(values, version)
        self.num_batches = self.measure(0, None)
        return self.end()

    def on_other(self, batches: Callable[..., Iterable[Sized]], values: FlatTensors, version: int) -> dict[str, float]:
        """Return the metrics over other batches, such as those of the test set; metrics of the module begin anew.

        Called when the run has ended: no further evaluation may follow.
        """
        self._batches, self._lives = batches, False
        return self(values, version)

    @property
    def is_shared(self) -> bool:
        """Whether other processes may evaluate some of the batches.

        They may not if an evaluation has drawn random numbers, or the module has a hook that runs before the first or after
        the last batch.
        """
        ends = ("start", "epoch_start", "epoch_end", "end")
        return not (self._has_drawn or any(overrides(self.module, f"on_validation_{end}") for end in ends))

    def begin(self, values: FlatTensors, version: int) -> FlatTensors:
        """Load the model to evaluate into the module; return its values, which stay valid until the next evaluation.

        The function ``prepare``, an argument of the evaluator's constructor, may change the values first.
        """
        self.fill(values, metrics=not self._lives)
        with torch.no_grad(), self._stream("prepare", version):
            self._prepare(self._present)
        self._draws = self._stream("evaluation", version)
        with self._draws:
            begin(self.module, self._recorder)
        return self._present

    def _stream(self, *what: str | int) -> AbstractContextManager[None]:
        """Return a context with random numbers of its own; while a thread is in it, streams of other threads wait."""
        return nullcontext() if self._seed is None else RngStream(self.device, derive_seed(self._seed, *what))

    def measure(self, start: int, stop: int | None) -> int:
        """Evaluate the batches from ``start`` up to, not including, ``stop``; return their number.

        `stop`: number after the last batch; None = up to the end.
        """
        numbered, num = iter(self._numbered(start, stop)), 0
        while True:
            with self._draws:
                done = step(self.module, self._recorder, _for_a_turn(numbered), self.device)
            if not done:
                return num
            num += done

    def add(self, partials: dict[str, Any]) -> None:
        """Add partial sums that another process has computed for the next batches."""
        add(self._recorder, partials)

    def end(self) -> dict[str, float]:
        """Finish the evaluation; return the metrics over all batches."""
        with self._draws:
            metrics = end(self.module, self._recorder)
        self._has_drawn = self._has_drawn or (isinstance(self._draws, RngStream) and self._draws.has_drawn)
        self._state.check()
        if self._lives:
            self.living = self._metrics.state()
        return metrics

    def partials(self, start: int, stop: int) -> dict[str, Any]:
        """Evaluate some batches for another process; return partial sums, as plain data, for that process's `add`.

        Raises:
            NotMergeable: the result of a batch may depend on the batches before it.
        """
        recorder, drawn = PartialRecorder(), generators(self.device)
        recorder.attach(self.module)
        begin(self.module, recorder)
        counts = self._metrics.counts()
        try:
            step(self.module, recorder, self._numbered(start, stop), self.device)
            if not same_generators(drawn, generators(self.device)):
                raise NotMergeable(
                    "validation_step draws random numbers: compute metrics without them, so that several processes can "
                    "share the evaluation"
                )
            if changed := self._state.changed(metrics=False):
                raise NotMergeable(
                    f"validation_step changes the attribute {changed[0]}: leave it unchanged, so that several processes can share "
                    "the evaluation"
                )
            if updated := self._metrics.updated(counts, recorder.metrics):
                raise NotMergeable(
                    f"validation_step updates the metric {updated[0]} and does not log it as an object: log the metric itself, so "
                    "that several processes can share the evaluation"
                )
            return recorder.partials()
        finally:
            recorder.clear()

    def _numbered(self, start: int, stop: int | None) -> Iterable[tuple[int, Sized]]:
        batches = self._batches(first=start) if start else self._batches()
        return enumerate(islice(batches, None if stop is None else stop - start), start)


def _for_a_turn(batches: Iterator[tuple[int, Sized]]) -> Iterator[tuple[int, Sized]]:
    """Yield batches for about `TURN_S` seconds, at least one if there is one."""
    end = time.perf_counter() + TURN_S
    for batch in batches:
        yield batch
        if time.perf_counter() > end:
            return
