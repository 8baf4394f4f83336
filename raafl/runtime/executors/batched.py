"""Train the tasks of several clients as one batch in this process, with the same result to the bit as one by one.

In virtual time a result is needed only when it arrives, while values, data and seed of a task are known at assignment. So when a
result is requested, all waiting tasks of the same spec and length are trained with it, the most urgent first, and stored.

With ``fast`` products of all clients are one call, whatever its bits: which tasks were together is written to the journal, so
that a replay trains the same ones, and what a later checkpoint needs is saved. Only gross differences from one client alone are
looked for, once for each kind.

Else nothing is assumed: the first batches of a spec, and the first with batches of another shape, are trained both ways and
compared, including what they log and the state in which they leave the generators. What differs or fails is trained sequentially
from then on.
"""

from __future__ import annotations

import heapq
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from raafl.core.saving import to_plain
from raafl.core.types import Assignment, Update
from raafl.data.federated import ClientData
from raafl.errors import USER_ERRORS, TaskFailed, format_error
from raafl.local.context import ALONE, TaskContext
from raafl.local.stacked import CohortTrainer, Member, Parted, Trained, Unstackable
from raafl.local.train import LocalTrainer
from raafl.rng import generators, same_generators
from raafl.runtime.executors.base import Executor, Like, attempt, entries_of, is_out_of_memory, kind_of
from raafl.submodel import FULL, FlatTensors, Spec

MOST = 128
"""Largest number of clients in a batch; more are little faster, and more are trained in vain at the end of a run."""
MOST_BYTES = 1 << 25
"""Largest size of a batch's values, gradients and optimizer state, so that they stay in the processor's cache."""
MOST_ON_GPU, MOST_BYTES_ON_GPU = 256, 1 << 30
"""The same on a GPU, where a call for more clients takes little longer; not measured yet."""
# clients in the two trial batches, which are also trained one by one: the first is to compare, the second to time
_TRIALS = (8, 16)
_LEAST, _LEAST_AUTO = 2, 4
# speedup from which batching is used, as short trials measure inexactly
_GAIN = 1.2
# with "auto", trials may take so many seconds, or this share of the seconds of one-by-one training
_TRIAL_S, _TRIAL_SHARE = 0.5, 0.02
_TRIAL_AHEAD = 0.05  # share of the remaining time that trials in a short run may take
_FIRST_S = 0.07  # seconds that the first trial takes longer, as it also compares products and warms up
# batches that may fail since their clients' code took different branches; then such tasks are trained one by one
_MOST_PARTED = 3
# times that a batch is trained again to be timed, until its time no longer has one-off work: products that are tried,
# steps that are captured
_MOST_SETTLING = 5

_MOST_ROUNDING = 0.05
"""Largest distance of a fast client's change from that of the client alone, over the latter's length: rounding grows in steps."""
_ANSWER = ("tensors", "num_samples", "num_steps", "metrics", "extra", "refusal")
"""Fields of an update that a checkpoint stores; ids and times come from its assignment."""
_ALONE: Like = (FULL, -1, -1)  # kind of the tasks that are trained one by one


@dataclass(slots=True)
class _Standing:
    """Measurements that decide whether tasks of one kind are trained as one batch."""

    reason: str | None = None  # reason for which they are trained one by one; None = they may be batched
    seen: set[Any] = field(default_factory=set)  # kinds of data batches for which both ways gave equal results
    trials: int = 0  # number of trials so far
    alone_s: float = math.inf  # least seconds of a task that was trained alone
    task_s: float = 0.0  # seconds for each task trained alone, in the trial with the best speedup
    cohort_s: float = 0.0  # seconds for the batch of `size` clients in that trial
    size: int = 0
    parted: int = 0  # number of batches that failed because their clients' code took different branches

    @property
    def is_slow(self) -> bool:
        """Whether training as one batch was not clearly faster than training one by one."""
        return self.cohort_s * _GAIN >= self.size * self.task_s

    @property
    def gains(self) -> bool:
        """Whether training as one batch was faster than training one by one, even slightly."""
        return self.cohort_s < self.size * self.task_s

    def note(self, trained: Trained, seconds: float, loop_s: float, size: int) -> None:
        """Record a trial's seconds as one batch and one by one (``loop_s``), if its speedup is the best so far."""
        self.trials += 1
        self.seen |= trained.seen.keys()
        if not self.size or seconds * self.size * self.task_s <= self.cohort_s * loop_s:
            self.task_s, self.cohort_s, self.size = loop_s / size, seconds, size


