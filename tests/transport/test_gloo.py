"""What a pair over Gloo promises beyond the suite of all transports (tests/conformance/test_transports.py)."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import psutil
import pytest
import torch
import torch.distributed as dist

from raafl.submodel.flat import FlatTensors
from raafl.transport import Kind, Message, PeerTimeout, Refused
from raafl.transport.frames import CHUNK_BYTES
from raafl.transport.gloo import GlooConnection

HOST = "127.0.0.1"
pytestmark = pytest.mark.timeout(120)


def new_store():
    return dist.TCPStore(HOST, 0, None, True, timeout=timedelta(seconds=60), wait_for_workers=False)


def join(store, prefix="pair/1"):
    with ThreadPoolExecutor(2) as pool:
        ends = [pool.submit(GlooConnection.connect, store, prefix, server, 60.0, HOST) for server in (True, False)]
        return tuple(end.result() for end in ends)


@pytest.fixture
def pool():
    with ThreadPoolExecutor(2) as pool:
        yield pool


@pytest.fixture
def ends():
    server, client = join(new_store())
    with server, client:
        yield server, client


def refuse(kind, assignment, meta):
    raise Refused("unknown-assignment", "by the test")


def test_an_old_header_is_not_taken_for_a_new_one(ends):
    client, server = ends
    client.send(Message(Kind.UPDATE, 5))
    assert server.recv(lambda *_: None, 5).assignment == 5
    client._send_first(4, 5)  # only the magic; the rest of the receiving buffer is what the last message left there
    with pytest.raises(Refused):
        server.recv(lambda *_: None, 5)


def test_refused_payloads_do_not_grow_memory(ends, pool):
    message, sizes = Message(Kind.UPDATE, 9, 0, {}, FlatTensors.from_named({"w": torch.zeros(2 * CHUNK_BYTES)})), []
    for _ in range(6):
        sent = pool.submit(ends[0].send, message)
        with pytest.raises(Refused):
            ends[1].recv(refuse, 10)
        sent.result(10)
        sizes.append(psutil.Process().memory_info().rss)
    assert sizes[-1] - sizes[1] < CHUNK_BYTES


def test_a_missing_peer_blocks_nobody_else_and_is_named_at_the_deadline(pool):
    store = new_store()
    missing = pool.submit(GlooConnection.connect, store, "pair/2/0", True, 60.0, HOST)
    time.sleep(0.1)
    for end in join(store, "pair/3/0"):
        end.close()
    assert not missing.done()
    late = pool.submit(GlooConnection.connect, store, "pair/2/0", False, 60.0, HOST)
    for waiting in (missing, late):
        waiting.result(90).close()
    with pytest.raises(PeerTimeout, match="pair/4/0"):
        GlooConnection.connect(store, "pair/4/0", True, 0.3, HOST)
