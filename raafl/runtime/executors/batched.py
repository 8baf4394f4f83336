"""Train the tasks of several clients as one batch in this process, with the same result to the bit as one by one.

In virtual time a result is needed only when it arrives, while values, data and seed of a task are known at assignment. So when a
result is requested, all waiting tasks of the same spec and length are trained with it, the most urgent first, and stored.

Nothing is assumed: the first batches of a spec, and the first with batches of another shape, are trained both ways and compared,
including what they log and the state in which they leave the generators. What differs or fails is trained sequentially from then
on.
"""

from __future__ import annotations

import heapq
import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from raafl.core.types import Assignment, Update
from raafl.data.federated import ClientData
from raafl.errors import USER_ERRORS, TaskFailed, format_error
from raafl.local.context import ALONE, TaskContext
from raafl.local.failure import attempt, is_out_of_memory
from raafl.local.stacked import CohortTrainer, Member, Parted, Trained, Unstackable
from raafl.local.train import LocalTrainer
from raafl.rng import generators, same_generators
from raafl.runtime.executors.base import Executor, Like, kind_of
from raafl.submodel import FULL, FlatTensors, Spec

MOST = 64
"""Clients of a cohort at most; more are little faster, and more are trained in vain at the end of a run."""
MOST_BYTES = 1 << 25
"""Values, gradients and optimiser state of a cohort at most, so that they stay in the processor's cache."""
_TRIALS = (8, 16)  # clients in the cohorts that are trained both ways: to compare, and, when all is warm, to time
_LEAST, _LEAST_AUTO = 2, 4
_GAIN = 1.2  # of cohorts over the loop, below which they are not worth it: short trials are not measured more closely
_TRIAL_S, _TRIAL_SHARE = 0.5, 0.02  # what all trials may take with auto: so long, or that share of the loop's time
_TRIAL_AHEAD = 0.05  # share of the time that is left of a short run, of which they take no more
_FIRST_S = 0.07  # what the first trial takes beside its tasks: products are tried both ways, and nothing is warm
_MOST_PARTED = 3  # cohorts in which clients went different ways, after which a spec is left to the loop

_ALONE: Like = (FULL, -1, -1)  # of tasks that are to be trained by the loop


@dataclass(slots=True)
class _Standing:
    """What is known of the tasks of one kind."""

    reason: str | None = None  # why they are left to the loop; None = they are not
    seen: set[Any] = field(default_factory=set)  # kinds of batches that were compared, and found equal
    trials: int = 0  # cohorts trained both ways
    alone_s: float = math.inf  # least seconds of a task in the loop so far
    task_s: float = 0.0  # seconds of a task in the loop, in the trial
    cohort_s: float = 0.0  # seconds of a cohort of `size` clients, in the trial
    size: int = 0
    parted: int = 0  # cohorts in which clients went different ways

    @property
    def is_slow(self) -> bool:
        """Whether training as one batch was about as slow as training one by one."""
        return self.cohort_s * _GAIN >= self.size * self.task_s

    def note(self, trained: Trained, seconds: float, loop_s: float, size: int) -> None:
        """Record how long the same tasks took as one batch and one by one; only the best speedup of a batch is stored."""
        self.trials += 1
        self.seen |= trained.seen.keys()
        if not self.size or seconds * self.size * self.task_s <= self.cohort_s * loop_s:
            self.task_s, self.cohort_s, self.size = loop_s / size, seconds, size


def _kind(assignment: Assignment) -> Like:
    """Key a task as `kind_of` does; the loop trains one whose learning rate a schedule has changed: each may have its own."""
    return kind_of(assignment) if assignment.lr_scale == 1.0 else _ALONE


