"""Run on a virtual clock: device profiles determine how long each task takes; the training itself is real."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from raafl.compression.streams import CompressedSnapshots
from raafl.core.coordinator import TIME_UP, Coordinator
from raafl.core.hooks import RunHooks
from raafl.core.records_json import assignment_from_json, assignment_to_json, event_from_json, event_to_json
from raafl.core.saving import from_plain, to_plain
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
    Work,
)
from raafl.devices.profiles import TaskTime
from raafl.errors import USER_ERRORS, BadInput, CodeFailed, TaskFailed
from raafl.local.evaluation.evaluate import Evaluator
from raafl.local.failure import measuring, of_server
from raafl.runfolder.record import RunRecord
from raafl.runtime.driver import Driver
from raafl.runtime.early import EarlySteps
from raafl.runtime.executors import Executor
from raafl.runtime.lifecycle.signals import Interrupt
from raafl.runtime.secure_groups import SecureGroups
from raafl.submodel import FlatTensors
from raafl.watch.progress import Progress

# at the same instant: who reports is heard before who leaves, joins, or is awaited
ARRIVED, LOST, JOINED, TIMER = range(4)

LOST_FOR_EACH_CLIENT = 100
"""Tasks lost with none finished between them, for each client, after which a run has failed."""


@dataclass(frozen=True, slots=True)
class _Due:
    """A task's answer, due at the far end of its simulated time."""

    assignment: Assignment  # assignment of the task
    time: TaskTime  # durations of its parts
    more_bytes: int = 0  # number of bytes sent to the client beyond the prediction
    # seconds for which the trained update waited for its client's uplink, which an earlier update took
    waited_s: float = 0.0


