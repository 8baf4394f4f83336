"""Train and evaluate on a rank what rank 0 sends, and read there what the rank answers."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

from raafl.core.types import OUT_OF_MEMORY, Assignment, Update
from raafl.errors import USER_ERRORS, GpuLost, TaskFailed, format_error
from raafl.local.context import Stopped, TaskContext
from raafl.local.evaluate import Evaluator
from raafl.local.malloc import give_back
from raafl.local.shared_evaluation import partials
from raafl.local.train import LocalTrainer
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
