"""A site's gate, check by check: what it lets pass, what it refuses, and what a client does then."""

from __future__ import annotations

import shutil
import socket
import threading
from datetime import datetime
from types import SimpleNamespace

import pytest
import torch
import yaml
from torch.utils.data import TensorDataset

from raafl.algorithms import fed_avg, split_fed
from raafl.core.algorithm import Training
from raafl.data.federated import ClientData
from raafl.errors import TaskFailed
from raafl.local.train import LocalTrainer
from raafl.runtime.client.worker import Gate
from raafl.runtime.protocol import Failed
from raafl.sites.gate import PolicyRefusal, SiteGate, model_digest, policy_of
from raafl.sites.policy import Consent, SiteBooks, SitePolicy, SitePrivacy
from raafl.submodel import FlatTensors, Submodels
from raafl.transport import Connection, Kind, Message
from raafl.transport.tcp.connection import TcpConnection
from tests.helpers.coordinators import EXAMPLE
from tests.helpers.coordinators import Line as TwoLayers
from tests.helpers.site_gates import CONFIG, DIGESTS, NOON, Clock, answer, site_gate, task


def refusal(gate, check):
    with pytest.raises(PolicyRefusal) as refused:
        check(gate)
    return refused.value.then, str(refused.value).removeprefix("the site's policy refuses ")


def check_config(**policy):
    SiteGate(SitePolicy(**policy)).check_config(yaml.safe_dump(CONFIG), DIGESTS)


@pytest.mark.parametrize(
    "policy",
    [
        {},
        {"models": ["CNN", "MLP"], "data": ["Digits"], "algorithms": ["fed_avg"]},
        {"data": ["Digits@" + "d" * 16], "algorithms": ["fed_buff", "raafl.fed_avg@" + "a" * 16]},
    ],
)
def test_a_run_of_the_named_parts_is_let_in(policy):
    check_config(**policy)


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        ({"models": ["CNN"]}, "its model is model_zoo.MLP, but policy.models allows only ['CNN']"),
        ({"models": ["mine.MLP"]}, "its model is model_zoo.MLP, but policy.models allows only ['mine.MLP']"),
        ({"models": []}, "its model is model_zoo.MLP, but policy.models allows only []"),
        ({"data": ["MNIST"]}, "its data is raafl.data.Digits, but policy.data allows only ['MNIST']"),
        (
            {"data": ["Digits@" + "0" * 16]},
            f"its data has digest {'d' * 16}, but policy.data allows only ['Digits@{'0' * 16}']",
        ),
        (
            {"algorithms": ["fed_buff"]},
            "its algorithm is raafl.fed_avg, but policy.algorithms allows only ['fed_buff']",
        ),
    ],
)
def test_a_run_of_other_parts_is_refused_before_any_is_made(policy, said):
    with pytest.raises(PolicyRefusal) as refused:
        check_config(**policy)
    assert str(refused.value) == f"the site's policy refuses this run: {said}" and refused.value.then == "end"


def test_a_model_is_bounded_in_size_and_known_by_its_digest():
    gate = site_gate(fed_avg())
    digest = model_digest(gate._trainer.submodels, DIGESTS)
    assert digest != model_digest(gate._trainer.submodels, {**DIGESTS, "model": "1" * 16})
    site_gate(fed_avg(), models=[f"MLP@{digest}"])
    with pytest.raises(PolicyRefusal, match=f"its model has digest {digest}, but policy.models allows only"):
        site_gate(fed_avg(), models=["MLP@" + "0" * 16])
    with pytest.raises(
        PolicyRefusal, match=f"has digest {digest}, but policy.models allows only .'MLP@0000000000000000'.$"
    ):
        site_gate(fed_avg(), models=["CNN", "MLP@" + "0" * 16])  # that any CNN is allowed does not allow any MLP
    site_gate(fed_avg(), models=["MLP", "MLP@" + "0" * 16])
    site_gate(fed_avg(), max_parameters=7).check_size(7)
    said = refusal(site_gate(fed_avg(), max_parameters=7), lambda gate: gate.check_size(8))
    assert said == ("end", "this run: its model has 8 parameters, but policy.max_parameters is 7")


def test_samples_behind_an_update_are_those_of_its_batches():
    """Ten samples in batches of two: the run's three steps see six of them."""
    with pytest.raises(PolicyRefusal, match=r"the client has 10 samples, but policy.min_samples is 11"):
        site_gate(fed_avg(), min_samples=11)
    gate = site_gate(fed_avg(), min_samples=7)
    assert refusal(gate, lambda gate: gate.before(task()))[0] == "go on"
    assert refusal(gate, lambda gate: gate.before(task(num_steps=3)))[1].startswith("a task: it trains on 6 samples, ")
    gate.before(task(num_steps=4))
    gate.before(task(num_epochs=1))
    assert refusal(gate, lambda gate: gate.after(task(num_epochs=1), answer(num_steps=3), None))[0] == "go on"
    update = answer(num_steps=5)
    assert gate.after(task(num_epochs=1), update, None) is update
    site_gate(fed_avg(), min_samples=10).before(task(num_steps=99))  # ten in all, however often


