"""A session whose client's connection breaks: away and back, and what a client may say that comes back."""

from __future__ import annotations

import asyncio
import socket
import time
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from raafl.config.options import Timeouts
from raafl.core.roster import Roster
from raafl.core.saving import client_to_json
from raafl.core.types import Arrived, Joined, Lost
from raafl.runtime.identity import PROTOCOL
from raafl.runtime.server.link import Away, Back, Inbox
from raafl.runtime.server.session_loop import LoopSession, SessionLine
from raafl.runtime.server.session_protocol import SessionSetup, Terms
from raafl.runtime.server.wall_clock import LinkTracker
from raafl.submodel import FlatTensors
from raafl.submodel.tensor_files import PayloadRoom, is_in_files
from raafl.transport import Kind, Message, PeerLost, codec, frames
from raafl.transport.tcp.connection import TcpConnection
from raafl.transport.tcp.stream import Wait
from tests.helpers.coordinators import filled, line_state
from tests.runtime.server.sessions import INFO, LOOP, WAIT_S, task

CHUNK = 8  # the model has 16 bytes and more


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(frames, "PIECE_BYTES", CHUNK)


class Door:
    """Sessions of client 4, a loop that the test turns, and the other ends of the connections, which the test plays."""

    def __init__(self, storage=None, **waits):
        self.terms = Terms(storage=storage or PayloadRoom())
        self.state, self.inbox, self.roster = line_state(value=2.0), Inbox(), Roster()
        self.times = Timeouts(**{"join_s": WAIT_S, "task_s": WAIT_S, "stop_s": 2.0, "resume_s": WAIT_S, **waits})
        self.sessions, self.rows, self.notes, self.moved = [], [], [], []
        self.tracker = LinkTracker(self.roster, self.rows.append, self.notes.append, self.offer)

    def offer(self, asked):
        return asked.wanted == 0 and self.sessions[0].offer(asked.pair, asked.position)

    def call(self):
        """Connect anew."""
        ours, theirs = socket.socketpair()
        pair = TcpConnection(ours, 5.0)
        pair.resumes = True  # as over TLS
        moved = lambda down, up: self.moved.append((down, up))  # noqa: E731
        setup = SessionSetup(self.state.submodels, self.times, moved, terms=self.terms)
        session = LoopSession(LOOP, 4, len(self.sessions), pair, setup, self.inbox)
        self.sessions.append(session)
        session.start()
        return TcpConnection(theirs, 5.0)

    def hello(self, pair):
        meta = {"protocol": PROTOCOL, "model": self.state.submodels.layout().fingerprint, **client_to_json(INFO)}
        pair.send(Message(Kind.HELLO, meta=meta))
        return hear(pair)

    def begin(self):
        """Have the client join and get assignment 1; return its connection."""
        pair = self.call()
        assert self.hello(pair).kind is Kind.WELCOME and isinstance(self.event(), Joined)
        self.sessions[0].assign(task(1), self.state.values.clone())
        hear(pair, FlatTensors.empty(self.state.submodels.layout()))
        return pair

    def event(self):
        """Turn the loop until there is an event."""
        while (item := self.inbox.get(WAIT_S)) is not None:
            if (event := self.tracker.process(item)) is not None:
                if isinstance(event, Joined):
                    self.roster.join(event.client)
                return event
        raise AssertionError("nothing has happened")

    def turn(self):
        """See to the next step of a connection."""
        assert self.tracker.process(self.inbox.get(WAIT_S)) is None

    def resume(self, received=1, chunks=0, incarnation=0):
        """Come back; return the new connection."""
        pair = self.call()
        pair.send(Message(Kind.RESUME, 0, incarnation, {"received": received, "chunks": chunks}))
        return pair

    def close(self):
        for session in self.sessions:
            session.stop("over")
            session.join(WAIT_S)
            assert not session.is_alive()


@pytest.fixture
def door(request):
    made = Door(**getattr(request, "param", {}))
    yield made
    made.close()


def hear(pair, into=None):
    return pair.recv(lambda kind, number, meta: into, WAIT_S)


def update(door, fill=3.0):
    return Message(Kind.UPDATE, 1, 0, {"num_samples": 17, "num_steps": 2}, filled(door.state, fill))


