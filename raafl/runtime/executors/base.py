"""Define the interface for training the tasks of a simulation, and its simplest form, which trains in this process.

A task is a pure function of its assignment, its snapshot and the client's data, so where and in which order tasks are trained
changes nothing but the time. Every process computes with the same number of threads.
"""

from __future__ import annotations

import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import torch

from raafl.core.types import OUT_OF_MEMORY, Assignment, Update
from raafl.data.federated import ClientData
from raafl.errors import USER_ERRORS, BadInput, TaskFailed
from raafl.local.context import ALONE, Stopped, TaskContext
from raafl.local.evaluate import Evaluator
from raafl.local.train import LocalTrainer
from raafl.submodel import FlatTensors, Layout, Spec

# texts of RuntimeErrors by which torch reports too little memory
_NO_MEMORY: Final = ("can't allocate memory", "out of memory", "_STATUS_ALLOC_FAILED")

Like = tuple[Spec, int | None, int | None]
"""Key that tasks share which can be trained together."""


def kind_of(assignment: Assignment) -> Like:
    """Return a key that is equal for tasks that can be trained together as one batch."""
    return assignment.spec, assignment.num_epochs, assignment.num_steps


class Executor(ABC):
    """Trainer of the tasks of a simulation: call `submit` in any order, then `result` or `cancel` once for each task."""

    note: Callable[[str], None] = staticmethod(lambda text: None)  # shows a line to the user
    warn: Callable[[str], None] = staticmethod(lambda text: None)  # shows a warning to the user, from any thread
    # records which tasks were trained as one batch, if that changes the last bits of their results
    batch_trained: Callable[[Sequence[int]], None] = staticmethod(lambda assignments: None)
    # number of results that the run needs if none is refused, beyond which no task is trained in advance; None =
    # unknown
    needed: int | None = None

    @property
    def num_processes(self) -> int:
        """Number of processes that train tasks, this one included."""
        return 1

    def max_together(self, assignment: Assignment) -> int:
        """Return the largest number of tasks like this one that one process trains together as one batch."""
        return 1

    def compute_s(self, assignment: Assignment, snapshot: FlatTensors, received_s: float) -> float | None:
        """Return the virtual seconds that a task's training takes; None = as the client's device profile predicts.

        Args:
            assignment: the task, which is submitted next.
            snapshot: values that its client receives.
            received_s: time at which it has received them.
        """
        return None

    @abstractmethod
    def submit(self, assignment: Assignment, snapshot: FlatTensors, needed_at: float) -> None:
        """Accept a task for training."""

    @abstractmethod
    def result(self, assignment_id: int, context: TaskContext = ALONE) -> Update:
        """Return the trained update of a task; its tensors are valid until the next call of any method."""

    @abstractmethod
    def cancel(self, assignment_id: int) -> None:
        """Remove a task whose result is not needed; unknown ids are ignored."""

    def evaluate(self, evaluator: Evaluator, values: FlatTensors, version: int) -> dict[str, float]:
        """Evaluate the global model in several processes; the result is the same to the bit as in one process."""
        return evaluator(values, version)

    def counted(self) -> dict[str, Any]:
        """Return statistics on how many tasks were trained as batches; empty if all are trained one by one."""
        return {}

    def report(self) -> dict[str, Any]:
        """Return an entry for the run's summary about how tasks were trained; empty if they are trained one by one."""
        return summed([self.counted()])

    def on_gpu(self) -> dict[str, Any]:
        """Return entries for the run's summary about captured steps, and data that lie on the GPU; empty on a CPU."""
        return {}

    def follow(self, batches: Iterable[Sequence[int]]) -> None:
        """Train these tasks together, by their assignments' ids, and all others one by one: as a recorded run did."""
        return

    def save(self) -> dict[str, Any]:
        """Return this executor's state for a checkpoint, as plain data and tensors; empty if no result depends on it."""
        return {}

    def restore(self, data: dict[str, Any]) -> None:
        """Restore the result of `save`, once the tasks of the checkpoint are submitted."""
        return

    def close(self) -> None:
        """End other processes and release memory; the method can be called again."""
        return


