"""Two sides on this machine; what is measured is only looked at for its order of magnitude."""

import contextlib
import socket
import struct
import threading

import pytest

from raafl.devices.measure import MAGIC, MOST_BYTES, Answerer, measure_link
from raafl.errors import BadInput


@pytest.fixture
def answerer():
    found = Answerer("127.0.0.1:0", deadline_s=20.0)
    thread = threading.Thread(target=found.serve, kwargs={"num_peers": 2}, daemon=True)
    thread.start()
    yield found
    found.close()
    thread.join(20)
    assert not thread.is_alive()


def test_a_link_is_measured_both_ways_and_the_next_peer_is_answered_too(answerer):
    for _ in range(2):
        link = measure_link(f"127.0.0.1:{answerer.port}", duration_s=0.05)
        assert link.down_bytes_per_s > 1e5 and link.up_bytes_per_s > 1e5
        assert 0 < link.latency_s < 5


def has_ipv6():
    with contextlib.suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        return True
    return False


@pytest.mark.skipif(not has_ipv6(), reason="the loopback interface has no IPv6 address")
def test_a_link_is_measured_at_an_ipv6_address():
    """It was said that this machine cannot listen there."""
    found = Answerer("[::1]:0", deadline_s=20.0)
    thread = threading.Thread(target=found.serve, args=(1,), daemon=True)
    thread.start()
    assert measure_link(f"[::1]:{found.port}", duration_s=0.01).latency_s > 0
    thread.join(20)
    found.close()


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack("!8scQ", MAGIC, b"d", MOST_BYTES + 1),
        struct.pack("!8scQ", MAGIC, b"x", 1),
    ],
)
def test_whoever_says_something_else_gets_nothing(answerer, said):
    with socket.create_connection(("127.0.0.1", answerer.port), timeout=20) as peer:
        with contextlib.suppress(OSError):  # it may have been hung up on before it has said all
            peer.sendall(said)
            peer.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            assert peer.recv(1) == b""


def test_nobody_there_and_bad_addresses_are_said(free_port):
    with pytest.raises(BadInput, match=f"127.0.0.1:{free_port}', where no `raafl plan --answer` answers"):
        measure_link(f"127.0.0.1:{free_port}", duration_s=0.05)
    with pytest.raises(BadInput, match="address is 'somewhere': give HOST:PORT"):
        measure_link("somewhere")
    with pytest.raises(BadInput, match="address is 'host:99999', whose port is '99999': give 0 to 65535"):
        Answerer("host:99999")
