"""Simulate subfederations: clients of a simulated run whose local training is a federation with a virtual clock of its own.

A task of the run starts the clock of one subfederation at the time at which the model has arrived there, and lets it go on until
the task's last merge. That lasts as long as the simulated clients below take; the link to the run's server comes to it. What is
trained below does not depend on what happens above meanwhile, so it is known as the task is assigned.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from raafl.core import saving
from raafl.core.coordinator import Coordinator
from raafl.core.hooks import RunHooks
from raafl.core.restoring import from_plain
from raafl.core.saving import to_plain
from raafl.core.state import GlobalState
from raafl.core.subfederation import TaskBelow, below, differences, from_json, to_json, with_contributions
from raafl.core.types import Action, Assignment, ClientInfo, Received, Settled, Update
from raafl.errors import CodeFailed, TaskFailed
from raafl.local.context import ALONE, TaskContext
from raafl.local.evaluate import Evaluator
from raafl.plain_yaml import dump_yaml, load_yaml
from raafl.runfolder.journal import FolderLock
from raafl.runfolder.record import RunRecord
from raafl.runfolder.schema import SUBFEDERATIONS
from raafl.runtime.executors import Executor
from raafl.runtime.setup import assemble, sends_of
from raafl.runtime.simulation import Simulation
from raafl.submodel import FlatTensors

if TYPE_CHECKING:
    from raafl.runtime.lifecycle.resume import SavedRun

_ANSWER = (
    *("assignment", "client", "incarnation", "tensors", "num_samples", "num_steps", "metrics", "extra", "journal"),
    "refusal",
)
"""Fields of a subfederation's update that a checkpoint stores beside its contributions."""


class Below(Simulation):
    """Simulation of one subfederation, which goes on while it has a task of the run above."""

    def __init__(
        self,
        number: int,
        coordinator: Coordinator,
        clients: Sequence[ClientInfo],
        executor: Executor,
        record: RunRecord,
        sends: str,
        hooks: RunHooks | None = None,
    ) -> None:
        """Create the run of a subfederation, without a task; ``sends``: what the run above merges, "values" or "delta"."""
        super().__init__(coordinator, clients, executor, record, None, hooks=hooks)
        self.number, self._sends, self._task = number, sends, TaskBelow()
        self._dismissed = ""  # reason for which a client was last dismissed
        self._num_clients = sum(one.stands_for for one in clients)
        self._num_samples = sum(one.num_samples for one in clients)

    def train(self, assignment: Assignment, received: FlatTensors, at_s: float) -> tuple[Update, float]:
        """Do a task of the run above; return its update, and the time at which that is there.

        Args:
            assignment: the task.
            received: values that were sent.
            at_s: time at which they arrive here.

        Raises:
            CodeFailed: the user's code failed, or no client is left.
        """
        above = self.coordinator.above
        assert above is not None
        while self._heap and self._heap[0][0] <= at_s:  # late tasks, and clients that come and go
            self._turn_or_raise()
        # this run may have gone on after the run above lost its client
        self._now = max(self._now, at_s)
        self._task = TaskBelow()
        spec = assignment.spec.without_base
        self.tell(Received(assignment.id, assignment.version, spec, received, self._fingerprint(received)))
        while not above.waits:
            self._turn_or_raise()
        return self._answer(assignment, received, above.num_merges), self._now

    def _turn_or_raise(self) -> None:
        why = self._dismissed or "all its clients have left, and none will come back"
        if self._heap:
            self._turn()
            why = self.reason
        if self.error is not None:
            raise self.error
        if why:
            where = f"a task of subfederation {self.number}"
            raise TaskFailed(self.number, where, why.removeprefix("failed: "), "")

    def _fingerprint(self, received: FlatTensors) -> str:
        return received.fingerprint()

    def _dismiss(self, client: int, incarnation: int, reason: str) -> None:
        self._dismissed = f"client {client} was dismissed: {reason}"

    def _answer(self, assignment: Assignment, received: FlatTensors, num_merges: int) -> Update:
        """Return the update of the last task, in the form that the server above expects from subfederations."""
        submodels, folder = self.coordinator.state.submodels, self.record.folder
        update = self._task.update(
            assignment,
            submodels,
            received,
            self.coordinator.state.values,
            sends=self._sends,
            num_merges=num_merges,
            most_samples=self._num_samples,
            journal="" if folder is None else folder.head,
        )
        with_contributions(update, submodels, assignment.spec, self._num_clients, self._num_samples)
        return update

    def _do(self, action: Action) -> None:
        super()._do(action)
        if isinstance(action, Settled):
            self._task.add(action)

    def save(self) -> dict[str, Any]:
        """Return the clock, and which tasks do not count any more; the run above has no task here while it is saved."""
        return super().save() | {"late": sorted(self.coordinator.roster.late)}

    def restore(self, data: dict[str, Any]) -> None:
        """Restore the result of `save`."""
        super().restore(data)
        self.coordinator.roster.late = set(data["late"])

    def state(self) -> dict[str, Any]:
        """Return all that this run is resumed from, as plain data and tensors, for a checkpoint of the run above."""
        values = self.coordinator.state.values
        section = {
            "runtime": "simulated",
            "finished": None,
            "coordinator": saving.save(self.coordinator),
            "record": self.record.save(),
            "clock": self.save(),
        }
        return {"values": dict(FlatTensors.empty(values.layout).copy_(values).items()), "section": section}


