"""The loop of all sockets: reminders on one timer, sockets that stay registered, and what others post."""

from __future__ import annotations

import socket
import threading
from types import SimpleNamespace

import pytest

from raafl.transport import PeerTimeout
from raafl.transport.tcp import loop as loop_module
from raafl.transport.tcp.connection import TcpConnection
from raafl.transport.tcp.loop import TICK_S, Patience, Reminders, SocketLoop
from raafl.transport.tcp.stream import SocketStream, TimeBudget


class HandClock:
    """A loop and a clock that a test moves on."""

    def __init__(self):
        self.now, self.timers = 100.0, []

    def call_later(self, seconds, function):
        self.timers.append((self.now + seconds, function))

    def monotonic(self):
        return self.now

    def pass_to(self, now):
        while self.timers and self.timers[0][0] <= now:
            self.now, function = self.timers.pop(0)
            function()
        self.now = now


def test_reminders_have_one_timer_and_end_with_their_last_member(monkeypatch):
    clock, heard = HandClock(), []
    monkeypatch.setattr(loop_module, "time", clock)
    reminders = Reminders(clock, 8.0)  # looks each second
    first, second = (lambda: heard.append(("first", clock.now))), (lambda: heard.append(("second", clock.now)))
    reminders.add(first)
    clock.pass_to(103.5)
    reminders.add(second)
    assert len(clock.timers) == 1
    clock.pass_to(117.0)
    # each 8 s after it was added, and at the next look
    assert heard == [("first", 108.0), ("second", 112.0), ("first", 116.0)]
    reminders.discard(first)
    reminders.discard(second)
    clock.pass_to(130.0)
    assert len(heard) == 3 and not clock.timers
    reminders.add(second)
    clock.pass_to(138.0)
    assert heard[3:] == [("second", 138.0)]


@pytest.mark.parametrize(
    "idle_s,counted_s",
    [
        (0.25, 0.25),  # of a tick of 0.25 s
        (0.025, 0.25),  # a tenth is enough
        (0.01, 0.1),
        (0.0, 0.025),  # busy all the time
    ],
)
def test_the_clock_of_waits_for_clients_is_slow_while_they_wait_for_the_server(monkeypatch, idle_s, counted_s):
    clock, selector = HandClock(), SimpleNamespace(idle_s=7.0)
    monkeypatch.setattr(loop_module, "time", clock)
    patience = Patience(clock, selector)
    with patience.running():
        for tick in range(1, 5):
            selector.idle_s += idle_s
            clock.pass_to(100.0 + tick * TICK_S)
        assert patience.now == pytest.approx(4 * counted_s)
        before = patience.now
        with patience.asking():  # the run's loop owes an answer
            selector.idle_s += TICK_S
            clock.pass_to(100.0 + 5 * TICK_S)
        assert patience.now == pytest.approx(before + TICK_S / 10)
        before = patience.now
        clock.now, selector.idle_s = 4000.0, selector.idle_s + TICK_S  # the machine was suspended
        clock.timers.pop()[1]()
        assert patience.now == pytest.approx(before + TICK_S)
    clock.pass_to(4010.0)
    assert not clock.timers  # nobody waits


@pytest.fixture
def loop():
    made = SocketLoop().start()
    yield made
    made.close()


def read(loop, stream, num_bytes):
    into = bytearray(num_bytes)
    loop.wait_for(loop.drive(stream.reading_into(memoryview(into))))
    return bytes(into)


def test_a_socket_is_registered_once_and_a_new_one_may_have_its_descriptor(loop):
    numbers = []
    for text in (b"first", b"other"):
        ours, theirs = socket.socketpair()
        stream = SocketStream(ours, TimeBudget(20.0), 0)
        for _ in range(3):
            threading.Timer(0.02, theirs.sendall, (text,)).start()
            assert read(loop, stream, 5) == text
        numbers.append(ours.fileno())
        assert [key for key in loop._watches if key[0] == numbers[-1]] == [(numbers[-1], False)]
        theirs.close()
        ours.close()
    assert numbers[0] == numbers[1]


def test_a_peer_that_does_not_read_does_not_fail_the_next_socket_with_its_descriptor(loop):
    ours, theirs = socket.socketpair()
    stream = SocketStream(ours, TimeBudget(0.1), 0)
    threading.Timer(0.02, theirs.sendall, (b"12345",)).start()
    assert read(loop, stream, 5) == b"12345"  # from now on it is watched for reading
    with pytest.raises(PeerTimeout):
        loop.wait_for(loop.drive(stream.writing_all([bytes(8 << 20)])))
    number = ours.fileno()
    assert (number, True) not in loop._watches
    ours.close()
    theirs.close()
    ours, theirs = socket.socketpair()
    assert ours.fileno() == number
    threading.Timer(0.02, theirs.sendall, (b"67890",)).start()
    assert read(loop, SocketStream(ours, TimeBudget(20.0), 0), 5) == b"67890"
    ours.close()
    theirs.close()


def test_what_comes_while_nobody_waits_does_not_keep_the_loop_busy(loop):
    ours, theirs = socket.socketpair()
    stream = SocketStream(ours, TimeBudget(20.0), 0)
    threading.Timer(0.02, theirs.sendall, (b"12345",)).start()
    assert read(loop, stream, 5) == b"12345"
    theirs.sendall(b"67890")
    done = threading.Event()
    for _ in range(3):  # turns of the loop
        done.clear()
        loop.post(done.set)
        assert done.wait(20.0)
    assert not loop._watches
    assert read(loop, stream, 5) == b"67890"
    ours.close()
    theirs.close()


def test_a_half_open_peer_costs_the_buffer_of_what_it_began_to_send(loop):
    """Half a header and then silence: the pair is cut off, and holds no memory to read into meanwhile."""
    ours, theirs = socket.socketpair()
    pair = TcpConnection(ours, 0.3)
    theirs.sendall(b"RAFL")
    with pytest.raises(Exception, match=r"nothing from the peer within 0\.3 s"):
        loop.wait_for(loop.drive(pair.receiving(lambda *_: None, 20.0)))
    assert pair.closed and pair.partial is None and len(pair._socket._ahead) == 0
    theirs.close()


def test_the_error_of_one_call_is_not_that_of_the_others(loop):
    done = threading.Event()

    def fail():
        raise ZeroDivisionError

    loop._loop.set_exception_handler(lambda *_: None)
    loop.post(lambda: (loop.post(fail), loop.post(done.set)))
    assert done.wait(20.0)