class BatchedExecutor(Executor):
    """Executor that trains waiting tasks together as one batch.

    Tasks that cannot or need not be batched are trained one by one.
    """

    def __init__(
        self, trainer: LocalTrainer, data: Callable[[int], ClientData], most: int | Literal["auto"] = "auto"
    ) -> None:
        """Prepare."""
        self._trainer, self._data, self._most = trainer, data, most
        self._least = _LEAST_AUTO if most == "auto" else _LEAST
        self._together = CohortTrainer(trainer)
        self._waiting: defaultdict[Like, dict[int, Member]] = defaultdict(dict)
        # heaps of when they are needed, with some that do not wait any more
        self._order: defaultdict[Like, list[tuple[float, int]]] = defaultdict(list)
        self._kinds: dict[int, Like] = {}
        self._kept: dict[int, Trained | Update | TaskFailed] = {}
        self._standing: dict[Like, _Standing] = {}
        self._refusal = self._together.refusal()
        self._num_tasks = self._num_together = self._num_in_vain = self._num_cohorts = self._num_in_cohorts = 0
        self._loop_s = self._tried_s = 0.0
        self._reasons: dict[str, None] = {}
        self._not_tried = ""  # why the last tasks were not trained together, although nothing spoke against it

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
        if isinstance(found, TaskFailed):  # said when its turn comes
            raise found
        if not isinstance(found, Trained):
            return found
        self._num_together += 1
        try:
            return found.update(assignment_id, context)
        except USER_ERRORS:  # measuring its test part has failed: the loop says how
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
        }

    # ---- together, or not ----

    def _alone(self, assignment_id: int, context: TaskContext) -> Update:
        """Train a task by the loop."""
        kind = self._kinds[assignment_id]
        standing, begun = self._standing.setdefault(kind, _Standing()), time.thread_time()
        try:
            return attempt(self._trainer, *self._waiting[kind].pop(assignment_id), context)
        finally:
            seconds = time.thread_time() - begun
            standing.alone_s = min(standing.alone_s, seconds)
            self._loop_s += seconds

    def _train(self, assignment_id: int, context: TaskContext) -> None:
        """Train what waits together with a task, if there is something, and it pays; else leave it waiting."""
        if self._refusal is not None:
            self._say(self._refusal)
            return
        kind = self._kinds[assignment_id]
        standing = self._standing.setdefault(kind, _Standing())
        if kind == _ALONE or standing.reason is not None:
            self._not_tried = "train.lr_schedule gives tasks learning rates of their own"
            return
        most = self._cap(kind[0])
        members = self._due(kind, most if self.needed is None else min(most, self.needed))
        trial = standing.trials < len(_TRIALS) or self._is_worth_another(standing, len(members))
        if trial:
            members = members[: _TRIALS[min(standing.trials, 1)]]
        self._not_tried = self._why_not(kind, len(members), trial)
        if self._not_tried:
            return
        known, begun = self._together.num_known, time.thread_time()
        try:
            trained = self._together.train(members)
        except USER_ERRORS as error:  # of the user's code on stacks, too: the loop says what there is to say
            self._leave(kind, error)
            for member in members:  # at least these
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
            rest = [member for member in members if member.assignment.id not in new]
            self._keep(rest, [trained] * len(rest))
            self._num_cohorts += bool(rest)
            self._num_in_cohorts += len(rest)
            return
        if self._together.num_known > known:  # it has tried products meanwhile, which no other will
            begun = time.thread_time()
            self._together.train(members)
            seconds = time.thread_time() - begun
        self._tried_s += seconds
        standing.note(trained, seconds + asked_s, loop_s, len(members))
        if self._most == "auto" and standing.is_slow and len(members) >= _TRIALS[-1]:
            self._leave(kind, Unstackable(f"{len(members)} clients are not faster together than one after the other"))

    def _why_not(self, kind: Like, size: int, trial: bool) -> str:
        """Return why so many waiting tasks of a kind are not trained together now; empty if they are."""
        if size < self._least:
            return f"fewer than {self._least} tasks of the same submodel and length wait at a time"
        if trial:
            return "" if self._may_try(kind, size) else "the run is too short for a trial of clients as one batch"
        return "" if self._pays(self._standing[kind], size) else f"{size} clients are not faster as one batch"

    def _cap(self, spec: Spec) -> int:
        return min(MOST, MOST_BYTES // max(self._together.num_bytes(spec), 1)) if self._most == "auto" else self._most

    def _due(self, kind: Like, size: int) -> list[Member]:
        """List the tasks that wait of a kind, those due first before the rest."""
        waiting, order = self._waiting[kind], self._order[kind]
        found: list[tuple[float, int]] = []
        while order and len(found) < size:
            entry = heapq.heappop(order)
            if entry[1] in waiting:
                found.append(entry)
        for entry in found:  # back, for whoever is not trained now
            heapq.heappush(order, entry)
        return [waiting[number] for _, number in found]

    def _is_worth_another(self, standing: _Standing, size: int) -> bool:
        """Check whether a cohort is so much larger than the one timed, which was too small to be faster, that it may be."""
        return self._most == "auto" and standing.is_slow and size >= 2 * standing.size

    def _may_try(self, kind: Like, size: int) -> bool:
        """Check whether all trials, with one more, take little beside the loop, or this one less than it promises to save."""
        standing = self._standing[kind]
        trial_s = self._tried_s + standing.alone_s * size + (0.0 if self._together.num_known else _FIRST_S)
        ahead_s = math.inf if self.needed is None else self.needed * standing.alone_s
        allowed_s = max(min(_TRIAL_S, _TRIAL_AHEAD * ahead_s), _TRIAL_SHARE * self._loop_s)
        if self._most != "auto" or trial_s <= allowed_s:
            return True
        if not standing.size:
            return False
        together_s = standing.cohort_s / standing.size  # of a task, in the cohort that was timed
        return (standing.task_s - together_s) * (len(self._waiting[kind]) - size) > together_s * size

    def _pays(self, standing: _Standing, size: int) -> bool:
        """Check whether a cohort is faster than the loop: one that is smaller than the one timed takes no less than it did."""
        return self._most != "auto" or size * standing.task_s > standing.cohort_s * max(1.0, size / standing.size)

    def _compare(self, members: Sequence[Member], trained: Trained, context: TaskContext) -> tuple[str, float, float]:
        """Train tasks by the loop as well, and keep what that gives.

        Returns what differs, the seconds of the loop, and those of asking for what was trained together.
        """
        found: list[Trained | Update | TaskFailed] = []
        seconds, asked_s, different = 0.0, 0.0, ""
        for member in members:
            begun = time.thread_time()
            try:
                update: Update | TaskFailed = attempt(self._trainer, *member, context)
            except TaskFailed as failed:
                update = failed
            seconds += time.thread_time() - begun
            if isinstance(update, Update):
                update.tensors = update.tensors.clone()  # the trainer's own
                drawn, begun = generators(), time.thread_time()
                try:
                    other = trained.update(member.assignment.id, context, draws=True)
                    asked_s += time.thread_time() - begun
                    different = different or _difference(update, other, drawn)
                except USER_ERRORS as error:
                    different = different or format_error(error)
            else:
                different = "the training step fails"
            found.append(update)
        self._keep(members, found)
        self._loop_s += seconds
        return different, seconds, asked_s

    def _keep(self, members: Sequence[Member], found: Sequence[Trained | Update | TaskFailed]) -> None:
        for member, one in zip(members, found, strict=True):
            number = member.assignment.id
            del self._waiting[self._kinds[number]][number]
            self._kept[number] = one

    def _leave(self, kind: Like, error: BaseException) -> None:
        """Leave a kind of tasks to the loop; where clients have parted, not at once, if they had gone together before."""
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


def _difference(one: Update, other: Update, drawn: tuple[Any, ...]) -> str:
    """Name what differs between an update, that of a task trained with others, and what they have left of generators."""
    if one.tensors.fingerprint() != other.tensors.fingerprint():
        return "other values"
    if repr(one.metrics) != repr(other.metrics):
        return f"other metrics ({one.metrics} and {other.metrics})"
    if not same_generators(drawn, generators()):
        return "other random numbers are drawn"
    same = (one.num_samples, one.num_steps, one.extra, one.refusal) == (
        other.num_samples,
        other.num_steps,
        other.extra,
        other.refusal,
    )
    return "" if same else "another answer"
