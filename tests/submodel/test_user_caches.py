"""What is found about a model does not hang on what ran before: caches are hidden, and left as they were."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import ClassVar

import pytest
import torch
from lightning import LightningModule
from torch import nn
from torch.nn import functional as F

from raafl.submodel import Submodels, isolated_run
from raafl.submodel.isolated_run import uncached
from raafl.submodel.prove.proof import refuted

BATCH = [torch.randn(4, 9, 12, generator=torch.Generator().manual_seed(1)), torch.arange(4) % 3]
NAMES = {"identity": lambda x: x}
SPLITS: dict[tuple[int, int], tuple[int, int]] = {}
RAMPS: dict[int, torch.Tensor] = {}
SCALES = {8: torch.tensor(8.0), 9: torch.tensor(9.0)}


class Shared:
    """Holds a cache at its class, as position tables do."""

    ramps: ClassVar[dict[tuple[str, int], torch.Tensor]] = {}


def halves(width, heads):
    return heads, width // heads


cached_halves = lru_cache(halves)


def halves_in_a_table(width, heads):
    if (width, heads) not in SPLITS:
        SPLITS[width, heads] = halves(width, heads)
    return SPLITS[width, heads]


def ramp(length):
    return torch.linspace(0, 1, length)[:, None]


cached_ramp = cache(ramp)


def ramp_in_a_table(length):
    if length not in RAMPS:
        RAMPS[length] = ramp(length)
    return RAMPS[length]


def ramp_of_the_class(length):
    return Shared.ramps.setdefault(("ramp", length), ramp(length))


def scaled(length):
    return ramp(length) * SCALES[length]


class Attention(nn.Module):
    """Splits a width into heads by one function, and adds what another makes of the length."""

    def __init__(self, split, table):
        super().__init__()
        self.qkv, self.out, self.split, self.table = nn.Linear(16, 48), nn.Linear(16, 16), split, table

    def forward(self, x):
        parts = self.qkv(x + self.table(x.shape[1])).chunk(3, dim=-1)
        q, k, v = (p.view(p.shape[0], p.shape[1], *self.split(p.shape[-1], heads=4)).transpose(1, 2) for p in parts)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape[0], x.shape[1], -1))


class Blocks(LightningModule):
    """Two such layers of equal sizes, but other dimensions."""

    def __init__(self, split=halves, table=ramp):
        super().__init__()
        self.embed, self.head = nn.Linear(12, 16), nn.Linear(16, 3)
        self.blocks = nn.ModuleList(Attention(split, table) for _ in range(2))

    def training_step(self, batch, batch_idx):
        x = self.embed(batch[0])
        for block in self.blocks:
            x = x + block(x)
        return F.cross_entropy(self.head(x.mean(1)), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def found(module):
    submodels = Submodels(module, BATCH)
    axes = {name: axis.size for name, axis in submodels.axes.items()}
    return axes, refuted(submodels, module, BATCH), submodels.cost(batch_size=4)


@pytest.mark.parametrize("table", [cached_ramp, ramp_in_a_table, ramp_of_the_class, scaled])
@pytest.mark.parametrize("split", [cached_halves, halves_in_a_table])
def test_the_same_is_found_three_times_and_after_steps_that_filled_caches(split, table, monkeypatch):
    monkeypatch.setattr(isolated_run, "_known", (0, *isolated_run._known[1:]))  # as after an import
    module = Blocks(split, table)
    first = found(module)
    assert first[0] == {"embed": 16, "blocks.0.heads": 4, "blocks.1.heads": 4} and first[1] == {}
    assert SPLITS == RAMPS == Shared.ramps == {} and cached_ramp.cache_info().currsize == 0
    try:
        for width in range(4, 20, 4):
            split(width, heads=4)
        assert table(9).device.type == "cpu" and table(9).dtype == torch.float32
        kept = dict(RAMPS), dict(SPLITS), dict(Shared.ramps)
        assert found(module) == first == found(Blocks(split, table))
        now = RAMPS, SPLITS, Shared.ramps
        for before, after in zip(kept, now, strict=True):
            assert list(before) == list(after) and all(after[key] is value for key, value in before.items())
    finally:
        for entries in (RAMPS, SPLITS, Shared.ramps):
            entries.clear()
        cached_ramp.cache_clear()
        cached_halves.cache_clear()


def test_a_context_hides_tensors_alone_and_keeps_what_is_no_cache():
    module, one = Blocks(), torch.zeros(1)
    RAMPS[3] = one
    try:
        with uncached(module) as hidden:
            assert hidden.any and RAMPS == {} and 8 not in SCALES
            RAMPS.update({3: torch.ones(1), 4: one})
            NAMES.update({"new": abs, "cached": one, 7: abs})
        assert {3: one} == RAMPS and RAMPS[3] is one and list(SCALES) == [8, 9]
        assert list(NAMES) == ["identity", "new"]
        with uncached(module, is_cold=False) as hidden:
            assert not hidden.any and {3: one} == RAMPS
    finally:
        RAMPS.clear()
        NAMES.pop("new", None)


def test_what_a_function_has_cached_has_values(monkeypatch):
    @lru_cache
    def places(number):
        return torch.arange(number)

    class Placed(Blocks):
        def training_step(self, batch, batch_idx):
            return super().training_step([batch[0][places(len(batch[0]))], batch[1]], batch_idx)

    monkeypatch.setattr(isolated_run, "_known", (0, *isolated_run._known[1:]))
    module = Placed()
    submodels = Submodels(module, BATCH)
    for use in (
        lambda: submodels.axes,
        lambda: submodels.cost(batch_size=4),
        lambda: refuted(submodels, module, BATCH),
    ):
        use()
        assert places.cache_info().currsize == 0
    assert places(4).tolist() == [0, 1, 2, 3]


def test_a_table_of_what_to_do_for_which_size_is_found():
    class Chosen(Blocks):
        def training_step(self, batch, batch_idx):
            width = self.embed(batch[0]).shape[-1]
            return {16: 1.0, 8: 1.0, 1: 1.0}[width] * super().training_step(batch, batch_idx)

    submodels = Submodels(Chosen(), BATCH)
    assert submodels.problem is None and "blocks.1.heads" in submodels.axes