def _kind(assignment: Assignment) -> Like:
    """Return the key under which tasks may form a batch; a task with its own learning rate is trained alone."""
    return kind_of(assignment) if assignment.lr_scale == 1.0 else _ALONE


class BatchedExecutor(Executor):
    """Executor that trains waiting tasks together as one batch.

    Tasks that cannot or need not be batched are trained one by one.
    """

    def __init__(
        self, trainer: LocalTrainer, data: Callable[[int], ClientData], most: int | Literal["auto", "fast"] = "auto"
    ) -> None:
        self._trainer, self._data, self._most, self._is_fast = trainer, data, most, most == "fast"
        self._least = _LEAST_AUTO if most == "auto" else _LEAST
        self._together = CohortTrainer(trainer, fast=self._is_fast)
        # by task, in a replay: the tasks of the recorded batch that contains it
        self._recorded: dict[int, Sequence[int]] | None = None
        self._waiting: defaultdict[Like, dict[int, Member]] = defaultdict(dict)
        # heaps of (time needed, id), which may contain tasks that no longer wait
        self._order: defaultdict[Like, list[tuple[float, int]]] = defaultdict(list)
        self._kinds: dict[int, Like] = {}
        self._kept: dict[int, Trained | Update | TaskFailed] = {}
        self._standing: dict[Like, _Standing] = {}
        self._refusal = self._together.refusal()
        self._num_tasks = self._num_together = self._num_in_vain = self._num_cohorts = self._num_in_cohorts = 0
        self._loop_s = self._tried_s = 0.0
        self._reasons: dict[str, None] = {}
        self._not_tried = ""  # reason for which the last tasks were not batched, although they might have been

    def max_together(self, assignment: Assignment) -> int:
        """Return the largest number of tasks like this one that are trained together; 1 = they are trained one by one."""
        standing = self._standing.get(_kind(assignment))
        is_left = self._refusal is not None or (standing is not None and standing.reason is not None)
        return 1 if is_left else max(self._cap(assignment.spec), 1)

    def submit(self, assignment: Assignment, snapshot: FlatTensors, needed_at: float) -> None:
        """Store the task until its result or the result of a similar task is requested; see `Executor.submit`."""
        kind = self._kinds[assignment.id] = _kind(assignment)
        self._waiting[kind][assignment.id] = Member(assignment, snapshot, self._data(assignment.client))
        if self._refusal is None and (kind not in self._standing or self._standing[kind].reason is None):
            heapq.heappush(self._order[kind], (needed_at, assignment.id))

    def result(self, assignment_id: int, context: TaskContext = ALONE) -> Update:
        """Return the update of a task; if it is not trained yet, train it together with similar tasks that wait."""
        self._num_tasks += 1
        if assignment_id not in self._kept:
            self._train(assignment_id, context)
        found = self._kept.pop(assignment_id, None)
        if found is None:
            found = self._alone(assignment_id, context)
        del self._kinds[assignment_id]
        if isinstance(found, TaskFailed):  # errors are raised only when the result is requested
            raise found
        if not isinstance(found, Trained):
            return found
        self._num_together += 1
        try:
            return found.update(assignment_id, context)
        except USER_ERRORS:  # the evaluation on the test part failed; training alone raises the full error
            return attempt(self._trainer, *found.member(assignment_id), context)

    def cancel(self, assignment_id: int) -> None:
        """Remove a task, or its result; see `Executor.cancel`."""
        kind = self._kinds.pop(assignment_id, None)
        if kind is not None:
            self._waiting[kind].pop(assignment_id, None)
        self._num_in_vain += self._kept.pop(assignment_id, None) is not None

    def close(self) -> None:
        """Release results that nobody has requested."""
        self._num_in_vain += len(self._kept)
        self._kept.clear()
        self._waiting.clear()

    def counted(self) -> dict[str, Any]:
        """Return the number of tasks, batched tasks, batches and unused results, and why other tasks were trained one by one."""
        return {
            "tasks": self._num_tasks,
            "together": self._num_together,
            "cohorts": self._num_cohorts,
            "in_cohorts": self._num_in_cohorts,
            "in_vain": self._num_in_vain + len(self._kept),
            "by_the_loop": list(self._reasons),
            "not_tried": self._not_tried,
            **({"mode": "fast"} if self._is_fast else {}),
        }

    def on_gpu(self) -> dict[str, Any]:
        """Return the numbers of one-by-one tasks with captured steps and with data on the GPU; see `Executor.on_gpu`."""
        return entries_of(self._trainer)

    # ---- as one batch, or one by one ----

    def _alone(self, assignment_id: int, context: TaskContext) -> Update:
        """Train a task alone, and measure the time."""
        kind = self._kinds[assignment_id]
        standing, begun = self._standing.setdefault(kind, _Standing()), time.thread_time()
        try:
            return attempt(self._trainer, *self._waiting[kind].pop(assignment_id), context)
        finally:
            seconds = time.thread_time() - begun
            standing.alone_s = min(standing.alone_s, seconds)
            self._loop_s += seconds

    def _train(self, assignment_id: int, context: TaskContext) -> None:
        """Train a task as one batch with waiting tasks of its kind, if that is possible and faster; else leave it waiting."""
        if self._refusal is not None:
            self._say(self._refusal)
            return
        kind = self._kinds[assignment_id]
        standing = self._standing.setdefault(kind, _Standing())
        if kind == _ALONE or standing.reason is not None:
            self._not_tried = "train.lr_schedule gives tasks learning rates of their own"
            return
        if self._is_fast:
            self._train_fast(assignment_id, kind, context)
            return
        most = self._cap(kind[0])
        members = self._due(kind, most)
        trial = standing.trials < len(_TRIALS) or self._is_worth_another(standing, len(members))
        if trial:
            members = members[: _TRIALS[min(standing.trials, 1)]]
        self._not_tried = self._why_not(kind, len(members), trial)
        if self._not_tried:
            return
        known, begun = self._together.num_known, time.thread_time()
        try:
            trained = self._together.train(members)
        # a batch may fail where training alone does not, so errors are raised only by training alone
        except USER_ERRORS as error:
            self._leave(kind, error)
            for member in members:  # train at least these tasks alone
                number = member.assignment.id
                self._waiting[_ALONE][number] = self._waiting[kind].pop(number)
                self._kinds[number] = _ALONE
            return
        seconds = time.thread_time() - begun
        new = {number for batch in trained.seen.keys() - standing.seen for number in trained.seen[batch]}
        compared = [member for member in members if trial or member.assignment.id in new]
        different, loop_s, asked_s = self._compare(compared, trained, context)
        if different:
            self._leave(kind, Unstackable(f"clients trained together give other results than alone: {different}"))
            return
        if not trial:
            standing.seen |= trained.seen.keys()
            rest = {number: trained for member in members if (number := member.assignment.id) not in new}
            self._keep(rest)
            self._num_cohorts += bool(rest)
            self._num_in_cohorts += len(rest)
            return
        seconds = self._settled_s(members, seconds, known)
        self._tried_s += seconds
        standing.note(trained, seconds + asked_s, loop_s, len(members))
        # a second trial is in vain if the first shows no gain
        is_enough = len(members) >= _TRIALS[-1] or not standing.gains
        if self._most == "auto" and standing.is_slow and is_enough:
            self._leave(kind, Unstackable(f"{len(members)} clients are not faster together than one after the other"))

    # ---- fast: bits of their own ----

    def _train_fast(self, assignment_id: int, kind: Like, context: TaskContext) -> None:
        """Train a task as one batch with all waiting tasks of its kind or, in a replay, with those of the recorded batch."""
        standing, waiting = self._standing[kind], self._waiting[kind]
        if self._recorded is not None:
            members = [waiting[number] for number in self._recorded.get(assignment_id, ()) if number in waiting]
        else:
            most = self._cap(kind[0])
            members = self._due(kind, most)
        if len(members) < _LEAST:
            self._not_tried = f"fewer than {_LEAST} tasks of the same submodel and length wait at a time"
            return
        try:
            trained = self._together.train(members)
            if self._recorded is None and not standing.seen:
                self._check_fast(members[:2], trained, context)
        except USER_ERRORS as error:
            self._leave(kind, error)
            return
        standing.seen |= trained.seen.keys()
        self._keep({member.assignment.id: trained for member in members})
        self._num_cohorts += 1
        self._num_in_cohorts += len(members)
        self.batch_trained([member.assignment.id for member in members])

    def _check_fast(self, members: Sequence[Member], trained: Trained, context: TaskContext) -> None:
        """Raise `Unstackable` if a batch's results differ from those of training alone by more than rounding."""
        for member in members:
            alone = attempt(self._trainer, *member, context)
            alone.tensors = alone.tensors.clone()
            found = trained.update(member.assignment.id, context)
            if alone.refusal != found.refusal or alone.num_steps != found.num_steps or alone.extra != found.extra:
                raise Unstackable("clients trained together give another answer than alone")
            gap, length = 0.0, 0.0
            for dtype, values in alone.tensors.buffers.items():
                if values.is_floating_point():
                    start = member.received.buffers[dtype][: len(values)].to(values.device)
                    change = values if self._trainer.sends == "delta" else values - start
                    gap += float((found.tensors.buffers[dtype] - values).double().square().sum())
                    length += float(change.double().square().sum())
            if gap > _MOST_ROUNDING**2 * length and alone.refusal is None:
                raise Unstackable("clients trained together differ from those alone by more than rounding")

    def follow(self, batches: Iterable[Sequence[int]]) -> None:
        """Train the tasks of a recorded run together as it did; see `Executor.follow`."""
        self._recorded = {number: batch for batch in batches for number in batch}

    def save(self) -> dict[str, Any]:
        """Return results that nobody has asked for yet, since their bits depend on tasks that are over; see `Executor.save`."""
        if not self._is_fast:
            return {}
        for number, found in self._kept.items():
            if isinstance(found, Trained):
                update = found.update(number)
                update.tensors = update.tensors.clone()
                self._kept[number] = update
        answers = [
            [number, {name: to_plain(getattr(found, name)) for name in _ANSWER}]
            for number, found in self._kept.items()
            if isinstance(found, Update)
        ]
        tried = [
            [to_plain(kind), one.reason, one.parted]
            for kind, one in self._standing.items()
            if one.seen or one.reason is not None
        ]
        return {"answers": answers, "tried": tried}

    def restore(self, data: dict[str, Any]) -> None:
        """Restore the result of `save`; see `Executor.restore`."""
        from raafl.core.restoring import from_plain

        device = self._trainer.fabric.device
        for number, answer in data.get("answers", ()):
            member = self._waiting[self._kinds[number]].pop(number)
            ids = member.assignment.id, member.assignment.client, member.assignment.incarnation
            self._kept[number] = Update(*ids, **{name: from_plain(answer[name], device) for name in _ANSWER})
        for kind, reason, parted in data.get("tried", ()):
            self._standing[from_plain(kind)] = _Standing(reason, {None}, parted=parted)

    # ---- to the same bits ----

    def _why_not(self, kind: Like, size: int, trial: bool) -> str:
        """Return the reason for which ``size`` waiting tasks are not trained as one batch now; "" if they are."""
        if size < self._least:
            return f"fewer than {self._least} tasks of the same submodel and length wait at a time"
        if trial:
            return "" if self._may_try(kind, size) else "the run is too short for a trial of clients as one batch"
        return "" if self._pays(self._standing[kind], size) else f"{size} clients are not faster as one batch"

    def _cap(self, spec: Spec) -> int:
        if not isinstance(self._most, str):
            return self._most
        on_gpu = self._trainer.fabric.device.type != "cpu"
        most, num_bytes = (MOST_ON_GPU, MOST_BYTES_ON_GPU) if on_gpu else (MOST, MOST_BYTES)
        return min(most, num_bytes // max(self._together.num_bytes(spec), 1))

    def _due(self, kind: Like, size: int) -> list[Member]:
        """Return up to ``size`` waiting tasks of a kind, those first whose results are needed first."""
        waiting, order = self._waiting[kind], self._order[kind]
        size = size if self.needed is None else min(size, self.needed)
        found: list[tuple[float, int]] = []
        while order and len(found) < size:
            entry = heapq.heappop(order)
            if entry[1] in waiting:
                found.append(entry)
        for entry in found:  # put back, since they may not be trained now
            heapq.heappush(order, entry)
        return [waiting[number] for _, number in found[: self._together.fitting(len(found))]]

    def _is_worth_another(self, standing: _Standing, size: int) -> bool:
        """Check whether a batch is worth another trial: twice as large as the one that was too slow, or larger."""
        return self._most == "auto" and standing.is_slow and size >= 2 * standing.size

    def _may_try(self, kind: Like, size: int) -> bool:
        """Check whether another trial is within its time limit, or takes less time than it may save."""
        standing = self._standing[kind]
        trial_s = self._tried_s + standing.alone_s * size + (0.0 if self._together.num_known else _FIRST_S)
        ahead_s = math.inf if self.needed is None else self.needed * standing.alone_s
        allowed_s = max(min(_TRIAL_S, _TRIAL_AHEAD * ahead_s), _TRIAL_SHARE * self._loop_s)
        if self._most != "auto" or trial_s <= allowed_s:
            return True
        if not standing.size:
            return False
        together_s = standing.cohort_s / standing.size  # seconds for each task in the batch that was timed
        return (standing.task_s - together_s) * (len(self._waiting[kind]) - size) > together_s * size

    def _settled_s(self, members: Sequence[Member], seconds: float, known: int) -> float:
        """Repeat a batch until it tries nothing out any more, such as products or captured steps; return its seconds then."""
        for _ in range(_MOST_SETTLING):
            if self._together.num_known == known:
                break
            known, begun = self._together.num_known, time.thread_time()
            self._together.train(members)
            seconds = time.thread_time() - begun
        return seconds

    def _pays(self, standing: _Standing, size: int) -> bool:
        """Check whether ``size`` tasks are faster as one batch, which is assumed unless the size is `auto`."""
        return self._most != "auto" or size * standing.task_s > standing.cohort_s * max(1.0, size / standing.size)

    def _compare(self, members: Sequence[Member], trained: Trained, context: TaskContext) -> tuple[str, float, float]:
        """Train a batch's tasks one by one, too; return the first difference, and the seconds of this and of reading the batch."""
        found: dict[int, Trained | Update | TaskFailed] = {}
        seconds, asked_s, different = 0.0, 0.0, ""
        for member in members:
            begun = time.thread_time()
            try:
                update: Update | TaskFailed = attempt(self._trainer, *member, context)
            except TaskFailed as failed:
                update = failed
            seconds += time.thread_time() - begun
            if isinstance(update, Update):
                update.tensors = update.tensors.clone()  # copied, since the trainer reuses its tensors
                device = self._trainer.fabric.device
                drawn, begun = generators(device), time.thread_time()
                try:
                    other = trained.update(member.assignment.id, context, draws=True)
                    asked_s += time.thread_time() - begun
                    drawn_alike = same_generators(drawn, generators(device))
                    other_draws = "" if drawn_alike else "other random numbers are drawn"
                    different = different or update.difference(other) or other_draws
                except USER_ERRORS as error:
                    different = different or format_error(error)
            else:
                different = "the training step fails"
            found[member.assignment.id] = update
        self._keep(found)
        self._loop_s += seconds
        return different, seconds, asked_s

    def _keep(self, found: Mapping[int, Trained | Update | TaskFailed]) -> None:
        """Store results by their tasks' ids; the tasks wait no longer."""
        for number in found:
            del self._waiting[self._kinds[number]][number]
        self._kept |= found

    def _leave(self, kind: Like, error: BaseException) -> None:
        """Train tasks of this kind one by one from now on, because of ``error``, or after `_MOST_PARTED` differing branches."""
        standing = self._standing[kind]
        if isinstance(error, Parted) and standing.seen:
            standing.parted += 1
            if standing.parted < _MOST_PARTED:
                return
        if is_out_of_memory(error):
            self._trainer.release()
        standing.reason = str(error) if isinstance(error, Unstackable) else format_error(error)
        self._order.pop(kind, None)
        self._say(standing.reason)

    def _say(self, reason: str) -> None:
        if reason not in self._reasons:
            self._reasons[reason] = None
            self.note(f"clients are trained one after the other: {reason}")
