"""How pairs of every transport end, and how their ends meet."""

from __future__ import annotations

import gc
import multiprocessing as mp
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from raafl.submodel.flat import FlatTensors, Layout
from raafl.transport import Kind, Message, PeerLost, PeerTimeout, Refused
from tests.conformance.messages import (
    CHUNK,
    flat,
    into,
    nothing,
    random_flat,
    still_works,
)
from tests.conformance.transports import ENDS, KINDS, WAIT_S, Hub

pytestmark = pytest.mark.timeout(120)
DOINGS = ("idle", "sending", "receiving")


# ---- processes that will be killed, forked before any thread of this module is there ----


def _victim(told, kind, doing):
    """Wait to be told where the server is, connect, and do something until killed."""
    gc.freeze()
    try:
        place, client = told.recv()
        name, _, tls = KINDS[kind]
        pair = ENDS[name](place, client, tls, WAIT_S).connect()
        pair.send(Message(Kind.HELLO))
        if doing == "sending":
            pair.send(Message(Kind.UPDATE, 1, 0, {}, flat(w=torch.zeros(16 << 20))))
        time.sleep(WAIT_S)
    finally:
        os._exit(1)


@pytest.fixture(scope="module", autouse=True)
def victims():
    context, made = mp.get_context("fork"), {}
    for name in ENDS:
        for doing in DOINGS:
            told, telling = context.Pipe(duplex=False)
            process = context.Process(target=_victim, args=(told, name, doing), daemon=True)
            process.start()
            told.close()
            made[name, doing] = process, telling
    yield made
    for process, telling in made.values():
        process.kill()
        process.join()
        telling.close()


# ---- how pairs end ----


def test_the_last_words_arrive_after_close(ends):
    server, client = ends
    server.send(Message(Kind.STOP, meta={"reason": "done"}))
    server.close()
    assert client.recv(nothing, WAIT_S).meta == {"reason": "done"}
    with pytest.raises(PeerLost):
        client.recv(nothing, WAIT_S)


def test_a_silent_peer_is_a_timeout_and_both_ends_are_closed(ends):
    start = time.monotonic()
    with pytest.raises(PeerTimeout):
        ends[0].recv(nothing, 0.1)
    assert time.monotonic() - start > 0.09 and ends[0].closed
    for end in ends:
        with pytest.raises(PeerLost):
            end.recv(nothing, WAIT_S)


def test_a_send_that_nobody_receives_is_a_timeout(ends):
    with pytest.raises(PeerTimeout):
        ends[0].send(Message(Kind.ASSIGN, 1, 0, {}, random_flat(CHUNK)), timeout_s=0.1)


def test_a_wait_may_outlast_the_timeout_of_the_pair(ends, pool):
    server, client = ends
    server.timeout_s = 0.05
    waiting = pool.submit(server.recv, nothing, WAIT_S)
    time.sleep(0.2)
    client.send(Message(Kind.KEEPALIVE))
    assert waiting.result(WAIT_S).kind is Kind.KEEPALIVE


@pytest.mark.parametrize("what", ["recv", "send"])
def test_close_wakes_a_waiter_and_is_idempotent(ends, pool, what):
    server, _ = ends
    if what == "recv":
        waiting = pool.submit(server.recv, nothing, WAIT_S)
    else:
        waiting = pool.submit(server.send, Message(Kind.ASSIGN, 1, 0, {}, random_flat(CHUNK)), WAIT_S)
    time.sleep(0.1)
    for _ in range(3):
        server.close()
    with pytest.raises(PeerLost, match="closed-here"):
        waiting.result(WAIT_S / 2)
    for call in (lambda: server.send(Message(Kind.STOP)), lambda: server.recv(nothing, 1)):
        with pytest.raises(PeerLost, match="closed-here"):
            call()


def test_a_peer_that_closes_in_mid_message_is_lost(ends, pool):
    server, client = ends
    tensors = random_flat(16 * CHUNK)
    sent = pool.submit(client.send, Message(Kind.UPDATE, 1, 0, {}, tensors))

    def expect(*args):
        client.close()
        return FlatTensors.empty(tensors.layout)

    with pytest.raises(PeerLost):
        server.recv(expect, WAIT_S)
    with pytest.raises(PeerLost):
        sent.result(WAIT_S)


