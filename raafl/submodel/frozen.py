"""Hold the frozen base: parameters that train in no submodel. Config and seed determine them, so they do not travel."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from raafl.errors import nearest
from raafl.submodel.cut.layers import copy_structure, on_meta, select
from raafl.submodel.flat import Layout
from raafl.submodel.spec import Runs, SpecError

Selections = Mapping[str, Mapping[int, Runs]]
"""Runs kept, by tensor and dimension, of the tensors that are cut."""


class FrozenBase:
    """Values of a model's frozen parameters, which the modules of all submodels on this machine share; nothing may change them.

    `tensors`: frozen parameters by name, in their full shapes.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        """Create a frozen base of ``tensors``, which are not copied."""
        self.tensors = {name: tensor.detach() for name, tensor in tensors.items()}
        self._on: dict[torch.device, dict[str, Tensor]] = {}
        self._digests: dict[str, str] = {}

    def idle_bytes(self, layout: Layout, selections: Selections) -> int:
        """Return the bytes of frozen parameters that are stored, but that a submodel lacks or uses only in part."""
        return sum(t.nbytes for n, t in self.tensors.items() if n not in layout.by_name or n in selections)

    def note(self) -> None:
        """Compute the digest of the values and store it, if that was not done before."""
        if not self._digests:
            self._digests = {name: _digest(tensor) for name, tensor in self.tensors.items()}

    @cached_property
    def digest(self) -> str:
        """Hexadecimal digest of names, dtypes, shapes and values, by which two machines compare their frozen parameters."""
        self.note()
        rows = [
            [name, str(self.tensors[name].dtype), list(self.tensors[name].shape), digest]
            for name, digest in sorted(self._digests.items())
        ]
        return xxhash.xxh3_128(json.dumps(rows).encode()).hexdigest()

    def let_go(self) -> None:
        """Release the values of the frozen parameters but keep their digest; the tensors move to the meta device."""
        self.note()
        self.tensors = {name: on_meta(tensor) for name, tensor in self.tensors.items()}
        self._on.clear()

    def selected(self, layout: Layout, selections: Selections, device: torch.device) -> dict[str, Tensor]:
        """Return the frozen parameters that a submodel uses, by name: whole tensors are shared, cut ones are copied."""
        self.note()
        here, part = self._on.setdefault(device, {}), {}
        for name in (entry.name for entry in layout.entries if entry.name in self.tensors):
            tensor = here.get(name)
            if tensor is None:
                tensor = here[name] = self.tensors[name].to(device)
            part[name] = select(tensor, selections[name]) if name in selections else tensor
        return part

    def changed(self, device: torch.device) -> str | None:
        """Return the name of a frozen tensor that training has changed on ``device``; None if there is none."""
        return next((name for name, t in self._on.get(device, {}).items() if _digest(t) != self._digests[name]), None)


def _digest(tensor: Tensor) -> str:
    data: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return xxhash.xxh3_128(data).hexdigest()


class Bases:
    """A model's frozen parameters (its base) in one or more precisions, such as 32, 16 and 4 bits.

    Each machine computes them itself, so they are never sent.

    `names`: names of the precisions, from the highest, the module's own, to the lowest; empty if there is only one.
    """

    def __init__(self, module: nn.Module, frozen: Mapping[str, Tensor]) -> None:
        """Read from a module in which precisions its frozen parameters ``frozen`` can be sent."""
        self.names: tuple[str, ...] = tuple(getattr(module, "submodel_bases", ()))
        self._module, self._frozen = module, frozen
        self._own: FrozenBase | None = None
        self._made: dict[str | None, FrozenBase] = {}
        self._digests: dict[str, str] = {}
        self._rebuild: Callable[[], nn.Module] | None = None

    def normal(self, name: str | None) -> str | None:
        """Check the name of a precision; return it, or None if it is the module's own precision.

        Raises:
            SpecError: the frozen parameters do not exist in this precision.
        """
        if name is not None and name not in self.names:
            known = nearest(name, self.names, "this model has only one precision: leave base out")
            raise SpecError(f"spec.base is '{name}', which this model does not have: {known}")
        return None if self.names and name == self.names[0] else name

    def module(self, name: str, values: Mapping[str, Tensor] | None = None) -> Any:
        """Return a copy of the module with its frozen parameters in another precision.

        `values`: frozen parameters in the module's own precision, to be converted; None = leave out all values.
        """
        memo = {id(self._frozen[n]): nn.Parameter(value, requires_grad=False) for n, value in (values or {}).items()}
        module: Any = copy_structure(self._module, memo)
        module.submodel_hold(name)
        return module

    def take(self, own: FrozenBase, rebuild: Callable[[], nn.Module] | None = None) -> None:
        """Store the frozen parameters in the module's own precision, from which those in other precisions are converted.

        `rebuild`: function that builds the model anew, so that memory needs to hold only the precision of the latest
        task; None = keep all precisions in memory.
        """
        self._own, self._rebuild = own, rebuild if self.names else None
        self._made, self._digests = {}, {}
        if self._rebuild is not None:
            own.let_go()

    def values(self, name: str | None) -> FrozenBase | None:
        """Return the frozen parameters in a precision; None if the model has none, or their values are not loaded."""
        name = self.normal(name)
        if self._own is None or (name is None and self._rebuild is None):
            return self._own
        if name not in self._made:
            values: Mapping[str, Tensor] = self._own.tensors
            if self._rebuild is not None:
                self._made.clear()
                values = {n: p for n, p in self._rebuild().named_parameters() if n in self._frozen}
            self._made[name] = self._make(name, values)
        return self._made[name]

    def digest(self, name: str | None) -> str | None:
        """Return a digest of the frozen parameters in a precision."""
        name = self.normal(name)
        if self._own is None or name is None or self._rebuild is not None:
            base = self.values(name)
            return None if base is None else base.digest
        if name not in self._digests:
            base = self._made.get(name) or self._make(name, self._own.tensors)
            self._digests[name] = base.digest
        return self._digests[name]

    def _make(self, name: str | None, values: Mapping[str, Tensor]) -> FrozenBase:
        if name is None:
            return FrozenBase(values)
        others = dict(self._module.named_parameters()).keys() - self._frozen.keys()
        named = self.module(name, values).named_parameters()
        return FrozenBase({n: parameter for n, parameter in named if n not in others})
