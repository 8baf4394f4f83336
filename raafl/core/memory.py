"""Hold what parts of an algorithm keep on the server between updates, as one typed record for each part.

A checkpoint has each record in its plain form, under the record's key.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, ClassVar, Generic, Self, TypeVar

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
        record = self.find(kind, key)
        if record is None:
            record = self._records[kind.key if key is None else key] = kind() if make is None else make()
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
