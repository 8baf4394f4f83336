"""Tasks trained by other ranks, each on a processor or GPU of its own, on this machine or others.

Rank 0 drives the virtual clock. A thread for each other rank takes the most urgent task that nobody has begun, sends it,
and waits for its result; where rank 0 needs a result that is not there, it trains what is most urgent itself. Values
travel as flat buffers, of submodels alone.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from raafl.core.types import OUT_OF_MEMORY, Assignment, Update, assignment_to_json
from raafl.data.federated import ClientData
from raafl.errors import TaskFailed
from raafl.foreign import foreign
from raafl.local.evaluate import Evaluator
from raafl.local.failure import from_meta, out_of_memory
from raafl.local.train import LocalTrainer
from raafl.runtime.executors.base import Executor, Inline
from raafl.runtime.executors.other_rank import FOR_EVER_S, hello, nothing
from raafl.runtime.executors.shared_evaluation import Shared
from raafl.runtime.transport import Kind, Message, Pair, PeerLost, PeerTimeout, Refused
from raafl.submodel import FlatTensors

AHEAD_BYTES = 1 << 29
"""Results that wait to be asked for, beyond which nothing more is begun ahead of need."""
_LEAST_AHEAD = 2  # tasks for each rank, however large their results are
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
        self._device = trainer.fabric.device
        self._shared: Shared | None = None  # the evaluation at hand
        self._measures_alone = False  # what is measured cannot be shared

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
                    self._one_less_needed()
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
                        self._one_less_needed()
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

    def evaluate(self, evaluator: Evaluator, values: FlatTensors) -> dict[str, float]:
        """Measure the first batches here, while other ranks that have nothing else begun measure the last ones."""
        alone = self._measures_alone or not (self._num_ranks and evaluator.is_shared)
        if alone or evaluator.num_batches < 2 or evaluator.device.type != self._device.type:
            return evaluator(values)
        shared = Shared(evaluator, values, self._num_ranks + 1, self._changed)
        with self._changed:
            self._shared = shared
            self._changed.notify_all()
        try:
            return shared.measure()
        finally:
            with self._changed:
                shared.close()
                self._shared, self._measures_alone = None, shared.is_refused

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
        if self.needed is not None and self.needed < len(self._tasks) and self.needed <= self._num_under_way():
            return None
        if self._ahead_bytes > AHEAD_BYTES and self._num_ahead >= _LEAST_AHEAD * (self._num_ranks + 1):
            return None
        while self._waiting:
            task = self._tasks.get(heapq.heappop(self._waiting)[1])
            if task is not None and not task.begun:
                return task
        return None

    def _one_less_needed(self) -> None:
        """Count down at once: a thread that looked before whoever sets `needed` would begin a task in vain."""
        if self.needed is not None:
            self.needed -= 1

    def _num_under_way(self) -> int:
        """Count the tasks that are begun, or done, and will be asked for."""
        return sum(task.begun and not task.cancelled for task in self._tasks.values())

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
                while (found := self._next()) is not None:
                    if isinstance(found, Shared):
                        found.measure_at(pair)
                    else:
                        task = found
                        self._keep(task, self._exchange(pair, task))
                    task = found = None  # nothing is kept while the next is waited for
                self._stop(pair)  # it may have come when the others had been told
        except Exception as error:  # whatever it is, the others can do what this one cannot
            if self._lose(task):
                warn(f"{name} is lost ({foreign(error)}); the run goes on without it")

    def _greet(self, pair: Pair) -> None:
        """Check that the rank has the same raafl and model, and tell it which axes are whole."""
        theirs = pair.recv(nothing, FOR_EVER_S).meta
        for name, ours in hello(self._submodels).items():
            if theirs.get(name) != ours:
                raise Refused("incompatible", f"another {name}: {foreign(theirs.get(name))}, here it is {ours}")
        with self._stopping:
            pair.send(Message(Kind.WELCOME, meta={"kept_whole": sorted(self._submodels.refuted)}))

    def _stop(self, pair: Pair) -> None:
        """Tell a rank that the run has ended; it is no error if it is gone."""
        with self._stopping, suppress(PeerLost, PeerTimeout):
            pair.send(Message(Kind.STOP, meta={"reason": "the run has ended"}), 1.0)

    def _next(self) -> _Task | Shared | None:
        """Wait for an evaluation to help with, or a task to begin; None = the run has ended."""
        with self._changed:
            while not self._closed:
                if self._shared is not None and self._shared.has_more:
                    return self._shared
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

        answer = pair.recv(expect, FOR_EVER_S)
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


def _update(assignment: Assignment, meta: Mapping[str, Any], tensors: FlatTensors) -> Update:
    metrics = {name: float(text) for name, text in meta["metrics"].items()}
    return Update(
        assignment.id, assignment.client, assignment.incarnation, tensors, meta["num_samples"], meta["num_steps"],
        metrics, extra=meta["extra"], refusal=meta["refusal"],
    )  # fmt: skip