class Simulation(Driver):
    """Runtime on a virtual clock. It processes events in the order of (time, priority, sequence number)."""

    def __init__(
        self,
        coordinator: Coordinator,
        clients: Iterable[ClientInfo],
        executor: Executor,
        record: RunRecord,
        evaluator: Evaluator | None,
        *,
        hooks: RunHooks | None = None,
        progress: Progress | None = None,
    ) -> None:
        super().__init__(coordinator, record, evaluator, hooks, progress)
        self.executor = executor
        self._has_raised = False  # a part of the method: the event at hand is half handled
        self._now = 0.0
        self._heap: list[tuple[float, int, int, Event | _Due]] = []
        self._sequence = 0
        self._num_lost = 0  # since the last arrival
        self._snapshots = CompressedSnapshots(coordinator)
        self._out: dict[int, dict[int, FlatTensors]] = {}  # client -> its unanswered assignments, with their values
        self._uplink_free: dict[int, float] = {}  # where tasks overlap: when the client's last update will have arrived
        self._early = EarlySteps()
        self._ready: dict[int, _Due] = {}  # by assignment: trained, and waiting for a group to be complete
        for client in clients:
            self._plan_join(client, 0.0)

    @property
    def now(self) -> float:
        """Virtual seconds since the run began."""
        return self._now

    # ---- interrupted and resumed ----

    def save(self) -> dict[str, Any]:
        """Return the clock, waiting events and snapshots of unfinished tasks as plain data and tensors, for a checkpoint."""
        out = [(client, *task) for client, tasks in self._out.items() for task in tasks.items()]
        snapshots = {id(snapshot): snapshot for _, _, snapshot in out}
        return {
            "now": self.now,
            "sequence": self._sequence,
            "num_lost": self._num_lost,
            "early": self._early.save(),
            "heap": [[at, priority, number, _item_to_plain(item)] for at, priority, number, item in self._heap],
            "ready": [_item_to_plain(due) for due in self._ready.values()],
            "out": [[client, number, id(snapshot)] for client, number, snapshot in out],
            "snapshots": [[key, to_plain(snapshot)] for key, snapshot in snapshots.items()],
        }

    def restore(self, data: dict[str, Any]) -> None:
        """Restore the clock, waiting events and unfinished tasks from the result of `save`, but not the coordinator."""
        self._now, self._sequence, self._num_lost = data["now"], data["sequence"], data["num_lost"]
        self._early.restore(data.get("early", []))
        self._heap = [(at, priority, number, _item_from_plain(item)) for at, priority, number, item in data["heap"]]
        limit = self.coordinator.limits.max_time_s
        if all(item != Timer(TIME_UP) or at != limit for at, _, _, item in self._heap):  # it is another than it was
            self._heap = [entry for entry in self._heap if entry[3] != Timer(TIME_UP)]
            if limit is not None and self.coordinator.started:
                self._push(limit, TIMER, Timer(TIME_UP))
        heapq.heapify(self._heap)
        device = self.coordinator.state.values.device
        snapshots = {key: self._snapshots.adopt(from_plain(plain, device)) for key, plain in data["snapshots"]}
        due = {item.assignment.id: (at, item) for at, _, _, item in self._heap if isinstance(item, _Due)}
        for item in map(_item_from_plain, data.get("ready", [])):
            assert isinstance(item, _Due)
            self._ready[item.assignment.id] = item
            due[item.assignment.id] = (self._now, item)
        for client, number, key in data["out"]:
            at, item = due[number]
            snapshot = self._snapshots.share(snapshots[key])
            self._out.setdefault(client, {})[number] = snapshot
            if self.coordinator.overlap:
                self._uplink_free[client] = max(at, self._uplink_free.get(client, 0.0))
            self.executor.submit(item.assignment, snapshot, at)

    def run(self) -> str:
        """Run until the coordinator finishes or no event is left; return the reason for the end."""
        if self.record.reached:  # by the initial model
            self._tell(Stop("target"))
        with Interrupt() as interrupt:
            self._stop_if_asked()
            while self._heap and not self.reason:
                self._turn()
                if self.error is not None:
                    self.stop(f"failed: {self.error}")
                if interrupt.asked:
                    self.stop("interrupted")
                self._stop_if_asked()
        self.stop("failed: all clients have left, and none will come back")
        return self._ended()

    def _turn(self) -> None:
        """See to the next that is due."""
        coordinator, most = self.coordinator, self.coordinator.limits.max_updates
        if most is not None:
            trigger, num_waiting = coordinator.algorithm.trigger, len(coordinator.state.waiting)
            self.executor.needed = trigger.needed(most - coordinator.merged, num_waiting)
        entry = heapq.heappop(self._heap)
        self._now, _, _, item = entry
        try:
            if self.groups is not None and isinstance(item, _Due):
                event = None
                self._ready |= {item.assignment.id: item} if self._snapshot_of(item.assignment) is not None else {}
            else:
                event = self._arrive(item) if isinstance(item, _Due) else item
                if isinstance(item, Sending) and item.assignment not in self._out.get(item.client, {}):
                    event = None  # its client was lost meanwhile
        except TaskFailed as failed:
            heapq.heappush(self._heap, entry)  # it is trained again when the run is resumed
            self.error, event = failed, None
        if event is not None:
            self._tell(event)
        if self.groups is not None and not self.reason and self.error is None:
            self._sum_if_complete(self.groups)

    def _sum_if_complete(self, groups: SecureGroups) -> None:
        """Train, encode and sum the tasks of a group once all of its clients are ready."""
        if not groups.is_complete(self._ready):
            return
        dues = list(self._ready.values())[: groups.merge.point.num_members]
        scale = groups.scale(due.assignment for due in dues)
        updates = []
        try:
            for due in dues:
                update = self._trained(due)
                groups.encode(
                    due.assignment, update, scale
                )  # into storage of its own: the next task reuses the trainer's
                updates.append(update)
        except TaskFailed as failed:  # all are trained again when the run is resumed
            self.error = failed
            return
        for due in dues:
            self._forget_task(due)
            del self._ready[due.assignment.id]
        sound = [(due.assignment, update) for due, update in zip(dues, updates, strict=True) if update.refusal is None]
        groups.form_group(sound, scale)
        self._tell_group(updates)

    # ---- events ----

    def _push(self, at: float, priority: int, item: Event | _Due) -> None:
        heapq.heappush(self._heap, (at, priority, self._sequence, item))
        self._sequence += 1

    def _plan_join(self, client: ClientInfo, not_before: float) -> None:
        """Queue the client's next arrival in the fleet, and its leaving after that."""
        profile = client.profile
        at = not_before if profile.available(not_before) else profile.next_change_s(not_before)
        if at < float("inf"):
            self._push(at, JOINED, Joined(client))
            leaves = profile.next_change_s(at)
            if leaves < float("inf"):
                self._push(leaves, LOST, Lost(client.id, "unavailable", client.incarnation))

    def _arrive(self, due: _Due) -> Event | None:
        """Return the arrival of a task's answer, or None when its client was lost meanwhile."""
        if self._snapshot_of(due.assignment) is None:
            return None
        update = self._trained(due)
        self._forget_task(due)
        if update.refusal is not None:
            self._early.forget(update.client)
        return Arrived(update)

    def _snapshot_of(self, assignment: Assignment) -> FlatTensors | None:
        """Return the values that a task started from, or None when its client was lost meanwhile."""
        return self._out.get(assignment.client, {}).get(assignment.id)

    def _trained(self, due: _Due) -> Update:
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

    def _forget_task(self, due: _Due) -> None:
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
        """Drop what a lost client was doing, and see when it comes back; give up when no task is ever finished."""
        num_lost = self._cancel(lost.id)
        self._plan_join(replace(lost, incarnation=lost.incarnation + 1), self.now)
        if not num_lost:
            return
        self._num_lost += num_lost
        if self._num_lost >= LOST_FOR_EACH_CLIENT * len(self.record.participation) and not self.reason:
            reason = event.reason if isinstance(event, Lost) else ""
            self.stop(f"failed: {self._num_lost} tasks in a row were lost, the last as {reason}")

    def _cancel(self, client: int) -> int:
        """Drop the tasks that a client has not answered; return their number."""
        tasks = self._out.pop(client, {})
        self._uplink_free.pop(client, None)
        self._early.forget(client)
        for number, snapshot in tasks.items():
            self._ready.pop(number, None)
            self.executor.cancel(number)
            self._snapshots.give_back(snapshot)
        return len(tasks)

    # ---- parts that raise ----

    def _decide(self, event: Event, now: float) -> list[Action]:
        try:
            return super()._decide(event, now)
        except USER_ERRORS as error:  # a hook's comes out as it is
            self._take_raised(error, None)
            return []

    def _do(self, action: Action) -> None:
        if isinstance(action, Dismiss) and action.error is not None:
            self._blame(action.client, action.error)
        else:
            super()._do(action)
        if isinstance(action, Dismiss | Suspend) and self.coordinator.overlap:  # the other of its two tasks
            self._cancel(action.client)

    def _blame(self, client: int, error: Exception) -> None:
        """Take it that the method is at fault: what a client says here is this process's own, and it is not let go."""
        self._take_raised(error, client)

    def _take_raised(self, error: BaseException, client: int | None) -> None:
        if isinstance(error, BadInput):
            raise error
        self._has_raised = True
        self.error = self.error or of_server(error, client)

    def _checkpoint(self) -> None:
        """Save the run, unless a part has raised: from the checkpoint before, the mended run goes on as if none had."""
        if not self._has_raised:
            super()._checkpoint()

    # ---- actions ----

    def _set_timer(self, id: int, at: float) -> None:
        self._push(max(at, self.now), TIMER, Timer(id))

    def _deliver(self, assignment: Assignment) -> None:
        snapshot = self._snapshots.cut(assignment)
        client, more_bytes = assignment.client, self._snapshots.more_bytes(assignment)
        free_s = self._uplink_free.get(client, 0.0)
        task_time = self._task_time(assignment, more_bytes, free_s)
        self._early.begin(assignment, self.now + task_time.down_s + task_time.compute_s)
        self.record.assigned(assignment)
        down_bytes = self.coordinator.fleet.cost(assignment.spec, assignment.extra).down_bytes
        self.record.moved(down=down_bytes + more_bytes)
        trained_at = self.now + task_time.down_s + task_time.compute_s
        at, waited_s = self.now + task_time.total_s, max(free_s - trained_at, 0.0)
        if waited_s:
            at = free_s + task_time.up_s
        self._out.setdefault(client, {})[assignment.id] = snapshot
        self.executor.submit(assignment, snapshot, at)
        if self.coordinator.overlap:
            self._uplink_free[client] = at
            if task_time.up_s > 0:  # before the arrival, should both fall on one instant
                sending = Sending(client, assignment.incarnation, assignment.id)
                self._push(min(max(trained_at, free_s), at), ARRIVED, sending)
        self._push(at, ARRIVED, _Due(assignment, task_time, more_bytes, waited_s))

    def _task_time(self, assignment: Assignment, more_bytes: int, up_from_s: float) -> TaskTime:
        """Return the durations of a task that is assigned now.

        Args:
            assignment: assignment of the task.
            more_bytes: number of bytes sent to the client beyond the prediction.
            up_from_s: time before which the client's uplink is not free.
        """
        fleet = self.coordinator.fleet
        client = self.coordinator.roster.clients[assignment.client]
        work = Work(assignment.spec, assignment.region, assignment.num_epochs, assignment.num_steps, assignment.extra)
        time = fleet.task_time(client, work)
        if more_bytes:
            time = replace(time, down_s=time.down_s + more_bytes / client.profile.down_bytes_per_s)
        real = fleet.real_time(client, time, self.now, assignment.task, up_from_s)
        saved_s = self._early.saved_s(assignment, client, fleet, self.now + real.down_s, real.compute_s)
        return replace(real, compute_s=real.compute_s - saved_s) if saved_s else real

    def _measure(self, version: int, now: float) -> None:
        assert self.evaluator is not None
        try:
            with measuring(version):
                measured = self.executor.evaluate(self.evaluator, self.coordinator.state.values, version)
        except CodeFailed as failed:
            self.error = failed
            return
        self.hooks.on_values(version, measured, self.coordinator.state.values)
        if self._measured(version, now, measured) and self.coordinator.finished is None:
            self._push(now, ARRIVED, Stop("target"))


def _item_to_plain(item: Event | _Due) -> dict[str, Any]:
    if isinstance(item, _Due):
        return {
            "due": assignment_to_json(item.assignment),
            "time": [item.time.down_s, item.time.compute_s, item.time.up_s],
            "more": [item.more_bytes, item.waited_s],
        }
    return event_to_json(item)


def _item_from_plain(data: dict[str, Any]) -> Event | _Due:
    if "due" in data:
        return _Due(assignment_from_json(data["due"]), TaskTime(*data["time"]), *data.get("more", ()))
    return event_from_json(data)