def cut_in(door, pair, num_chunks):
    """Send an update of which so many chunks arrive, and break the connection."""
    one = update(door)
    head, whole = codec.encode_head(one), one.tensors.buffers[torch.float32]
    data = bytearray(head)
    for index, piece in enumerate(torch.split(whole, CHUNK // 4)[:num_chunks]):
        checksum = codec.Checksum(index)
        checksum.update(codec.memory(piece))
        data += codec.memory(piece).tobytes() + checksum.footer()
    pair._stream.write([bytes(data) + b"\0\0\0"])  # and three bytes of the next
    pair.close()


def test_a_client_comes_back_to_its_session_and_its_update_is_settled_once(door):
    cut_in(door, door.begin(), 1)
    door.turn()
    assert door.roster.away == {4} and "client 4 is away (connection-closed" in door.notes[0]
    pair = door.resume()
    door.turn()  # the request
    welcome = hear(pair)
    assert (welcome.kind, welcome.meta, welcome.incarnation) == (Kind.WELCOME, {"received": 0, "chunks": 1}, 0)
    pair.send(update(door), first_chunk=1)
    event = door.event()
    assert door.roster.away == set() and "1 chunks of its update had arrived" in door.notes[1]
    assert isinstance(event, Arrived) and event.update.refusal is None and event.update.incarnation == 0
    assert event.update.tensors.fingerprint() == filled(door.state, 3.0).fingerprint()
    assert hear(pair).kind is Kind.KEEPALIVE  # it has arrived
    door.sessions[1].join(WAIT_S)
    assert not door.sessions[1].is_alive()  # the new connection's session has handed it over, and says nothing
    assert door.inbox.get(0.0) is None
    assert [row["event"] for row in door.rows] == ["away", "back"] and door.rows[1]["chunks"] == 1
    assert sum(up for _, up in door.moved) > update(door).tensors.num_bytes  # what came twice is counted


def test_an_update_that_is_cut_goes_on_in_its_file(tmp_path):
    door = Door(PayloadRoom(str(tmp_path), most_bytes=47))  # the model has 48 bytes: 12 float32
    cut_in(door, door.begin(), 2)
    door.turn()
    pair = door.resume()
    door.turn()
    assert hear(pair).meta == {"received": 0, "chunks": 2}
    pair.send(update(door), first_chunk=2)
    tensors = door.event().update.tensors
    assert is_in_files(tensors) and tensors.fingerprint() == filled(door.state, 3.0).fingerprint()
    assert list(tmp_path.iterdir()) == []  # it has no name
    door.close()


def test_a_client_may_know_first_that_its_connection_is_dead(door):
    """The server still waits on the old one, which a middlebox has forgotten."""
    old = door.begin()
    pair = door.resume()
    door.turn()
    assert hear(pair).meta == {"received": 0, "chunks": 0}
    pair.send(update(door))
    assert isinstance(door.event(), Arrived)
    with pytest.raises(PeerLost):
        hear(old)


@pytest.mark.parametrize("door", [{"resume_s": 0.05}], indirect=True)
def test_a_client_that_does_not_come_back_is_lost_after_resume_s(door):
    cut_in(door, door.begin(), 1)
    door.turn()
    event = door.event()
    assert isinstance(event, Lost) and event.reason.startswith("disconnected: connection-closed") and not event.counts
    pair = door.resume()
    door.turn()
    assert hear(pair).kind is Kind.REFUSED  # too late
    assert door.hello(pair).kind is Kind.WELCOME  # and it joins by the same connection
    assert isinstance(door.event(), Joined)


@pytest.mark.parametrize("door", [{"resume_s": 1.0}], indirect=True)
def test_a_client_that_came_back_to_a_server_that_was_late_is_not_lost(door):
    """It waits longer than ``resume_s``, for the thread of the sockets and then for the run's loop."""
    cut_in(door, door.begin(), 1)
    door.turn()
    LOOP.post(time.sleep, 1.5)
    pair = door.resume()
    time.sleep(2.5)
    door.turn()  # the request
    assert hear(pair).kind is Kind.WELCOME
    pair.send(update(door), first_chunk=1)
    assert isinstance(door.event(), Arrived)


@pytest.mark.parametrize("ends", [lambda session: session.stop("over"), lambda session: session.abandon()])
def test_who_waits_for_a_client_hears_at_once_that_it_is_not_wanted(door, ends):
    door.begin().close()
    door.turn()
    session, since = door.sessions[0], time.monotonic()
    ends(session)
    session.join(WAIT_S)
    assert not session.is_alive() and time.monotonic() - since < WAIT_S / 2  # of ``resume_s``


def test_a_task_that_was_given_before_the_break_was_known_waits_for_its_client(door):
    """The run's loop is behind: it takes an update and assigns the next task after the connection has broken."""
    pair = door.begin()
    pair.send(update(door))
    pair.close()
    assert isinstance(door.event(), Arrived)
    door.roster.busy[4] = 2
    door.sessions[0].assign(task(2), door.state.values.clone())
    door.turn()  # the session asks whether there is a task
    door.turn()
    assert door.rows[0]["event"] == "away" and door.rows[0]["assignment"] == 2
    pair = door.resume()
    door.turn()
    assert hear(pair).meta == {"received": 1, "chunks": 0}
    sent = hear(pair, FlatTensors.empty(door.state.submodels.layout()))
    assert (sent.kind, sent.assignment) == (Kind.ASSIGN, 2)


def test_without_a_task_a_client_is_lost_at_once(door):
    pair = door.call()
    door.hello(pair)
    door.event()
    pair.close()
    assert isinstance(door.event(), Lost)


@pytest.mark.parametrize("received,chunks", [(0, 9), (2, 0), (1, 1), (2**52, 2**52)])
def test_a_position_that_cannot_be_is_refused_with_a_reason(door, received, chunks):
    cut_in(door, door.begin(), 1)
    door.turn()
    pair = door.resume(received, chunks)
    event = door.event()
    assert isinstance(event, Arrived) and event.update.refusal == "wrong-position"
    assert isinstance(door.event(), Lost)
    pair.close()


@pytest.mark.parametrize("meta", [{}, {"received": -1, "chunks": 0}, {"received": "1", "chunks": 2}, {"received": 1}])
def test_words_that_are_no_position_are_refused(door, meta):
    cut_in(door, door.begin(), 1)
    door.turn()
    pair = door.call()
    pair.send(Message(Kind.RESUME, 0, 0, meta))
    event = door.event()
    assert isinstance(event, Lost) and event.incarnation == 1 and "bad-json" in event.reason
    assert door.sessions[0].is_alive()  # the session waits for its own client still
    pair.close()


def test_a_session_that_is_none_is_not_come_back_to(door):
    pair = door.resume(incarnation=7)
    door.turn()
    assert hear(pair).kind is Kind.REFUSED


@pytest.mark.parametrize("door", [{"resume_s": 1.5}], indirect=True)
def test_who_comes_again_and_again_while_nothing_arrives_has_resume_s_in_all(door):
    """And the server holds the storage of one update, whatever the client does."""
    cut_in(door, door.begin(), 1)
    event, pairs, left_s = None, [], []
    while event is None:
        item = door.inbox.get(WAIT_S)
        event = door.tracker.process(item)
        if isinstance(item, Away):
            left_s.append(item.wait_s)
            time.sleep(0.3)
            pairs.append(door.resume())
        elif isinstance(item, Back):
            pairs[-1].close()
    pairs[-1].close()
    # a chunk had arrived before the first time; from then on there is less each time, how much hangs on the machine's load
    assert isinstance(event, Lost) and left_s[:2] == [1.5, 1.5] and len(left_s) > 2
    assert all(later < earlier for earlier, later in pairwise(left_s[1:])) and left_s[-1] >= 0
    assert [len(by_layout) for by_layout in door.sessions[0].protocol.scratch._kept.values()] == [1]


def test_a_run_that_ends_waits_for_nobody_who_is_away(door):
    cut_in(door, door.begin(), 1)
    door.turn()
    door.sessions[0].stop("done")
    door.sessions[0].join(WAIT_S)
    assert not door.sessions[0].is_alive() and door.inbox.get(0.0) is None


def test_a_client_whose_site_is_taken_out_while_it_is_away_is_lost_at_once(door):
    pair = door.begin()
    pair.close()
    door.turn()
    assert door.roster.away == {4}
    door.sessions[0].line.pair.cut("revoked", "the certificate of site 'south' was revoked")
    since = time.monotonic()
    event = door.event()
    assert isinstance(event, Lost) and "revoked" in event.reason and time.monotonic() - since < WAIT_S / 4


class Full:
    """A connection for whose messages the system lacks buffers; `sent` has the halves of what it sends."""

    resumes = closed = has_unsent = False

    def __init__(self, sent):
        self._sent = sent

    def sending(self, message):
        self._sent.append("first half")
        yield Wait(None, False, 0.0)
        self._sent.append("second half")


def test_nothing_is_sent_within_a_heartbeat_for_which_the_system_lacked_buffers():
    tasks, sent = [], []

    async def drive(steps):
        with pytest.raises(StopIteration):
            steps.send(True)

    async def other(line):
        async with line._sending:
            sent.append("an assignment")

    async def both(line):
        line.beat(Message(Kind.KEEPALIVE))
        line.beat(Message(Kind.KEEPALIVE))  # none while the first is on its way
        # the assignment's turn comes first
        await asyncio.gather(other(line), *tasks)
        await line._sending.acquire()
        waiting = asyncio.ensure_future(other(line))
        await asyncio.sleep(0)
        line._sending.release()
        line.beat(Message(Kind.KEEPALIVE))  # nor while nothing is, but an assignment has its turn
        await waiting
        line.beat(Message(Kind.KEEPALIVE))
        await tasks[1]
        return len(tasks), line._sending.locked()

    session = SimpleNamespace(loop=SimpleNamespace(drive=drive, begin=tasks.append))
    assert asyncio.run(both(SessionLine(Full(sent), session, 0.0, None))) == (2, False)
    beat = ["first half", "second half"]
    assert sent == [*beat, "an assignment", "an assignment", *beat]
