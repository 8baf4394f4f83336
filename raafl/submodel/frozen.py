"""Hold the frozen base: parameters that train in no submodel. Config and seed determine them, so they do not travel."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
import xxhash
from torch import Tensor

from raafl.submodel.axes import Runs
from raafl.submodel.cut.copying import on_meta
from raafl.submodel.flat import Layout

Selections = Mapping[str, Mapping[int, Runs]]
"""Runs kept, by tensor and dimension, of the tensors that are cut."""


class FrozenBase:
    """Values of a model's frozen parameters, which the modules of all submodels on this machine share; nothing may change them.

    `tensors`: frozen parameters by name, in their full shapes.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        """Share ``tensors``; nothing is copied."""
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


def select(tensor: Tensor, selection: Mapping[int, Runs]) -> Tensor:
    """Return a copy of the elements of a tensor that ``selection`` keeps."""
    for dim, runs in selection.items():
        tensor = torch.cat([tensor.narrow(dim, start, stop - start) for start, stop in runs], dim)
    return tensor
