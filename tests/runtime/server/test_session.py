"""The server's side of one client, against clients that behave and clients that do not, over a real pair."""

from __future__ import annotations

import errno
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from raafl.core.types import Arrived, Joined, Lost
from raafl.runtime.server.link import Inbox
from raafl.runtime.server.session import ThreadSession
from raafl.runtime.server.session_protocol import SessionSetup, Terms
from raafl.submodel import FlatTensors
from raafl.submodel.tensor_files import NoRoom, PayloadRoom, is_in_files
from raafl.transport import Kind, PeerLost, codec
from raafl.transport.gloo import GlooConnection
from raafl.transport.tcp.connection import TcpConnection
from raafl.transport.tcp.stream import Wait
from tests.helpers.coordinators import filled, line_state
from tests.runtime.server.sessions import INFO, WAIT_S, Table

pytestmark = pytest.mark.timeout(120)
HOST = "127.0.0.1"


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


@pytest.mark.parametrize("reason", ["out-of-memory", "policy"])
def test_a_client_may_refuse_a_task_by_one_of_two_reasons(table, reason):
    table.greet()
    table.assign(1)
    table.say(Kind.FAILED, 1, {"reason": reason, "error": "more"})
    update = table.event().update
    assert (update.assignment, update.refusal, update.num_samples) == (1, reason, 0)
    table.assign(2)
    table.update(2)
    assert table.event().update.refusal is None


def test_an_answer_from_another_life_is_refused(table):
    table.greet()
    table.assign()
    table.update(incarnation=3)
    update = table.event().update
    assert (update.assignment, update.incarnation, update.refusal) == (1, 0, "wrong-incarnation")


@pytest.mark.parametrize("has_thread", [False, True])
@pytest.mark.parametrize("in_task", [True, False])
def test_a_client_that_goes_is_lost_at_once_idle_or_not(in_task, has_thread):
    table = Table(has_thread=has_thread, idle_s=3 * WAIT_S)  # so that no heartbeat finds it out
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
    assert event == Lost(4, "timeout: nothing from the peer within 0.5 s", 0, counts=True)
    with pytest.raises(PeerLost):
        table.hear()
    table.close()


def test_long_updates_lie_in_files_and_a_full_disk_ends_one_session_alone(tmp_path, monkeypatch):
    terms = Terms(storage=PayloadRoom(str(tmp_path), most_bytes=16))
    tables = [Table(terms) for _ in range(3)]
    for table in tables:
        table.greet()
    for number, table in enumerate(tables):
        table.assign()
        with monkeypatch.context() as patch:
            if number == 1:
                patch.setattr(os, "posix_fallocate", no_room)
            table.update()
            event = table.event()
        if number == 1:
            reason = f"no-space: '{tmp_path}' has no room for a payload of 52 bytes (No space left on device): free some space, or "
            assert event == Lost(4, reason + "keep payloads in memory with payload_memory_bytes null", 0, counts=True)
            with pytest.raises(PeerLost):
                table.hear()
        else:
            assert event.update.refusal is None and is_in_files(event.update.tensors)
        table.close()
    assert list(tmp_path.iterdir()) == []


def test_updates_in_memory_are_bounded_in_all_and_the_next_lie_in_files(tmp_path):
    terms = Terms(
        storage=PayloadRoom(str(tmp_path), most_bytes=100, most_in_all_bytes=2 * 52)
    )  # an update has 52 bytes
    tables, in_files = [Table(terms) for _ in range(3)], []
    for table in tables:
        table.greet()
        table.assign()
        table.update()
        in_files.append(is_in_files(table.event().update.tensors))
    assert in_files == [False, False, True] and terms.storage._held.num_bytes == 104
    for table in tables:
        table.close()


def test_room_that_is_given_back_is_taken_again(tmp_path):
    room = PayloadRoom(str(tmp_path), most_bytes=100, most_in_all_bytes=60)
    layout = line_state().submodels.layout()
    first = room(layout)
    assert not is_in_files(first) and is_in_files(room(layout))
    del first
    assert room._held.num_bytes == 0 and not is_in_files(room(layout))


