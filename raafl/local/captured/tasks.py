"""Train tasks with captured steps where they give what eager steps give."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch

from raafl.core.types import Assignment, Update
from raafl.data.federated import ClientData
from raafl.errors import USER_ERRORS, format_error
from raafl.local.captured import graphs as bounds
from raafl.local.captured.batches import BatchGraphs
from raafl.local.captured.graphs import PROOFS, CapturedSteps, Step, StepGraphs
from raafl.local.captured.limits import NotCapturable, problems
from raafl.local.context import Stopped, TaskContext
from raafl.local.train import LocalTrainer, PreparedTask, TaskSteps
from raafl.local.trainable import TrainableSubmodel
from raafl.log import warn_once
from raafl.rng import generators, same_generators
from raafl.submodel import FlatTensors

MOST_COMPARED = 64
"""Compared tasks beyond those that used graphs without, after which a run captures nothing more."""


class Capture:
    """Trains the tasks of a `LocalTrainer` with captured steps where they give what eager steps give.

    Attributes:
        stream: stream of warm-up steps and captures.
        pool: memory of all graphs.
    """

    def __init__(self, trainer: LocalTrainer) -> None:
        self._trainer, self.device = trainer, trainer.fabric.device
        self._problems = problems(trainer.local, trainer.options)
        self._of: WeakKeyDictionary[TrainableSubmodel, StepGraphs] = WeakKeyDictionary()
        self._used: OrderedDict[Step, None] = OrderedDict()
        self._stream: Any = None
        self._pool: Any = None
        self._reasons: dict[str, None] = {}
        for problem in self._problems:
            self._say(problem)
        self.num_tasks = self.num_captured = self.num_compared = 0
        self.num_batches = self.num_batches_captured = 0

    @property
    def stream(self) -> Any:
        """Stream of warm-up steps and captures."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        return self._stream

    @property
    def pool(self) -> Any:
        """Memory that all graphs share, since no two replays run at once and nothing is read there after one."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        return self._pool

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Return a context that computes on the stream of captures, in the order of the current one."""
        outside = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(outside)
        try:
            with torch.cuda.stream(self.stream):
                yield
        finally:  # also after an error, since kernels are queued on that stream
            outside.wait_stream(self.stream)

    def use(self, step: Step) -> None:
        """Note that a graph was replayed; the one that was used least recently goes if there are too many."""
        self._used[step] = None
        self._used.move_to_end(step)
        while len(self._used) > bounds.MOST_GRAPHS:
            self._used.popitem(last=False)[0].graph = None

    def run(self, assignment: Assignment, received: FlatTensors, data: ClientData, context: TaskContext) -> Update:
        """Train a task; see `LocalTrainer.run`."""
        trainer, device = self._trainer, self.device
        if context.process_group is not None or trainer.shards is not None:
            self._say("a client has several processes")
            return trainer.run_once(assignment, received, data, context)
        self.num_tasks += 1
        built = trainer.built(assignment.spec)
        graphs = self._of.get(built)
        if graphs is None:
            graphs = self._of[built] = StepGraphs(self, built, trainer.local.masked)
            self._say(graphs.reason)

        def eagerly() -> Update:
            return trainer.run_once(assignment, received, data, context, partial(self._eager, graphs))

        is_eager, graphs.waits = graphs.waits or bool(self._problems) or graphs.reason is not None, False
        if is_eager or context.link is not None or context.receive is not None:
            return eagerly()
        made: list[CapturedSteps] = []
        try:
            update = trainer.run_once(assignment, received, data, context, partial(self._captured, graphs, made))
            graphs.end(built)
        except Stopped:
            raise
        except (NotCapturable, *USER_ERRORS) as error:
            self._leave(graphs, self.reason_of(error))
            return eagerly()  # an error of the user's code is raised again by this eager run
        steps = made[0]
        self.num_captured += bool(steps.used)
        if all(step.proofs >= PROOFS for step in steps.used):
            return update
        update.tensors, drawn = update.tensors.clone(), generators(device)
        plain = eagerly()
        self.num_compared += 1
        if 2 * self.num_compared - self.num_captured > MOST_COMPARED:
            self._problems.append(
                "submodels change too often: tasks are compared more often than graphs are used again"
            )
            self._say(self._problems[-1])
        different = plain.difference(update)
        if not different and not same_generators(drawn, generators(device)):
            different = "other random numbers are drawn"
        if different:
            self._leave(graphs, f"captured steps give other results than eager ones: {different}")
        for step in steps.used:
            step.proofs += 1
        return plain

    def of_batches(self, built: TrainableSubmodel, num: int) -> BatchGraphs | None:
        """Return new graphs for batches of ``num`` clients in a submodel's module; None if no step of the run can be captured."""
        return None if self._problems else BatchGraphs(self, built, num, self._trainer.local.masked)

    def note_batch(self, graphs: BatchGraphs | None) -> None:
        """Count a batch of clients, and record why its steps were not captured; ``graphs``: those that it has used."""
        self.num_batches += 1
        if graphs is not None:
            self.num_batches_captured += bool(graphs.used)
            self.note_reason(graphs)

    def note_reason(self, graphs: BatchGraphs) -> None:
        """Record why steps of batches of clients are not captured, if they are not."""
        if graphs.reason is not None:
            self._say(f"batches of clients: {graphs.reason}")

    def reason_of(self, error: BaseException) -> str:
        """Return the reason for which an error ends the capture of steps."""
        return str(error) if isinstance(error, NotCapturable) else format_error(error)

    def _eager(self, graphs: StepGraphs, trainer: LocalTrainer, task: PreparedTask) -> TaskSteps:
        """Return eager steps whose optimizer has the options of captured steps, so that both compute the same bits."""
        if graphs.rates is not None:
            graphs.rates.prepare(task.built.optimizer)
        return TaskSteps(trainer, task)

    def _captured(
        self, graphs: StepGraphs, made: list[CapturedSteps], trainer: LocalTrainer, task: PreparedTask
    ) -> TaskSteps:
        assert graphs.rates is not None
        graphs.rates.prepare(task.built.optimizer)
        made.append(CapturedSteps(trainer, task, graphs))
        return made[-1]

    def _leave(self, graphs: StepGraphs, reason: str) -> None:
        graphs.forget(reason)
        self._say(reason)

    def _say(self, reason: str | None) -> None:
        if reason is not None and reason not in self._reasons:
            self._reasons[reason] = None
            if self._trainer.options.capture == "on":
                warn_once(logging.getLogger(__name__), f"steps are not captured: {reason}")

    def counted(self) -> dict[str, Any]:
        """Return the number of tasks, of those with captured steps and of those compared, and why others were eager."""
        return {
            "tasks": self.num_tasks,
            "captured": self.num_captured,
            "compared": self.num_compared,
            "eager": list(self._reasons),
            **(
                {"batches": self.num_batches, "batches_captured": self.num_batches_captured} if self.num_batches else {}
            ),
        }

    def release(self) -> None:
        """Release all graphs and their memory."""
        self._of.clear()
        for step in self._used:  # batches of clients keep their steps, whose graphs are captured again
            step.graph = None
        self._used.clear()
        self._pool = None
