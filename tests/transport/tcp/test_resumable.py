"""A session over connections that break: what arrives, what is sent twice, and positions that cannot be."""

from __future__ import annotations

import queue
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import torch

from raafl.submodel.flat import FlatTensors
from raafl.transport import Kind, Message, PeerLost, PeerTimeout, Refused, frames
from raafl.transport.tcp.connection import TcpConnection
from raafl.transport.tcp.resumable import Position, ResumableConnection

CHUNK, WAIT_S = 1 << 12, 20.0


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(frames, "PIECE_BYTES", CHUNK)


class Relay:
    """Connections of two ends; of each, so many bytes pass each way, then it breaks. The last has no limit."""

    def __init__(self, *limits):
        self.limits, self.threads, self.now = list(limits), [], ()

    def connect(self):
        (one, near), (far, two) = socket.socketpair(), socket.socketpair()
        for sock in (one, near, far, two):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, CHUNK)
        limit = self.limits.pop(0) if self.limits else None
        self.now = near, far
        for source, sink in ((near, far), (far, near)):
            thread = threading.Thread(target=self._pump, args=(source, sink, limit), daemon=True)
            thread.start()
            self.threads.append(thread)
        return TcpConnection(one, WAIT_S), TcpConnection(two, WAIT_S)

    def _pump(self, source, sink, limit):
        left = float("inf") if limit is None else limit
        with suppress(OSError):
            while left and (data := source.recv(int(min(left, 1000)))):
                sink.sendall(data)
                left -= len(data)
        self.cut(source, sink)

    def cut(self, *ends):
        """Break the connection of these sockets, or the last one."""
        for end in ends or self.now:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self):
        for thread in self.threads:
            thread.join(WAIT_S)


class Ends:
    """Both ends of a session; whoever asks for the next connection waits for the other to do so."""

    def __init__(self, *limits):
        self.relay = Relay(*limits)
        self.positions, self.given = [queue.Queue(), queue.Queue()], [queue.Queue(), queue.Queue()]
        self.renewed = []
        first = self.relay.connect()
        self.ends = [ResumableConnection(pair, self._renewer(side)) for side, pair in enumerate(first)]

    def _renewer(self, side):
        def renew(mine, error):
            self.renewed.append((side, mine))
            self.positions[side].put(mine)
            theirs = self.positions[1 - side].get(timeout=WAIT_S)
            if side == 0:
                mine_next, their_next = self.relay.connect()
                self.given[1].put(their_next)
                return mine_next, theirs
            return self.given[1].get(timeout=WAIT_S), theirs

        return renew

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for end in self.ends:
            end.close()
        self.relay.close()


