"""Where a simulated run's tasks are trained: in this process when they are asked for, or elsewhere and ahead of need.

A task is a pure function of its assignment, its snapshot and the client's data, so where and in which order tasks are
trained changes nothing but the time it takes. Every process computes with the same number of threads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

from raafl.core.types import Assignment, Update
from raafl.data.federated import ClientData
from raafl.local.evaluate import Evaluator
from raafl.local.failure import attempt
from raafl.local.train import LocalTrainer
from raafl.submodel import FlatTensors, Spec

Like = tuple[Spec, int | None, int | None]
"""What tasks that can be trained together have alike."""


def kind_of(assignment: Assignment) -> Like:
    """Key a task by what it has to have alike with those that it is trained with."""
    return assignment.spec, assignment.num_epochs, assignment.num_steps


class Executor(ABC):
    """Trains tasks; `submit` in any order, then `result` or `cancel` each once.

    Attributes:
        note: told what a user should know of how tasks are trained.
        warn: told what has gone wrong meanwhile; in any thread.
        needed: results that will be asked for from now on, if none is refused; what is trained beyond is in vain. None = not known.
    """

    note: Callable[[str], None] = staticmethod(lambda text: None)
    warn: Callable[[str], None] = staticmethod(lambda text: None)
    needed: int | None = None

    @property
    def num_processes(self) -> int:
        """Count the processes that train, this one included."""
        return 1

    def most(self, assignment: Assignment) -> int:
        """Count the tasks like this one that are trained together at most, where so many wait."""
        return 1

    @abstractmethod
    def submit(self, assignment: Assignment, snapshot: FlatTensors, needed_at: float) -> None:
        """Take a task; ``snapshot`` must stay as it is until `result` or `cancel`. First needed, first trained."""

    @abstractmethod
    def result(self, assignment_id: int) -> Update:
        """Return the update; its tensors are good until the next call of any method.

        Raises:
            TaskFailed: the user's code has failed in it.
        """

    @abstractmethod
    def cancel(self, assignment_id: int) -> None:
        """Drop a task whose result will not be asked for; harmless if it was not submitted."""

    def evaluate(self, evaluator: Evaluator, values: FlatTensors) -> dict[str, float]:
        """Measure the global model, in as many processes as can help, to the bits of one; see `Evaluator`."""
        return evaluator(values)

    def counted(self) -> dict[str, Any]:
        """Count how tasks were trained so far, as plain data that `summed` adds up; of each in turn nothing."""
        return {}

    def report(self) -> dict[str, Any]:
        """Say how tasks were trained so far; of each in turn nothing."""
        return summed([self.counted()])

    def close(self) -> None:
        """Release processes and memory; harmless when called twice."""
        return


class Inline(Executor):
    """Trains each task in this process when its result is asked for."""

    def __init__(self, trainer: LocalTrainer, data: Callable[[int], ClientData]) -> None:
        """Train with ``trainer``; ``data(i)`` is client i's."""
        self._trainer, self._data = trainer, data
        self._tasks: dict[int, tuple[Assignment, FlatTensors]] = {}

    def submit(self, assignment: Assignment, snapshot: FlatTensors, needed_at: float) -> None:
        """Keep the task until its result is asked for."""
        self._tasks[assignment.id] = (assignment, snapshot)

    def result(self, assignment_id: int) -> Update:
        """Train now."""
        assignment, snapshot = self._tasks.pop(assignment_id)
        return attempt(self._trainer, assignment, snapshot, self._data(assignment.client))

    def cancel(self, assignment_id: int) -> None:
        """Forget the task."""
        self._tasks.pop(assignment_id, None)


def summed(counts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Add several processes' counts up, to a share and a mean; nothing where none counts."""
    found = [one for one in counts if one]
    if not found:
        return {}
    tasks, together, cohorts, in_cohorts, in_vain = (
        sum(one.get(name, 0) for one in found) for name in ("tasks", "together", "cohorts", "in_cohorts", "in_vain")
    )
    reasons = dict.fromkeys(reason for one in found for reason in one.get("by_the_loop", ()))
    return {
        "share": together / max(tasks, 1), "mean_cohort": in_cohorts / max(cohorts, 1), "in_vain": in_vain,
        "by_the_loop": list(reasons),
    }  # fmt: skip
