"""Both ends of a compressed wire, against slow references; and whole simulated runs."""

from __future__ import annotations

import math
import socket
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import raafl
from model_zoo import MLP
from raafl.algorithms import fed_avg, fed_buff
from raafl.commands.replay import replay
from raafl.compression.compressors import Compress, TopK, Unsound
from raafl.compression.plan import CompressionPlan
from raafl.compression.streams import COPY, LIVES, RESIDUAL, CompressedSnapshots, Down, Up
from raafl.config.options import Waits
from raafl.core import saving
from raafl.core.local import Local
from raafl.core.types import Assignment, ClientInfo, Joined, Update, client_to_json
from raafl.errors import BadInput
from raafl.parts.merge.mean import Deltas, Mean
from raafl.parts.protect.privacy import Privacy
from raafl.parts.protect.robust import Guard
from raafl.runtime.inbox import Inbox
from raafl.runtime.session import Session
from raafl.runtime.transport import Kind, Message
from raafl.runtime.transport.tcp import TcpPair
from raafl.submodel import FULL, FlatTensors, Spec, Submodels
from tests.crashed import crashed, simulated
from tests.federation import SPEEDS, experiment, finish, unequal
from tests.tools import coordinator_for

CONFIG = str(Path(__file__).parents[2] / "configs" / "quickstart.yaml")


def model() -> Submodels:
    return Submodels(MLP(3, (4,), 2))


def plan_of(down="none", up="none", top_k=0.25, merge=None) -> CompressionPlan:
    made = CompressionPlan.of(model(), Compress(down, up, top_k), (merge or Mean()).sends, Local())
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
    client, server = Up(made), Up(made)
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
        update = server.unpack(spec, wire, received).buffers[torch.float32]
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
    client = Up(made)
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
    client = Up(made)
    change = drawn(made.submodels.layout(FULL, "trained"), seed=1)
    wire = client.pack(task(), change, change)
    assert Up(made).unpack(FULL, wire, None).fingerprint() == change.fingerprint() and client.residual is None


@pytest.mark.parametrize("name", ["bf16", "int8", "top_k"])
def test_an_update_that_is_not_finite_is_refused_and_forgotten(name):
    made = plan_of(up=name)
    client = Up(made)
    received = drawn(made.submodels.layout(FULL, "sent"), seed=1)
    for number, bad in enumerate([0.0, math.nan, 0.0], start=1):
        trained = drawn(made.submodels.layout(FULL, "trained"), seed=2)
        trained.buffers[torch.float32][5] += bad
        wire = client.pack(task(number), trained, received)
        if math.isnan(bad):
            with pytest.raises(Unsound, match="non-finite"):
                Up(made).unpack(FULL, wire, received)
            assert client.residual is None
        else:
            assert Up(made).unpack(FULL, wire, received).is_finite()


def test_values_that_overflow_are_refused():
    made = plan_of(up="bf16")
    received, trained = (FlatTensors.zeros(made.submodels.layout(FULL, part)) for part in ("sent", "trained"))
    received.buffers[torch.float32].fill_(3e38)
    trained.buffers[torch.float32].fill_(-3e38)
    with pytest.raises(Unsound, match="non-finite"):
        Up(made).unpack(FULL, Up(made).pack(task(), trained, received), received)


# ---- down ----


def test_bf16_down_by_hand():
    made = plan_of(down="bf16")
    values = FlatTensors.zeros(made.submodels.layout(FULL, "sent"))
    values.buffers[torch.float32].fill_(1 + 2**-9)
    end = Down(made)
    assert torch.equal(end.unpack(FULL, end.pack(task(), values)).buffers[torch.float32], torch.ones(26))


def test_top_k_down_is_whole_at_first_and_then_what_has_changed():
    made = plan_of(down="top_k", top_k=0.1)
    server, client = Down(made), Down(made)
    values = drawn(made.submodels.layout(FULL, "sent"), seed=1)
    flat = values.buffers[torch.float32]

    def carry(number, spec=FULL):
        small = made.submodels.plan(spec, "sent").gather(values)
        expected = client.layout(spec)
        wire = server.pack(task(number, spec), small)
        assert wire.layout == expected
        theirs, ours = client.unpack(spec, wire), server.unpack(spec, wire)
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