@pytest.mark.parametrize("doing", DOINGS)
@pytest.mark.parametrize("hub", ENDS, indirect=True)
def test_a_client_that_is_killed_is_noticed(hub, victims, doing):
    process, telling = victims[hub.name, doing]
    client = hub.new_client()
    telling.send((hub.place, client))

    def kill(*args):
        process.kill()
        process.join()
        return FlatTensors.empty(Layout.pack([("w", (16 << 20,), torch.float32)]))

    with hub.accepted(client) as server:
        assert server.recv(nothing, WAIT_S).kind is Kind.HELLO
        later = threading.Timer(0.1, kill)
        if doing != "sending":
            later.start()
        with pytest.raises(PeerLost):  # within half the time that it would take to find it silent
            if doing == "receiving":
                server.send(Message(Kind.ASSIGN, 1, 0, {}, random_flat(8 * CHUNK)), 2 * WAIT_S)
            else:
                server.recv(kill if doing == "sending" else nothing, 2 * WAIT_S)
        assert server.closed
    if doing != "sending":
        later.join()  # of two threads that wait for a process, one is told nothing
    process.join()
    assert process.exitcode == -signal.SIGKILL


# ---- how ends meet ----


def test_many_clients_at_once_and_one_that_says_nothing(hub):
    hub.silent()
    clients = [hub.new_client() for _ in range(8)]
    theirs = {client: hub.pool.submit(hub.client(client).connect) for client in clients}

    def serve(client):
        with hub.accepted(client) as pair, theirs[client].result(WAIT_S) as other:
            for turn in range(5):
                tensors = flat(w=torch.full((client * 1000,), float(turn)))
                target = FlatTensors.empty(tensors.layout)
                pair.send(Message(Kind.ASSIGN, turn, client, {}, None))
                assert other.recv(nothing, WAIT_S).incarnation == client
                sent = pool.submit(other.send, Message(Kind.UPDATE, turn, client, {}, tensors))
                assert pair.recv(into(target), WAIT_S).incarnation == client
                assert target.fingerprint() == tensors.fingerprint()
                sent.result(WAIT_S)

    with ThreadPoolExecutor(8) as pool, ThreadPoolExecutor(8) as servers:
        for done in [servers.submit(serve, client) for client in clients]:
            done.result(WAIT_S)


@pytest.mark.parametrize("kind", KINDS)
def test_a_client_that_comes_before_the_server_listens_gets_in_once_it_does(kind):
    with Hub(kind, listening=False) as hub:

        def come():
            while True:  # as clients do
                try:
                    return hub.client(1).connect()
                except PeerLost:
                    time.sleep(0.02)

        coming = hub.pool.submit(come)
        time.sleep(0.1)
        assert not coming.done()
        hub.listen()
        with hub.accepted(1) as server, coming.result(WAIT_S) as client:
            client.send(Message(Kind.HELLO, 1))
            assert server.recv(nothing, WAIT_S).assignment == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_that_is_not_there_is_lost_or_a_timeout(kind):
    hub = Hub(kind, listening=False)
    hub.server.__exit__(None, None, None)
    with pytest.raises((PeerLost, PeerTimeout)):
        hub.client(1, 0.1).connect()
    hub.close()


def test_a_pair_outlives_the_transport_and_a_word_is_left_where_there_is_a_place_for_it(pool):
    for kind in ENDS:
        with Hub(kind) as hub:
            server, client = hub.ends(1)
            hub.server.announce(1, "for the test")
            hub.server.__exit__(None, None, None)
            still_works(pool, server, client)
            hub.client(2).let_go()
            told = [hub.client(number).let_go() for number in (1, 2)]
            assert told == ([None, None] if hub.server.comes_and_goes else ["for the test", None])


@pytest.mark.parametrize("kind", [name for name in KINDS if name.startswith("tcp")])
def test_where_clients_come_and_go_one_comes_back_and_one_is_refused(kind):
    def admit(client):
        if client == 9:
            raise Refused("unknown-client", "by the test")

    with Hub(kind, admit) as hub:
        assert hub.server.comes_and_goes
        for _ in range(3):
            server, client = hub.ends(1)
            client.close()
            with pytest.raises(PeerLost):
                server.recv(nothing, WAIT_S)
        with hub.client(9).connect() as pair, pytest.raises(PeerLost):
            pair.recv(nothing, WAIT_S)
        assert hub.refused.get(timeout=WAIT_S) == "unknown-client"


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_left_when_all_is_closed(kind):
    def level():
        gc.collect()
        return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))

    def once():
        with Hub(kind) as hub, ThreadPoolExecutor(4) as pool:
            for _ in range(3):
                still_works(pool, *hub.ends())

    once()  # which leaves what the process keeps once and for all
    before = level()
    once()
    once()

    def left():
        return [what for what, was, is_ in zip(("threads", "files"), before, level(), strict=True) if is_ > was]

    deadline = time.monotonic() + WAIT_S / 2
    while left() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not left()
