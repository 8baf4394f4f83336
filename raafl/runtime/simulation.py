"""Run on a virtual clock: device profiles determine how long each task takes; the training itself is real."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from raafl.core.coordinator import TIME_UP, Coordinator
from raafl.core.hooks import RunHooks
from raafl.core.saving import assignment_to_json, event_to_json, to_plain
from raafl.core.types import (
    Action,
    Arrived,
    Assignment,
    ClientInfo,
    Dismiss,
    Event,
    Joined,
    Lost,
    Sending,
    Stop,
    Suspend,
    Timer,
    Update,
)
from raafl.devices.profiles import TaskTime
from raafl.errors import USER_ERRORS, BadInput, TaskFailed
from raafl.local.evaluate import Evaluator
from raafl.log import Notices
from raafl.runfolder.record import RunRecord
from raafl.runtime.driver import Driver, snapshots_of
from raafl.runtime.executors import Executor
from raafl.runtime.extensions import extensions_of
from raafl.runtime.lifecycle.signals import Interrupt
from raafl.submodel import FlatTensors

# order of simultaneous events: arrivals first, then losses, joins and timers
ARRIVED, LOST, JOINED, TIMER = range(4)

LOST_FOR_EACH_CLIENT = 100
"""Number of tasks per client that may be lost without one finishing, before the run counts as failed."""


@dataclass(frozen=True, slots=True)
class Due:
    """A task's answer, due at the far end of its simulated time."""

    assignment: Assignment  # assignment of the task
    time: TaskTime  # durations of download, computation and upload
    more_bytes: int = 0  # bytes sent to the client beyond the predicted ones
    # seconds for which the update waited until an earlier update of the client was sent
    waited_s: float = 0.0


class ClockExtension:
    """Extension of simulated tasks by an optional feature: before, around and after each. This base adds nothing.

    `raafl.runtime.extensions` lists them, and says which run names which.
    """

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation

    def uplink_free_s(self, client: int) -> float:
        """Return the time until which an earlier update takes the client's uplink."""
        return 0.0

    def saved_s(self, assignment: Assignment, received_s: float, compute_s: float) -> float:
        """Return the seconds of a task's computing that are over when it is received, at ``received_s``."""
        return 0.0

    def assigned(self, due: Due, trained_s: float, at_s: float) -> None:
        """Take note of a task that was assigned: trained at ``trained_s``, its answer is there at ``at_s``."""

    def arrives(self, due: Due) -> bool:
        """Take a task whose time is over; return whether its answer is told later, by this extension."""
        return False

    def refused(self, client: int) -> None:
        """Take note of a client whose update cannot be used."""

    def turned(self) -> None:
        """Continue after an event was handled, while the run goes on."""

    def let_go(self, client: int) -> None:
        """Take note of a client that was dismissed or suspended."""

    def cancelled(self, client: int, tasks: Iterable[int]) -> None:
        """Take note of a client that was lost with these tasks."""

    def save(self) -> dict[str, Any]:
        """Return entries of the checkpoint's section, as plain data."""
        return {}

    def restore(self, data: dict[str, Any]) -> list[Due]:
        """Restore from the section; return the tasks that this extension holds."""
        return []

    def resumed(self, client: int, at_s: float) -> None:
        """Take note of a task that a checkpoint had: its answer is there at ``at_s``."""


