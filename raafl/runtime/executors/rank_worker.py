"""Train and evaluate on a rank what rank 0 sends, and read there what the rank answers.

Of an evaluation a rank answers partial sums for its batches of the test set, which rank 0 adds in the order of batches.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from raafl.core.types import OUT_OF_MEMORY, Assignment, Update
from raafl.errors import USER_ERRORS, GpuLost, TaskFailed, format_error
from raafl.local.context import Stopped, TaskContext
from raafl.local.evaluate import Evaluator, LivingMetrics, begin, step
from raafl.local.malloc import give_back
from raafl.local.record import Recorder, logged_value, reduction_of
from raafl.local.train import LocalTrainer
from raafl.module_hooks import overrides
from raafl.rng import generators, same_generators
from raafl.runtime.executors.base import Executor, unanswered
from raafl.runtime.identity import Identity
from raafl.runtime.protocol import Answer, Assign, Failed, Hello, Measure, Welcome
from raafl.submodel import FULL, FlatTensors
from raafl.transport import Connection, Kind, Message

FOR_EVER_S = 1e6
"""Timeout of waiting for a message; a rank that is gone is noticed by its connection."""

_Received = tuple[Assignment | Measure, FlatTensors | None, bool]


def work(pair: Connection, trainer: LocalTrainer, inner: Executor, evaluator: Callable[[], Evaluator]) -> None:
    """Train the tasks, and evaluate the models, that rank 0 sends over ``pair``, until rank 0 ends the run.

    A second thread receives at all times, so that the end of the run interrupts the present task.

    Raises:
        GpuLost: the GPU of this process has failed; another rank will train the task.
        PeerLost: the connection to rank 0 is lost.
        Refused: rank 0 has sent an invalid message.
    """
    stop, made, out = threading.Event(), cache(evaluator), list[Assignment]()
    inbox: queue.SimpleQueue[_Received | Exception | None] = queue.SimpleQueue()
    context = TaskContext(stop)
    pair.send(Message(Kind.HELLO, meta=Hello(Identity.of(trainer.submodels)).to_meta()))
    threading.Thread(target=_receive, args=(pair, trainer, inbox, stop), name="reader", daemon=True).start()
    while (item := inbox.get()) is not None:
        if isinstance(item, Exception):
            raise item
        asked, values, more = item
        if not isinstance(asked, Assignment):
            pair.send(_measured(made, asked, values))
            continue
        assert values is not None
        inner.submit(asked, values, float(len(out)))
        out.append(asked)
        del item, values  # frees the task's memory before the next one is awaited
        if more:
            continue
        with suppress(Stopped):  # after Stopped, the receiving thread's last item comes next
            for assignment in out:
                pair.send(answer_of(inner, assignment, context))
        out.clear()
        give_back()  # frees memory for other processes, since the next task may come late


def _receive(pair: Connection, trainer: LocalTrainer, inbox: queue.SimpleQueue[Any], stop: threading.Event) -> None:
    """Put received tasks into ``inbox``; after the last, set ``stop`` to end a task that runs, and put None or an error."""
    expected: list[Assign | Measure] = []

    def expect(kind: Kind, number: int, meta: dict[str, Any]) -> FlatTensors | None:
        device = trainer.fabric.device
        if kind is Kind.MEASURE:
            measure = Measure.from_meta(meta)
            expected[:] = [measure]
            return FlatTensors.empty(trainer.submodels.layout(FULL, "present"), device) if measure.has_values else None
        if kind is not Kind.ASSIGN:
            return None
        task = Assign.from_meta(meta)
        expected[:] = [task]
        return FlatTensors.empty(trainer.payload.layout(task.assignment.spec, "sent"), device)

    last: Exception | None = None
    try:
        while (message := pair.recv(expect, FOR_EVER_S)).kind is not Kind.STOP:
            if message.kind is Kind.WELCOME:
                Welcome.from_meta(message.meta).apply_to(trainer.submodels)
            elif expected:
                item = expected.pop()
                task, more = (item.assignment, item.more) if isinstance(item, Assign) else (item, False)
                inbox.put((task, message.tensors, more))
    except Exception as error:
        last = error
    stop.set()
    inbox.put(last)


def _measured(made: Callable[[], Evaluator], asked: Measure, values: FlatTensors | None) -> Message:
    """Evaluate the batches that rank 0 asks for, on the values that it sent last."""
    try:
        evaluator = made()
        if values is not None:
            evaluator.fill(values)
        return Message(Kind.MEASURED, meta=partials(evaluator, asked.start, asked.stop))
    except USER_ERRORS as error:  # rank 0 evaluates these batches itself, and reports the error
        return Message(Kind.FAILED, meta=Failed(error=format_error(error)).to_meta())


def answer_of(inner: Executor, assignment: Assignment, context: TaskContext) -> Message:
    """Train a task, and others batched with it; return the message with its result.

    Raises:
        GpuLost: the GPU of this process has failed.
    """
    try:
        update = inner.result(assignment.id, context)
    except GpuLost:
        raise
    except TaskFailed as failed:
        return Message(Kind.FAILED, assignment.id, meta=Failed.of(failed, private=False).to_meta())
    if update.refusal == OUT_OF_MEMORY:
        return Message(Kind.FAILED, update.assignment, meta=Failed(OUT_OF_MEMORY).to_meta())
    fields = Answer(
        update.num_samples,
        update.num_steps,
        update.metrics,
        update.extra,
        refusal=update.refusal,
        counted=inner.counted(),
    )
    return Message(Kind.UPDATE, update.assignment, 0, fields.to_meta(exact=True), update.tensors)


def failure_of(assignment: Assignment, meta: dict[str, Any]) -> Update | TaskFailed:
    """Convert the fields of a message without tensors to the failure of a task, or to an update that is refused."""
    failed = Failed.from_meta(meta)
    return failed.to_error(assignment.client) if failed.refusal is None else unanswered(assignment, failed.refusal)


def update_of(assignment: Assignment, fields: Answer, tensors: FlatTensors) -> Update:
    """Convert the fields and tensors of an answer to the update of a task."""
    return Update(
        assignment.id,
        assignment.client,
        assignment.incarnation,
        tensors,
        fields.num_samples,
        fields.num_steps,
        dict(fields.metrics),
        extra=dict(fields.extra),
        refusal=fields.refusal,
    )


class NotMergeable(Exception):
    """Raised if several processes cannot share an evaluation; the message says why."""


class PartialRecorder(Recorder):
    """Recorder for one process's share of an evaluation; it stores every number, so that one process can sum all in order."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers: list[tuple[str, Tensor | float, str, float]] = []

    def log(
        self,
        name: str,
        value: object,
        *,
        reduce_fx: str | Callable[..., Any] = "mean",
        batch_size: int | None = None,
        **kwargs: object,
    ) -> None:
        """Record one logged value; see `Recorder.log`."""
        super().log(name, value, reduce_fx=reduce_fx, batch_size=batch_size)
        if not callable(getattr(value, "compute", None)):
            how = reduction_of(reduce_fx)
            weight = self.weight if batch_size is None else float(batch_size)
            self._numbers.append((name, logged_value(name, value), how, weight))

    def partials(self) -> dict[str, Any]:
        """Return all recorded numbers, and the states of metrics, as plain data.

        Raises:
            NotMergeable: the state of a metric is not a sum of integers, so that the order of additions would matter.
        """
        states = {name: _states(name, metric) for name, metric in self._metrics.items()}
        return {
            "numbers": [[name, _plain(value), how, weight] for name, value, how, weight in self._numbers],
            "states": states,
        }


