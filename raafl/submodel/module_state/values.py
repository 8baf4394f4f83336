"""Record values that are no Python containers: tensors, arrays, random generators, iterators."""

from __future__ import annotations

import io
import itertools
import operator
import random
import types
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raafl.submodel.module_state.containers import Record
from raafl.submodel.module_state.reach import Reached

LARGE_BYTES = 1 << 24
"""Tensors above this are not copied: one that changes in place is refused. Arrays above it are not looked at."""


class TensorRecord(Record):
    """Record of a tensor's values, its storage, and whether it had a gradient."""

    def __init__(self, reached: Reached) -> None:
        super().__init__(reached)
        self._now: Tensor = reached.thing
        self._version, self._grad = self._now._version, self._now.grad if self._now.is_leaf else None
        self.can_restore = self._now.nbytes <= LARGE_BYTES
        self._data = self._now.data
        self._saved = self._data.clone() if self.can_restore else None

    def changed(self) -> list[str]:
        """Return a list with the name of the tensor if its values have changed, else an empty list."""
        same = self._now._version == self._version and (self._saved is None or torch.equal(self._now, self._saved))
        return [] if same else [self.name]

    def restore(self) -> None:
        """Put the recorded values back into the tensor."""
        assert self._saved is not None
        self._now.data = self._data  # a step may have given it other storage
        self._data.copy_(self._saved)
        self._version = self._now._version
        if self._now.is_leaf:
            self._now.grad = self._grad


class ArrayRecord(Record):
    """Record of the values of a NumPy array."""

    def __init__(self, reached: Reached) -> None:
        super().__init__(reached)
        self._now, self._saved = reached.thing, reached.thing.copy()

    def changed(self) -> list[str]:
        """Return a list with the name of the array if its values have changed, else an empty list."""
        return [] if self._now.tobytes() == self._saved.tobytes() else [self.name]

    def restore(self) -> None:
        """Put the recorded values back into the array."""
        np.copyto(self._now, self._saved)


class RandomRecord(Record):
    """Record of the state of a random generator of Python, NumPy or torch."""

    def __init__(self, reached: Reached) -> None:
        super().__init__(reached)
        self._now = reached.thing
        self._saved = self._state()

    def _state(self) -> Any:
        if isinstance(self._now, torch.Generator):
            return self._now.get_state()
        if isinstance(self._now, random.Random):
            return self._now.getstate()
        return self._bits().state

    def _bits(self) -> Any:
        if isinstance(self._now, np.random.RandomState):
            return self._now._bit_generator  # private: the one that it draws from
        return self._now.bit_generator if isinstance(self._now, np.random.Generator) else self._now

    def changed(self) -> list[str]:
        """Return a list with the name of the generator if its state has changed, else an empty list."""
        now = self._state()
        same = torch.equal(now, self._saved) if isinstance(now, Tensor) else _plain(now) == _plain(self._saved)
        return [] if same else [self.name]

    def restore(self) -> None:
        """Set the generator to its recorded state."""
        if isinstance(self._now, torch.Generator):
            self._now.set_state(self._saved)
        elif isinstance(self._now, random.Random):
            self._now.setstate(self._saved)
        else:
            self._bits().state = self._saved


class OpaqueRecord(Record):
    """Record of the position of an iterator, a queue or an open file, as far as it is visible; it cannot be restored."""

    can_restore = False

    def __init__(self, reached: Reached) -> None:
        super().__init__(reached)
        self._now, self._saved = reached.thing, progress_of(reached.thing)

    def changed(self) -> list[str]:
        """Return a list with the name of the object if its position has changed, else an empty list."""
        return [] if progress_of(self._now) == self._saved else [self.name]


def has_values_of_its_own(tensor: Tensor, storages: set[int]) -> bool:
    """Check whether a tensor's values can be restored and lie outside of the given storages."""
    if tensor.layout != torch.strided or tensor.device.type == "meta" or tensor.is_inference():
        return False
    tensor = local_part(tensor)
    storage = tensor.untyped_storage()
    return storage.data_ptr() not in storages and storage.nbytes() >= tensor.nbytes  # else it is expanded


def local_part(tensor: Any) -> Tensor:
    """Return the part of a sharded tensor (`torch.distributed.tensor.DTensor`) on this process; other tensors unchanged."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def _plain(state: object) -> Any:
    """Return a generator's state as values that `==` compares."""
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    return state.tobytes() if isinstance(state, np.ndarray) else state


def progress_of(thing: Any) -> object:
    """Return the position of an iterator, a queue or an open file; None if ``thing`` is none of these or hides it."""
    if isinstance(thing, types.GeneratorType):
        frame = thing.gi_frame
        return ("ended",) if frame is None else (frame.f_lasti, list(map(id, frame.f_locals.values())))
    try:
        if isinstance(thing, io.IOBase):
            return thing.tell() if thing.readable() else None
        if hasattr(type(thing), "__length_hint__"):
            return operator.length_hint(thing)
        if hasattr(type(thing), "qsize"):
            return thing.qsize()
    except (OSError, ValueError, NotImplementedError):  # a text file that is iterated over does not tell
        return "unknown"
    return repr(thing) if isinstance(thing, itertools.count) else None
