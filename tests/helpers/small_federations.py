"""Build small federations on the digits, for the tests of `raafl.Federation`."""

from __future__ import annotations

from torch import nn

import raafl
from tests.helpers.small_runs import unequal


def federation(folder=None, algorithm="fed_avg", **settings):
    """Return a federation of four unequal clients that ends after eight updates; ``settings``: those of `raafl.Federation`."""
    settings = {"max_updates": 8, "num_steps": 3, "progress": "quiet", "output": folder, **settings}
    return raafl.Federation(algorithm, **{"devices": unequal(), **settings})


def small_net():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 10))