class Simulation(Driver):
    """Runtime on a virtual clock, which processes events in the order of (time, priority, sequence number)."""

    def __init__(
        self,
        coordinator: Coordinator,
        clients: Iterable[ClientInfo],
        executor: Executor,
        record: RunRecord,
        evaluator: Evaluator | None,
        *,
        hooks: RunHooks | None = None,
        progress: Notices | None = None,
    ) -> None:
        super().__init__(coordinator, record, evaluator, hooks, progress)
        self.executor = executor
        executor.batch_trained = lambda assignments: record.batch_trained(assignments, self._now)
        # whether the method has raised an error, so that the present event was handled only in part
        self._has_raised = False
        self._now = 0.0
        self._heap: list[tuple[float, int, int, Event | Due]] = []
        self._sequence = 0
        self._num_lost = 0  # tasks lost since the last update arrived
        self._snapshots = snapshots_of(coordinator)
        self._out: dict[int, dict[int, FlatTensors]] = {}  # by client and assignment: values from which tasks start
        self._extensions: list[ClockExtension] = [make(self) for make in extensions_of(coordinator, "clock")]
        for client in clients:
            self._plan_join(client, 0.0)

    @property
    def now(self) -> float:
        """Virtual seconds since the run began."""
        return self._now

    # ---- saving and resuming ----

    def save(self) -> dict[str, Any]:
        """Return the clock, waiting events and snapshots of unfinished tasks as plain data and tensors, for a checkpoint."""
        out = [(client, *task) for client, tasks in self._out.items() for task in tasks.items()]
        snapshots = {id(snapshot): snapshot for _, _, snapshot in out}
        data: dict[str, Any] = {
            "now": self.now,
            "sequence": self._sequence,
            "num_lost": self._num_lost,
            "heap": [[at, priority, number, item_to_plain(item)] for at, priority, number, item in self._heap],
            "out": [[client, number, id(snapshot)] for client, number, snapshot in out],
            "snapshots": [[key, to_plain(snapshot)] for key, snapshot in snapshots.items()],
        }
        for extension in self._extensions:
            data |= extension.save()
        trained = self.executor.save()
        return {**data, "trained": trained} if trained else data

    def restore(self, data: dict[str, Any]) -> None:
        """Restore the clock, waiting events and unfinished tasks from the result of `save`, but not the coordinator."""
        from raafl.core.restoring import from_plain

        self._now, self._sequence, self._num_lost = data["now"], data["sequence"], data["num_lost"]
        self._heap = [(at, priority, number, item_from_plain(item)) for at, priority, number, item in data["heap"]]
        limit = self.coordinator.limits.max_time_s
        # the time limit has changed since the checkpoint, so replace its timer
        if all(item != Timer(TIME_UP) or at != limit for at, _, _, item in self._heap):
            self._heap = [entry for entry in self._heap if entry[3] != Timer(TIME_UP)]
            if limit is not None and self.coordinator.started:
                self.push(limit, TIMER, Timer(TIME_UP))
        heapq.heapify(self._heap)
        device = self.coordinator.state.values.device
        snapshots = {key: self._snapshots.adopt(from_plain(plain, device)) for key, plain in data["snapshots"]}
        due = {item.assignment.id: (at, item) for at, _, _, item in self._heap if isinstance(item, Due)}
        for extension in self._extensions:
            due |= {item.assignment.id: (self._now, item) for item in extension.restore(data)}
        for client, number, key in data["out"]:
            at, item = due[number]
            snapshot = self._snapshots.share(snapshots[key])
            self._out.setdefault(client, {})[number] = snapshot
            for extension in self._extensions:
                extension.resumed(client, at)
            self.executor.submit(item.assignment, snapshot, at)
        self.executor.restore(data.get("trained", {}))

    def run(self) -> str:
        """Run until the coordinator finishes or no event is left; return the reason for the end."""
        if self.record.reached and not self.reason:  # the initial model may meet the targets
            self.tell(Stop("target"))
        with Interrupt() as interrupt:
            self._stop_if_asked()
            self._evaluate_again()
            while self._heap and not self.reason:
                if self.error is None:
                    self._turn()
                if self.error is not None:
                    self.stop(f"failed: {self.error}")
                if interrupt.asked:
                    self.stop("interrupted")
                self._stop_if_asked()
        self.stop("failed: all clients have left, and none will come back")
        return self._ended()

    def _turn(self) -> None:
        """Handle the item that is due next."""
        coordinator, most = self.coordinator, self.coordinator.limits.max_updates
        if most is not None:
            trigger, num_waiting = coordinator.algorithm.trigger, len(coordinator.state.waiting)
            self.executor.needed = trigger.needed(most - coordinator.merged, num_waiting)
        entry = heapq.heappop(self._heap)
        self._now, _, _, item = entry
        try:
            event = self._event_of(item)
        except TaskFailed as failed:
            heapq.heappush(self._heap, entry)  # train the task again when the run is resumed
            self.error = failed
            return
        if event is not None:
            self.tell(event)
        for extension in self._extensions:
            if not self.reason and self.error is None:
                extension.turned()

    def _event_of(self, item: Event | Due) -> Event | None:
        """Return the event for the coordinator that a due item stands for; None if there is nothing to report."""
        if isinstance(item, Sending):
            # the client may have been lost in the meantime, and with it the task
            return item if item.assignment in self._out.get(item.client, {}) else None
        if not isinstance(item, Due):
            return item
        if self._snapshot_of(item.assignment) is None or any(one.arrives(item) for one in self._extensions):
            return None
        update = self.trained(item)
        self.forget_task(item)
        if update.refusal is not None:
            for extension in self._extensions:
                extension.refused(update.client)
        return Arrived(update)

    # ---- events ----

    def push(self, at: float, priority: int, item: Event | Due) -> None:
        """Queue an item for the time ``at``."""
        heapq.heappush(self._heap, (at, priority, self._sequence, item))
        self._sequence += 1

    def _plan_join(self, client: ClientInfo, not_before: float) -> None:
        """Queue the next join of a client, and its leave after that, by the availability of its device."""
        profile = client.profile
        at = not_before if profile.available(not_before) else profile.next_change_s(not_before)
        if at < float("inf"):
            self.push(at, JOINED, Joined(client))
            leaves = profile.next_change_s(at)
            if leaves < float("inf"):
                self.push(leaves, LOST, Lost(client.id, "unavailable", client.incarnation))

    def _snapshot_of(self, assignment: Assignment) -> FlatTensors | None:
        """Return the values from which a task starts; None if its client was lost in the meantime."""
        return self._out.get(assignment.client, {}).get(assignment.id)

    def trained(self, due: Due) -> Update:
        """Return the answer of a task, whose tensors are valid until the next task's."""
        assignment, snapshot = due.assignment, self._snapshot_of(due.assignment)
        assert snapshot is not None
        update = self.executor.result(assignment.id)
        self._snapshots.returned(assignment, update, snapshot)
        update.train_s = due.time.total_s + due.waited_s
        update.down_s, update.up_s = due.time.down_s, due.time.up_s
        cost = self.coordinator.fleet.cost(assignment.spec, assignment.extra)
        update.bytes_down, update.bytes_up = cost.down_bytes + due.more_bytes, cost.up_bytes
        return update

    def forget_task(self, due: Due) -> None:
        """Give back the values that an answered task started from, and count what it sent."""
        tasks = self._out[due.assignment.client]
        self._snapshots.give_back(tasks.pop(due.assignment.id))
        if not tasks:
            del self._out[due.assignment.client]
        self.record.moved(up=self.coordinator.fleet.cost(due.assignment.spec, due.assignment.extra).up_bytes)

    def _handled(self, event: Event, now: float, lost: ClientInfo | None) -> None:
        if isinstance(event, Arrived):
            self._num_lost = 0
        elif lost is not None:
            self._forget(lost, event)
        super()._handled(event, now, lost)

    def _forget(self, lost: ClientInfo, event: Event) -> None:
        """Cancel a lost client's tasks, and queue its next join; end the run if too many tasks in a row were lost."""
        num_lost = self.cancel(lost.id)
        self._plan_join(replace(lost, incarnation=lost.incarnation + 1), self.now)
        if not num_lost:
            return
        self._num_lost += num_lost
        if self._num_lost >= LOST_FOR_EACH_CLIENT * len(self.record.participation) and not self.reason:
            reason = event.reason if isinstance(event, Lost) else ""
            self.stop(f"failed: {self._num_lost} tasks in a row were lost, the last as {reason}")

    def cancel(self, client: int) -> int:
        """Drop the tasks that a client has not answered; return their number."""
        tasks = self._out.pop(client, {})
        for extension in self._extensions:
            extension.cancelled(client, tasks)
        for number, snapshot in tasks.items():
            self.executor.cancel(number)
            self._snapshots.give_back(snapshot)
        return len(tasks)

    # ---- errors of the method's parts ----

    def _decide(self, event: Event, now: float) -> list[Action]:
        try:
            return super()._decide(event, now)
        except USER_ERRORS as error:  # an error in a hook is raised unchanged
            self._take_raised(error, None)
            return []

    def _do(self, action: Action) -> None:
        if isinstance(action, Dismiss) and action.error is not None:
            self._blame(action.client, action.error)
        else:
            super()._do(action)
        if isinstance(action, Dismiss | Suspend):
            for extension in self._extensions:
                extension.let_go(action.client)

    def _figures(self) -> dict[str, float | None]:
        try:
            return super()._figures()
        except USER_ERRORS as error:
            self._take_raised(error, None)
            return {}

    def _blame(self, client: int, error: Exception) -> None:
        """Record an error that the method raised about a client, which is simulated here and so is not dismissed."""
        self._take_raised(error, client)

    def _take_raised(self, error: BaseException, client: int | None) -> None:
        if isinstance(error, BadInput):
            raise error
        self._has_raised = True
        from raafl.local.failure import of_server

        self.error = self.error or of_server(error, client)

    def _checkpoint(self) -> None:
        """Save a checkpoint, unless the method has raised an error: the corrected run resumes from the one before."""
        if not self._has_raised:
            super()._checkpoint()

    # ---- actions ----

    def _set_timer(self, id: int, at: float) -> None:
        self.push(max(at, self.now), TIMER, Timer(id))

    def _deliver(self, assignment: Assignment) -> None:
        snapshot = self._snapshots.cut(assignment)
        client, more_bytes = assignment.client, self._snapshots.more_bytes(assignment)
        free_s = max((one.uplink_free_s(client) for one in self._extensions), default=0.0)
        time = self._task_time(assignment, more_bytes, free_s)
        compute_s = self.executor.compute_s(assignment, snapshot, self.now + time.down_s)
        if compute_s is not None:
            time = replace(time, compute_s=compute_s)
        self.record.assigned(assignment)
        down_bytes = self.coordinator.fleet.cost(assignment.spec, assignment.extra).down_bytes
        self.record.moved(down=down_bytes + more_bytes)
        trained_at = self.now + time.down_s + time.compute_s
        at, waited_s = self.now + time.total_s, max(free_s - trained_at, 0.0)
        if waited_s:
            at = free_s + time.up_s
        self._out.setdefault(client, {})[assignment.id] = snapshot
        self.executor.submit(assignment, snapshot, at)
        due = Due(assignment, time, more_bytes, waited_s)
        for extension in self._extensions:
            extension.assigned(due, trained_at, at)
        self.push(at, ARRIVED, due)

    def _task_time(self, assignment: Assignment, more_bytes: int, up_from_s: float) -> TaskTime:
        """Return the durations of a task's parts, if it starts now; its update can be sent from the time ``up_from_s`` on."""
        fleet = self.coordinator.fleet
        client = self.coordinator.roster.clients[assignment.client]
        time = fleet.task_time(client, assignment)
        if more_bytes:
            time = replace(time, down_s=time.down_s + more_bytes / client.profile.down_bytes_per_s)
        real = fleet.real_time(client, time, self.now, assignment.task, up_from_s)
        saved_s = sum(one.saved_s(assignment, self.now + real.down_s, real.compute_s) for one in self._extensions)
        return replace(real, compute_s=real.compute_s - saved_s) if saved_s else real

    def _measure(self, version: int, now: float) -> None:
        assert self.evaluator is not None
        try:
            measured = self.executor.evaluate(self.evaluator, self.coordinator.state.values, version)
        except USER_ERRORS as error:
            from raafl.local.failure import of_evaluation

            self.error = of_evaluation(error, version)
            return
        self.hooks.on_values(version, measured, self.coordinator.state.values)
        if self._measured(version, now, measured) and self.coordinator.finished is None:
            self.push(now, ARRIVED, Stop("target"))


def item_to_plain(item: Event | Due) -> dict[str, Any]:
    """Return a waiting event or answer as plain data, for a checkpoint."""
    if isinstance(item, Due):
        return {
            "due": assignment_to_json(item.assignment),
            "time": [item.time.down_s, item.time.compute_s, item.time.up_s],
            "more": [item.more_bytes, item.waited_s],
        }
    return event_to_json(item)


def item_from_plain(data: dict[str, Any]) -> Event | Due:
    """Return the item from the result of `item_to_plain`."""
    from raafl.core.restoring import assignment_from_json, event_from_json

    if "due" in data:
        return Due(assignment_from_json(data["due"]), TaskTime(*data["time"]), *data.get("more", ()))
    return event_from_json(data)
