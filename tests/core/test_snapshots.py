"""Storage of what clients receive: what is freed is used again, of a bounded number of layouts."""

from __future__ import annotations

import torch

from raafl.algorithms import fed_async
from raafl.core.snapshots import _MOST_FREE, Snapshots
from raafl.submodel import FlatTensors, Layout
from tests.helpers.coordinators import coordinator_for


def test_storage_of_submodels_that_are_rare_is_given_up_first():
    snapshots = Snapshots(coordinator_for(fed_async()))
    layouts = [Layout.pack([("a", (size,), torch.float32)]) for size in range(1, 61)]
    first = snapshots.adopt(FlatTensors.empty(layouts[0]))
    for layout in layouts[1:]:
        snapshots.share(snapshots.adopt(FlatTensors.empty(layout)))
    for _ in range(2):
        snapshots.share(first)
    for layout in layouts[1:30]:
        other = snapshots.share(snapshots.adopt(FlatTensors.empty(layout)))
        snapshots.give_back(other)
    snapshots.give_back(first)
    assert layouts[0] not in snapshots._free  # a task still reads it
    snapshots.give_back(first)
    assert list(snapshots._free) == [*layouts[30 - (_MOST_FREE - 1) : 30], layouts[0]]
    assert snapshots._room(layouts[0]) is first