def test_a_client_that_has_a_part_is_sent_the_rest_whole():
    made = plan_of(down="top_k")
    end = Down(made)
    values = drawn(made.submodels.layout(FULL, "sent"), seed=1)
    for spec, is_whole in [(cut(), True), (cut(), False), (FULL, True), (FULL, False)]:
        small = made.submodels.plan(spec, "sent").gather(values)
        wire = end.pack(task(1, spec), small)
        assert (wire.layout == made.submodels.layout(spec, "sent")) is is_whole
        assert end.unpack(spec, wire).fingerprint() == small.fingerprint()


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
    assert plan_of(up="top_k").cost(plain, FULL).peak_bytes - plain.peak_bytes == held_by(Up) == 48 + 4 * full
    assert plan_of(down="top_k").cost(plain, FULL).peak_bytes - plain.peak_bytes == 48 + 2 * full
    (note,) = plan_of(down="top_k").notes(num_clients=1)
    assert note.endswith(f"up to {held_by(Down):,} bytes more, for 1 clients at work")


def held_by(end):
    """What one end holds after a few tasks, beside what it is given."""
    made = plan_of(**{end.__name__.lower(): "top_k"})
    one, values = end(made), drawn(made.submodels.layout(FULL, "sent"), seed=1)
    for number in range(1, 4):
        values.buffers[torch.float32].add_(1.0)
        if end is Down:
            one.unpack(FULL, one.pack(task(number), values))
        else:
            one.pack(task(number), values, FlatTensors.zeros(values.layout))
    scratch = sum(flat.num_bytes for kept in one._scratch._kept.values() for flat in kept.values())
    return scratch + (one.copy if end is Down else one.residual).num_bytes


def test_a_simulation_keeps_both_ends_with_what_else_is_kept_for_a_client_until_it_comes_back():
    coordinator = coordinator_for(fed_avg())
    plan = CompressionPlan.of(coordinator.state.submodels, Compress("top_k", "top_k"), "values", Local())
    coordinator.fleet = replace(coordinator.fleet, plan=plan)
    carried, kept = CompressedSnapshots(coordinator), coordinator.state.clients
    layout = coordinator.payload.layout(FULL, "trained")

    def answered(one: Assignment) -> None:
        received = carried.cut(one)
        carried.returned(one, Update(one.id, 1, one.incarnation, drawn(layout, one.id), 1), received)

    answered(task(1))
    sent, left = kept.find(COPY, 1), kept.find(RESIDUAL, 1)
    assert sent is not None and left is not None and coordinator.state.memory[LIVES][1][0] == 0
    again = saving.from_plain(saving.to_plain(kept.kept))
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
    update = Up(made).unpack(FULL, Up(made).pack(task(), values, received), received)
    for name in ("1.running_mean", "1.running_var"):
        assert torch.equal(update[name], values[name])


# ---- a session ----


def test_a_session_refuses_places_that_cannot_be_and_goes_on():
    made = plan_of(up="top_k", merge=Deltas())
    submodels, inbox = made.submodels, Inbox()
    ours, theirs = socket.socketpair()
    times = Waits(join_s=5.0, task_s=20.0, idle_s=20.0, stop_s=2.0)
    session = Session(4, 0, lambda: TcpPair(ours, 20.0), submodels, inbox, times, lambda d, u: None, plan=made)
    session.start()
    pair = TcpPair(theirs, 20.0)
    try:
        info = ClientInfo(4, 17)
        hello = {"raafl": raafl.__version__, "model": submodels.layout().fingerprint, **client_to_json(info)}
        pair.send(Message(Kind.HELLO, 0, 0, hello, None))
        pair.recv(lambda *_: None, 20.0)
        assert inbox.get(20.0) == Joined(info)
        values = drawn(submodels.layout(FULL, "sent"), seed=1)
        for number, swap, refusal in [(1, True, "bad-indices"), (2, False, None)]:
            session.assign(task(number, client=4), values)
            message = pair.recv(lambda *_: FlatTensors.empty(submodels.layout(FULL, "sent")), 20.0)
            assert message.tensors.fingerprint() == values.fingerprint()
            change = drawn(submodels.layout(FULL, "trained"), seed=number)
            wire = Up(made).pack(task(number, client=4), change, values)
            if swap:
                wire["torch.float32 places"].copy_(wire["torch.float32 places"].flip(0))
            meta = {"num_samples": 17, "num_steps": 2, "metrics": {}}
            pair.send(Message(Kind.UPDATE, number, 0, meta, wire))
            update = inbox.get(20.0).update
            assert update.refusal == refusal
            kept = int((update.tensors.buffers[torch.float32] != 0).sum())
            assert kept == (0 if swap else TopK(share=0.25).count(26))
    finally:
        pair.close()
        session.stop("over")
        session.join(timeout=8)
    assert not session.is_alive()


# ---- whole runs ----


def test_none_is_no_section(tmp_path):
    plain = finish(experiment(tmp_path / "plain", fed_avg()))
    none = finish(experiment(tmp_path / "none", fed_avg(), compress=Compress()))
    assert none.digest == plain.digest and none.journal() == plain.journal()


