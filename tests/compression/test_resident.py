"""A payload that stays on the client: what travels first and then, and what each end keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from raafl.compression.plan import CompressionPlan
from raafl.compression.streams import RESIDENT, DownlinkCodec, UplinkCodec
from raafl.core.local import Local, Traits
from raafl.core.options import Compress
from raafl.core.state import ClientState
from raafl.submodel import FULL, FlatTensors
from tests.compression.ends import cut, drawn, model, task


@dataclass(frozen=True)
class Halves(Local):
    """The last layer's tensors travel; a bundle of numbers stays."""

    traits: ClassVar[Traits] = Traits(resident=True)
    down: ClassVar[tuple[str, ...]] = ("own",)
    up: ClassVar[tuple[str, ...]] = ("own",)

    def travels(self, submodels, extra, way):
        return frozenset(name for name in submodels.parameter_names if name.startswith("layers.3"))


def ends(down="none", up="none"):
    plan = CompressionPlan.of(model(), Compress(down, up), "delta", Halves())
    kept = ClientState()
    return (
        plan,
        (DownlinkCodec(plan), UplinkCodec(plan)),
        (DownlinkCodec(plan, kept=kept), UplinkCodec(plan, kept=kept)),
        kept,
    )


def carry(plan, server, client, number, spec=FULL):
    """Send values of seed ``number``, train to those of seed 50 + ``number``; return what arrived at either end, and bytes."""
    now = task(number, spec)
    values = drawn(plan.submodels.layout(spec, "sent"), number)
    expected = client[0].layout(now)
    wire = server[0].pack(now, values)
    assert wire.layout == expected
    received = client[0].unpack(now, wire).clone()
    trained = drawn(plan.payload.layout(spec, "trained"), 50 + number)
    back = client[1].pack(now, trained, received)
    update = server[1].unpack(now, back, None).clone()
    return values, received, trained, update, (wire.num_bytes, back.num_bytes)


def test_the_first_task_brings_all_values_and_the_next_a_part():
    plan, server, client, kept = ends()
    values, received, trained, update, num_bytes = carry(plan, server, client, 1)
    last = ("layers.3.weight", "layers.3.bias")
    num = sum(values[name].numel() for name in last)
    assert num_bytes == (4 * 26, 4 * num) and num == 4 * 2 + 2
    assert all(torch.equal(received[name], values[name]) for name in values.layout.by_name)
    assert not received["own/layers.1.weight"].any()
    assert update.layout == plan.submodels.layout(FULL, "trained") == plan.payload.returned(FULL)
    assert torch.equal(update[last[0]], trained[last[0]]) and not update["layers.1.weight"].any()

    new, again, _, _, num_bytes = carry(plan, server, client, 2)
    assert num_bytes == (4 * num, 4 * num)
    assert torch.equal(again[last[0]], new[last[0]]) and torch.equal(
        again["layers.1.weight"], values["layers.1.weight"]
    )
    assert torch.equal(again["own/layers.1.weight"], trained["own/layers.1.weight"])  # as the last task left it
    assert kept.find(RESIDENT, 0) is not None and server[0]._kept.find(RESIDENT, 0) is None


def test_a_client_of_another_submodel_gets_that_whole():
    plan, server, client, _ = ends()
    carry(plan, server, client, 1)
    values, received, *_, num_bytes = carry(plan, server, client, 2, cut())
    assert num_bytes[0] == values.num_bytes and all(torch.equal(received[n], values[n]) for n in values.layout.by_name)
    assert not received["own/layers.3.bias"].any()


def test_what_travels_is_compressed():
    plan, server, client, _ = ends("bf16", "int8")
    assert carry(plan, server, client, 1)[-1] == (2 * 26, 10 + 4 * 2)
    assert carry(plan, server, client, 2)[-1] == (2 * 10, 10 + 4 * 2)
    cost = plan.cost(plan.submodels.cost(FULL, 1), FULL, {"any": 1})
    assert (cost.down_bytes, cost.up_bytes) == (2 * 10, 10 + 4 * 2)
    # bundles and the copy of all of it, beside what travels and the differences
    plain = plan.submodels.cost(FULL, 1)
    assert plan.cost(plain, FULL).down_bytes == 2 * 26 and cost.peak_bytes - plain.peak_bytes >= 3 * 4 * 26


def test_a_plain_payload_is_as_it_was():
    payload = Local().payload(model())
    assert not payload.is_resident and payload.returned(FULL) == payload.layout(FULL, "trained")
    assert payload.travelling(FULL, "sent", {"up": 1}) == payload.layout(FULL, "sent")
    assert isinstance(payload.split(FlatTensors.empty(payload.layout(FULL, "sent")), FULL, "sent")[0], FlatTensors)
