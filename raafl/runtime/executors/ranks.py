"""Train tasks on other ranks, each with its own CPU or GPU, on this machine or others.

Rank 0 drives the virtual clock. One thread per other rank takes the most urgent task that nobody has begun, sends it and waits
for its result; when rank 0 needs a missing result, it trains the most urgent task itself. Where processes train batches, each takes
its share of the waiting tasks of one kind. Only values of submodels travel.
"""

from __future__ import annotations

import heapq
import threading
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from raafl.core.types import Assignment, Update
from raafl.errors import TaskFailed
from raafl.local.context import ALONE, TaskContext
from raafl.local.evaluate import Evaluator
from raafl.local.train import LocalTrainer
from raafl.runtime.executors.base import Executor, Like, kind_of, summed
from raafl.runtime.executors.rank_worker import FOR_EVER_S, add, failure_of, may_share, update_of
from raafl.runtime.identity import Identity, agree
from raafl.runtime.protocol import Answer, Assign, Hello, Measure, Reason, Welcome, no_tensors
from raafl.sanitize import sanitize_text
from raafl.submodel import FlatTensors
from raafl.transport import Connection, Expect, Kind, Message, PeerLost, PeerTimeout, Refused

AHEAD_BYTES = 1 << 29
"""Size of results in store above which no further task is trained ahead of need."""
_LEAST_AHEAD = 2  # tasks that each rank may train in advance, however large their results are
_PART_S = 10.0


@dataclass(slots=True)
class _Task:
    """Task that any process may take; `begun`: whether one has; `here`: whether this process has, and so has the result."""

    assignment: Assignment
    snapshot: FlatTensors
    needed_at: float
    begun: bool = False
    here: bool = False
    sending: bool = False
    cancelled: bool = False
    result: Update | TaskFailed | None = None