class Inline(Executor):
    """Executor that trains each task in this process, when its result is requested."""

    def __init__(self, trainer: LocalTrainer, data: Callable[[int], ClientData]) -> None:
        """Create an executor that trains in this process; ``data`` returns a client's data by its id."""
        self._trainer, self._data = trainer, data
        self._tasks: dict[int, tuple[Assignment, FlatTensors]] = {}

    def submit(self, assignment: Assignment, snapshot: FlatTensors, needed_at: float) -> None:
        """Store the task until its result is requested; see `Executor.submit`."""
        self._tasks[assignment.id] = (assignment, snapshot)

    def result(self, assignment_id: int, context: TaskContext = ALONE) -> Update:
        """Train the task in this process, and return its update."""
        assignment, snapshot = self._tasks.pop(assignment_id)
        return attempt(self._trainer, assignment, snapshot, self._data(assignment.client), context)

    def cancel(self, assignment_id: int) -> None:
        """Remove the stored task; see `Executor.cancel`."""
        self._tasks.pop(assignment_id, None)

    def on_gpu(self) -> dict[str, Any]:
        """Return the numbers of tasks with captured steps and with data on the GPU; see `Executor.on_gpu`."""
        return entries_of(self._trainer)


def entries_of(trainer: LocalTrainer) -> dict[str, Any]:
    """Return the summary's entries about a trainer on a GPU: captured steps, and data on the device."""
    found = {"captured": trainer.capture, "data_on_device": trainer.feed}
    return {name: one.counted() for name, one in found.items() if one is not None}


def summed(counts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Combine the statistics of several processes on how many tasks were trained as batches."""
    found = [one for one in counts if one]
    if not found:
        return {}
    tasks, together, cohorts, in_cohorts, in_vain = (
        sum(one.get(name, 0) for one in found) for name in ("tasks", "together", "cohorts", "in_cohorts", "in_vain")
    )
    reasons = dict.fromkeys(reason for one in found for reason in one.get("by_the_loop", ()))
    if not reasons and not together:
        reasons = dict.fromkeys(one["not_tried"] for one in found if one.get("not_tried"))
    return {
        "share": together / max(tasks, 1),
        "mean_cohort": in_cohorts / max(cohorts, 1),
        "in_vain": in_vain,
        "by_the_loop": list(reasons),
        **({"mode": "fast"} if any("mode" in one for one in found) else {}),
    }


def attempt(
    trainer: LocalTrainer, assignment: Assignment, received: FlatTensors, data: ClientData, context: TaskContext = ALONE
) -> Update:
    """Train a task and return its update; if memory runs out, free it, and return an empty update that says so."""
    try:
        return trainer.run(assignment, received, data, context)
    except (BadInput, Stopped, TaskFailed):
        raise
    except USER_ERRORS as error:
        # the client's other processes wait for this one, so it cannot refuse the task alone
        if context.process_group is not None:
            context.process_group.failed()
        if context.process_group is not None or not is_out_of_memory(error):
            from raafl.local import failure

            raise failure.of_task(trainer.fabric.device, assignment, context, error) from error
        traceback.clear_frames(error.__traceback__)  # the frames refer to the task's tensors
    trainer.release()
    return unanswered(assignment, OUT_OF_MEMORY)


def unanswered(assignment: Assignment, refusal: str) -> Update:
    """Return an empty update, which tells the server why the client has not done a task."""
    nothing = FlatTensors.empty(Layout(()))
    return Update(assignment.id, assignment.client, assignment.incarnation, nothing, 0, refusal=refusal)


def is_out_of_memory(error: BaseException) -> bool:
    """Check whether ``error`` means that the memory of the machine or of a GPU ran out."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY)
