"""Form the groups of clients whose masked updates are summed (secure aggregation): who belongs to a group, with which weights."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self, cast

from raafl.core.coordinator import Coordinator
from raafl.core.saving import group_from_json
from raafl.core.types import Assignment, SumGroup, Update
from raafl.errors import TaskFailed
from raafl.parts.protect.secure.group import OUT_OF_RANGE, CannotOpen, IntegerLayouts, OutOfRange
from raafl.parts.protect.secure.member import mask_and_open_
from raafl.parts.protect.secure.merge import SecureSum
from raafl.parts.trigger import Buffered
from raafl.runfolder.schema import JournalRow
from raafl.runtime.extensions import ReplayExtension
from raafl.runtime.simulation import ClockExtension, Due, Simulation, item_from_plain, item_to_plain

NOT_OPENED = "not-opened"
"""Reason of a refusal: the sum that contains the update could not be opened."""

UNCERTIFIED = (
    "secure aggregation: clients have no certificates, so it protects from a server that follows the protocol and reads "
    "along, and not from one that lies to its clients (docs/secure-aggregation.md)"
)
"""Note at the start of a run with secure aggregation whose keys nobody certifies."""


@dataclass(frozen=True)
class SecureGroups:
    """Rules by which clients form groups for secure aggregation: only the sum of a group's updates becomes known."""

    coordinator: Coordinator  # coordinator of the run; read only
    merge: SecureSum  # merge of the run, which merges sums of updates

    @classmethod
    def of(cls, coordinator: Coordinator) -> Self | None:
        """Return the rules by which the clients of a run form groups; None if the run has no secure aggregation."""
        merge = coordinator.algorithm.merge
        return cls(coordinator, merge) if isinstance(merge, SecureSum) else None

    @property
    def least(self) -> int:
        """Smallest number of clients in a group, so that the sum of their updates does not reveal a single update."""
        return max(self.merge.min_cover, 3)

    def is_complete(self, ready: Collection[int]) -> bool:
        """Check whether a group is complete, so that its updates are summed now instead of waiting for more clients."""
        trigger, num_out = self.coordinator.algorithm.trigger, self.coordinator.roster.num_out
        if not ready:
            return False
        if isinstance(trigger, Buffered):
            return len(ready) >= trigger.size or (num_out == len(ready) and len(ready) >= self.least)
        return num_out == len(ready)

    def scale(self, assignments: Iterable[Assignment]) -> float:
        """Return the largest weight of an update in a group; all weights are divided by it, so that none is above 1.

        Weights are based on the number of samples that each client reported when it joined.
        """
        clients = self.coordinator.roster.clients
        return max((self._product(one, clients[one.client].num_samples) for one in assignments), default=1.0) or 1.0

    def share(self, assignment: Assignment, num_samples: int, scale: float) -> float:
        """Return the factor, from 0 to 1, by which a client multiplies its update before masking."""
        return min(self._product(assignment, num_samples) / scale, 1.0)

    def _product(self, assignment: Assignment, num_samples: int) -> float:
        client = self.coordinator.roster.clients[assignment.client]
        counted = self.coordinator.counted_samples(client, num_samples)
        weight, factor = self.merge.weigh(counted, self.coordinator.state.version - assignment.version)
        return weight * factor

    def encode(self, assignment: Assignment, update: Update, scale: float) -> None:
        """Replace a trained update by the whole numbers that a real client would mask and send in its place.

        The update is refused if a value is too large to be encoded.
        """
        update.metrics, update.extra = {}, {}
        if update.refusal is not None:
            return
        submodels = self.coordinator.state.submodels
        try:
            share, clip = self.share(assignment, update.num_samples, scale), self.merge.scale(update.tensors)
            update.tensors = self.merge.encoded(submodels, assignment.spec, update.tensors, share, clip)
        except OutOfRange:
            update.refusal = OUT_OF_RANGE

    def form_group(self, pairs: Sequence[tuple[Assignment, Update]], scale: float) -> None:
        """Put encoded updates into one group whose sum is merged; refuse them if there are too few to hide each other.

        With the option ``simulate_masks`` the masks are added and removed, as in a run with real clients.
        """
        masked, opened = self.merge.options.simulate_masks, len(pairs) >= self.least
        if masked and opened:
            numbers = {assignment.id: update.tensors for assignment, update in pairs}
            specs = {assignment.id: assignment.spec for assignment, _ in pairs}
            layouts, options = IntegerLayouts(self.coordinator.state.submodels), self.merge.options
            try:
                mask_and_open_(numbers, specs, layouts, self.merge.min_cover, options.threshold)
            except CannotOpen:
                opened = False
        group = SumGroup(tuple(assignment.id for assignment, _ in pairs), scale, masked)
        for _, update in pairs:
            update.group, update.refusal = (group, None) if opened else (None, NOT_OPENED)


class SimulatedSums(ClockExtension):
    """Groups in a simulation: tasks that are over wait for the others of their group, and are summed with them."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__(simulation)
        groups = SecureGroups.of(simulation.coordinator)
        assert groups is not None
        self._groups = groups
        self._ready: dict[int, Due] = {}  # by assignment: trained updates that wait until a group is complete

    def arrives(self, due: Due) -> bool:
        """Keep a task that is over until its group is complete."""
        self._ready[due.assignment.id] = due
        return True

    def turned(self) -> None:
        """Train, encode and sum the tasks of a group once all of its clients are ready."""
        groups, simulation = self._groups, self.simulation
        if not groups.is_complete(self._ready):
            return
        dues = list(self._ready.values())[: groups.merge.point.num_members]
        scale = groups.scale(due.assignment for due in dues)
        updates = []
        try:
            for due in dues:
                update = simulation.trained(due)
                # encoded into separate storage, since the next task reuses the trainer's
                groups.encode(due.assignment, update, scale)
                updates.append(update)
        except TaskFailed as failed:  # all tasks of the group are trained again when the run is resumed
            simulation.error = failed
            return
        for due in dues:
            simulation.forget_task(due)
            del self._ready[due.assignment.id]
        sound = [(due.assignment, update) for due, update in zip(dues, updates, strict=True) if update.refusal is None]
        groups.form_group(sound, scale)
        simulation.tell_group(updates)

    def cancelled(self, client: int, tasks: Iterable[int]) -> None:
        """Continue without the tasks of a client that was lost."""
        for number in tasks:
            self._ready.pop(number, None)

    def save(self) -> dict[str, Any]:
        """Return the tasks that wait."""
        return {"ready": [item_to_plain(due) for due in self._ready.values()]}

    def restore(self, data: dict[str, Any]) -> list[Due]:
        """Restore the tasks that wait, and return them."""
        for item in map(item_from_plain, data.get("ready", [])):
            assert isinstance(item, Due)
            self._ready[item.assignment.id] = item
        return list(self._ready.values())


class ReplayedSums(ReplayExtension):
    """Groups in a replay: masks cancel out, so a sum is computed again from the numbers before they were masked."""

    def __init__(self, coordinator: Coordinator) -> None:
        super().__init__(coordinator)
        groups = SecureGroups.of(coordinator)
        assert groups is not None
        self._groups = groups

    def trained(self, assignment: Assignment, update: Update, row: JournalRow) -> None:
        """Encode an update that was summed."""
        group = group_from_json(cast(dict[str, Any], row))
        if group is not None:
            self._groups.encode(assignment, update, group.scale)
            update.group = group