class Above(Simulation):
    """Simulation of a run all of whose clients are subfederations; its checkpoints have their runs, too."""

    executor: Subfederations

    def save(self) -> dict[str, Any]:
        """Return the clocks of this run and of those below, and the state of these; see `Simulation.save`."""
        return super().save() | {"subfederations": [one.state() for one in self.executor.below.values()]}

    def _checkpoint(self) -> None:
        # a failed task has left its subfederation in the middle, so that the corrected run resumes from before that task
        if not self.executor.has_failed:
            super()._checkpoint()


class Subfederations(Executor):
    """Executor of a run all of whose clients are subfederations, by their numbers."""

    def __init__(self, inner: Executor, below: Sequence[Below]) -> None:
        """Create an executor that gives each task to a subfederation of ``below``; ``inner`` trains the tasks of their clients."""
        self._inner, self.below = inner, {one.number: one for one in below}
        self._answers: dict[int, Update | CodeFailed] = {}
        self.has_failed = False

    def compute_s(self, assignment: Assignment, snapshot: FlatTensors, received_s: float) -> float:
        """Have the task done, and return the virtual seconds that it takes; see `Executor.compute_s`."""
        try:
            update, at_s = self.below[assignment.client].train(assignment, snapshot, received_s)
        except CodeFailed as failed:
            self._answers[assignment.id], self.has_failed = failed, True
            return 0.0
        self._answers[assignment.id] = update
        return at_s - received_s

    def submit(self, assignment: Assignment, snapshot: FlatTensors, needed_at: float) -> None:
        """Do nothing: the task is done already."""

    def result(self, assignment_id: int, context: TaskContext = ALONE) -> Update:
        """Return the update of a task; see `Executor.result`."""
        answer = self._answers.pop(assignment_id)
        if isinstance(answer, CodeFailed):
            raise answer
        return answer

    def cancel(self, assignment_id: int) -> None:
        """Drop the update of a task; see `Executor.cancel`."""
        self._answers.pop(assignment_id, None)

    def save(self) -> dict[str, Any]:
        """Return the updates of tasks that are done here already, but not in the run above; see `Executor.save`."""
        answers = [
            {name: to_plain(getattr(update, name)) for name in _ANSWER}
            | {"contributions": to_json(update.contributions)}
            for update in self._answers.values()
            if isinstance(update, Update)
        ]
        return {"answers": answers}

    def restore(self, data: dict[str, Any]) -> None:
        """Restore the result of `save`; see `Executor.restore`."""
        device = next(iter(self.below.values())).coordinator.state.values.device
        for answer in data["answers"]:
            fields = {name: from_plain(answer[name], device) for name in _ANSWER}
            self._answers[fields["assignment"]] = Update(**fields, contributions=from_json(answer["contributions"]))

    def evaluate(self, evaluator: Evaluator, values: FlatTensors, version: int) -> dict[str, float]:
        """Evaluate the global model in the processes that train; see `Executor.evaluate`."""
        return self._inner.evaluate(evaluator, values, version)


