"""What every transport promises, over real sockets on 127.0.0.1; clients that die are real processes."""

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

from raafl.runtime.transport import TRANSPORTS, Kind, Message, PeerLost, PeerTimeout, Refused, codec
from raafl.runtime.transport.gloo import FIRST_BYTES
from raafl.runtime.transport.payload import CHUNK_BYTES
from raafl.submodel.flat import FlatTensors, Layout
from tests.conformance.transports import ENDS, KINDS, WAIT_S, Hub, limit_drained, started, write_raw

pytestmark = pytest.mark.timeout(120)
CHUNK = CHUNK_BYTES // 4  # float32 elements
DOINGS = ("idle", "sending", "receiving")


def flat(**tensors):
    return FlatTensors.from_named(tensors)


def random_flat(numel):
    return flat(w=torch.randn(numel, generator=torch.Generator().manual_seed(numel)))


def nothing(kind, assignment, meta):
    return None


def into(target):
    return lambda kind, assignment, meta: target


def refuse(kind, assignment, meta):
    raise Refused("unknown-assignment", "by the test")


# ---- processes that will be killed, forked before any thread of this module is there ----


def _victim(told, kind, doing):
    """Wait to be told where the server is, connect, and do something until killed."""
    gc.freeze()
    try:
        place, client = told.recv()
        name, _, encrypt = KINDS[kind]
        pair = ENDS[name](place, client, encrypt, WAIT_S).connect()
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


@pytest.fixture(scope="module", params=KINDS)
def hub(request, victims):
    with Hub(request.param) as hub:
        yield hub


@pytest.fixture(scope="module")
def both(hub):
    """One connection that all tests share which leave it as it is: a message that went astray would be the next one's."""
    return hub.ends()


@pytest.fixture
def ends(hub):
    server, client = hub.ends()
    with server, client:
        yield server, client


@pytest.fixture(scope="module")
def pool():
    with started(4) as pool:
        yield pool


def exchange(pool, sender, receiver, message, expect=nothing, **more):
    sent = pool.submit(sender.send, message)
    try:
        received = receiver.recv(expect, WAIT_S, **more)
    finally:
        assert sent.result(WAIT_S) == receiver.received_bytes
    return received


def still_works(pool, sender, receiver):
    tensors = random_flat(10)
    target = FlatTensors.zeros(tensors.layout)
    got = exchange(pool, sender, receiver, Message(Kind.UPDATE, 77, 0, {"again": 1}, tensors), into(target))
    assert (got.assignment, got.meta) == (77, {"again": 1}) and target.fingerprint() == tensors.fingerprint()


def test_every_transport_of_the_table_is_here():
    assert {name for name, _, _ in KINDS.values()} == set(TRANSPORTS) == set(ENDS)


# ---- messages: order and integrity ----

