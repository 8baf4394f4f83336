"""Both ends of a compressed stream, for its tests."""

from __future__ import annotations

import torch

from model_zoo import MLP
from raafl.compression.plan import Compress, CompressionPlan
from raafl.core.local import Local
from raafl.core.types import Assignment
from raafl.parts.merge.mean import Mean
from raafl.submodel import FULL, FlatTensors, Spec, Submodels


def model() -> Submodels:
    return Submodels(MLP(3, (4,), 2))


def plan_of(down="none", up="none", top_k=0.25, merge=None) -> CompressionPlan:
    wanted = Compress(down, up, top_k) if "top_k" in (down, up) else Compress(down, up)
    made = CompressionPlan.of(model(), wanted, (merge or Mean()).sends, Local())
    assert made is not None
    return made


def task(number=1, spec=FULL, client=1, incarnation=0) -> Assignment:
    return Assignment(number, client, incarnation, number, 0, spec, 0, None, None, 100 + number, 0.0)


def drawn(layout, seed) -> FlatTensors:
    flat = FlatTensors.empty(layout)
    for buffer in flat.buffers.values():
        buffer.copy_(torch.randn(len(buffer), generator=torch.Generator().manual_seed(seed)))
    return flat


def axis() -> str:
    return next(iter(model().axes))


def cut() -> Spec:
    """Hidden units 1 and 3 of the four."""
    return Spec(((axis(), (1, 3)),))
