"""The lowest blocks, with exits up to their top, and the leading units."""

from __future__ import annotations

import random

import pytest
import torch

pytest.importorskip("transformers")

from model_zoo import MLP, ViT
from raafl.core.algorithm import SelectContext, Training
from raafl.core.state import GlobalState
from raafl.core.types import ClientInfo
from raafl.devices.profiles import Profile
from raafl.errors import BadInput
from raafl.parts.local.distilled import with_every_exit
from raafl.parts.select.windows import LeadingBlocks
from raafl.submodel import Submodels


def fleet(module, batch, *clients):
    submodels = Submodels(module, batch)
    state = GlobalState(submodels, submodels.state(module))
    context = SelectContext(state, {}, random.Random(0), Training(), 2)
    return context.of(clients)


@pytest.fixture(scope="module")
def vit():
    import model_zoo.vit

    model_zoo.vit.SIZES["four"] = (4, 16, 24, 2)
    torch.manual_seed(0)
    model = with_every_exit(ViT("four", 8, 4, num_classes=5))
    del model_zoo.vit.SIZES["four"]
    return model


BATCH = (torch.zeros(2, 3, 8, 8), torch.zeros(2, dtype=torch.int64))


def test_each_client_gets_its_share_of_the_blocks_and_the_exits_below(vit):
    clients = [ClientInfo(i, 1) for i in range(1, 5)]
    context, select = fleet(vit, BATCH, *clients), LeadingBlocks([0.25, 0.5, 0.6, 1.0])
    specs = [select(client, context).spec for client in clients]
    (stack,) = context.state.submodels.stacks
    assert [dict(spec.blocks).get(stack) for spec in specs] == [range(1), range(2), range(3), None]
    assert [spec.exits for spec in specs] == [
        ("model.exit1",),
        ("model.exit1", "model.exit2"),
        ("model.exit1", "model.exit2", "model.exit3"),
        None,
    ]
    sizes = [context.cost(spec).params for spec in specs]
    assert sizes == sorted(sizes) and len(set(sizes)) == 4
    assert select(clients[0], context).region == 1
    assert select.check(context) == []


def test_width_is_cut_in_the_present_blocks_alone(vit):
    context = fleet(vit, BATCH, ClientInfo(1, 1))
    spec = LeadingBlocks(0.5, 0.5)(ClientInfo(1, 1), context).spec
    submodels = context.state.submodels
    for axis, units in spec.kept:
        assert list(units) == list(range(-(-submodels.axes[axis].size // 2)))
    blocks = {
        name.split("layers.")[1][0]
        for axis, _ in spec.kept
        for m in submodels.axes[axis].members
        for name in [m.name]
        if "layers." in name
    }
    assert blocks == {"0", "1"}
    assert submodels.shrink(spec, device="meta")


def test_a_client_with_little_memory_gets_fewer_blocks_and_one_with_too_little_an_error(vit):
    context = fleet(vit, BATCH)
    select = LeadingBlocks()
    needs = [context.cost(select.spec(context.state.submodels, num, 1.0)).peak_bytes for num in range(1, 5)]
    one = ClientInfo(1, 1, Profile(memory_bytes=needs[1]))
    assert dict(select(one, context).spec.blocks).popitem()[1] == range(2)
    small = ClientInfo(2, 1, Profile(memory_bytes=needs[0] - 1))
    assert select.check(context.of([small]))[0].startswith("client 2: memory_bytes is ")
    with pytest.raises(BadInput, match="a rate in rates is 0"):
        LeadingBlocks(0.0)


def test_a_model_without_blocks_is_cut_in_width_alone():
    context = fleet(MLP(3, (4,), 2), (torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64)), ClientInfo(1, 1))
    assert str(LeadingBlocks(0.25, 0.5)(ClientInfo(1, 1), context).spec).endswith("[0:2]")
    assert LeadingBlocks(0.25)(ClientInfo(1, 1), context.of(context.clients.values())).spec.is_full
    assert LeadingBlocks(0.25).notes(context)[0].startswith("the model has no stack of blocks")