def no_room(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_task_for_which_there_is_no_room_ends_the_session(table):
    table.greet()
    table.session.fail(NoRoom("no room"))
    assert table.event() == Lost(4, "no-space: no room", 0, counts=True)


def test_a_client_that_never_says_hello_is_lost_at_the_deadline():
    table = Table(join_s=0.4)
    assert table.event() == Lost(4, "timeout: nothing from the peer within 0.4 s", 0)
    table.close()


@pytest.mark.parametrize("has_thread", [False, True])
def test_an_idle_client_hears_three_times_in_idle_s_that_the_server_is_alive(has_thread):
    table, began = Table(has_thread=has_thread, idle_s=1.5), time.monotonic()
    table.greet()
    assert [table.hear(wait_s=1.5).kind for _ in range(3)] == [Kind.KEEPALIVE] * 3
    assert time.monotonic() - began >= 1.5  # and no more often
    assert table.assign().kind is Kind.ASSIGN
    table.update()
    assert table.event().update.refusal is None
    began = time.monotonic()
    assert table.hear(wait_s=1.5).kind is Kind.KEEPALIVE
    assert time.monotonic() - began > 0.25  # it counts from the end of the task
    table.close()


def test_a_client_that_does_not_read_is_sent_no_second_heartbeat():
    table = Table(idle_s=0.3)
    table.greet()
    line = table.session.line
    before = line.pair.sent_bytes
    deadline = time.monotonic() + WAIT_S
    while line.pair.sent_bytes == before and time.monotonic() < deadline:
        time.sleep(0.02)
    once = line.pair.sent_bytes
    time.sleep(0.5)
    assert before < once == line.pair.sent_bytes
    assert [table.hear().kind for _ in range(2)] == [Kind.KEEPALIVE] * 2  # the second once the first was read
    table.close()


@pytest.mark.parametrize("has_thread", [False, True])
def test_abandoning_wakes_a_session_that_waits_for_an_answer(has_thread):
    table = Table(has_thread=has_thread)
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
    connect = lambda: GlooConnection.connect(store, "pair", True, 0.5, HOST)  # noqa: E731
    session = ThreadSession(4, 0, connect, SessionSetup(state.submodels), inbox)
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
    assert late.update.incarnation == -1  # of an earlier connection than this one, the first
    assert late.update.tensors.num_bytes == 0  # nothing of it has been sent


@pytest.mark.parametrize("unsent", [0, -1, "7", 1.5, True, 10**30])
def test_an_unsent_answer_that_makes_no_sense_loses_the_client(table, unsent):
    table.hello(unsent=unsent)
    assert table.hear().kind is Kind.STOP  # told, before it is let in
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


def test_a_stop_reaches_a_client_that_still_builds_its_model(table):
    table.session.stop("max_updates")
    message = table.hear()
    assert (message.kind, message.meta) == (Kind.STOP, {"reason": "max_updates"})
    table.hello()
    assert table.hear().kind is Kind.WELCOME
    table.session.join(timeout=WAIT_S)
    assert not table.session.is_alive()  # and is not told again
    with pytest.raises(PeerLost):
        table.hear()


def test_a_stop_reaches_a_client_whose_task_is_just_being_sent(table, monkeypatch):
    """`stop` comes while the message goes out: it follows the message."""
    sending = TcpConnection.sending

    def stopped_meanwhile(self, message, *args):
        sent = yield from sending(self, message, *args)
        if message.kind is Kind.ASSIGN:
            table.session.stop("max_updates")
            yield Wait(None, False, 0.1)  # until the loop has heard of it
        return sent

    table.greet()
    monkeypatch.setattr(TcpConnection, "sending", stopped_meanwhile)
    assert table.assign().kind is Kind.ASSIGN
    message = table.hear()
    assert (message.kind, message.meta) == (Kind.STOP, {"reason": "max_updates"})
    table.pair.close()
    table.session.join(timeout=WAIT_S)
    assert table.event(0.0) is None


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
