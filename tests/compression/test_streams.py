"""Both ends of a compressed wire, against slow references; and whole simulated runs."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from raafl.algorithms import fed_avg
from raafl.compression.plan import Compress, CompressionPlan, InvalidPayload
from raafl.compression.streams import COPY, LAGS, RESIDUAL, CompressedSnapshots, DownlinkCodec, LastSent, UplinkCodec
from raafl.core import restoring, saving
from raafl.core.local import Local
from raafl.core.state import ClientState
from raafl.core.types import Assignment, Update
from raafl.parts.merge.deltas import Deltas
from raafl.parts.merge.mean import Mean
from raafl.submodel import FULL, FlatTensors, Submodels
from tests.compression.ends import cut, drawn, model, plan_of, task
from tests.helpers.coordinators import coordinator_for


def whole_of(spec, flat, submodels) -> dict[str, torch.Tensor]:
    """The tensors of a submodel at their places in the whole model, 0 elsewhere, through an index of every element."""
    full = FlatTensors.zeros(submodels.layout())
    submodels.plan(spec, "trained").scatter_(full, flat)
    return {name: full[name].clone() for name, _ in flat.items()}


# ---- up ----


@pytest.mark.parametrize("merge", [Mean(), Deltas()], ids=["values", "delta"])
@pytest.mark.parametrize("spec", [FULL, "cut"])
def test_what_top_k_leaves_out_comes_later(merge, spec):
    """At any time the updates as received and the residual make the updates as they were."""
    spec = cut() if spec == "cut" else FULL
    made = plan_of(up="top_k", merge=merge)
    client, server = UplinkCodec(made), UplinkCodec(made)
    layout = made.submodels.layout(spec, "trained")
    total, arrived = torch.zeros(sum(layout.numel.values())), torch.zeros(sum(layout.numel.values()))
    for number in range(1, 6):
        received = drawn(made.submodels.layout(spec, "sent"), seed=number)
        change = drawn(layout, seed=50 + number).buffers[torch.float32]
        base = received.buffers[torch.float32][: len(change)]
        trained = FlatTensors(layout, {torch.float32: base + change if merge.sends == "values" else change.clone()})
        before = trained.clone()
        wire = client.pack(task(number, spec), trained, received)
        assert wire.layout == made.layout(spec, "trained") and trained.fingerprint() == before.fingerprint()
        update = server.unpack(task(spec=spec), wire, received).buffers[torch.float32]
        got = update - base if merge.sends == "values" else update
        count = max(1, round(0.25 * len(change)))
        assert int((got.abs() > 1e-6).sum()) <= count == len(wire["torch.float32 places"])
        total, arrived = total + change, arrived + got
        left = client.residual
        assert left is not None
        plan = made.plan(spec, "trained")
        torch.testing.assert_close(arrived + plan.gather(left).buffers[torch.float32], total, rtol=0, atol=1e-5)
    assert server.residual is None


def test_residuals_of_different_submodels_share_what_they_share():
    made = plan_of(up="top_k", top_k=0.01, merge=Deltas())  # one element travels
    client = UplinkCodec(made)
    small, full = made.submodels.layout(cut(), "trained"), made.submodels.layout(FULL, "trained")
    ones = FlatTensors.zeros(small)
    ones.buffers[torch.float32].fill_(1.0)
    client.pack(task(1, cut()), ones, ones)
    left = whole_of(cut(), made.plan(cut(), "trained").gather(client.residual), made.submodels)
    assert sum(float(tensor.sum()) for tensor in left.values()) == sum(small.numel.values()) - 1
    zeros = FlatTensors.zeros(full)
    wire = client.pack(task(2), zeros, zeros)  # nothing new: what travels was left out of the submodel
    place, value = int(wire["torch.float32 places"][0]), float(wire["torch.float32 elements"][0])
    flat = torch.cat([left.get(entry.name, torch.zeros(entry.shape)).reshape(-1) for entry in full.entries])
    assert value == 1.0 == float(flat[place])


def test_all_of_top_k_leaves_no_residual_and_changes_no_bit():
    made = plan_of(up="top_k", top_k=1.0, merge=Deltas())
    client = UplinkCodec(made)
    change = drawn(made.submodels.layout(FULL, "trained"), seed=1)
    wire = client.pack(task(), change, change)
    assert (
        UplinkCodec(made).unpack(task(), wire, None).fingerprint() == change.fingerprint() and client.residual is None
    )


@pytest.mark.parametrize("name", ["bf16", "int8", "top_k"])
def test_an_update_that_is_not_finite_is_refused_and_forgotten(name):
    made = plan_of(up=name)
    client = UplinkCodec(made)
    received = drawn(made.submodels.layout(FULL, "sent"), seed=1)
    for number, bad in enumerate([0.0, math.nan, 0.0], start=1):
        trained = drawn(made.submodels.layout(FULL, "trained"), seed=2)
        trained.buffers[torch.float32][5] += bad
        wire = client.pack(task(number), trained, received)
        if math.isnan(bad):
            with pytest.raises(InvalidPayload, match="non-finite"):
                UplinkCodec(made).unpack(task(), wire, received)
            assert client.residual is None
        else:
            assert UplinkCodec(made).unpack(task(), wire, received).is_finite()


def test_values_that_overflow_are_refused():
    made = plan_of(up="bf16")
    received, trained = (FlatTensors.zeros(made.submodels.layout(FULL, part)) for part in ("sent", "trained"))
    received.buffers[torch.float32].fill_(3e38)
    trained.buffers[torch.float32].fill_(-3e38)
    with pytest.raises(InvalidPayload, match="non-finite"):
        UplinkCodec(made).unpack(task(), UplinkCodec(made).pack(task(), trained, received), received)


# ---- down ----


def test_bf16_down_by_hand():
    made = plan_of(down="bf16")
    values = FlatTensors.zeros(made.submodels.layout(FULL, "sent"))
    values.buffers[torch.float32].fill_(1 + 2**-9)
    end = DownlinkCodec(made)
    assert torch.equal(end.unpack(task(), end.pack(task(), values)).buffers[torch.float32], torch.ones(26))


def test_top_k_down_is_whole_at_first_and_then_what_has_changed():
    made = plan_of(down="top_k", top_k=0.1)
    server, client = DownlinkCodec(made), DownlinkCodec(made)
    values = drawn(made.submodels.layout(FULL, "sent"), seed=1)
    flat = values.buffers[torch.float32]

    def carry(number, spec=FULL):
        small = made.submodels.plan(spec, "sent").gather(values)
        expected = client.layout(task(number, spec))
        wire = server.pack(task(number, spec), small)
        assert wire.layout == expected
        theirs, ours = client.unpack(task(spec=spec), wire), server.unpack(task(spec=spec), wire)
        assert theirs.fingerprint() == ours.fingerprint()
        return wire, theirs.clone()

    wire, first = carry(1)
    assert wire.layout == made.submodels.layout(FULL, "sent") and first.fingerprint() == values.fingerprint()
    old = flat.clone()
    flat.add_(torch.arange(26) * 0.01)  # of 26 elements the three that have changed most travel: 23, 24 and 25
    wire, second = carry(2)
    assert wire["torch.float32 places"].tolist() == [23, 24, 25] and wire.num_bytes == 24
    torch.testing.assert_close(second.buffers[torch.float32], torch.cat([old[:23], flat[23:]]))
    for number in range(3, 12):  # what was left out comes later
        _, last = carry(number)
    torch.testing.assert_close(last.buffers[torch.float32], flat)
    wire, _ = carry(20, cut())  # a client that has the whole model has every submodel
    assert wire.layout == made.layout(cut(), "sent")


@pytest.mark.parametrize("merge", [Mean(), Deltas()], ids=["values", "delta"])
@pytest.mark.parametrize("up", ["none", "top_k"])
@pytest.mark.parametrize("spec", [FULL, "cut"])
def test_what_top_k_has_not_sent_yet_is_not_taken_back(merge, up, spec):
    """A client that lacks most of a change of 1 adds 2 to what it has; an update is the server's values and 2, or 2 alone.

    Two tasks are out at once, as with overlap; of a compressed update one element of 2 comes, of the others nothing.
    """
    spec = cut() if spec == "cut" else FULL
    made = plan_of(down="top_k", up=up, top_k=1e-9, merge=merge)
    kept = ClientState()
    server, taken = DownlinkCodec(made, kept=kept), UplinkCodec(made, kept=kept)
    client, back = DownlinkCodec(made), UplinkCodec(made)
    exact, at_work = drawn(made.submodels.layout(spec, "sent"), seed=1), []
    for number in (1, 2, 3):
        if number == 3:
            del at_work[0]  # the first task, which brings all values, is answered before the third is sent
        wire = server.pack(task(number, spec), exact)
        received = client.unpack(task(number, spec), wire).clone()
        server.unpack(task(number, spec), wire)
        at_work.append((number, exact.clone(), received))
        exact.buffers[torch.float32].add_(1.0)
    for number, sent, received in at_work:
        assert (sent.buffers[torch.float32] - received.buffers[torch.float32]).count_nonzero() >= len(received) - 1
        trained = received.clone()
        trained.buffers[torch.float32].add_(2.0)
        if merge.sends == "delta":
            trained.buffers[torch.float32].sub_(received.buffers[torch.float32])
        got = taken.unpack(task(number, spec), back.pack(task(number, spec), trained, received), received)
        change = got.buffers[torch.float32] - (sent.buffers[torch.float32] if merge.sends == "values" else 0.0)
        wanted = [2.0] * change.numel() if up == "none" else [0.0] * (change.numel() - 1)
        # the residual of the first update is part of the second
        assert change.sort().values[: len(wanted)].tolist() == pytest.approx(wanted, abs=1e-5)
    assert not any(kept.values.get(name) for name in LAGS)


def test_a_client_that_has_a_part_is_sent_the_rest_whole():
    made = plan_of(down="top_k")
    end = DownlinkCodec(made)
    values = drawn(made.submodels.layout(FULL, "sent"), seed=1)
    for spec, is_whole in [(cut(), True), (cut(), False), (FULL, True), (FULL, False)]:
        small = made.submodels.plan(spec, "sent").gather(values)
        wire = end.pack(task(1, spec), small)
        assert (wire.layout == made.submodels.layout(spec, "sent")) is is_whole
        assert end.unpack(task(spec=spec), wire).fingerprint() == small.fingerprint()


# ---- costs ----


def test_predicted_bytes_are_those_that_travel():
    plain = model()
    for spec in (FULL, cut()):
        cost = plain.cost(spec)
        params = cost.up_bytes // 4
        found = plan_of("bf16", "int8").cost(cost, spec)
        assert (found.down_bytes, found.up_bytes) == (2 * params, params + 4 * 4)  # a scale to each of four tensors
        assert found.peak_bytes == cost.peak_bytes + 2 * params + (params + 16) + 4 * params
        count = max(1, round(0.25 * params))
        assert plan_of(up="top_k").cost(cost, spec).up_bytes == 8 * count


def test_what_the_user_is_told():
    (note,) = plan_of("bf16", "top_k").notes(num_clients=10)
    # what is sent (52), the decoded model for the sum, and the decoded update: 26 elements each
    assert note == (
        "compress: down BFloat16, 52 bytes in the place of 104; up TopK, 48 bytes in the place of 104 for the whole model; "
        "the server holds up to 2,600 bytes more, for 10 clients at work"
    )


def test_what_top_k_holds_at_either_end_is_predicted():
    """Every element of 26 is 4 bytes; of a quarter, 6, go elements and places: 48 bytes."""
    plain, full = model().cost(FULL), 4 * 26
    assert plan_of(up="top_k").cost(plain, FULL).peak_bytes - plain.peak_bytes == held_by(UplinkCodec) == 48 + 4 * full
    assert plan_of(down="top_k").cost(plain, FULL).peak_bytes - plain.peak_bytes == 48 + 2 * full
    (note,) = plan_of(down="top_k").notes(num_clients=1)
    assert note.endswith(f"up to {held_by(DownlinkCodec):,} bytes more, for 1 client at work")


def held_by(end):
    """What one end holds after a few tasks, beside what it is given."""
    made = plan_of(**{"down" if end is DownlinkCodec else "up": "top_k"})
    one, values = end(made), drawn(made.submodels.layout(FULL, "sent"), seed=1)
    for number in range(1, 4):
        values.buffers[torch.float32].add_(1.0)
        if end is DownlinkCodec:
            one.unpack(task(), one.pack(task(number), values))
        else:
            one.pack(task(number), values, FlatTensors.zeros(values.layout))
    scratch = sum(flat.num_bytes for kept in one._scratch._kept.values() for flat in kept.values())
    return scratch + sum(flat.num_bytes for clients in one._kept.values.values() for flat in clients.values())


def test_a_simulation_keeps_both_ends_with_what_else_is_kept_for_a_client_until_it_comes_back():
    coordinator = coordinator_for(fed_avg())
    plan = CompressionPlan.of(coordinator.state.submodels, Compress("top_k", "top_k"), "values", Local())
    coordinator.change(fleet=replace(coordinator.fleet, plan=plan))
    carried, kept = CompressedSnapshots(coordinator), coordinator.state.clients
    layout = coordinator.payload.layout(FULL, "trained")

    def answered(one: Assignment) -> None:
        received = carried.cut(one)
        carried.returned(one, Update(one.id, 1, one.incarnation, drawn(layout, one.id), 1), received)

    answered(task(1))
    sent, left = kept.find(COPY, 1), kept.find(RESIDUAL, 1)
    assert sent is not None and left is not None and coordinator.state.memory.of(LastSent).value[1][0] == 0
    again = restoring.from_plain(saving.to_plain(kept.values))
    assert again[COPY][1].fingerprint() == sent.fingerprint() and again[RESIDUAL][1].fingerprint() == left.fingerprint()
    carried.cut(task(2, incarnation=1))
    assert kept.find(COPY, 1) is not sent and kept.find(RESIDUAL, 1) is None
    assert carried.more_bytes(task(2, incarnation=1)) == layout.num_bytes - carried._plan.layout(FULL, "sent").num_bytes


def test_nothing_is_made_of_no_compressor():
    assert CompressionPlan.of(model(), Compress(), "values", Local()) is None


def test_statistics_travel_as_they_are():
    net = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    made = CompressionPlan.of(Submodels(net), Compress("int8", "top_k", 0.5), "values", Local())
    values = drawn(made.submodels.layout(FULL, "trained"), seed=1)
    received = FlatTensors.zeros(made.submodels.layout(FULL, "sent"))
    received["1.running_var"].fill_(5.0)
    update = UplinkCodec(made).unpack(task(), UplinkCodec(made).pack(task(), values, received), received)
    for name in ("1.running_mean", "1.running_var"):
        assert torch.equal(update[name], values[name])