def test_nothing_is_trained_and_nothing_leaves_outside_the_hours():
    clock, told = Clock(), []
    gate = site_gate(fed_avg(), clock, say=told.append, hours=["thu 20:00-22:00"])
    assert refusal(gate, lambda gate: gate.before(task())) == (
        "wait",
        "a task: policy.hours allows no task until Thu 20:00",
    )
    assert gate.wait() is True
    assert (clock.at, clock.slept) == (datetime(2026, 11, 26, 20), 8 * 3600)
    assert told == ["policy.hours allows no task now: waiting until Thu 26 Nov 20:00"]
    assert gate.wait() is False
    gate.before(task())
    clock.at = datetime(2026, 11, 26, 22)
    assert refusal(gate, lambda gate: gate.after(task(), answer(), None))[0] == "wait"


class Line(Connection):
    """A connection whose every message has 400 bytes."""

    received_bytes = 400

    def send(self, message, timeout_s=None):
        return 400

    def recv(self, expect, timeout_s, *, finite=False):
        return Message(Kind.STOP)

    def close(self):
        pass


def test_the_days_bytes_end_the_work_until_midnight_also_after_a_restart(tmp_path):
    """An answer has four bytes: one weight."""
    clock, policy = Clock(), {"bytes_per_day": 1000, "state": str(tmp_path)}
    gate = site_gate(fed_avg(), clock, **policy)
    pair = gate.connection(Line())
    assert pair.send(Message(Kind.HELLO)) == 400
    pair.recv(None, 1.0)
    gate.before(task())
    SiteBooks(str(tmp_path)).add_bytes(196, NOON.date())  # another client of the site
    gate.before(task())
    SiteBooks(str(tmp_path)).add_bytes(1, NOON.date())
    said = refusal(gate, lambda gate: gate.before(task()))
    assert said == (
        "wait",
        "a task: its answer has 4 B, and today 997 B were transferred, but policy.bytes_per_day is 1 kB",
    )
    SiteBooks(str(tmp_path)).add_bytes(3, NOON.date())
    for one in (gate, site_gate(fed_avg(), clock, **policy)):
        clock.at = NOON
        assert one.wait() is True and clock.at == datetime(2026, 11, 27)
        one.before(task())


def test_a_download_that_the_day_has_no_bytes_for_is_not_received(tmp_path):
    """A task of 4,000 bytes is announced, and 800 are left: none of its numbers crosses the link."""
    gate = site_gate(fed_avg(), Clock(), bytes_per_day=1000, state=str(tmp_path))
    SiteBooks(str(tmp_path)).add_bytes(200, NOON.date())
    ours, theirs = socket.socketpair()
    storage = FlatTensors.from_named({"w": torch.zeros(1000)})
    with TcpConnection(theirs, 5.0) as server, gate.connection(TcpConnection(ours, 5.0)) as pair:
        server.send(Message(Kind.ASSIGN, 1, tensors=storage))
        said = refusal(gate, lambda gate: pair.recv(lambda *_: storage, 5.0))
        assert said == (
            "wait",
            "a task: it has 4 kB, and today 200 B were transferred, but policy.bytes_per_day is 1 kB",
        )
        assert pair.closed and pair.received_bytes < 800
    assert gate.wait() is True  # until midnight


def test_what_cannot_be_accounted_for_ends_the_work(tmp_path):
    """Whether a folder is full or gone, neither a byte nor an update leaves without a row in the site's books."""
    noise = SitePrivacy(clip_norm=1.0, noise_multiplier=1.0)
    gate = site_gate(fed_avg(), Clock(), bytes_per_day=1000, state=str(tmp_path / "state"), privacy=noise, metrics=[])
    pair = gate.connection(Line())
    shutil.rmtree(tmp_path / "state")
    said = (
        f"this run: policy.state is '{tmp_path / 'state'}', in which no file can be written (No such file or directory): "
        "make room, or name another folder, and start the client again"
    )
    assert refusal(gate, lambda gate: pair.send(Message(Kind.HELLO))) == ("end", said)
    assert refusal(gate, lambda gate: pair.recv(None, 1.0)) == ("end", said)
    assert refusal(gate, lambda gate: gate.after(task(), answer(), RECEIVED)) == ("end", said)


def test_bytes_are_counted_only_where_they_are_bounded():
    line = Line()
    assert site_gate(fed_avg()).connection(line) is line is Gate().connection(line)