def flat(num_chunks, fill=0.0):
    return FlatTensors.from_named({"w": torch.arange(num_chunks * CHUNK // 4, dtype=torch.float32) + fill})


def receive(end, like):
    target = FlatTensors.empty(like.layout)
    return end.recv(lambda *_: target, WAIT_S, finite=True)


def test_an_update_gets_over_a_link_that_is_cut_again_and_again():
    """40 chunks of 4 KiB; a connection lets 10 of them through. What is under way at a cut is small here: see the relay."""
    task, update = flat(2), flat(40, 1.0)
    with Ends(*[10 * CHUNK] * 5) as made, ThreadPoolExecutor(1) as pool:
        server, client = made.ends

        def work():
            found = receive(client, task)
            num_bytes = client.send(Message(Kind.UPDATE, 3, 0, {}, update))
            client.recv(lambda *_: None, WAIT_S)
            return found, num_bytes

        working = pool.submit(work)
        server.send(Message(Kind.ASSIGN, 3, 0, {}, task))
        found = receive(server, update)
        received_bytes = server.received_bytes
        server.send(Message(Kind.KEEPALIVE))
        got, sent_bytes = working.result(WAIT_S)
    assert torch.equal(got.tensors["w"], task["w"]) and torch.equal(found.tensors["w"], update["w"])
    chunks = [mine.num_chunks for side, mine in made.renewed if side == 0]
    assert len(chunks) >= 4 and chunks == sorted(chunks) and chunks[-1] >= 30
    assert client.is_unconfirmed is False
    # Each cut costs what was under way (buffers of this relay: about four chunks), a broken chunk, and a head.
    assert update.num_bytes < received_bytes <= update.num_bytes * 1.25
    assert sent_bytes < update.num_bytes * 2


def test_a_cut_while_nothing_travels_is_not_noticed_above():
    """The client trains; its connection breaks, and it answers by the next."""
    task = flat(2)
    with Ends(None) as made, ThreadPoolExecutor(2) as pool:
        server, client = made.ends

        def work():
            receive(client, task)
            reading = pool.submit(client.recv, lambda *_: None, WAIT_S)
            made.relay.cut()  # in the middle of the task
            client.send(Message(Kind.UPDATE, 3, 0, {"num_samples": 1}))
            return reading.result(WAIT_S)

        working = pool.submit(work)
        server.send(Message(Kind.ASSIGN, 3, 0, {}, task))
        assert server.recv(lambda *_: None, WAIT_S).meta == {"num_samples": 1}
        server.send(Message(Kind.KEEPALIVE))
        assert working.result(WAIT_S).kind is Kind.KEEPALIVE
    sides = dict(made.renewed)
    assert sides == {0: Position(0, 0), 1: Position(1, 0)} and len(made.renewed) == 2


def test_a_message_whose_tail_was_lost_after_it_was_sent_is_sent_again_by_the_receiving_thread():
    """The send has returned: the rest lay in the system's buffers. Whoever receives finds out, and sends it."""
    update = flat(1)
    with Ends(200) as made, ThreadPoolExecutor(2) as pool:
        server, client = made.ends
        client.send(Message(Kind.UPDATE, 3, 0, {}, update))
        reading = pool.submit(client.recv, lambda *_: None, WAIT_S)
        found = receive(server, update)
        server.send(Message(Kind.KEEPALIVE))
        assert reading.result(WAIT_S).kind is Kind.KEEPALIVE
    assert torch.equal(found.tensors["w"], update["w"]) and not client.is_unconfirmed


def test_tasks_and_updates_that_travel_at_once_get_over_cuts():
    """Three tasks and their updates of 20 chunks each, the next task beside the update; a connection lets 12 chunks through."""
    tasks, updates = [flat(20, number) for number in range(4)], [flat(20, -number) for number in range(4)]
    with Ends(*[12 * CHUNK] * 12) as made, ThreadPoolExecutor(3) as pool:
        server, client = made.ends
        got, received = queue.Queue(), []

        def send(number):
            server.send(Message(Kind.ASSIGN, number, 0, {"ahead": True}, tasks[number]))

        def read():
            while (message := client.recv(lambda kind, *_: flat(20) if kind is Kind.ASSIGN else None, WAIT_S)).kind:
                if message.kind is Kind.ASSIGN:
                    got.put(message)
                if message.meta == {"confirms": 3}:
                    return

        def answer():
            for number in (1, 2, 3):
                assert torch.equal(got.get(timeout=WAIT_S).tensors["w"], tasks[number]["w"])
                client.send(Message(Kind.UPDATE, number, 0, {}, updates[number]))
                client.settle(lambda: False)
                assert not client.is_unconfirmed

        working = [pool.submit(read), pool.submit(answer)]
        send(1)
        for number in (1, 2, 3):
            ahead = []

            def expect(kind, assignment, meta, number=number, ahead=ahead):
                if number < 3:
                    ahead.append(pool.submit(send, number + 1))
                return flat(20)

            received.append(server.recv(expect, WAIT_S, finite=True))
            for sending in ahead:
                sending.result(WAIT_S)
            assert len(ahead) == (number < 3)
            # as a server: a connection that breaks at a heartbeat is replaced by whoever reads, and its position confirms, too
            with suppress(PeerLost):
                server.send(Message(Kind.KEEPALIVE, 0, 0, {"confirms": number}))
        while not working[0].done():
            with suppress(PeerLost):
                server.check()
                server.send(Message(Kind.KEEPALIVE, 0, 0, {"confirms": 3}))
            time.sleep(0.01)
        for done in working:
            done.result(WAIT_S)
    assert [message.assignment for message in received] == [1, 2, 3]
    assert all(torch.equal(m.tensors["w"], updates[m.assignment]["w"]) for m in received)
    assert len([side for side, _ in made.renewed if side == 0]) >= 4


def alone(renew):
    ours, theirs = socket.socketpair()
    return ResumableConnection(TcpConnection(ours, WAIT_S), renew), TcpConnection(theirs, WAIT_S)


@pytest.mark.parametrize("theirs", [Position(2, 0), Position(0, 3), Position(1, 1), Position(2**52, 2**52)], ids=str)
def test_a_position_that_cannot_be_ends_the_session_with_a_reason(theirs):
    nexts = [socket.socketpair()]
    end, peer = alone(lambda mine, error: (TcpConnection(nexts[0][0], WAIT_S), theirs))
    end.send(Message(Kind.ASSIGN, 1, 0, {}, flat(2)))
    peer.close()
    with pytest.raises(Refused, match=r"wrong-position: the other end has .* of 1 messages and 2 chunks"):
        end.recv(lambda *_: None, WAIT_S)
    assert end.closed and nexts[0][1].recv(1) == b""
    nexts[0][1].close()


def test_a_session_ends_with_what_broke_it_where_there_is_no_other_connection():
    def renew(mine, error):
        raise error

    end, peer = alone(renew)
    peer.close()
    with pytest.raises(PeerLost, match="connection-closed"):
        end.recv(lambda *_: None, WAIT_S)
    assert end.closed
    with pytest.raises(PeerLost):
        end.send(Message(Kind.UPDATE, 1))


def test_a_connection_that_this_end_cuts_is_not_renewed():
    """One of a site that was revoked: its client is not waited for."""
    end, peer = alone(lambda *_: pytest.fail("renewed"))
    threading.Timer(0.05, end.pair.cut, ("revoked", "the certificate was revoked")).start()
    with pytest.raises(PeerLost, match="revoked"):
        end.recv(lambda *_: None, WAIT_S)
    peer.close()


def test_a_deadline_is_for_the_beginning_of_a_message():
    end, peer = alone(lambda *_: pytest.fail("renewed"))
    with pytest.raises(PeerTimeout):
        end.recv(lambda *_: None, 0.05)
    assert end.closed
    peer.close()


def test_a_sender_that_finds_its_connection_closed_by_the_receiving_thread_goes_on():
    """The receiver noticed the break first: its close is no end of the session."""
    update = flat(3, 1.0)
    with Ends() as made, ThreadPoolExecutor(2) as pool:
        server, client = made.ends
        client.pair.close()
        arriving = pool.submit(receive, server, update)
        client.send(Message(Kind.UPDATE, 3, 0, {}, update))
        assert torch.equal(arriving.result(WAIT_S).tensors["w"], update["w"])
        assert len(made.renewed) == 2