def add(recorder: Recorder, partials: dict[str, Any]) -> None:
    """Log everything in ``recorder`` that a `PartialRecorder` has recorded."""
    for name, text, how, weight in partials["numbers"]:
        recorder.log(name, float(text), reduce_fx=how, batch_size=weight)
    for name, states in partials["states"].items():
        metric = recorder.metrics[name]
        for state, numbers in states.items():
            own = getattr(metric, state)
            setattr(metric, state, own + torch.tensor(numbers, dtype=own.dtype, device=own.device))


def _states(name: str, metric: object) -> dict[str, Any]:
    states = {state: getattr(metric, state) for state in getattr(metric, "_defaults", {})}
    reductions = getattr(metric, "_reductions", {})
    for state, value in states.items():
        is_sum = getattr(reductions.get(state), "__name__", "") == "dim_zero_sum"
        if not isinstance(value, Tensor) or value.is_floating_point() or value.is_complex() or not is_sum:
            raise NotMergeable(
                f"the metric '{name}' has a state '{state}' that is not a sum of integers, so several processes cannot share "
                "the evaluation: use a metric that counts"
            )
    if not states:
        raise NotMergeable(
            f"the metric '{name}' is not a torchmetrics Metric with registered states (add_state), so several processes "
            "cannot share the evaluation: give it such states, or log numbers"
        )
    return {state: value.tolist() for state, value in states.items()}