class RankExecutor(Executor):
    """Executor that trains in this process and on other ranks; tasks of a rank that is lost are trained by the others.

    One lock (a condition) protects all state that threads share; no thread holds it while it trains, sends or receives.
    """

    def __init__(self, trainer: LocalTrainer, inner: Executor) -> None:
        """Create an executor over ranks; ``inner`` trains in this process."""
        self._inner, self._payload, self._submodels = inner, trainer.payload, trainer.submodels
        inner.note = lambda text: self.note(text)
        self._tasks: dict[int, _Task] = {}
        # heap of (time needed, id), which may contain tasks that were begun or are gone
        self._waiting: list[tuple[float, int]] = []
        # by kind and id: tasks that no process has begun
        self._alike: defaultdict[Like, dict[int, _Task]] = defaultdict(dict)
        self._counted: dict[str, dict[str, Any]] = {}  # by rank: its statistics of training as batches
        self._ahead_bytes = self._num_ahead = self._num_ranks = self._num_in_vain = 0
        self._num_free = 1  # number of processes without a task, this process included
        self._num_here = 0  # number of tasks begun in this process
        self._changed = threading.Condition()
        self._stopping = threading.Lock()  # one thread at a time may send a rank the message to stop
        self._threads: list[threading.Thread] = []
        self._pairs: list[Connection] = []
        self._closed = False
        self._device = trainer.fabric.device
        self._shared: Shared | None = None  # evaluation that is being divided
        self._measures_alone = False  # whether evaluations cannot be divided

    def take_on(self, name: str, connect: Callable[[], Connection]) -> None:
        """Start a thread that connects to another rank by ``connect`` and gives it tasks until `close`; return at once."""
        thread = threading.Thread(target=self._serve, args=(name, connect), name=name, daemon=True)
        self._threads.append(thread)
        self._num_ranks += 1
        thread.start()

    @property
    def num_processes(self) -> int:
        """Number of processes that train: this one and all ranks that are not lost."""
        return 1 + self._num_ranks

    def max_together(self, assignment: Assignment) -> int:
        """Return the largest number of tasks like this one that one process trains together as one batch."""
        return self._inner.max_together(assignment)

    def submit(self, assignment: Assignment, snapshot: FlatTensors, needed_at: float) -> None:
        """Accept a task for training; see `Executor.submit`. Tasks begin in the order in which their results are needed."""
        with self._changed:
            task = self._tasks[assignment.id] = _Task(assignment, snapshot, needed_at)
            self._offer(task)
            # wake a free process only once enough tasks of this kind wait for a batch
            if len(self._alike[kind_of(assignment)]) >= self.max_together(assignment) // 4:
                self._changed.notify()

    def result(self, assignment_id: int, context: TaskContext = ALONE) -> Update:
        """Return the update of a task; while another rank trains it, this process trains the task that is needed next."""
        while True:
            with self._changed:
                task = self._tasks[assignment_id]
                if task.result is not None:
                    self._one_less_needed()
                    return self._taken(assignment_id, task.result)
                some = self._for_here(task)
                if not some and not task.here:
                    self._changed.wait()
                    continue
                self._num_free -= 1
                if some and self._alike:  # other processes may begin what is left
                    self._changed.notify_all()
            first = some[0] if some else task
            try:
                for one in some:
                    self._inner.submit(one.assignment, one.snapshot, one.needed_at)
                if first is task:
                    return self._inner.result(assignment_id, context)
                self._keep(first, self._trained_ahead(first.assignment.id, context))
            finally:
                self._end_here(task if first is task else None)

    def _end_here(self, task: _Task | None) -> None:
        """Record that this process has finished its tasks; ``task``: the one whose result was requested, None = none."""
        with self._changed:
            self._num_free += 1
            self._num_here -= 1
            if task is not None:
                self._one_less_needed()
                del self._tasks[task.assignment.id]

    def _for_here(self, task: _Task) -> list[_Task]:
        """Select tasks to train here while the result of ``task`` is awaited; the caller holds the lock."""
        if task.here or (task.begun and self._num_here >= self.max_together(task.assignment)):
            return []
        some = self._begin() if task.begun else self._with(task, max(self._room(), 1))
        for one in some:
            one.here = True
        self._num_here += len(some)
        return some

    def cancel(self, assignment_id: int) -> None:
        """Remove a task; if a rank has begun it, the rank finishes it, and its result is dropped."""
        with self._changed:
            task = self._tasks.get(assignment_id)
            if task is None:  # never submitted: a replay submits only tasks whose results it will need
                return
            while task.sending:  # wait, since the caller reuses the snapshot once this returns
                self._changed.wait()
            if task.begun and not task.here and task.result is None:
                task.cancelled = True
                return
            del self._tasks[assignment_id]
            if task.result is not None:
                self._count(task.result, -1)
                self._num_in_vain += 1
            elif not task.begun:
                self._drop(task)
            elif task.here:
                self._num_here -= 1
        if task.here and task.result is None:
            self._inner.cancel(assignment_id)

    def evaluate(self, evaluator: Evaluator, values: FlatTensors, version: int) -> dict[str, float]:
        """Evaluate the global model: this process takes the first batches, idle ranks take the last ones.

        See `Executor.evaluate`.
        """
        alone = self._measures_alone or not (self._num_ranks and may_share(evaluator))
        if alone or evaluator.num_batches < 2 or evaluator.device.type != self._device.type:
            return evaluator(values, version)
        shared = Shared(evaluator, values, version, self._num_ranks + 1, self._changed)
        with self._changed:
            self._shared = shared
            self._changed.notify_all()
        try:
            return shared.measure()
        finally:
            with self._changed:
                shared.close()
                self._shared, self._measures_alone = None, shared.is_refused

    def report(self) -> dict[str, Any]:
        """Return statistics, over all processes, of tasks trained one by one and in batches."""
        here = self._inner.counted()
        with self._changed:
            kept = sum(task.result is not None for task in self._tasks.values())
            there = list(self._counted.values())
        return summed([here, *there, {"in_vain": self._num_in_vain + kept}]) if here else {}

    def on_gpu(self) -> dict[str, Any]:
        """Return the numbers of this process's tasks with captured steps and with data on the GPU; see `Executor.on_gpu`."""
        return self._inner.on_gpu()

    def close(self) -> None:
        """End the work of all other ranks, even in the middle of a task."""
        self._end()
        with self._changed:
            # at most one message per rank is still being sent, since no task begins any more
            while any(task.sending for task in self._tasks.values()):
                self._changed.wait()
        for pair in list(self._pairs):
            self._stop(pair)
        for thread in self._threads:
            thread.join(timeout=_PART_S)
        for pair in list(self._pairs):
            pair.close()
        self._inner.close()

    def _end(self) -> None:
        """Prevent all processes from beginning another task."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    # ---- choice of the next task; the caller holds the lock ----

    def _offer(self, task: _Task) -> None:
        """Offer a task to the processes that become free."""
        heapq.heappush(self._waiting, (task.needed_at, task.assignment.id))
        self._alike[kind_of(task.assignment)][task.assignment.id] = task

    def _drop(self, task: _Task) -> None:
        """Remove a task from those that free processes may take, since it has begun or was cancelled."""
        kind = kind_of(task.assignment)
        del self._alike[kind][task.assignment.id]
        if not self._alike[kind]:
            del self._alike[kind]

    def _begin(self) -> list[_Task]:
        """Begin the most urgent task, with others for a batch; [] if enough results are stored unread."""
        room = self._room()
        if not room or (self._ahead_bytes > AHEAD_BYTES and self._num_ahead >= _LEAST_AHEAD * (self._num_ranks + 1)):
            return []
        while self._waiting:
            task = self._tasks.get(heapq.heappop(self._waiting)[1])
            if task is not None and not task.begun:
                return self._with(task, room)
        return []

    def _with(self, task: _Task, room: int) -> list[_Task]:
        """Begin a task with this process's share of the waiting tasks of its kind, the most urgent first."""
        alike = self._alike[kind_of(task.assignment)]
        size = min(self._inner.max_together(task.assignment), -(-len(alike) // self._num_free), room)
        some = [task]
        if size > 1:
            others = (one for one in alike.values() if one is not task)
            some += heapq.nsmallest(size - 1, others, key=lambda one: one.needed_at)
        for one in some:
            one.begun = True
            self._drop(one)
        return some

    def _room(self) -> int:
        """Return the number of tasks that may begin, so that no result is computed in vain."""
        if self.needed is None or self.needed >= len(self._tasks):
            return len(self._tasks)
        return max(self.needed - sum(task.begun and not task.cancelled for task in self._tasks.values()), 0)

    def _one_less_needed(self) -> None:
        """Decrement `needed` at once, before another thread begins a task whose result nobody needs."""
        if self.needed is not None:
            self.needed -= 1

    # ---- results ----

    def _trained_ahead(self, assignment_id: int, context: TaskContext) -> Update | TaskFailed:
        try:
            update = self._inner.result(assignment_id, context)
        except TaskFailed as failed:  # to be raised when the result is requested
            return failed
        update.tensors = update.tensors.clone()  # copied, since the trainer reuses its tensors
        return update

    def _keep(self, task: _Task, result: Update | TaskFailed) -> None:
        """Store a task's result until it is requested, or drop it if the task was cancelled."""
        with self._changed:
            if task.cancelled:
                del self._tasks[task.assignment.id]
                self._num_in_vain += 1
            else:
                task.result = result
                self._count(result, 1)
            self._changed.notify_all()

    def _taken(self, assignment_id: int, result: Update | TaskFailed) -> Update:
        del self._tasks[assignment_id]
        self._count(result, -1)
        if isinstance(result, TaskFailed):
            raise result
        return result

    def _count(self, result: Update | TaskFailed, sign: int) -> None:
        self._num_ahead += sign
        self._ahead_bytes += sign * (0 if isinstance(result, TaskFailed) else result.tensors.num_bytes)
        self._changed.notify_all()  # a process that waits may now begin a task

    # ---- exchange with another rank, each in its own thread ----

    def _serve(self, name: str, connect: Callable[[], Connection]) -> None:
        out: list[_Task] = []
        try:
            with connect() as pair:
                self._pairs.append(pair)
                self._greet(pair)
                while (work := self._next()) is not None:
                    out = out if isinstance(work, Shared) else work
                    self._do(name, pair, work)
                    work = None  # frees the tasks' memory while more are awaited
                self._stop(pair)  # for a rank that connected after `close` stopped the others
        except Exception as error:  # after any error the other ranks can train these tasks
            if self._lose(out):
                self.warn(f"{name} is lost ({sanitize_text(error)}); the run goes on without it")

    def _greet(self, pair: Connection) -> None:
        """Compare raafl's version and the model with those of a rank, and send it the axes that must not be cut."""
        theirs = Hello.from_meta(pair.recv(no_tensors, FOR_EVER_S).meta)
        if (different := agree(Identity.of(self._submodels), theirs.identity, same_package=True)) is not None:
            name = "frozen parameters" if different.field == "base" else different.field
            raise Refused("incompatible", f"another {name}: {different.theirs}, here it is {different.ours}")
        with self._stopping:
            pair.send(Message(Kind.WELCOME, meta=Welcome(tuple(sorted(self._submodels.refuted))).to_meta()))

    def _stop(self, pair: Connection) -> None:
        """Tell a rank, unless it is gone, that the run has ended."""
        with self._stopping, suppress(PeerLost, PeerTimeout):
            pair.send(Message(Kind.STOP, meta=Reason("the run has ended").to_meta()), 1.0)

    def _do(self, name: str, pair: Connection, work: list[_Task] | Shared) -> None:
        return work.measure_at(pair) if isinstance(work, Shared) else self._exchange(name, pair, work)

    def _next(self) -> list[_Task] | Shared | None:
        """Wait for tasks to send to a rank, or for an evaluation to divide; return None once the run has ended."""
        with self._changed:
            self._num_free += 1
            try:
                work = None
                while not self._closed and not (work := self._ready()):
                    self._changed.wait()
                return work or None
            finally:
                self._num_free -= 1

    def _ready(self) -> list[_Task] | Shared | None:
        """Return an evaluation with batches left, or else the next tasks, marked as being sent; the caller holds the lock."""
        if self._shared is not None and self._shared.has_more:
            return self._shared
        some = self._begin()
        for task in some:
            task.sending = True
        return some

    def _exchange(self, name: str, pair: Connection, out: list[_Task]) -> None:
        """Send tasks to a rank and store their results; tasks with results are removed from ``out``."""
        for place, task in enumerate(out, start=1):
            meta = Assign(task.assignment, more=place < len(out)).to_meta()
            try:
                pair.send(Message(Kind.ASSIGN, task.assignment.id, 0, meta, task.snapshot))
            finally:
                with self._changed:
                    task.sending = False
                    self._changed.notify_all()
        while out:
            answer = pair.recv(self._expected(out[0].assignment), FOR_EVER_S)
            found = self._found(name, out[0].assignment, answer)
            self._keep(out.pop(0), found)

    def _expected(self, assignment: Assignment) -> Expect:
        def expect(kind: Kind, number: int, meta: dict[str, Any]) -> FlatTensors | None:
            if number != assignment.id or kind not in (Kind.UPDATE, Kind.FAILED):
                raise Refused("bad-kind", f"{kind.name} of {number} came in the place of {assignment.id}'s answer")
            return FlatTensors.empty(self._payload.layout(assignment.spec, "trained")) if kind is Kind.UPDATE else None

        return expect

    def _found(self, name: str, assignment: Assignment, message: Message) -> Update | TaskFailed:
        """Convert a rank's reply to the task's update, or to its failure."""
        if message.tensors is None:
            return failure_of(assignment, message.meta)
        answer = Answer.from_rank(message.meta)
        if answer.counted:
            self._counted[name] = dict(answer.counted)
        return update_of(assignment, answer, message.tensors)

    def _lose(self, out: list[_Task]) -> bool:
        """Offer the tasks of a lost rank to the others; return whether the run goes on."""
        with self._changed:
            self._num_ranks -= 1
            for task in out:
                if task.cancelled:
                    del self._tasks[task.assignment.id]
                else:
                    # the task becomes the most urgent one, since its result may be awaited already
                    task.begun, task.sending, task.needed_at = False, False, 0.0
                    self._offer(task)
            self._changed.notify_all()
            return not self._closed


# Divide an evaluation between ranks: rank 0 evaluates from the first batch on, the others from the last one backwards.
#
# Rank 0 adds partial sums in the order of batches, so that metrics have the bits of one process.

_PARTS = 8
"""Number of parts of an evaluation for each process, so that fast processes take more and none waits long."""


class Shared:
    """One evaluation whose batches several ranks share.

    Attributes:
        is_refused: whether a rank found that the evaluation cannot be shared, or failed in it.
    """

    def __init__(
        self, evaluator: Evaluator, values: FlatTensors, version: int, num_processes: int, changed: threading.Condition
    ) -> None:
        """Divide an evaluation into parts, each of which a process takes when it is free.

        Args:
            evaluator: evaluator of rank 0.
            values: values of the global model.
            version: version of the global model.
            num_processes: number of processes, rank 0 included.
            changed: condition that guards state shared by the ranks' threads.
        """
        self._evaluator, self._changed = evaluator, changed
        self._values = evaluator.begin(values, version)
        num = evaluator.num_batches
        size = max(num // (_PARTS * num_processes), 1)
        self._parts = [(start, min(start + size, num)) for start in range(0, num, size)]
        # range of the parts that no process has taken; the first part is always rank 0's
        self._first, self._last = 1, len(self._parts)
        # by part: its partial sums; None = a rank could not evaluate it
        self._found: dict[int, dict[str, Any] | None] = {}
        self._num_out = 0
        self.is_refused = self._is_closed = False

    @property
    def has_more(self) -> bool:
        """Whether batches are left that no rank has begun; the caller must hold the shared lock."""
        return self._first < self._last and not (self.is_refused or self._is_closed)

    def close(self) -> None:
        """Give the other ranks no more batches, and wait until they have evaluated theirs; the caller must hold the shared lock."""
        self._is_closed = True
        while self._num_out:  # some are left only if the evaluation in this process failed
            self._changed.wait()

    def measure(self) -> dict[str, float]:
        """Evaluate batches in this process while other ranks help; return the metrics."""
        for place, (start, stop) in enumerate(self._parts):
            partials = self._of_another(place)
            if partials is None:
                self._evaluator.measure(start, stop)
            else:
                add(self._evaluator.recorder, partials)
        return self._evaluator.end()

    def _of_another(self, place: int) -> dict[str, Any] | None:
        """Wait until another process has evaluated a part, and return its sums; None = this process must evaluate it."""
        with self._changed:
            if place < self._last:
                self._first = max(self._first, place + 1)
                return None
            while place not in self._found:
                self._changed.wait()
            return self._found.pop(place)

    def measure_at(self, pair: Connection) -> None:
        """Let one rank evaluate parts of the batches until none is left; runs on the thread for that rank."""
        values: FlatTensors | None = self._values  # sent with a rank's first part only
        while (place := self._take()) is not None:
            partials = None
            try:
                start, stop = self._parts[place]
                asked = Measure(start, stop, values is not None)
                pair.send(Message(Kind.MEASURE, meta=asked.to_meta(), tensors=values))
                answer = pair.recv(no_tensors, FOR_EVER_S)
                values = None
                if answer.kind is not Kind.MEASURED:
                    self.is_refused = True
                    return
                partials = answer.meta
            finally:
                with self._changed:
                    self._found[place] = partials
                    self._num_out -= 1
                    self._changed.notify_all()

    def _take(self) -> int | None:
        with self._changed:
            if not self.has_more:
                return None
            self._last -= 1
            self._num_out += 1
            return self._last