MANY_DTYPES = {
    name: torch.arange(1, 4).to(dtype) if dtype != torch.bool else torch.tensor([True, False, True])
    for name, dtype in codec.DTYPES.items()
}
CONTENTS = {
    "none": lambda: None,
    "empty": lambda: flat(),
    "empty tensor": lambda: flat(w=torch.zeros(0, 3)),
    "one element": lambda: flat(w=torch.tensor(2.5)),
    "every dtype": lambda: flat(**MANY_DTYPES),
    # 56 + len('{"meta":{"a":1},"buffers":[["float32",16356]]}') + 4 * 16356 + 8 = 65534 of 65536 bytes
    "just inline": lambda: random_flat(16356),
    "just not inline": lambda: random_flat(FIRST_BYTES // 4),
    "one piece": lambda: random_flat(CHUNK),
    "one piece and a bit": lambda: random_flat(CHUNK + 1),
    "more pieces than are staged": lambda: random_flat(6 * CHUNK + 3),
    "pieces of three dtypes": lambda: flat(
        a=torch.randn(CHUNK + 5), b=torch.arange(CHUNK), c=torch.ones(2 * CHUNK + 1).to(torch.bfloat16), d=torch.ones(3)
    ),
}  # fmt: skip


@pytest.mark.parametrize("content", CONTENTS)
def test_a_message_comes_as_it_went_either_way(both, pool, content):
    tensors = CONTENTS[content]()
    for sender, receiver in (both, both[::-1]):
        target = None if tensors is None else FlatTensors.empty(tensors.layout)
        message = Message(Kind.ASSIGN, 3, 2, {"a": 1}, tensors)
        got = exchange(pool, sender, receiver, message, into(target), finite=True)
        assert (got.kind, got.assignment, got.incarnation, got.meta) == (Kind.ASSIGN, 3, 2, {"a": 1})
        assert got.tensors is target
        assert tensors is None or target.fingerprint() == tensors.fingerprint()


@pytest.mark.parametrize("length", [FIRST_BYTES - 100, FIRST_BYTES, 1_000_000])
@pytest.mark.parametrize("numel", [0, 5, 2 * CHUNK])
def test_long_json(both, pool, length, numel):
    tensors = random_flat(numel)
    target = FlatTensors.empty(tensors.layout)
    got = exchange(pool, *both, Message(Kind.UPDATE, 1, 0, {"x": "y" * length}, tensors), into(target))
    assert got.meta == {"x": "y" * length} and target.fingerprint() == tensors.fingerprint()


def test_messages_come_in_the_order_in_which_they_went(both, pool):
    def send():
        for number in range(50):
            both[1].send(Message(Kind.UPDATE, number, 0, {}, random_flat(number * 500)))

    sent = pool.submit(send)
    for number in range(50):
        tensors = random_flat(number * 500)
        target = FlatTensors.empty(tensors.layout)
        got = both[0].recv(into(target), WAIT_S)
        assert got.assignment == number and target.fingerprint() == tensors.fingerprint()
    sent.result(WAIT_S)


def test_both_directions_at_once(both, pool):
    tensors, work = random_flat(3_000_000), []
    for end in both:
        target = FlatTensors.empty(tensors.layout)
        work.append(pool.submit(end.send, Message(Kind.UPDATE, 1, 0, {}, tensors)))
        work.append(pool.submit(end.recv, into(target), WAIT_S))
    _, one, _, other = [item.result(WAIT_S) for item in work]
    assert one.tensors.fingerprint() == other.tensors.fingerprint() == tensors.fingerprint()


def test_both_may_send_before_either_receives(both):
    for end in both:
        end.send(Message(Kind.KEEPALIVE), timeout_s=WAIT_S)
    for end in both:
        assert end.recv(nothing, WAIT_S).kind is Kind.KEEPALIVE


def test_a_message_that_cannot_be_encoded_sends_nothing(both, pool):
    with pytest.raises(ValueError, match="not JSON"):
        both[0].send(Message(Kind.ASSIGN, 1, 0, {"a": {1}}))
    still_works(pool, *both)


def test_asking_after_the_peer_disturbs_nothing(both, pool):
    both[0].check()
    both[1].send(Message(Kind.KEEPALIVE))
    both[0].check()
    assert both[0].recv(nothing, WAIT_S).kind is Kind.KEEPALIVE


# ---- what is refused, and what comes after ----


@pytest.mark.parametrize("numel", [1, 3 * CHUNK + 1])
def test_refused_by_expect_then_usable(both, pool, numel):
    message = Message(Kind.UPDATE, 9, 0, {"m": 1}, random_flat(numel))
    for _ in range(2):
        with pytest.raises(Refused) as caught:
            exchange(pool, *both, message, refuse)
        assert caught.value.reason == "unknown-assignment" and caught.value.message.assignment == 9
        still_works(pool, *both)


@pytest.mark.parametrize("numel", [1, 2 * CHUNK])
def test_wrong_layout_then_usable(both, pool, numel):
    target = FlatTensors.zeros(Layout.pack([("w", (numel + 1,), torch.float32)]))
    for expect in (into(target), nothing):
        with pytest.raises(Refused, match="wrong-layout"):
            exchange(pool, *both, Message(Kind.UPDATE, 9, 0, {}, random_flat(numel)), expect)
    assert not target.buffers[torch.float32].any()
    still_works(pool, *both)


@pytest.mark.parametrize("numel", [2, 2 * CHUNK + 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_non_finite_is_refused_where_asked(both, pool, numel, dtype):
    for value in (float("nan"), float("inf"), float("-inf")):
        tensors = flat(a=torch.ones(3), w=torch.zeros(numel, dtype=dtype))
        tensors["w"][-1] = value
        message, target = Message(Kind.UPDATE, 1, 0, {}, tensors), FlatTensors.empty(tensors.layout)
        with pytest.raises(Refused, match="non-finite"):
            exchange(pool, *both, message, into(target), finite=True)
        exchange(pool, *both, message, into(target))


def test_large_finite_values_whose_sum_overflows_are_finite(both, pool):
    tensors = flat(w=torch.full((100,), 3e38), h=torch.full((CHUNK,), 6e4, dtype=torch.float16))
    target = FlatTensors.empty(tensors.layout)
    exchange(pool, *both, Message(Kind.UPDATE, 1, 0, {}, tensors), into(target), finite=True)
    assert target.fingerprint() == tensors.fingerprint()


@pytest.mark.parametrize("numel", [2, CHUNK * 4])
def test_a_bool_that_is_none_is_refused(both, pool, numel):
    tensors = flat(b=torch.zeros(numel, dtype=torch.bool))
    tensors.buffers[torch.bool].view(torch.uint8)[-1] = 7
    with pytest.raises(Refused, match="bad-value"):
        exchange(pool, *both, Message(Kind.ASSIGN, 1, 0, {}, tensors), into(FlatTensors.empty(tensors.layout)))
    still_works(pool, *both)


@pytest.mark.parametrize("numel", [5, 2 * CHUNK])
def test_a_damaged_payload_is_refused_then_usable(both, pool, numel, monkeypatch):
    message, footer = Message(Kind.UPDATE, 4, 0, {}, random_flat(numel)), codec.Checksum.footer

    def wrong_where_sent(self):
        return footer(self) if threading.current_thread() is threading.main_thread() else bytes(8)

    with monkeypatch.context() as patch:
        patch.setattr(codec.Checksum, "footer", wrong_where_sent)
        with pytest.raises(Refused, match="bad-checksum") as caught:
            exchange(pool, *both, message, into(FlatTensors.empty(message.tensors.layout)))
    assert caught.value.message.assignment == 4
    still_works(pool, *both)


def test_a_refused_payload_over_the_limit_closes_the_pair(ends, pool):
    server, client = ends
    limit_drained(server, CHUNK_BYTES)
    sent = pool.submit(client.send, Message(Kind.UPDATE, 9, 0, {}, random_flat(8 * CHUNK)))
    with pytest.raises(Refused, match="unknown-assignment"):
        server.recv(refuse, WAIT_S)
    assert server.closed
    with pytest.raises(PeerLost):
        sent.result(WAIT_S)


@pytest.mark.parametrize("error", [ZeroDivisionError, ValueError])
def test_an_error_in_expect_closes_the_pair(ends, pool, error):
    def expect(*args):
        raise error

    sent = pool.submit(ends[0].send, Message(Kind.UPDATE, 1, 0, {}, random_flat(CHUNK)))
    with pytest.raises(error):
        ends[1].recv(expect, WAIT_S)
    assert ends[1].closed
    with pytest.raises(PeerLost):
        sent.result(WAIT_S)


def test_bytes_that_are_no_message_close_the_pair(ends):
    server, client = ends
    write_raw(client, b"x" * 100)
    with pytest.raises(Refused, match="bad-magic"):
        server.recv(nothing, WAIT_S)
    assert server.closed


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
        if doing != "sending":
            threading.Timer(0.1, kill).start()
        with pytest.raises(PeerLost):  # within half the time that it would take to find it silent
            if doing == "receiving":
                server.send(Message(Kind.ASSIGN, 1, 0, {}, random_flat(8 * CHUNK)), 2 * WAIT_S)
            else:
                server.recv(kill if doing == "sending" else nothing, 2 * WAIT_S)
        assert server.closed
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
