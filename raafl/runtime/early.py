"""Time what simulated clients do while an update travels: their next task, or the first steps of it (``overlap``)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from raafl.core.restoring import assignment_from_json
from raafl.core.saving import assignment_to_json
from raafl.core.select import SelectContext
from raafl.core.types import Assignment, ClientInfo, Sending, Work
from raafl.runtime.simulation import ARRIVED, ClockExtension, Due, Simulation


class EarlySteps:
    """Record of when each client began to make the first steps of its next task: when its last update began to travel.

    A real client does the same (`raafl.runtime.client.early`): it makes `Traits.steps_ahead` steps of the task that it
    expects, and they count if that task comes.
    """

    def __init__(self) -> None:
        self._since: dict[int, tuple[float, Assignment]] = {}

    def begin(self, assignment: Assignment, trained_s: float) -> None:
        """Record that a client begins its next task when ``assignment`` is trained, at ``trained_s``, if it may."""
        expected = expected_next(assignment)
        if expected is not None:
            self._since[assignment.client] = trained_s, expected

    def saved_s(
        self, assignment: Assignment, client: ClientInfo, fleet: SelectContext, received_s: float, compute_s: float
    ) -> float:
        """Return the seconds of a task's computing that are over when it is received."""
        since_s, expected = self._since.pop(assignment.client, (received_s, None))
        if expected is None or not begins_alike(expected, assignment):
            return 0.0
        work = Work(assignment.spec, assignment.region, assignment.num_epochs, assignment.num_steps, assignment.extra)
        return min(_early_share(fleet, client, work) * compute_s, received_s - since_s)

    def forget(self, client: int) -> None:
        """Forget what a client has begun, since it was lost, or since its update cannot be used."""
        self._since.pop(client, None)

    def save(self) -> list[Any]:
        """Return the record as plain data."""
        return [[at, assignment_to_json(expected)] for at, expected in self._since.values()]

    def restore(self, data: list[Any]) -> None:
        """Restore the record from the result of `save`."""
        both = [(at, assignment_from_json(expected)) for at, expected in data]
        self._since = {expected.client: (at, expected) for at, expected in both}


def _early_share(fleet: SelectContext, client: ClientInfo, work: Work) -> float:
    """Return the share of a task's computing that ``client`` may do before the task arrives; see `Traits.steps_ahead`."""
    samples, ahead = fleet.samples(client.num_samples, work), fleet.local.traits.steps_ahead
    early = min(fleet.samples(client.num_samples, Work(num_steps=ahead)), samples)
    # forward passes without backward are counted as a third of a training step, as in `raafl.core.select.time_on`
    return early / (samples + fleet.tested(client, work.extra) / 3)


class OverlappedClock(ClockExtension):
    """Simulated clients that train while they send: their whole next task, or the first steps of one they expect."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__(simulation)
        # True = an update is sent beside the next task; False = the next task begins before it is assigned
        self._overlaps = simulation.coordinator.overlap
        self._uplink_free: dict[int, float] = {}  # by client: time at which its last update will have been sent
        self._early = EarlySteps()

    def uplink_free_s(self, client: int) -> float:
        """Return the time until which an earlier update takes the client's uplink."""
        return self._uplink_free.get(client, 0.0)

    def saved_s(self, assignment: Assignment, received_s: float, compute_s: float) -> float:
        """Return the seconds of a task's computing that are over when it is received."""
        coordinator = self.simulation.coordinator
        client = coordinator.roster.clients[assignment.client]
        return self._early.saved_s(assignment, client, coordinator.fleet, received_s, compute_s)

    def assigned(self, due: Due, trained_s: float, at_s: float) -> None:
        """Queue the moment at which the client begins to send, and may have its next task."""
        assignment, client = due.assignment, due.assignment.client
        self._early.begin(assignment, trained_s)
        if not self._overlaps:
            return
        free_s, self._uplink_free[client] = self.uplink_free_s(client), at_s
        if due.time.up_s > 0:  # queued before the arrival, so that it comes first if both are due at once
            sending = Sending(client, assignment.incarnation, assignment.id)
            self.simulation.push(min(max(trained_s, free_s), at_s), ARRIVED, sending)

    def refused(self, client: int) -> None:
        """Forget the early steps of a client whose update cannot be used: it does not go on from it."""
        self._early.forget(client)

    def let_go(self, client: int) -> None:
        """Drop the other of a client's two tasks."""
        if self._overlaps:
            self.simulation.cancel(client)

    def cancelled(self, client: int, tasks: Iterable[int]) -> None:
        """Forget a client that was lost."""
        self._uplink_free.pop(client, None)
        self._early.forget(client)

    def save(self) -> dict[str, Any]:
        """Return the early steps; when uplinks are free follows from the tasks."""
        return {"early": self._early.save()}

    def restore(self, data: dict[str, Any]) -> list[Due]:
        """Restore the early steps."""
        self._early.restore(data.get("early", []))
        return []

    def resumed(self, client: int, at_s: float) -> None:
        """Take the client's uplink until its answer is there."""
        if self._overlaps:
            self._uplink_free[client] = max(at_s, self.uplink_free_s(client))


def expected_next(assignment: Assignment) -> Assignment | None:
    """Predict a client's next task, so that it can begin early; ``id``, ``version`` and ``extra`` are not known yet.

    Returns:
        The expected task; None = the client may not begin it early.
    """
    if assignment.next_seed is None:
        return None
    return replace(
        assignment, task=assignment.task + 1, seed=assignment.next_seed, lr_scale=assignment.next_lr_scale, pace_s=0.0
    )


def begins_alike(expected: Assignment, actual: Assignment) -> bool:
    """Check whether the first steps of two tasks of one client are the same, up to `Traits.steps_ahead`."""
    names = ("client", "incarnation", "task", "spec", "num_epochs", "num_steps", "seed", "lr_scale")
    return all(getattr(expected, name) == getattr(actual, name) for name in names)
