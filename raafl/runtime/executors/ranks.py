"""Tasks trained by other ranks, each on a processor or GPU of its own, on this machine or others.

Rank 0 drives the virtual clock. A thread for each other rank takes the most urgent task that nobody has begun, sends it,
and waits for its result; where rank 0 needs a result that is not there, it trains what is most urgent itself. Values
travel as flat buffers, of submodels alone.
"""

from __future__ import annotations

import heapq
import queue
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from raafl._version import __version__
from raafl.core.types import OUT_OF_MEMORY, Assignment, Update, assignment_from_json, assignment_to_json
from raafl.data.federated import ClientData
from raafl.errors import GpuLost, TaskFailed
from raafl.foreign import foreign
from raafl.local.failure import from_meta, out_of_memory, to_meta
from raafl.local.heap import give_back
from raafl.local.train import LocalTrainer, Stopped
from raafl.runtime.executors.base import Executor, Inline
from raafl.runtime.transport import Kind, Message, Pair, PeerLost, PeerTimeout, Refused
from raafl.submodel import FlatTensors, Submodels

AHEAD_BYTES = 1 << 29
"""Results that wait to be asked for, beyond which nothing more is begun ahead of need."""
_LEAST_AHEAD = 2  # tasks for each rank, however large their results are
_FOR_EVER_S = 1e6  # the pair tells of a rank that is gone
_PART_S = 10.0


@dataclass(slots=True)
class _Task:
    assignment: Assignment
    snapshot: FlatTensors
    begun: bool = False
    sending: bool = False
    cancelled: bool = False
    found: Update | TaskFailed | None = None