def test_all_of_top_k_is_none(tmp_path):
    """Bit for bit where differences are merged; but for rounding where the server adds them to what it had sent."""
    for name, make, exactly in [("buff", fed_buff, True), ("avg", fed_avg, False)]:
        devices = unequal(SPEEDS, up_bytes_per_s=1e12)  # more bytes travel, in no time: the order stays
        plain = finish(experiment(tmp_path / f"{name} plain", make(), devices=devices))
        whole = finish(
            experiment(tmp_path / f"{name} all", make(), devices=devices, compress=Compress(up="top_k", top_k=1.0))
        )
        assert (whole.digest == plain.digest) or not exactly
        assert whole.summary["final"]["loss"] == pytest.approx(plain.summary["final"]["loss"], rel=1e-5)


def test_what_each_side_of_a_slow_run_was_charged(tmp_path):
    """Bytes and seconds of a first task of top_k down, which travels whole, and of a second, by hand."""
    link = {"down_bytes_per_s": 1000.0, "latency_s": 0.0}
    run = finish(
        experiment(
            tmp_path / "run", fed_avg(), clients=1, devices=unequal([1e12], **link), max_updates=2,
            compress=Compress("top_k", "none", 0.1),
        )
    )  # fmt: skip
    rows, params = run.rows(), 64 * 24 + 24 + 24 * 10 + 10
    count = round(0.1 * params)
    assert [int(row["bytes_down"]) for row in rows] == [4 * params, 8 * count]
    assert run.summary["bytes_down"] == 4 * params + 8 * count
    up_s = 4 * params / 5e5
    spent = [float(row["train_s"]) - up_s for row in rows]
    assert spent == pytest.approx([4 * params / 1000, 8 * count / 1000], rel=1e-3)


FLAKY = (
    '[{"name": "steady", "flops_per_s": 1e8}, {"name": "flaky", "flops_per_s": 5e7,'
    ' "availability": [[0.0, 0.3]], "period_s": 0.5}]'
)
BOTH = ["--compress.down=top_k", "--compress.up=top_k", "--compress.top_k=0.2", f"--devices={FLAKY}"]


@pytest.mark.parametrize("options", [BOTH, ["--compress.down=bf16", "--compress.up=int8"]], ids=["top_k", "bf16, int8"])
def test_a_run_that_crashed_ends_as_if_it_had_not_and_replays(tmp_path, monkeypatch, options):
    options = ["--config", CONFIG, *options, "--max_updates=24", "--checkpoint_every=4"]
    whole = simulated(*options, f"--output={tmp_path / 'whole'}")
    crashed(monkeypatch, 14, *options, f"--output={tmp_path / 'cut'}")
    resumed = simulated("--resume", str(tmp_path / "cut"))
    same = set(whole) - {"wall_s"}
    assert {key: resumed[key] for key in same} == {key: whole[key] for key in same}
    result = replay(tmp_path / "cut")
    assert result["equal"] is True and result["parted_at"] is None
    assert (whole["updates_lost"] > 0) is ("flaky" in str(options))


@pytest.mark.parametrize(
    "fields",
    [
        {"guard": Guard(clip_norm=0.05)},
        {"guard": Guard(combine="median")},
        {"privacy": Privacy(clip_norm=0.1, noise_multiplier=0.0)},
    ],
    ids=["clipped", "median", "private"],
)
def test_protected_merges_go_by_what_was_received(tmp_path, fields):
    compress = Compress("bf16", "top_k", 0.2)
    run = finish(experiment(tmp_path / "run", fed_avg(), compress=compress, **fields))
    bare = finish(experiment(tmp_path / "bare", fed_avg(), compress=compress))
    assert run.summary["updates_merged"] == 12 and run.summary["bytes_up"] == bare.summary["bytes_up"]
    assert run.digest != bare.digest


def test_what_is_wrong_is_found_before_the_run(tmp_path):
    class Masks(Local):
        up_as = "bits"

    masks = replace(fed_avg(), local=Masks())
    with pytest.raises(BadInput, match=r"compress\.up is 'int8', but this algorithm's updates travel as bits"):
        experiment(tmp_path / "run", masks, compress=Compress(up="int8")).check()
    with pytest.raises(BadInput, match=r"compress\.down"):
        simulated("--config", CONFIG, "--compress.down=int4", f"--output={tmp_path / 'run'}")
    made = CompressionPlan.of(model(), Compress(), "values", Masks())
    assert made is not None and not made.adds_back and made.layout(FULL, "trained").num_bytes == 2 + 1 + 1 + 1