def test_tracebacks_stay_unless_the_site_allows_them():
    assert list(Gate().extensions()) == []  # without a policy the client decides, by its data
    client, error = SimpleNamespace(stop=threading.Event()), TaskFailed(1, "batch 0", "ValueError: x (m.py:3)", "a\nb")
    for allowed in (False, True):
        (make,) = site_gate(fed_avg(), tracebacks=allowed).extensions()
        for told in (Failed.of(error, private=False), Failed.of(error, private=True)):
            assert make(client).failure(error, told) == Failed.of(error, private=not allowed)


def test_only_named_metrics_leave():
    measured = {"loss": 1.0, "test/accuracy": 0.5, "test/num_samples": 9.0, "patient_age": 70.0}
    assert site_gate(fed_avg()).metrics(measured) == measured
    assert site_gate(fed_avg(), metrics=[]).metrics(measured) == {}
    assert list(site_gate(fed_avg(), metrics=["loss", "test/*"]).metrics(measured)) == [
        "loss",
        "test/accuracy",
        "test/num_samples",
    ]


RECEIVED = FlatTensors.from_named({"line.weight": torch.full((1, 1), 3.0)})


def test_an_update_leaves_clipped_and_accounted_for_and_what_noise_does_not_cover_stays(tmp_path):
    pytest.importorskip("dp_accounting", reason="needs the extra privacy")
    gate = site_gate(fed_avg(), state=str(tmp_path), privacy=SitePrivacy(0.5, 0.0), metrics=[])
    update = gate.after(task(), answer(7.0), RECEIVED)
    assert update.tensors["line.weight"].item() == 3.5
    assert SiteBooks(str(tmp_path)).used().releases == 1
    then, said = refusal(gate, lambda gate: gate.after(task(), answer(7.0, extra={"classes": [1]}), RECEIVED))
    assert (then, said) == (
        "end",
        "this run: its method sends classes beside the tensors, and policy.privacy can add noise to tensors only",
    )
    assert refusal(gate, lambda gate: gate.after(task(), answer(7.0, refusal="non-finite"), RECEIVED))[0] == "go on"
    assert SiteBooks(str(tmp_path)).used().releases == 1


def test_a_budget_that_is_spent_ends_the_work_before_the_next_task(tmp_path):
    pytest.importorskip("dp_accounting", reason="needs the extra privacy")
    policy = {"state": str(tmp_path), "metrics": [], "privacy": SitePrivacy(1.0, 4.0, max_epsilon=3.0)}
    gate, num = site_gate(fed_avg(), **policy), 0
    while SiteBooks(str(tmp_path)).used().releases == num:
        num += 1
        try:
            gate.before(task())
        except PolicyRefusal as refused:
            assert refused.then == "end" and "the privacy budget is used up: policy.privacy.max_epsilon is 3" in str(
                refused
            )
            break
        gate.after(task(), answer(), RECEIVED)
    assert 1 < num < 20
    with pytest.raises(PolicyRefusal, match="this run: the privacy budget is used up"):
        site_gate(fed_avg(), **policy)


def test_activations_do_not_leave_before_the_update_that_needs_consent(tmp_path):
    submodels, data = Submodels(TwoLayers(2), EXAMPLE), ClientData(TensorDataset(torch.zeros(2, 2)), torch.arange(2), 1)
    trainer = LocalTrainer(
        submodels, split_fed(client_layers=1).local, "values", Training(num_steps=1, num_epochs=None)
    )
    for every in ("task", "update"):
        gate = SiteGate(SitePolicy(consent=Consent("spool", every=every, folder=str(tmp_path))))
        if every == "task":
            gate.check_parts(submodels, trainer, data, DIGESTS)
            continue
        then, why = refusal(gate, lambda gate: gate.check_parts(submodels, trainer, data, DIGESTS))
        assert (then, why[:58]) == ("end", "this run: its method sends activations during a task, befo")


@pytest.mark.parametrize("every", ["run", "task", "update"])
def test_without_consent_nothing_is_done(tmp_path, every):
    consent = Consent("spool", every=every, folder=str(tmp_path), wait_s=0.01)
    if every == "run":
        with pytest.raises(PolicyRefusal, match="this run: nobody has consented to it"):
            site_gate(fed_avg(), consent=consent)
        return
    gate = site_gate(fed_avg(), consent=consent)
    if every == "update":
        gate.before(task())
        assert refusal(gate, lambda gate: gate.after(task(), answer(), RECEIVED))[0] == "go on"
    else:
        assert refusal(gate, lambda gate: gate.before(task())) == (
            "go on",
            "a task: nobody has consented to its task (policy.consent)",
        )


def test_what_a_site_asks_of_a_group_is_its_policys():
    default, own = SitePolicy(), SitePolicy(max_share=0.5, same_values=True, partners=["north"])
    assert (default.max_share, default.same_values, default.partners) == (0.9, False, None)
    assert policy_of(Gate()) == default and policy_of(SiteGate(own)) is own