class OverRanks(Executor):
    """This process and others that `take_on` brings. One that is lost gives its task back; the run goes on with the rest.

    One condition guards all that the threads share. Nobody holds it while training, sending or receiving.
    """

    def __init__(self, trainer: LocalTrainer, data: Callable[[int], ClientData]) -> None:
        """Train here with ``trainer``, on client i's ``data(i)``."""
        self._inline, self._payload, self._submodels = Inline(trainer, data), trainer.payload, trainer.submodels
        self._tasks: dict[int, _Task] = {}
        self._waiting: list[tuple[float, int]] = []
        self._ahead_bytes = self._num_ahead = self._num_ranks = 0
        self._changed = threading.Condition()
        self._stopping = threading.Lock()  # a rank is told to stop by whichever thread is first, and by one at a time
        self._threads: list[threading.Thread] = []
        self._pairs: list[Pair] = []
        self._closed = False

    def take_on(self, name: str, connect: Callable[[], Pair], warn: Callable[[str], None]) -> None:
        """Let a rank work from when it has connected, until `close`; returns at once. ``warn`` hears of its loss, in any thread."""
        thread = threading.Thread(target=self._serve, args=(name, connect, warn), name=name, daemon=True)
        self._threads.append(thread)
        self._num_ranks += 1
        thread.start()

    @property
    def num_processes(self) -> int:
        """Count this process and the ranks that are not lost."""
        return 1 + self._num_ranks

    def submit(self, assignment: Assignment, snapshot: FlatTensors, needed_at: float) -> None:
        """Take the task; it is begun in the order in which results are needed."""
        with self._changed:
            self._tasks[assignment.id] = _Task(assignment, snapshot)
            heapq.heappush(self._waiting, (needed_at, assignment.id))
            self._changed.notify()

    def result(self, assignment_id: int) -> Update:
        """Return the update; while another rank trains it, train here what is needed next."""
        while True:
            with self._changed:
                task = other = self._tasks[assignment_id]
                if task.found is not None:
                    return self._taken(assignment_id, task.found)
                if task.begun:
                    begun = self._begin()
                    if begun is None:
                        self._changed.wait()
                        continue
                    other = begun
                other.begun = True
            if other is task:
                try:
                    return self._train(task)
                finally:
                    with self._changed:
                        del self._tasks[assignment_id]
            self._keep(other, self._trained_ahead(other))

    def cancel(self, assignment_id: int) -> None:
        """Drop the task; a rank that has begun it finishes in vain."""
        with self._changed:
            task = self._tasks[assignment_id]
            while task.sending:  # the snapshot is given back by whoever cancels
                self._changed.wait()
            if task.begun and task.found is None:
                task.cancelled = True
                return
            if task.found is not None:
                self._taken(assignment_id, task.found)
            else:
                del self._tasks[assignment_id]

    def close(self) -> None:
        """Let the ranks go, also in the middle of a task."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            while any(
                task.sending for task in self._tasks.values()
            ):  # one message at a time; no other is begun any more
                self._changed.wait()
        for pair in list(self._pairs):
            self._stop(pair)
        for thread in self._threads:
            thread.join(timeout=_PART_S)
        for pair in list(self._pairs):
            pair.close()

    # ---- in this process ----

    def _train(self, task: _Task) -> Update:
        self._inline.submit(task.assignment, task.snapshot, 0.0)
        return self._inline.result(task.assignment.id)

    def _trained_ahead(self, task: _Task) -> Update | TaskFailed:
        try:
            update = self._train(task)
        except TaskFailed as failed:  # said when its turn comes, wherever it was trained
            return failed
        update.tensors = update.tensors.clone()  # the trainer's own, used again for the next task
        return update

    def _begin(self) -> _Task | None:
        """Find the most urgent task that nobody has begun, if there is room for its result; the caller has the condition."""
        if self._ahead_bytes > AHEAD_BYTES and self._num_ahead >= _LEAST_AHEAD * (self._num_ranks + 1):
            return None
        while self._waiting:
            task = self._tasks.get(heapq.heappop(self._waiting)[1])
            if task is not None and not task.begun:
                return task
        return None

    def _keep(self, task: _Task, found: Update | TaskFailed) -> None:
        """Hold a result until it is asked for."""
        with self._changed:
            if task.cancelled:
                del self._tasks[task.assignment.id]
            else:
                task.found = found
                self._count(found, 1)
            self._changed.notify_all()

    def _taken(self, assignment_id: int, found: Update | TaskFailed) -> Update:
        del self._tasks[assignment_id]
        self._count(found, -1)
        self._changed.notify_all()  # there may be room again
        if isinstance(found, TaskFailed):
            raise found
        return found

    def _count(self, found: Update | TaskFailed, sign: int) -> None:
        self._num_ahead += sign
        self._ahead_bytes += sign * (0 if isinstance(found, TaskFailed) else found.tensors.num_bytes)

    # ---- with another rank; each in a thread of its own ----

    def _serve(self, name: str, connect: Callable[[], Pair], warn: Callable[[str], None]) -> None:
        task: _Task | None = None
        try:
            with connect() as pair:
                self._pairs.append(pair)
                self._greet(pair)
                while (task := self._next()) is not None:
                    self._keep(task, self._exchange(pair, task))
                    task = None
                self._stop(pair)  # it may have come when the others had been told
        except Exception as error:  # whatever it is, the others can do what this one cannot
            if self._lose(task):
                warn(f"{name} is lost ({foreign(error)}); the run goes on without it")

    def _greet(self, pair: Pair) -> None:
        """Check that the rank has the same raafl and model, and tell it which axes are whole."""
        hello = pair.recv(_nothing, _FOR_EVER_S)
        for name, ours in _hello(self._submodels).items():
            if hello.meta.get(name) != ours:
                raise Refused("incompatible", f"another {name}: {foreign(hello.meta.get(name))}, here it is {ours}")
        with self._stopping:
            pair.send(Message(Kind.WELCOME, meta={"kept_whole": sorted(self._submodels.refuted)}))

    def _stop(self, pair: Pair) -> None:
        """Tell a rank that the run has ended; it is no error if it is gone."""
        with self._stopping, suppress(PeerLost, PeerTimeout):
            pair.send(Message(Kind.STOP, meta={"reason": "the run has ended"}), 1.0)

    def _next(self) -> _Task | None:
        """Wait for a task to begin; None = the run has ended."""
        with self._changed:
            while not self._closed:
                task = self._begin()
                if task is not None:
                    task.begun = task.sending = True
                    return task
                self._changed.wait()
        return None

    def _exchange(self, pair: Pair, task: _Task) -> Update | TaskFailed:
        assignment = task.assignment
        try:
            pair.send(Message(Kind.ASSIGN, assignment.id, 0, assignment_to_json(assignment), task.snapshot))
        finally:
            with self._changed:
                task.sending = False
                self._changed.notify_all()

        def expect(kind: Kind, number: int, meta: dict[str, Any]) -> FlatTensors | None:
            if number != assignment.id or kind not in (Kind.UPDATE, Kind.FAILED):
                raise Refused("bad-kind", f"{kind.name} of {number} came in the place of {assignment.id}'s answer")
            return FlatTensors.empty(self._payload.layout(assignment.spec, "trained")) if kind is Kind.UPDATE else None

        answer = pair.recv(expect, _FOR_EVER_S)
        if answer.tensors is not None:
            return _update(assignment, answer.meta, answer.tensors)
        if answer.meta.get("reason") == OUT_OF_MEMORY:
            return out_of_memory(assignment)
        return from_meta(assignment.client, answer.meta)

    def _lose(self, task: _Task | None) -> bool:
        """Go on without a rank, whose task is trained again, to the same bits; return whether the run had not ended."""
        with self._changed:
            self._num_ranks -= 1
            if task is not None and task.cancelled:
                del self._tasks[task.assignment.id]
            elif task is not None:
                task.begun = task.sending = False
                heapq.heappush(self._waiting, (0.0, task.assignment.id))  # somebody may wait for it already
            self._changed.notify_all()
            return not self._closed


def work(pair: Pair, trainer: LocalTrainer, data: Callable[[int], ClientData]) -> None:
    """Train what comes over ``pair`` until told that the run has ended.

    One thread receives all the time, so that the end of the run interrupts a task that nobody needs any more.

    Raises:
        GpuLost: this process's GPU is; another rank trains the task.
        PeerLost: rank 0 is gone.
        Refused: it has sent what is not raafl's.
    """
    inline, stop = Inline(trainer, data), threading.Event()
    inbox: queue.SimpleQueue[tuple[Assignment, FlatTensors] | Exception | None] = queue.SimpleQueue()
    trainer.stop = stop
    pair.send(Message(Kind.HELLO, meta=_hello(trainer.submodels)))
    threading.Thread(target=_receive, args=(pair, trainer, inbox), name="reader", daemon=True).start()
    while (item := inbox.get()) is not None:
        if isinstance(item, Exception):
            raise item
        assignment, values = item
        inline.submit(assignment, values, 0.0)
        try:
            pair.send(_answer(inline.result(assignment.id)))
        except GpuLost:
            raise
        except TaskFailed as failed:
            pair.send(Message(Kind.FAILED, assignment.id, meta=to_meta(failed, private=False)))
        except Stopped:
            continue  # the reader's last word comes next
        give_back()  # the next task may be long in coming


def _receive(pair: Pair, trainer: LocalTrainer, inbox: queue.SimpleQueue[Any]) -> None:
    """Put tasks into ``inbox``, and at the end None, or what went wrong; then the task at hand is stopped, too."""
    out: list[Assignment] = []

    def expect(kind: Kind, number: int, meta: dict[str, Any]) -> FlatTensors | None:
        if kind is not Kind.ASSIGN:
            return None
        out[:] = [assignment_from_json(meta)]
        return FlatTensors.empty(trainer.payload.layout(out[0].spec, "sent"), trainer.fabric.device)

    last: Exception | None = None
    try:
        while (message := pair.recv(expect, _FOR_EVER_S)).kind is not Kind.STOP:
            if message.kind is Kind.WELCOME:
                names = message.meta["kept_whole"]
                trainer.submodels.keep_whole(dict.fromkeys(names, "not proven by rank 0"))
            elif message.tensors is not None:
                inbox.put((out[0], message.tensors))
    except Exception as error:
        last = error
    if trainer.stop is not None:
        trainer.stop.set()
    inbox.put(last)


def _hello(submodels: Submodels) -> dict[str, str]:
    base = submodels.base
    frozen = "" if base is None else base.digest
    return {"raafl": __version__, "model": submodels.layout().fingerprint, "frozen parameters": frozen}


def _nothing(kind: Kind, number: int, meta: dict[str, Any]) -> None:
    return None


def _answer(update: Update) -> Message:
    if update.refusal == OUT_OF_MEMORY:
        return Message(Kind.FAILED, update.assignment, meta={"reason": OUT_OF_MEMORY})
    meta = {
        "num_samples": update.num_samples, "num_steps": update.num_steps, "refusal": update.refusal,
        "metrics": {name: repr(value) for name, value in update.metrics.items()},  # to the bit, and NaN too
        "extra": dict(update.extra),
    }  # fmt: skip
    return Message(Kind.UPDATE, update.assignment, 0, meta, update.tensors)


def _update(assignment: Assignment, meta: Mapping[str, Any], tensors: FlatTensors) -> Update:
    metrics = {name: float(text) for name, text in meta["metrics"].items()}
    return Update(
        assignment.id, assignment.client, assignment.incarnation, tensors, meta["num_samples"], meta["num_steps"],
        metrics, extra=meta["extra"], refusal=meta["refusal"],
    )  # fmt: skip
