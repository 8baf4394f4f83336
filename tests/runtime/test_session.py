"""The server's side of one client, against clients that behave and clients that do not, over a real pair."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import raafl
from raafl.config.options import Waits
from raafl.core.types import Arrived, Assignment, ClientInfo, Joined, Lost, client_to_json
from raafl.devices.profiles import Profile
from raafl.runtime.inbox import Inbox
from raafl.runtime.session import Session, Terms
from raafl.runtime.transport import Kind, Message, PeerLost, codec
from raafl.runtime.transport.gloo import GlooPair
from raafl.runtime.transport.tcp import TcpPair
from raafl.submodel import FULL, FlatTensors
from tests.tools import filled, line_state

pytestmark = pytest.mark.timeout(120)
HOST = "127.0.0.1"
WAIT_S = 60.0  # for what comes at once on an idle machine, and before a sign of life that the test does not expect
INFO = ClientInfo(4, 17, Profile(name="phone", flops_per_s=1e8))


def task(number=1, **fields):
    values = {"id": number, "client": 4, "incarnation": 0, "task": 0, "version": 0, "spec": FULL, "region": 0}
    return Assignment(**{**values, "num_epochs": 1, "num_steps": None, "seed": 5, "assigned_s": 0.0, **fields})


class Table:
    """A session and the other end of its pair, which the test plays."""

    def __init__(self, terms=None, share=None, **waits):
        self.state, self.inbox, self.moved = line_state(value=2.0), Inbox(), []
        ours, theirs = socket.socketpair()
        times = Waits(**{"join_s": WAIT_S, "task_s": WAIT_S, "idle_s": WAIT_S, "stop_s": 2.0, **waits})
        self.session = Session(
            4, 0, lambda: TcpPair(ours, 20.0), self.state.submodels, self.inbox, times,
            lambda down, up: self.moved.append((down, up)), terms=terms, share=share,
        )  # fmt: skip
        self.session.start()
        self.pair = TcpPair(theirs, 20.0)

    def hello(self, **changes):
        meta = {"raafl": raafl.__version__, "model": self.state.submodels.layout().fingerprint, **client_to_json(INFO)}
        return self.say(Kind.HELLO, meta={**meta, **changes})

    def greet(self):
        self.hello()
        assert self.hear().kind is Kind.WELCOME
        return self.event()

    def say(self, kind, number=0, meta=None, tensors=None, incarnation=0):
        return self.pair.send(Message(kind, number, incarnation, meta or {}, tensors))

    def update(self, number=1, tensors=None, meta=None, incarnation=0):
        tensors = filled(self.state, 3.0) if tensors is None else tensors
        counts = {"num_samples": 17, "num_steps": 2, "metrics": {"loss": 0.5}}
        return self.say(Kind.UPDATE, number, {**counts, **(meta or {})}, tensors, incarnation)

    def hear(self, into=None):
        return self.pair.recv(lambda kind, number, meta: into, WAIT_S)

    def assign(self, number=1):
        self.session.assign(task(number), self.state.values.clone())
        into = FlatTensors.empty(self.state.submodels.layout())
        return self.hear(into)

    def event(self, timeout_s=WAIT_S):
        return self.inbox.get(timeout_s)

    def close(self):
        self.pair.close()
        self.session.stop("over")
        self.session.join(timeout=WAIT_S)
        assert not self.session.is_alive()


@pytest.fixture
def table():
    table = Table()
    yield table
    table.close()


def test_a_client_is_greeted_given_work_and_let_go(table):
    event = table.greet()
    assert event == Joined(INFO)
    message = table.assign()
    assert (message.kind, message.assignment, message.meta["seed"]) == (Kind.ASSIGN, 1, 5)
    assert message.tensors.fingerprint() == table.state.values.fingerprint()
    sent = table.update()
    event = table.event()
    assert isinstance(event, Arrived)
    update = event.update
    assert (update.assignment, update.client, update.num_samples, update.num_steps) == (1, 4, 17, 2)
    assert (update.metrics, update.refusal, update.bytes_up) == ({"loss": 0.5}, None, sent)
    assert update.tensors.fingerprint() == filled(table.state, 3.0).fingerprint()
    assert table.moved == [(update.bytes_down, 0), (0, sent)]
    table.session.stop("max_updates")
    message = table.hear()
    assert (message.kind, message.meta) == (Kind.STOP, {"reason": "max_updates"})
    table.session.join(timeout=WAIT_S)
    assert table.event(0.0) is None


@pytest.mark.parametrize(
    ("changes", "named"),
    [({"raafl": "0.0.0"}, "different raafl: the server has"), ({"model": "0" * 32}, "different model: the server has")],
)
def test_a_client_with_another_version_or_model_is_told_so_and_lost(table, changes, named):
    table.hello(**changes)
    message = table.hear()
    assert message.kind is Kind.STOP
    assert message.meta["reason"].startswith("refused: ") and named in message.meta["reason"]
    event = table.event()
    assert (event.client, event.incarnation) == (4, 0)
    assert named in event.reason


@pytest.mark.parametrize(
    "changes",
    [
        {"num_samples": -1}, {"num_samples": 0},
        {"num_samples": "many"}, {"num_samples": True}, {"num_samples": 10**30}, {"profile": None},
        {"profile": 3}, {"profile": {"flops_per_s": -1.0}}, {"profile": {"flops_per_s": "fast"}},
        {"profile": {"unheard_of": 1}}, {"profile": {"flops_per_s": 10**400}},
    ],
)  # fmt: skip
def test_a_hello_that_makes_no_sense_loses_the_client_and_never_hangs(table, changes):
    table.hello(**changes)
    event = table.event()
    assert isinstance(event, Lost), event
    assert event.client == 4


def test_a_client_that_does_not_say_hello_is_lost(table):
    table.update()
    event = table.event()
    assert isinstance(event, Lost)
    assert "wrong-layout: declared float32[13], expected no tensors" in event.reason  # a hello has none


def test_a_client_that_begins_with_something_else_is_lost(table):
    table.say(Kind.KEEPALIVE)
    assert "expected HELLO, got KEEPALIVE" in table.hear().meta["reason"]
    assert "expected HELLO, got KEEPALIVE" in table.event().reason


# what a client may answer, and why it is refused; the session must be usable afterwards
BAD_ANSWERS = {
    "another assignment": ("unknown-assignment", lambda t: t.update(number=9)),
    "not an update": ("bad-kind", lambda t: t.say(Kind.KEEPALIVE)),
    "another hello": ("bad-kind", lambda t: t.hello()),
    "no tensors": ("wrong-layout", lambda t: t.say(Kind.UPDATE, 1, {"num_samples": 1, "num_steps": 1})),
    "too few values": ("wrong-layout", lambda t: t.update(tensors=FlatTensors.from_named({"w": torch.ones(3)}))),
    "not a number": ("non-finite", lambda t: t.update(tensors=filled(t.state, float("nan")))),
    "infinity": ("non-finite", lambda t: t.update(tensors=filled(t.state, float("-inf")))),
    "no counts": ("bad-json", lambda t: t.say(Kind.UPDATE, 1, {}, filled(t.state, 1.0))),
    "a negative count": ("bad-json", lambda t: t.update(meta={"num_samples": -4})),
    "no samples at all": ("bad-json", lambda t: t.update(meta={"num_samples": 0})),
    "more samples than it has": ("too-many-samples", lambda t: t.update(meta={"num_samples": 18})),
    "as many samples as there are": ("too-many-samples", lambda t: t.update(meta={"num_samples": 2**53 - 1})),
    "a count that is true": ("bad-json", lambda t: t.update(meta={"num_steps": True})),
    "metrics that are a list": ("bad-json", lambda t: t.update(meta={"metrics": [1, 2]})),
    "too many metrics": ("bad-json", lambda t: t.update(meta={"metrics": {str(i): 1.0 for i in range(101)}})),
    "a metric beyond all floats": ("bad-json", lambda t: t.update(meta={"metrics": {"loss": 10**400}})),
}


@pytest.mark.parametrize("name", BAD_ANSWERS)
def test_a_bad_answer_is_refused_by_name_and_the_next_one_is_taken(table, name):
    reason, answer = BAD_ANSWERS[name]
    table.greet()
    table.assign(1)
    answer(table)
    event = table.event()
    assert isinstance(event, Arrived), event
    assert (event.update.refusal, event.update.assignment, event.update.client) == (reason, 1, 4)
    table.assign(2)
    table.update(2)
    event = table.event()
    assert (event.update.refusal, event.update.assignment) == (None, 2)


def test_an_answer_from_another_life_is_refused(table):
    table.greet()
    table.assign()
    table.update(incarnation=3)
    update = table.event().update
    assert (update.assignment, update.incarnation, update.refusal) == (1, 0, "wrong-incarnation")


def test_a_client_that_goes_is_lost_at_once_idle_or_not():
    for in_task in (True, False):
        table = Table(idle_s=0.3)
        table.greet()
        if in_task:
            table.assign()
        table.pair.close()
        began = time.monotonic()
        event = table.event()
        assert isinstance(event, Lost) and event.reason.startswith("disconnected: "), event
        assert time.monotonic() - began < WAIT_S / 2
        table.close()


def test_a_client_that_never_answers_is_lost_at_the_deadline():
    table = Table(task_s=0.5)
    table.greet()
    table.assign()
    event = table.event()
    assert event == Lost(4, "timeout: nothing from the peer within 0.5 s", 0)
    with pytest.raises(PeerLost):
        table.hear()
    table.close()


def test_a_client_that_never_says_hello_is_lost_at_the_deadline():
    table = Table(join_s=0.4)
    assert table.event() == Lost(4, "timeout: nothing from the peer within 0.4 s", 0)
    table.close()


def test_an_idle_client_hears_that_the_server_is_alive():
    table = Table(idle_s=0.3)
    table.greet()
    assert [table.hear().kind for _ in range(3)] == [Kind.KEEPALIVE] * 3
    table.close()


def test_abandoning_wakes_a_session_that_waits_for_an_answer():
    table = Table()
    table.greet()
    table.assign()
    began = time.monotonic()
    table.session.abandon()
    table.session.join(timeout=WAIT_S)
    assert not table.session.is_alive()
    assert time.monotonic() - began < WAIT_S / 2
    table.close()


def test_a_client_that_does_not_come_is_lost_at_the_deadline():
    state, inbox = line_state(), Inbox()
    store = dist.TCPStore(HOST, 0, None, True, timeout=timedelta(seconds=1), wait_for_workers=False)
    session = Session(
        4,
        0,
        lambda: GlooPair.connect(store, "pair", True, 0.5, HOST),
        state.submodels,
        inbox,
        Waits(),
        lambda d, u: None,
    )
    with ThreadPoolExecutor(1) as pool:
        pool.submit(session.run)
        event = inbox.get(20.0)
    assert isinstance(event, Lost) and event.reason.startswith(("timeout: ", "disconnected: "))


def test_an_answer_from_a_broken_connection_is_reported_and_refused_by_its_id(table):
    """A client that hung past its deadline still holds its answer when it comes back."""
    table.hello(unsent=7)
    assert table.hear().kind is Kind.WELCOME
    assert isinstance(table.event(), Joined)
    late = table.event()
    assert isinstance(late, Arrived)
    assert (late.update.assignment, late.update.client, late.update.refusal) == (7, 4, "late")
    assert late.update.tensors.num_bytes == 0  # nothing of it has been sent


@pytest.mark.parametrize("unsent", [0, -1, "7", 1.5, True, 10**30])
def test_an_unsent_answer_that_makes_no_sense_loses_the_client(table, unsent):
    table.hello(unsent=unsent)
    assert isinstance(table.event(), Joined)
    event = table.event()
    assert isinstance(event, Lost) and "unsent is" in event.reason


def test_a_stop_reaches_a_client_in_the_middle_of_its_task(table):
    table.greet()
    table.assign()
    table.session.stop("max_updates")
    message = table.hear()
    assert (message.kind, message.meta) == (Kind.STOP, {"reason": "max_updates"})
    table.pair.close()
    table.session.join(timeout=WAIT_S)
    assert table.event(0.0) is None  # not lost: let go


def test_a_stop_reaches_a_client_whose_task_is_just_being_sent(table):
    """`stop` comes when the message has gone out and its sender is about to let go of the pair."""

    class Late:
        def __init__(self, lock):
            self.lock, self.acquire, self.release, self.stopped = lock, lock.acquire, lock.release, False

        def __enter__(self):
            self.lock.acquire()

        def __exit__(self, *_):
            if not self.stopped:
                self.stopped = True
                table.session.stop("max_updates")
            self.lock.release()

    table.greet()
    table.session._sending = Late(table.session._sending)
    assert table.assign().kind is Kind.ASSIGN
    message = table.hear()
    assert (message.kind, message.meta) == (Kind.STOP, {"reason": "max_updates"})
    table.pair.close()
    table.session.join(timeout=WAIT_S)
    assert table.event(0.0) is None


def test_the_config_is_given_to_a_client_that_asks_and_compared_with_one_that_has_its_own():
    table = Table(terms=Terms("name: x\n", {"model": "aa", "data": "bb"}))
    try:
        table.say(Kind.CONFIG)
        assert table.hear().meta == {"config_yaml": "name: x\n"}
        table.hello(config={"model": "aa", "data": "cc"})
        reason = table.hear().meta["reason"]
        assert reason == "refused: different config: 'data' is not as in the server's config.yaml"
        assert "different config" in table.event().reason
    finally:
        table.close()


@pytest.mark.parametrize("data", ["bb", "own"])
def test_a_client_may_have_data_of_its_own(data):
    table = Table(terms=Terms("name: x\n", {"model": "aa", "data": "bb"}))
    try:
        table.hello(config={"model": "aa", "data": data}, own_data=data == "own")
        assert table.hear().kind is Kind.WELCOME
        assert table.event().client.own_data is (data == "own")
    finally:
        table.close()


def test_a_client_has_no_more_samples_than_it_was_dealt():
    table = Table(share=16)
    try:
        table.hello()
        reason = table.hear().meta["reason"]
        assert reason.startswith("refused: client 4 says that it has 17 samples, but its share of the run's data is 16")
        assert table.event().reason.startswith("disconnected: too-many-samples: ")
    finally:
        table.close()


@pytest.mark.parametrize("fields", [{"own_data": True}, {"num_samples": 16}, {"num_samples": 3}])
def test_a_client_with_data_of_its_own_or_fewer_than_its_share_may_come(fields):
    table = Table(share=16)
    try:
        table.hello(**fields)
        assert table.hear().kind is Kind.WELCOME
    finally:
        table.close()


HOSTILE = "\x1b[2J\u202e" + "x" * (1 << 18) + "\nnews"


@pytest.mark.parametrize(
    "changes",
    [{"raafl": HOSTILE}, {"model": [HOSTILE]}, {"config": {HOSTILE: 1}}, {"num_samples": HOSTILE},
     {"profile": {"name": HOSTILE, "flops_per_s": -1.0}}, {"profile": {HOSTILE: 1}}],
)  # fmt: skip
def test_what_a_client_says_of_itself_reaches_no_log_raw(changes):
    table = Table(terms=Terms("", {"model": "aa"}))
    try:
        table.hello(**{"config": {"model": "aa"}, **changes})
        event = table.event()
        assert isinstance(event, Lost) and event.reason.isprintable() and len(event.reason) < 600
    finally:
        table.close()


def test_names_that_a_client_gives_are_cleaned_where_they_come_in(table):
    table.hello(profile={**client_to_json(INFO)["profile"], "name": HOSTILE})
    assert table.hear().kind is Kind.WELCOME
    name = table.event().client.profile.name
    assert name.isprintable() and len(name) == 200 and name.startswith(r"\x1b[2J\u202e")
    table.assign()
    table.update(meta={"metrics": {HOSTILE: 1.0, "loss": 0.5}})
    metrics = table.event().update.metrics
    assert sorted(map(len, metrics)) == [4, 200] and all(name.isprintable() for name in metrics)


def test_a_connection_on_which_three_answers_in_a_row_were_damaged_is_given_up(table, monkeypatch):
    footer = codec.Checksum.footer

    def damaged_here(self):  # what the test sends; the session reckons right
        return bytes(8) if threading.current_thread() is threading.main_thread() else footer(self)

    table.greet()
    reasons = []
    for number, damaged in enumerate([True, True, False, True, True, True], start=1):
        table.assign(number)
        with monkeypatch.context() as patch:
            if damaged:
                patch.setattr(codec.Checksum, "footer", damaged_here)
            table.update(number)
        reasons.append(table.event().update.refusal)
    assert reasons == ["bad-checksum", "bad-checksum", None, *["bad-checksum"] * 3]
    why = "disconnected: connection-broken: 3 messages in a row were damaged, the last: bad-checksum"
    assert table.event().reason == why
