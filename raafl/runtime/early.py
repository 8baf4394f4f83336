"""Time the steps that simulated clients make of their next task before it arrives."""

from __future__ import annotations

from typing import Any

from raafl.core.records_json import assignment_from_json, assignment_to_json
from raafl.core.select import SelectContext
from raafl.core.task import begins_alike, expected_next
from raafl.core.types import Assignment, ClientInfo, Work


class EarlySteps:
    """Record of when each client began to make the first steps of its next task: when its last update began to travel.

    A real client does the same (`raafl.runtime.client.early`): it makes `Local.steps_ahead` steps of the task that it
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
        return min(fleet.early_share(client, work) * compute_s, received_s - since_s)

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
