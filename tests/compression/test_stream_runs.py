"""Compression in sessions and in whole runs."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path
from threading import Thread

import pytest
import torch
from torch.utils.data import TensorDataset

from raafl.algorithms import diloco, fed_avg, fed_buff
from raafl.compression.plan import Compress, CompressionPlan, TopK
from raafl.compression.streams import UplinkCodec
from raafl.config.options import Timeouts
from raafl.core.algorithm import Training
from raafl.core.local import Local, Traits
from raafl.core.options import Guard
from raafl.core.saving import client_to_json
from raafl.core.types import ClientInfo, Joined
from raafl.data.federated import ClientData
from raafl.errors import BadInput
from raafl.local.train import LocalTrainer
from raafl.parts.merge.deltas import Deltas
from raafl.parts.protect.privacy import Privacy
from raafl.rules import CURRENT
from raafl.runfolder import checkpoint_reader
from raafl.runtime.client.worker import Client, ClientExtension, TaskRefused
from raafl.runtime.identity import PROTOCOL
from raafl.runtime.replay import replay
from raafl.runtime.server.link import Inbox
from raafl.runtime.server.session_loop import LoopSession
from raafl.runtime.server.session_protocol import SessionSetup
from raafl.submodel import FULL, FlatTensors
from raafl.transport import Kind, Message
from raafl.transport.tcp.connection import TcpConnection
from tests.compression.ends import drawn, model, plan_of, task
from tests.helpers.crash import crashed, simulated
from tests.helpers.small_runs import SPEEDS, experiment, finish, unequal
from tests.runtime.server.sessions import LOOP

CONFIG = str(Path(__file__).parents[2] / "configs" / "quickstart.yaml")


# ---- a session ----


def test_a_session_refuses_places_that_cannot_be_and_goes_on():
    made = plan_of(up="top_k", merge=Deltas())
    submodels, inbox = made.submodels, Inbox()
    ours, theirs = socket.socketpair()
    times = Timeouts(join_s=5.0, task_s=20.0, idle_s=20.0, stop_s=2.0)
    setup = SessionSetup(submodels, times, plan=made)
    session = LoopSession(LOOP, 4, 0, TcpConnection(ours, 20.0), setup, inbox)
    session.start()
    pair = TcpConnection(theirs, 20.0)
    try:
        info = ClientInfo(4, 17)
        hello = {"protocol": PROTOCOL, "model": submodels.layout().fingerprint, **client_to_json(info)}
        pair.send(Message(Kind.HELLO, 0, 0, hello, None))
        pair.recv(lambda *_: None, 20.0)
        assert inbox.get(20.0) == Joined(info)
        values = drawn(submodels.layout(FULL, "sent"), seed=1)
        for number, swap, refusal in [(1, True, "bad-indices"), (2, False, None)]:
            session.assign(task(number, client=4), values)
            message = pair.recv(lambda *_: FlatTensors.empty(submodels.layout(FULL, "sent")), 20.0)
            assert message.tensors.fingerprint() == values.fingerprint()
            change = drawn(submodels.layout(FULL, "trained"), seed=number)
            wire = UplinkCodec(made).pack(task(number, client=4), change, values)
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


class Picky(ClientExtension):
    """Refuses the first and the third task, as the policy of a site does, and keeps the values from which others start."""

    starts: dict[int, FlatTensors]

    def before(self, assignment):
        if assignment.id in (1, 3):
            raise TaskRefused("there is no consent to it", "go on")

    def after(self, work):
        self.starts[work.assignment.id] = work.received.clone()


def test_both_ends_know_the_same_values_after_a_task_that_a_site_has_refused():
    """A task of top_k brings what has changed since the one before, even if nobody has trained that one."""
    made, inbox, Picky.starts, known = plan_of(down="top_k"), Inbox(), {}, {}
    ours, theirs = socket.socketpair()
    times = Timeouts(join_s=20.0, task_s=20.0, idle_s=20.0, stop_s=2.0)
    session = LoopSession(LOOP, 4, 0, TcpConnection(ours, 20.0), SessionSetup(made.submodels, times, plan=made), inbox)
    trainer = LocalTrainer(made.submodels, Local(), "values", Training(num_epochs=1, batch_size=1))
    data = ClientData(TensorDataset(torch.ones(2, 3), torch.tensor([0, 1])), torch.arange(2), 1)
    pair, info = TcpConnection(theirs, 20.0), ClientInfo(4, 2)
    client = Client(info, pair, made.submodels, trainer, data, times, plan=made, extensions=[Picky])
    worker = Thread(target=client.run, daemon=True)
    session.start()
    worker.start()
    try:
        assert inbox.get(20.0) == Joined(info)
        for number in (1, 2, 3, 4):
            session.assign(task(number, client=4), drawn(made.submodels.layout(FULL, "sent"), seed=number))
            assert inbox.get(20.0).update.refusal == ("policy" if number in (1, 3) else None)
            known[number] = session.protocol.down.copy.clone()
    finally:
        session.stop("over")
        session.join(timeout=8)
        worker.join(timeout=8)
        pair.close()
    assert list(Picky.starts) == [2, 4] and not worker.is_alive()
    for number, start in Picky.starts.items():
        assert start.fingerprint() == known[number].fingerprint()


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
            tmp_path / "run",
            fed_avg(),
            clients=1,
            devices=unequal([1e12], **link),
            max_updates=2,
            compress=Compress("top_k", "none", 0.1),
        )
    )
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


@pytest.mark.long(
    "tests/numerics/test_precision_runs.py::test_what_waits_in_single_precision_survives_a_crash_and_replays"
)
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
        traits = Traits(up_as="bits")

    masks = replace(fed_avg(), local=Masks())
    with pytest.raises(BadInput, match=r"compress\.up is 'int8', but this algorithm's updates travel as bits"):
        experiment(tmp_path / "run", masks, compress=Compress(up="int8")).check()
    with pytest.raises(BadInput, match=r"compress\.down"):
        simulated("--config", CONFIG, "--compress.down=int4", f"--output={tmp_path / 'run'}")
    made = CompressionPlan.of(model(), Compress(), "values", Masks())
    assert made is not None and not made.adds_back and made.layout(FULL, "trained").num_bytes == 2 + 1 + 1 + 1


@pytest.mark.parametrize(("revision", "is_same"), [(6, False), (CURRENT, True)])
def test_of_values_and_of_differences_top_k_down_makes_the_same_model(tmp_path, revision, is_same):
    """In rounds the mean of x + d_n is x plus the mean of d_n, whatever part of x the clients have.

    By earlier rules a client's values lacked what top_k had left out, which a mean of values took back.
    """
    fields = {"compress": Compress("top_k", "none", 0.1), "max_updates": 40, "rules": revision}
    methods = {"values": fed_avg(by_samples=False), "differences": diloco(outer_lr=1.0, outer_momentum=0.0)}
    runs = [finish(experiment(tmp_path / name, one, **fields)) for name, one in methods.items()]
    values, others = (checkpoint_reader.load(run.folder).values for run in runs)
    assert all(torch.allclose(tensor, others[name], atol=1e-5) for name, tensor in values.items()) == is_same
