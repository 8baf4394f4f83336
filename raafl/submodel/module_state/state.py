"""Restore what a module keeps beside its parameters and buffers, so that each task and each evaluation begins alike.

One rule says what goes on from task to task: floating-point and complex parameters and buffers, which the server merges. All
else begins each task as the server has it. Integer buffers are sent, and come from the server's state. Attributes, buffers that
are not persistent, hooks and `requires_grad` are restored here, in place, to what they were when the small module was built.

What cannot be restored must not change: `ModuleState.check` refuses it by name. That is state which all copies of a module share
(attributes of a class, objects that cannot be copied) and objects that hide their state (iterators, files that are read).
"""

from __future__ import annotations

import io
import itertools
import operator
import random
import types
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from raafl.errors import BadInput
from raafl.submodel.cut.layers import persistent_buffers
from raafl.submodel.module_state.containers import (
    ATTACHED,
    AttributesRecord,
    BytesRecord,
    ClassData,
    ClassRecord,
    DictRecord,
    FlagsRecord,
    Glance,
    HooksRecord,
    ListRecord,
    Reached,
    Record,
    SetRecord,
    SlotsRecord,
    TensorsRecord,
    reach,
    slots_in,
)

if TYPE_CHECKING:
    from raafl.submodel.submodels import Submodels


class ModuleState:
    """Record of a module's state other than parameters and persistent buffers, so that every task starts from the same state."""

    def __init__(self, module: nn.Module, submodels: Submodels) -> None:
        """Record all that the module stores besides parameters and persistent buffers."""
        own = [*module.parameters(), *persistent_buffers(module).values()]
        storages = {local_part(tensor).untyped_storage().data_ptr() for tensor in own}
        original = submodels.cached("reached", None, lambda: _ids(reach(submodels.module, ())))
        self._storages = storages
        self._flags = FlagsRecord(module)
        self._restored: list[Record] = []
        self._shared: list[Reached] = []  # objects that all copies of the module share, whose contents are not restored
        self._fixed: list[Record] = []
        for reached in reach(module, own):
            if isinstance(reached.thing, ClassData) or id(reached.thing) in original:
                self._shared.append(reached)
                continue
            for record in _records_of(reached, storages, shared=False):
                (self._restored if record.can_restore else self._fixed).append(record)
        self._tensors = [record for record in self._restored if isinstance(record, TensorsRecord)]
        self._watched: list[Record] = []
        self._watch()

    def _watch(self) -> None:
        """Record what shared objects hold now, since callbacks or the user's program may change it between tasks."""
        self._watched = [
            record for reached in self._shared for record in _records_of(reached, self._storages, shared=True)
        ]
        # most modules change nothing but tensors: one quick comparison of all containers then shows that no record changed
        live = [(record, record.live()) for record in (*self._restored, *self._fixed, *self._watched)]
        self._glance = Glance([collection for _, collections in live for collection in collections])
        self._unseen = {id(record) for record, collections in live if not collections}

    def _left(self, records: Iterable[Record], is_same: bool) -> Iterable[Record]:
        """Return the records that may have changed; ``is_same``: whether a quick comparison has found all containers equal."""
        return (record for record in records if id(record) in self._unseen) if is_same else records

    def restore(self, *, metrics: bool = True) -> None:
        """Restore the recorded state, before a task or an evaluation."""
        is_same = self._glance.is_same()
        self._flags.restore(modes=not is_same)
        for record in self._left(self._restored, is_same):
            if metrics or not record.of_metric:
                record.restore()
        if any(record.changed() for record in self._left(self._watched, is_same)):
            self._watch()
        if not metrics:
            self._glance.forget()  # metrics were not restored, so the next comparison must be full
        elif not is_same:
            self._glance.take()

    @property
    def flags(self) -> tuple[bool, ...]:
        """Which parameters require gradients, and which parts are in train mode, now."""
        return self._flags.now()

    def changed(self, *, metrics: bool = True) -> list[str]:
        """Return the names of the module's attributes that have changed since they were recorded."""
        records = self._left((*self._restored, *self._fixed, *self._watched), self._glance.is_same())
        return sorted({name for record in records if metrics or not record.of_metric for name in record.changed()})

    def check(self) -> None:
        """Raise an error if a step has changed something that cannot be restored or would be lost.

        Raises:
            BadInput: a parameter or submodule was replaced, or state has changed that cannot be restored.
        """
        is_same = self._glance.is_same()
        for record in self._left((*self._fixed, *self._watched), is_same):
            for name in record.changed():
                raise BadInput(_refusal(name, of_class=record.of_class))
        for tensors in () if is_same else self._tensors:
            for name in tensors.lost():
                raise BadInput(
                    f"parameter or submodule '{name}' is added or replaced in a step, so its training would be "
                    "lost: create it in __init__ and change it in place"
                )


