"""Form the groups whose updates are summed, on both clocks and in a replay: when one is complete, and with which weights."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Self

from raafl.config.experiment import Experiment
from raafl.core.algorithm import Algorithm
from raafl.core.coordinator import Coordinator
from raafl.core.types import Assignment, SumGroup, Update
from raafl.parts.protect.secure.assembly import secured
from raafl.parts.protect.secure.coverage import Ring
from raafl.parts.protect.secure.fixed_point import OUT_OF_RANGE, OutOfRange
from raafl.parts.protect.secure.group import CannotOpen
from raafl.parts.protect.secure.merge import SecureSum
from raafl.parts.protect.secure.rehearsal import mask_and_open_
from raafl.parts.trigger import Buffered

NOT_OPENED = "not-opened"
"""Why updates are refused whose sum could not be opened."""


@dataclass(frozen=True)
class SecureGroups:
    """Groups of clients in one run whose updates are summed.

    Attributes:
        coordinator: coordinator of the run; read only.
        merge: merge of sums that the run uses.
    """

    coordinator: Coordinator
    merge: SecureSum

    @classmethod
    def of(cls, coordinator: Coordinator) -> Self | None:
        """Return the groups of a run; None if updates are not masked."""
        merge = coordinator.algorithm.merge
        return cls(coordinator, merge) if isinstance(merge, SecureSum) else None

    @property
    def least(self) -> int:
        """Smallest number of clients of which a sum is opened."""
        return max(self.merge.min_cover, 3)

    def is_complete(self, ready: Collection[int]) -> bool:
        """Check whether the clients that have trained are to be summed now, rather than wait for more.

        Args:
            ready: ids of the assignments of these clients.
        """
        trigger, num_out = self.coordinator.algorithm.trigger, self.coordinator.roster.num_out
        if not ready:
            return False
        if isinstance(trigger, Buffered):
            return len(ready) >= trigger.size or (num_out == len(ready) and len(ready) >= self.least)
        return num_out == len(ready)

    def scale(self, assignments: Iterable[Assignment]) -> float:
        """Return the largest weight in a group, by which all weights are divided.

        Clients count with the samples that they joined with.
        """
        clients = self.coordinator.roster.clients
        return max((self._product(one, clients[one.client].num_samples) for one in assignments), default=1.0) or 1.0

    def share(self, assignment: Assignment, num_samples: int, scale: float) -> float:
        """Return the factor, from 0 to 1, by which a client multiplies its change.

        Args:
            assignment: assignment of the client's task.
            num_samples: number of samples that it has trained on; at most the number with which it joined.
            scale: scale of its group.
        """
        return min(self._product(assignment, num_samples) / scale, 1.0)

    def _product(self, assignment: Assignment, num_samples: int) -> float:
        client = self.coordinator.roster.clients[assignment.client]
        counted = self.coordinator.counted_samples(client, num_samples)
        weight, factor = self.merge.weigh(counted, self.coordinator.state.version - assignment.version)
        return weight * factor

    def encode(self, assignment: Assignment, update: Update, scale: float) -> None:
        """Replace a trained update by what its client would send, unmasked; refuse the update if it is out of range.

        Args:
            assignment: assignment of the client's task.
            update: trained update, changed in place; metrics and extra are removed, since they stay with the client.
            scale: scale of its group.
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

    def sum(self, pairs: Sequence[tuple[Assignment, Update]], scale: float) -> None:
        """Mark encoded updates as one group, and mask them if the simulation is to do so; refuse them if they are too few.

        Args:
            pairs: assignments with their updates, without refused ones.
            scale: scale of the group.
        """
        masked, opened = self.merge.options.simulate_masks, len(pairs) >= self.least
        if masked and opened:
            numbers = {assignment.id: update.tensors for assignment, update in pairs}
            specs = {assignment.id: assignment.spec for assignment, _ in pairs}
            ring, options = Ring(self.coordinator.state.submodels), self.merge.options
            try:
                mask_and_open_(numbers, specs, ring, self.merge.min_cover, options.threshold)
            except CannotOpen:
                opened = False
        group = SumGroup(tuple(assignment.id for assignment, _ in pairs), scale, masked)
        for _, update in pairs:
            update.group, update.refusal = (group, None) if opened else (None, NOT_OPENED)


def secure(experiment: Experiment, algorithm: Algorithm) -> Algorithm:
    """Return ``algorithm`` with a merge of sums, for a run with secure aggregation.

    Raises:
        BadInput: an option or the algorithm does not work with secure aggregation.
    """
    return secured(
        algorithm, experiment.secure_aggregation, experiment.rounds, experiment.guard, experiment.privacy,
        experiment.clients, experiment.compress.up,
    )  # fmt: skip


def sends_of(experiment: Experiment) -> Literal["values", "delta"]:
    """Return the content of updates: "values", or "delta", their difference from the received ones, as masked sums need it."""
    return "delta" if experiment.secure_aggregation.is_on else experiment.algorithm.merge.sends


def masking(experiment: Experiment) -> SecureSum | None:
    """Return the merge whose encoding a client uses, according to its own config; None = its updates are not masked."""
    if not experiment.secure_aggregation.is_on:
        return None
    merge = secure(experiment, experiment.algorithm).merge
    assert isinstance(merge, SecureSum)
    return merge
