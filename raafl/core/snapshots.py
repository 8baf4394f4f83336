"""Copy the values that clients receive from the global state, and share the copies between tasks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raafl.core.coordinator import Coordinator
from raafl.core.types import OUT_OF_MEMORY, Assignment, Update
from raafl.submodel import FlatTensors, Layout, Spec

if TYPE_CHECKING:
    from raafl.submodel.tensor_files import PayloadRoom

_MOST_FREE = 16
"""Layouts of which freed storage is kept for the next snapshot."""


class Snapshots:
    """Copies of the global values that clients receive. Tasks with the same version and submodel share one copy.

    If a merge gives clients their own values (`Merge.personalize`), each task gets its own copy. Storage is reused,
    since allocating costs more than copying.
    """

    remembers = False  # whether the values sent depend on the client's earlier tasks, as with delta compression

    def __init__(self, coordinator: Coordinator, storage: PayloadRoom | None = None) -> None:
        """Create an empty store of copies of the global model; ``storage`` allocates their memory, None = in RAM."""
        self._storage = storage or FlatTensors.empty
        self._state, self._payload, self._merge = coordinator.state, coordinator.payload, coordinator.algorithm.merge
        self._of = -1, 0
        self._current: dict[Spec, FlatTensors] = {}
        self._users: dict[int, int] = {}
        self._free: dict[Layout, list[FlatTensors]] = {}

    def cut(self, assignment: Assignment) -> FlatTensors:
        """Return a copy of the values to send for ``assignment``; it stays unchanged until passed to `give_back`.

        Raises:
            NoRoom: there is too little memory or disk space for the copy.
        """
        if self._merge.personalizes:
            return self._own(assignment)
        if self.is_outdated(assignment):
            old, self._of, self._current = self._current, (assignment.version, self._state.edition), {}
            for snapshot in old.values():
                self._recycle(snapshot)
        current = self._current.get(assignment.spec)
        if current is None:
            current = self._current[assignment.spec] = self._room(self._state.submodels.layout(assignment.spec, "sent"))
            self._gather(assignment.spec, current)
            self._users[id(current)] = 0
        self._users[id(current)] += 1
        return current

    def is_outdated(self, assignment: Assignment) -> bool:
        """Check whether the copies are of other values than ``assignment`` starts from."""
        return (assignment.version, self._state.edition) != self._of

    def _own(self, assignment: Assignment) -> FlatTensors:
        """Return a copy for one client only, for methods that send each client values of its own."""
        spec = assignment.spec
        out = self._room(self._payload.layout(spec, "sent"))
        values, bundles = self._payload.split(out, spec, "sent")
        self._gather(spec, values)
        self._merge.personalize(self._state, assignment.client, spec.without_base, values, bundles)
        self._users[id(out)] = 1
        return out

    def _room(self, layout: Layout) -> FlatTensors:
        """Return memory for a snapshot, if possible that of a released snapshot with the same layout."""
        free = self._free.get(layout)
        return free.pop() if free else self._storage(layout, self._state.values.device)

    def _gather(self, spec: Spec, out: FlatTensors) -> None:
        """Copy a submodel's values from the global model into ``out``, unless the model has no values, as in a plan."""
        if self._state.values.device.type != "meta":
            self._state.submodels.plan(spec, "sent").gather(self._state.values, out)

    def adopt(self, snapshot: FlatTensors) -> FlatTensors:
        """Add a snapshot restored from a checkpoint, which no task uses yet."""
        self._users[id(snapshot)] = 0
        return snapshot

    def share(self, snapshot: FlatTensors) -> FlatTensors:
        """Count one more task that uses ``snapshot``; return it."""
        self._users[id(snapshot)] += 1
        return snapshot

    def give_back(self, snapshot: FlatTensors) -> None:
        """Count one task fewer that uses ``snapshot``; free its storage for reuse when no task is left."""
        self._users[id(snapshot)] -= 1
        if not any(snapshot is current for current in self._current.values()):
            self._recycle(snapshot)

    def more_bytes(self, assignment: Assignment) -> int:
        """Return the number of bytes beyond the prediction that were sent to a client for its latest task."""
        return 0

    def returned(self, assignment: Assignment, update: Update, received: FlatTensors) -> None:
        """Replace the tensors of ``update`` by those that the server receives."""
        if update.refusal != OUT_OF_MEMORY:  # a client that ran out of memory has sent no tensors
            update.tensors = update.tensors.to(self._state.values.device)

    def refused(self, assignment: Assignment) -> None:
        """Forget what the client's end remembers of a task that was refused."""

    def _recycle(self, snapshot: FlatTensors) -> None:
        if self._users[id(snapshot)] == 0:
            del self._users[id(snapshot)]
            # move this layout to the end, so that the layouts that were not used for longest are dropped first
            self._free[snapshot.layout] = [*self._free.pop(snapshot.layout, ()), snapshot]
            if len(self._free) > _MOST_FREE:
                del self._free[next(iter(self._free))]