def has_values_beside(module: nn.Module) -> bool:
    """Check whether a module has tensors or arrays other than its parameters and persistent buffers."""
    own = [*module.parameters(), *persistent_buffers(module).values()]
    return any(isinstance(reached.thing, Tensor | np.ndarray) for reached in reach(module, own))


def _refusal(name: str, *, of_class: bool) -> str:
    carries = "so it would carry over from client to client"
    if of_class:
        return (
            f"attribute '{name}' of the class changes in a step, {carries}: set it in __init__ (self.NAME = ...), then each "
            "task begins with it anew"
        )
    return (
        f"attribute '{name}' changes in a step and cannot be restored, {carries}: create it inside the step, or keep its state "
        "in a buffer"
    )


def _ids(found: Iterable[Reached]) -> frozenset[int]:
    """Return ids of the objects, without `ClassData`, which is temporary, so that its id would be reused."""
    return frozenset(id(reached.thing) for reached in found if not isinstance(reached.thing, ClassData))


def _records_of(reached: Reached, storages: set[int], *, shared: bool) -> list[Record]:
    """Record the contents of an object; [] if these cannot change, or are in ``storages``, which are restored elsewhere."""
    thing = reached.thing
    if isinstance(thing, ClassData):
        return [ClassRecord(reached)]
    if isinstance(thing, Tensor):
        return [TensorRecord(reached)] if has_values_of_its_own(thing, storages) else []
    if isinstance(thing, np.ndarray):
        return [ArrayRecord(reached)] if thing.flags.writeable and thing.nbytes <= LARGE_BYTES else []
    if isinstance(
        thing, torch.Generator | random.Random | np.random.Generator | np.random.RandomState | np.random.BitGenerator
    ):
        return [RandomRecord(reached)]
    found: list[Record] = []
    if isinstance(thing, dict):
        found.append(DictRecord(reached, shared=shared))
    elif isinstance(thing, list | deque):
        found.append(ListRecord(reached))
    elif isinstance(thing, set):
        found.append(SetRecord(reached))
    elif isinstance(thing, bytearray):
        found.append(BytesRecord(reached))
    elif not isinstance(thing, nn.Module) and progress_of(thing) is not None:
        found.append(OpaqueRecord(reached))
    # by the type, since an object that is empty now may get attributes, or values in its slots, in a step
    if type(thing).__dictoffset__:
        found.append(AttributesRecord(reached, ATTACHED if isinstance(thing, nn.Module) else frozenset()))
    if reached.is_part:
        found += [HooksRecord(reached), TensorsRecord(reached)]
    return [*found, SlotsRecord(reached)] if slots_in(type(thing)) else found  # type: ignore[arg-type]


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
        self._now.data = self._data  # a step may have given the tensor another storage
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
            return self._now._bit_generator  # private: numpy has no other access to the random state of a RandomState
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
    # an expanded tensor, which cannot be written, has a smaller storage
    return storage.data_ptr() not in storages and storage.nbytes() >= tensor.nbytes


def local_part(tensor: Any) -> Tensor:
    """Return the part of a sharded tensor (`torch.distributed.tensor.DTensor`) on this process; other tensors unchanged."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def _plain(state: object) -> Any:
    """Convert a random generator's state to values that ``==`` can compare."""
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
    except (OSError, ValueError, NotImplementedError):  # a text file raises while it is being iterated
        return "unknown"
    return repr(thing) if isinstance(thing, itertools.count) else None
