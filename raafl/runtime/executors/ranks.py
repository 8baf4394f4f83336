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
from raafl.local.evaluation.evaluate import Evaluator
from raafl.local.failure import unanswered
from raafl.local.train import LocalTrainer
from raafl.runtime.executors.base import Executor, Like, kind_of, summed
from raafl.runtime.executors.rank_worker import FOR_EVER_S
from raafl.runtime.executors.shared_evaluation import Shared
from raafl.runtime.identity import Identity, agree
from raafl.runtime.protocol import Answer, Assign, Failed, Hello, Reason, Welcome, no_tensors
from raafl.sanitize import sanitize_text
from raafl.submodel import FlatTensors
from raafl.transport import Connection, Expect, Kind, Message, PeerLost, PeerTimeout, Refused

AHEAD_BYTES = 1 << 29
"""Results that wait to be asked for, beyond which nothing more is begun ahead of need."""
_LEAST_AHEAD = 2  # tasks for each rank, however large their results are
_PART_S = 10.0


@dataclass(slots=True)
class _Task:
    """A task; begun once a process has taken it, and here where that is this one, whose executor has its result."""

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
        """Train in this process with ``inner``, whose trainer is ``trainer``."""
        self._inner, self._payload, self._submodels = inner, trainer.payload, trainer.submodels
        inner.note = lambda text: self.note(text)
        self._tasks: dict[int, _Task] = {}
        self._waiting: list[tuple[float, int]] = []  # a heap, with some that are begun or gone
        self._alike: defaultdict[Like, dict[int, _Task]] = defaultdict(dict)  # what nobody has begun
        self._counted: dict[str, dict[str, Any]] = {}  # by ranks, of how they have trained
        self._ahead_bytes = self._num_ahead = self._num_ranks = self._num_in_vain = 0
        self._num_free = 1  # processes that train nothing, this one included
        self._num_here = 0  # tasks that are begun here
        self._changed = threading.Condition()
        self._stopping = threading.Lock()  # a rank is told to stop by whichever thread is first, and by one at a time
        self._threads: list[threading.Thread] = []
        self._pairs: list[Connection] = []
        self._closed = False
        self._device = trainer.fabric.device
        self._shared: Shared | None = None  # the evaluation at hand
        self._measures_alone = False  # what is measured cannot be shared

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
            if len(self._alike[kind_of(assignment)]) >= self.max_together(assignment) // 4:  # else wait for more
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
                if some and self._alike:  # the rest is for the others
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
        """Count one task less at work in this process; ``task`` is the one whose result was asked for, if it was that one."""
        with self._changed:
            self._num_free += 1
            self._num_here -= 1
            if task is not None:
                self._one_less_needed()
                del self._tasks[task.assignment.id]

    def _for_here(self, task: _Task) -> list[_Task]:
        """Take what this process trains next, as a task's result is asked for; the caller has the condition."""
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
            if task is None:  # a replay submits only what will be asked for
                return
            while task.sending:  # the snapshot is given back by whoever cancels
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
        alone = self._measures_alone or not (self._num_ranks and evaluator.is_shared)
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

    def close(self) -> None:
        """End the work of all other ranks, even in the middle of a task."""
        self._end()
        with self._changed:
            while any(task.sending for task in self._tasks.values()):  # a message at a time; no other is begun any more
                self._changed.wait()
        for pair in list(self._pairs):
            self._stop(pair)
        for thread in self._threads:
            thread.join(timeout=_PART_S)
        for pair in list(self._pairs):
            pair.close()
        self._inner.close()

    def _end(self) -> None:
        """Have nothing begun any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    # ---- which task is next; whoever calls has the condition ----

    def _offer(self, task: _Task) -> None:
        """Let whoever is free begin a task."""
        heapq.heappush(self._waiting, (task.needed_at, task.assignment.id))
        self._alike[kind_of(task.assignment)][task.assignment.id] = task

    def _drop(self, task: _Task) -> None:
        """Let nobody begin it any more."""
        kind = kind_of(task.assignment)
        del self._alike[kind][task.assignment.id]
        if not self._alike[kind]:
            del self._alike[kind]

    def _begin(self) -> list[_Task]:
        """Take the most urgent task that nobody has begun, and what is trained with it, if there is room for results."""
        room = self._room()
        if not room or (self._ahead_bytes > AHEAD_BYTES and self._num_ahead >= _LEAST_AHEAD * (self._num_ranks + 1)):
            return []
        while self._waiting:
            task = self._tasks.get(heapq.heappop(self._waiting)[1])
            if task is not None and not task.begun:
                return self._with(task, room)
        return []

    def _with(self, task: _Task, room: int) -> list[_Task]:
        """Take a task, and with it a process's share of what waits of its kind, what is needed first before the rest."""
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
        """Count how many tasks more may be begun before what is trained may be in vain."""
        if self.needed is None or self.needed >= len(self._tasks):
            return len(self._tasks)
        return max(self.needed - sum(task.begun and not task.cancelled for task in self._tasks.values()), 0)

    def _one_less_needed(self) -> None:
        """Count down at once: a thread that looked before whoever sets `needed` would begin a task in vain."""
        if self.needed is not None:
            self.needed -= 1

    # ---- results ----

    def _trained_ahead(self, assignment_id: int, context: TaskContext) -> Update | TaskFailed:
        try:
            update = self._inner.result(assignment_id, context)
        except TaskFailed as failed:  # said when its turn comes, wherever it was trained
            return failed
        update.tensors = update.tensors.clone()  # the trainer's own, used again for the next task
        return update

    def _keep(self, task: _Task, result: Update | TaskFailed) -> None:
        """Hold a result until it is asked for."""
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
        self._changed.notify_all()  # there may be room again

    # ---- with another rank; each in a thread of its own ----

    def _serve(self, name: str, connect: Callable[[], Connection]) -> None:
        out: list[_Task] = []
        try:
            with connect() as pair:
                self._pairs.append(pair)
                self._greet(pair)
                while (work := self._next()) is not None:
                    out = out if isinstance(work, Shared) else work
                    self._do(name, pair, work)
                    work = None  # nothing is kept while the next is waited for
                self._stop(pair)  # it may have come when the others had been told
        except Exception as error:  # whatever it is, the others can do what this one cannot
            if self._lose(out):
                self.warn(f"{name} is lost ({sanitize_text(error)}); the run goes on without it")

    def _greet(self, pair: Connection) -> None:
        """Check that the rank has the same raafl and model, and tell it which axes are whole."""
        theirs = Hello.from_meta(pair.recv(no_tensors, FOR_EVER_S).meta)
        if (different := agree(Identity.of(self._submodels), theirs.identity, same_package=True)) is not None:
            name = "frozen parameters" if different.field == "base" else different.field
            raise Refused("incompatible", f"another {name}: {different.theirs}, here it is {different.ours}")
        with self._stopping:
            pair.send(Message(Kind.WELCOME, meta=Welcome(tuple(sorted(self._submodels.refuted))).to_meta()))

    def _stop(self, pair: Connection) -> None:
        """Tell a rank that the run has ended; it is no error if it is gone."""
        with self._stopping, suppress(PeerLost, PeerTimeout):
            pair.send(Message(Kind.STOP, meta=Reason("the run has ended").to_meta()), 1.0)

    def _do(self, name: str, pair: Connection, work: list[_Task] | Shared) -> None:
        return work.measure_at(pair) if isinstance(work, Shared) else self._exchange(name, pair, work)

    def _next(self) -> list[_Task] | Shared | None:
        """Wait for an evaluation to help with, or tasks to begin; None = the run has ended."""
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
        """Return an evaluation with batches left, or the tasks to begin next, marked as being sent; the lock is held."""
        if self._shared is not None and self._shared.has_more:
            return self._shared
        some = self._begin()
        for task in some:
            task.sending = True
        return some

    def _exchange(self, name: str, pair: Connection, out: list[_Task]) -> None:
        """Have a rank train tasks, and keep what it answers; those that are done leave ``out``."""
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
        """Read what a rank answers to a task."""
        if message.tensors is None:
            failed = Failed.from_meta(message.meta)
            refusal = failed.refusal
            return failed.to_error(assignment.client) if refusal is None else unanswered(assignment, refusal)
        answer = Answer.from_rank(message.meta)
        if answer.counted:
            self._counted[name] = dict(answer.counted)
        return Update(
            assignment.id,
            assignment.client,
            assignment.incarnation,
            message.tensors,
            answer.num_samples,
            answer.num_steps,
            dict(answer.metrics),
            extra=dict(answer.extra),
            refusal=answer.refusal,
        )

    def _lose(self, out: list[_Task]) -> bool:
        """Go on without a rank, whose tasks are trained again, to the same bits; return whether the run had not ended."""
        with self._changed:
            self._num_ranks -= 1
            for task in out:
                if task.cancelled:
                    del self._tasks[task.assignment.id]
                else:
                    task.begun, task.sending, task.needed_at = False, False, 0.0  # somebody may wait for it already
                    self._offer(task)
            self._changed.notify_all()
            return not self._closed
