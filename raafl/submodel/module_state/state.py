"""Restore what a module keeps beside its parameters and buffers, so that each task and each evaluation begins alike.

One rule says what goes on from task to task: floating-point and complex parameters and buffers, which the server merges. All
else begins each task as the server has it. Integer buffers are sent, and come from the server's state. Attributes, buffers that
are not persistent, hooks and `requires_grad` are restored here, in place, to what they were when the small module was built.

What cannot be restored must not change: `ModuleState.check` refuses it by name. That is state which all copies of a module share
(attributes of a class, objects that cannot be copied) and objects that hide their state (iterators, files that are read).
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from raafl.errors import BadInput
from raafl.submodel.cut.copying import persistent_buffers
from raafl.submodel.module_state.containers import (
    AttributesRecord,
    BytesRecord,
    ClassRecord,
    DictRecord,
    FlagsRecord,
    HooksRecord,
    ListRecord,
    Record,
    SetRecord,
    SlotsRecord,
    TensorsRecord,
)
from raafl.submodel.module_state.reach import ATTACHED, ClassData, Reached, attributes_of, reach, slots_of
from raafl.submodel.module_state.values import (
    LARGE_BYTES,
    ArrayRecord,
    OpaqueRecord,
    RandomRecord,
    TensorRecord,
    has_values_of_its_own,
    local_part,
    progress_of,
)

if TYPE_CHECKING:
    from raafl.submodel.submodels import Submodels


class ModuleState:
    """Record of a module's state other than parameters and persistent buffers, so that every task starts from the same state."""

    def __init__(self, module: nn.Module, submodels: Submodels) -> None:
        """Record the state."""
        own = [*module.parameters(), *persistent_buffers(module).values()]
        storages = {local_part(tensor).untyped_storage().data_ptr() for tensor in own}
        original = submodels.cached("reached", None, lambda: _ids(reach(submodels.module, ())))
        self._storages = storages
        self._flags = FlagsRecord(module)
        self._restored: list[Record] = []
        self._shared: list[Reached] = []  # nobody restores what these hold
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
        """Record what copies share as it is now: a callback, or the user's program, may change it between two tasks."""
        self._watched = [
            record for reached in self._shared for record in _records_of(reached, self._storages, shared=True)
        ]

    def restore(self, *, metrics: bool = True) -> None:
        """Restore the recorded state, before a task or an evaluation."""
        self._flags.restore()
        for record in self._restored:
            if metrics or not record.of_metric:
                record.restore()
        if any(record.changed() for record in self._watched):
            self._watch()

    def changed(self, *, metrics: bool = True) -> list[str]:
        """Return the names of the module's attributes that have changed since they were recorded."""
        records = [r for r in (*self._restored, *self._fixed, *self._watched) if metrics or not r.of_metric]
        return sorted({name for record in records for name in record.changed()})

    def check(self) -> None:
        """Raise an error if a step has changed something that cannot be restored or would be lost.

        Raises:
            BadInput: a parameter or submodule was replaced, or state has changed that cannot be restored.
        """
        for record in (*self._fixed, *self._watched):
            for name in record.changed():
                raise BadInput(_refusal(name, of_class=record.of_class))
        for tensors in self._tensors:
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
    """Return the identities of objects that live as long as their module; a `ClassData` does not, and its id is soon another's."""
    return frozenset(id(reached.thing) for reached in found if not isinstance(reached.thing, ClassData))


def _records_of(reached: Reached, storages: set[int], *, shared: bool) -> list[Record]:
    """Return the records of an object's contents; none of what cannot change, or lies in one of ``storages``."""
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
    if attributes_of(thing):
        found.append(AttributesRecord(reached, ATTACHED if isinstance(thing, nn.Module) else frozenset()))
    if reached.is_part:
        found += [HooksRecord(reached), TensorsRecord(reached)]
    return [*found, SlotsRecord(reached)] if slots_of(thing) else found