class Shared(Executor):
    """Executor of one of several subfederations, which share another that trains the tasks of all."""

    def __init__(self, inner: Executor, number: int, num_all: int) -> None:
        """Wrap an executor for subfederation ``number`` of ``num_all``, so that equal task ids of several do not collide."""
        self._inner, self._number, self._num_all = inner, number, num_all

    def _id(self, assignment_id: int) -> int:
        return assignment_id * self._num_all + self._number - 1

    def submit(self, assignment: Assignment, snapshot: FlatTensors, needed_at: float) -> None:
        """Accept a task for training; see `Executor.submit`."""
        self._inner.submit(replace(assignment, id=self._id(assignment.id)), snapshot, needed_at)

    def result(self, assignment_id: int, context: TaskContext = ALONE) -> Update:
        """Return the trained update of a task; see `Executor.result`."""
        update = self._inner.result(self._id(assignment_id), context)
        update.assignment = assignment_id
        return update

    def cancel(self, assignment_id: int) -> None:
        """Remove a task whose result is not needed; see `Executor.cancel`."""
        self._inner.cancel(self._id(assignment_id))


class RunsBelow:
    """Runs of all subfederations of a simulated run, each with a run folder of its own in that of the run above.

    Attributes:
        executor: executor of the run above.
        notes: why its result differs from that of one flat federation of all clients, one line each.
    """

    def __init__(self, above: Any, executor: Executor, stack: ExitStack, saved: SavedRun | None = None) -> None:
        """Start a run for each subfederation, or resume it.

        ``executor`` trains the tasks of their clients, ``stack`` closes the runs. ``saved``: checkpoint of the run above,
        which is resumed; None = it is new.
        """
        parts, experiment = above.parts, above.parts.experiment
        config: dict[str, Any] = load_yaml(above.config_yaml) if above.config_yaml else {}
        num, values, why = experiment.num_members, parts.coordinator.state.values, dict[str, None]()
        self._runs: list[tuple[Any, Below]] = []
        for number in range(1, num + 1):
            folder = str(above.folder / SUBFEDERATIONS / str(number))
            made = replace(below(experiment, number), output=folder, resume=None)
            own = assemble(made, parts.data, parts.module, GlobalState(parts.submodels, values.clone()))
            before = None if saved is None else _saved_below(saved, number)
            if before is not None:
                stack.enter_context(FolderLock(before.folder, "resume"))
            run = type(above)(own, _config_below(config, number), "simulated", before)
            stack.callback(run.close)
            run.start()
            executor_below = Shared(executor, number, num)
            sends, hooks = sends_of(experiment), run.hooks
            one = Below(number, own.coordinator, own.clients, executor_below, run.record, sends, hooks)
            if before is not None:
                before.restore_clock(one.restore)
            self._runs.append((run, one))
            task = made.subfederation.merges
            why |= dict.fromkeys(differences(experiment.algorithm, made.algorithm, made.train, task, made.num_members))
        self.executor = Subfederations(executor, [one for _, one in self._runs])
        self.notes = [f"not equal to one flat federation: {reason}" for reason in why]

    def finish(self, reason: str) -> dict[str, Any]:
        """End all runs; return the entry of the summary above: what moved and was merged below."""
        found = []
        for run, one in self._runs:
            one.stop(reason)
            found.append(run.finish(one.reason, one.now, one.error))
        names = ("updates_merged", "bytes_up", "bytes_down")
        return {"number": len(found), **{name: sum(each[name] for each in found) for name in names}}


def _saved_below(saved: SavedRun, number: int) -> SavedRun:
    """Return the part of a run's checkpoint from which one of its subfederations is resumed."""
    from raafl.runtime.lifecycle.resume import SavedRun, check_state, restoring

    with restoring(saved):
        state = saved.section["clock"]["subfederations"][number - 1]
        check_state(state["section"])
        return SavedRun(saved.folder / SUBFEDERATIONS / str(number), state["values"], state["section"])


def _config_below(config: dict[str, Any], number: int) -> str:
    """Return the config for a subfederation's run folder: that of the run above, with the subfederation's number."""
    if not config:
        return ""
    own = config["subfederations"] | {"number": number}
    return dump_yaml(config | {"subfederations": own})
