"""Hold the global model, what is stored for clients and for an algorithm's parts, and undo a merge that is not finite."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeVar, overload

import torch

from raafl.core.types import Assignment, Update
from raafl.submodel import FlatTensors, Layout, Spec, Submodels
from raafl.submodel.flat import is_merged

if TYPE_CHECKING:
    from raafl.submodel.tensor_files import PayloadRoom

# Store the state of an algorithm's parts on the server between updates: a typed record for each part, which a
# checkpoint contains in its plain form, under the record's key.

Value = TypeVar("Value")


class MergeMemory:
    """Base class of records in which a part of an algorithm keeps its state on the server; checkpoints contain them.

    A record is a dataclass of numbers, text, tensors, `Spec` objects (descriptions of submodels), and containers of these.

    Attributes:
        key: name under which checkpoints store the record.
    """

    key: ClassVar[str]

    def to_plain(self) -> Any:
        """Convert the record to plain data: its fields that are not None, by name; tensors are shared, not copied."""
        found = {one.name: getattr(self, one.name) for one in fields(self)}  # type: ignore[arg-type]
        return {name: value for name, value in found.items() if value is not None}

    @classmethod
    def from_plain(cls, data: Any) -> Self:
        """Restore a record from the result of `to_plain`; fields that only earlier versions of raafl had are dropped."""
        names = {one.name for one in fields(cls)}  # type: ignore[arg-type]
        return cls(**{name: value for name, value in data.items() if name in names})


Record = TypeVar("Record", bound=MergeMemory)


class OneValue(MergeMemory, Generic[Value]):
    """Base class of records with a single field, ``value``."""

    value: Value

    def to_plain(self) -> Value:
        """Return the value of the record as plain data, for a checkpoint."""
        return self.value

    @classmethod
    def from_plain(cls, data: Any) -> Self:
        """Restore the record from the result of `to_plain`."""
        record = cls()
        record.value = data
        return record


class Memory:
    """Collection of the records in which the parts of an algorithm keep their state on the server.

    A record from a checkpoint is restored when its part first asks for it.
    """

    def __init__(self) -> None:
        self._records: dict[str, MergeMemory] = {}
        self._plain: dict[str, object] = {}

    def find(self, kind: type[Record], key: str | None = None) -> Record | None:
        """Return the record in which a part of the algorithm keeps its state; None if there is none.

        Args:
            kind: class of the record to find.
            key: name of the record, needed where a part occurs several times; None = ``kind.key``.
        """
        key = kind.key if key is None else key
        if key in self._plain:
            self._records[key] = kind.from_plain(self._plain.pop(key))
        record = self._records.get(key)
        assert record is None or isinstance(record, kind)
        return record

    def of(self, kind: type[Record], make: Callable[[], Record] | None = None, key: str | None = None) -> Record:
        """Return the record in which a part of the algorithm keeps its state, and create it if it is missing.

        Args:
            kind: class of the record to return.
            make: function that returns a new record; None = ``kind()``.
            key: name of the record, needed where a part occurs several times; None = ``kind.key``.
        """
        key = kind.key if key is None else key
        known = self._records.get(key)
        record = known if isinstance(known, kind) else self.find(kind, key)
        if record is None:
            record = self._records[key] = kind() if make is None else make()
        return record

    def pop(self, kind: type[Record]) -> Record | None:
        """Remove the record in which a part of the algorithm keeps its state, and return it; None if there is none."""
        record = self.find(kind)
        self._records.pop(kind.key, None)
        return record

    def put(self, record: MergeMemory) -> None:
        """Store the record in which a part of the algorithm keeps its state, replacing any earlier one of the same key."""
        self._plain.pop(record.key, None)
        self._records[record.key] = record

    def to_plain(self) -> dict[str, object]:
        """Convert all records to plain data, by their keys; tensors are shared with the records, not copied."""
        return {**self._plain, **{key: record.to_plain() for key, record in self._records.items()}}

    def load(self, plain: Mapping[str, object], but: str = "") -> None:
        """Replace all records by those in ``plain``, except the record under the key ``but``, which stays."""
        self._plain = {key: value for key, value in plain.items() if key != but}
        self._records = {key: record for key, record in self._records.items() if key == but}


RUINED = 1e6
"""Magnitude of a global parameter above which honest clients may fail, too."""


class ClientState:
    """Tensors stored for clients on the server, by name and client.

    Merges change them in place, on the coordinator's thread. Checkpoints include them.

    Clients themselves store nothing between tasks. So a client may die and come back on another machine, a checkpoint
    is complete, and a replay rebuilds the store from the journal.
    There are two exceptions, which a client loses when it disconnects: the state of compression (the copy of its values
    for top_k downwards, the residual of error feedback upwards), and the tensors that clients of some methods keep
    between tasks (`raafl.compression.streams`).

    `values`: tensors by name, then by client.
    """

    def __init__(self, storage: PayloadRoom | None = None) -> None:
        """Create an empty store; ``storage`` allocates tensors that are not in files, None = in RAM."""
        self._zeros: Callable[[Layout, torch.device | str], FlatTensors]
        self._zeros = FlatTensors.zeros if storage is None else storage.zeros
        self.values: dict[str, dict[int, FlatTensors]] = {}
        self._changed: dict[tuple[str, int], FlatTensors | None] | None = None

    @contextmanager
    def recording(self, changed: dict[tuple[str, int], FlatTensors | None]) -> Iterator[None]:
        """Return a context in which the old tensors of a client are saved before they first change.

        `changed`: dict that receives the old tensors by (name, client); None where the client had none under that
        name.
        """
        self._changed = changed
        try:
            yield
        finally:
            self._changed = None

    def find(self, name: str, client: int) -> FlatTensors | None:
        """Return the tensors stored for ``client`` under ``name``; None if there are none."""
        return self.values.get(name, {}).get(client)

    def of(
        self,
        name: str,
        client: int,
        layout: Layout,
        device: torch.device | str = "cpu",
        folder: str | None = None,
        fill: float = 0.0,
    ) -> FlatTensors:
        """Return the tensors stored for ``client`` under ``name``, for changes in place; create them if they are missing.

        `folder`: folder in which to keep the tensors as files, to save memory; None = in memory.
        """
        kept = self.everyone(name, folder)
        self._record(name, client)
        if client not in kept:
            if folder is None:
                kept[client] = self._zeros(layout, device)
            else:
                from raafl.submodel.tensor_files import zeros_in

                kept[client] = zeros_in(folder, layout)
            for buffer in kept[client].buffers.values() if fill != 0 else ():
                if is_merged(buffer.dtype):
                    buffer.fill_(fill)
        return kept[client]

    def forget(self, name: str, client: int) -> None:
        """Delete the tensors stored for ``client`` under ``name``."""
        self._record(name, client)
        self.values.get(name, {}).pop(client, None)

    def _record(self, name: str, client: int) -> None:
        if self._changed is not None and (name, client) not in self._changed:
            before = self.find(name, client)
            self._changed[name, client] = None if before is None else before.clone()

    def everyone(self, name: str, folder: str | None = None) -> dict[int, FlatTensors]:
        """Return the tensors of all clients under ``name``, by client.

        If ``folder`` is given, entries that a checkpoint restored to memory are first moved to files there.
        """
        kept = self.values.setdefault(name, {})
        # look at one entry: either all values come from a checkpoint, and so are in memory, or none do
        if folder is not None:
            from raafl.submodel.tensor_files import is_in_files, release, zeros_in

            if kept and not is_in_files(next(iter(kept.values()))):
                for client, flat in kept.items():
                    kept[client] = zeros_in(folder, flat.layout).copy_(flat)
                    release(kept[client])
        return kept


@dataclass(frozen=True, slots=True)
class PendingUpdate:
    """An accepted update that waits for a merge."""

    # client's update; its tensors may be overwritten after `take`, so a merge copies or sums them there
    update: Update
    spec: Spec  # submodel of the update, frozen base excluded
    staleness: int  # number of merges from the update's assignment to its arrival
    # task of the update; None = a merge has already combined updates of several clients into this one
    assignment: Assignment | None = None
    arrived_s: float = 0.0  # time of arrival, in seconds of the run's clock


@dataclass(slots=True)
class GlobalState:
    """The server's model and all state of a merge. Merges change the values, in place; the coordinator counts and lists.

    What waits for a merge is listed here alone: a merge, and each wrapper of it, reads `waiting`, and stores only what
    it has computed from the updates' tensors, in the same order.

    Attributes:
        submodels: description of the model: along which axes (groups of units, such as hidden neurons or heads) it can
            be cut, and layout and cost of each submodel.
        values: every parameter and buffer, in flat storage.
        version: number of merges so far, t.
        counts: number of merges in which each region was trained, q(j); a region is a part of the model that a method
            counts separately.
        memory: records that parts of the algorithm keep between updates, such as sums or the moments of a server
            optimiser.
        clients: tensors stored for each client.
        waiting: accepted updates that wait for a merge, in the order of arrival; during `Merge.apply` only those that
            it merges. The coordinator adds and removes them (see `Merge.take`).
        num_clients: number of clients N.
        now_s: time of the event that is being handled, in seconds of the run's clock; not saved.
        edition: number of times that the values were replaced without a merge, by a server above; not saved.
        scratch: storage that merges reuse; its contents are neither read nor saved.
    """

    submodels: Submodels
    values: FlatTensors
    version: int = 0
    counts: dict[int, int] = field(default_factory=dict)
    memory: Memory = field(default_factory=Memory)
    scratch: dict[str, Any] = field(default_factory=dict)
    clients: ClientState = field(default_factory=ClientState)
    waiting: list[PendingUpdate] = field(default_factory=list)
    num_clients: int = 1
    now_s: float = 0.0
    edition: int = 0

    def with_waiting(self, waiting: list[PendingUpdate]) -> GlobalState:
        """Return this state with another list of what waits, for a wrapped merge; everything else is shared."""
        return replace(self, waiting=waiting)


def is_ruined(state: GlobalState) -> bool:
    """Check whether global parameters are infinite, NaN, or so large that further training may overflow."""
    for entry in state.submodels.layout(part="trained").entries:
        if entry.name in state.submodels.parameter_names and is_merged(entry.dtype):
            most = min(RUINED, torch.finfo(entry.dtype).max / 10)
            if not bool((state.values[entry.name].abs() <= most).all()):
                return True
    return False


class ArrivalTimes(Sequence[float]):
    """Arrival times of the updates that wait, read from the state's list without a copy."""

    def __init__(self, waiting: Sequence[PendingUpdate]) -> None:
        self._waiting = waiting

    def __len__(self) -> int:
        return len(self._waiting)

    @overload
    def __getitem__(self, index: int) -> float: ...
    @overload
    def __getitem__(self, index: slice) -> list[float]: ...
    def __getitem__(self, index: int | slice) -> float | list[float]:
        if isinstance(index, slice):
            return [item.arrived_s for item in self._waiting[index]]
        return self._waiting[index].arrived_s