def _plain(value: Tensor | float) -> str:
    """Format a number as text, since JSON has no infinity and NaN."""
    if isinstance(value, Tensor) and (value.numel() != 1 or value.is_complex()):
        raise NotMergeable("a logged value is not a single number: log one number")
    return repr(float(value))


def may_share(evaluator: Evaluator) -> bool:
    """Check whether other processes may evaluate some of the batches.

    They may not if an evaluation has drawn random numbers or changed a buffer, or the module has a hook that runs before
    the first or after the last batch.
    """
    ends = ("start", "epoch_start", "epoch_end", "end")
    return not (evaluator.is_alone or any(overrides(evaluator.module, f"on_validation_{end}") for end in ends))


def partials(evaluator: Evaluator, start: int, stop: int) -> dict[str, Any]:
    """Evaluate some batches for another process; return partial sums, as plain data, for that process to `add`.

    Raises:
        NotMergeable: the result of a batch may depend on the batches before it.
    """
    recorder, drawn = PartialRecorder(), generators(evaluator.device)
    recorder.attach(evaluator.module)
    begin(evaluator.module, recorder)
    counts, versions = _counts(evaluator.metrics), evaluator.buffer_versions()
    try:
        step(evaluator.module, recorder, evaluator.numbered(start, stop), evaluator.device)
        if not same_generators(drawn, generators(evaluator.device)):
            raise NotMergeable(
                "validation_step draws random numbers: compute metrics without them, so that several processes can "
                "share the evaluation"
            )
        if versions != evaluator.buffer_versions():
            raise NotMergeable(
                "validation_step changes a buffer: leave buffers unchanged, so that several processes can share the "
                "evaluation"
            )
        if changed := evaluator.state.changed(metrics=False):
            raise NotMergeable(
                f"validation_step changes the attribute {changed[0]}: leave it unchanged, so that several processes can share "
                "the evaluation"
            )
        if updated := _updated(evaluator.metrics, counts, recorder.metrics):
            raise NotMergeable(
                f"validation_step updates the metric {updated[0]} and does not log it as an object: log the metric itself, so "
                "that several processes can share the evaluation"
            )
        return recorder.partials()
    finally:
        recorder.clear()


def _updated(living: LivingMetrics, counts: Mapping[str, int], logged: Mapping[str, Any]) -> list[str]:
    """Return the paths of metrics that were updated since ``counts`` was taken, and that are not logged as objects."""
    parts = {id(part) for metric in logged.values() if isinstance(metric, nn.Module) for part in metric.modules()}
    now = _counts(living)
    return [path for path, metric in living.metrics.items() if now[path] > counts[path] and id(metric) not in parts]


def _counts(living: LivingMetrics) -> dict[str, int]:
    """Map the path of each metric to its number of updates since its last reset."""
    return {path: int(getattr(metric, "_update_count", 0)) for path, metric in living.metrics.items()}
