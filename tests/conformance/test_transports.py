"""What every transport promises, over real sockets on 127.0.0.1; clients that die are real processes."""

from __future__ import annotations

import threading

import pytest
import torch

from raafl.submodel.flat import FlatTensors, Layout
from raafl.transport import TRANSPORTS, Kind, Message, PeerLost, Refused, codec
from raafl.transport.frames import CHUNK_BYTES
from raafl.transport.gloo import FIRST_BYTES
from tests.conformance.messages import (
    CHUNK,
    exchange,
    flat,
    into,
    nothing,
    random_flat,
    still_works,
)
from tests.conformance.transports import ENDS, KINDS, WAIT_S, limit_drained, write_raw

pytestmark = pytest.mark.timeout(120)


def refuse(kind, assignment, meta):
    raise Refused("unknown-assignment", "by the test")


@pytest.fixture(scope="module")
def both(hub):
    """One connection that all tests share which leave it as it is: a message that went astray would be the next one's."""
    return hub.ends()


def test_every_transport_of_the_table_is_here():
    assert {name for name, _, _ in KINDS.values()} == set(TRANSPORTS) == set(ENDS)


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
}


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
