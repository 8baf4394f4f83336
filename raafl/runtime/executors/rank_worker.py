"""A rank that trains, and measures, what rank 0 sends it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

from raafl._version import __version__
from raafl.core.types import OUT_OF_MEMORY, Assignment, assignment_from_json
from raafl.errors import GpuLost, TaskFailed, said
from raafl.local.evaluate import Evaluator
from raafl.local.failure import to_meta
from raafl.local.malloc import give_back
from raafl.local.train import LocalTrainer, Stopped
from raafl.runtime.executors.base import Executor
from raafl.submodel import FULL, FlatTensors, Submodels
from raafl.transport import Connection, Kind, Message

FOR_EVER_S = 1e6
"""To wait for a message: the pair tells of a rank that is gone."""

_Received = tuple[Assignment | dict[str, Any], FlatTensors | None, bool]


def work(pair: Connection, trainer: LocalTrainer, inner: Executor, evaluator: Callable[[], Evaluator]) -> None:
    """Train what comes over ``pair`` by ``inner``, and measure, until told that the run has ended.

    One thread receives all the time, so that the end of the run interrupts a task that nobody needs any more.

    Args:
        pair: to rank 0.
        trainer: with which ``inner`` trains.
        inner: trains here.
        evaluator: makes what measures here, when it is needed.

    Raises:
        GpuLost: this process's GPU is; another rank trains the task.
        PeerLost: rank 0 is gone.
        Refused: it has sent what is not raafl's.
    """
    stop, made, out = threading.Event(), cache(evaluator), list[Assignment]()
    inbox: queue.SimpleQueue[_Received | Exception | None] = queue.SimpleQueue()
    trainer.stop = stop
    pair.send(Message(Kind.HELLO, meta=hello(trainer.submodels)))
    threading.Thread(target=_receive, args=(pair, trainer, inbox), name="reader", daemon=True).start()
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
        del item, values  # nothing is kept of a task while the next is waited for
        if more:
            continue
        with suppress(Stopped):  # the reader's last word comes next
            for assignment in out:
                pair.send(_answer(inner, assignment))
        out.clear()
        give_back()  # the next task may be long in coming


def _receive(pair: Connection, trainer: LocalTrainer, inbox: queue.SimpleQueue[Any]) -> None:
    """Put tasks into ``inbox``, and at the end None, or what went wrong; then the task at hand is stopped, too."""
    out: list[Assignment] = []

    def expect(kind: Kind, number: int, meta: dict[str, Any]) -> FlatTensors | None:
        if kind is Kind.MEASURE:
            whole = trainer.submodels.layout(FULL, "present")
            return FlatTensors.empty(whole, trainer.fabric.device) if meta["has_values"] else None
        if kind is not Kind.ASSIGN:
            return None
        out[:] = [assignment_from_json(meta["task"])]
        return FlatTensors.empty(trainer.payload.layout(out[0].spec, "sent"), trainer.fabric.device)

    last: Exception | None = None
    try:
        while (message := pair.recv(expect, FOR_EVER_S)).kind is not Kind.STOP:
            if message.kind is Kind.WELCOME:
                names = message.meta["kept_whole"]
                trainer.submodels.keep_whole(dict.fromkeys(names, "not proven by rank 0"))
            elif message.kind is Kind.MEASURE:
                inbox.put((message.meta, message.tensors, False))
            elif message.tensors is not None:
                inbox.put((out[0], message.tensors, message.meta["more"]))
    except Exception as error:
        last = error
    if trainer.stop is not None:
        trainer.stop.set()
    inbox.put(last)


def _measured(made: Callable[[], Evaluator], asked: dict[str, Any], values: FlatTensors | None) -> Message:
    """Measure some test batches, with the values that were sent last."""
    try:
        evaluator = made()
        if values is not None:
            evaluator.fill(values)
        return Message(Kind.MEASURED, meta=evaluator.noted(asked["start"], asked["stop"]))
    except Exception as error:  # rank 0 measures on them itself, and says what there is to say
        return Message(Kind.FAILED, meta={"reason": said(error)})


def _answer(inner: Executor, assignment: Assignment) -> Message:
    """Train a task, and whatever is trained with it, and say what came of it."""
    try:
        update = inner.result(assignment.id)
    except GpuLost:
        raise
    except TaskFailed as failed:
        return Message(Kind.FAILED, assignment.id, meta=to_meta(failed, private=False))
    if update.refusal == OUT_OF_MEMORY:
        return Message(Kind.FAILED, update.assignment, meta={"reason": OUT_OF_MEMORY})
    meta = {
        "num_samples": update.num_samples, "num_steps": update.num_steps, "refusal": update.refusal,
        "metrics": {name: repr(value) for name, value in update.metrics.items()},  # to the bit, and NaN too
        "extra": dict(update.extra), "counted": inner.counted(),
    }  # fmt: skip
    return Message(Kind.UPDATE, update.assignment, 0, meta, update.tensors)


def hello(submodels: Submodels) -> dict[str, str]:
    """Describe what a rank and rank 0 must have alike."""
    base = submodels.base
    frozen = "" if base is None else base.digest
    return {"raafl": __version__, "model": submodels.layout().fingerprint, "frozen parameters": frozen}


def nothing(kind: Kind, number: int, meta: dict[str, Any]) -> None:
    """Expect no tensors."""
    return None
