"""One conformance suite for every transport, over real sockets on 127.0.0.1; peers that die are real processes."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from functools import partial

import psutil
import pytest
import torch
import torch.distributed as dist

from raafl.runtime.transport import Kind, Message, PeerLost, PeerTimeout, Refused, codec, gloo, nccl
from raafl.runtime.transport.cipher import RecordCipher
from raafl.runtime.transport.gloo import GlooPair
from raafl.runtime.transport.nccl import NcclPair, connect
from raafl.runtime.transport.payload import CHUNK_BYTES
from raafl.runtime.transport.tcp import TcpPair
from raafl.submodel.flat import FlatTensors, Layout

HOST = "127.0.0.1"
pytestmark = pytest.mark.timeout(120)


class StagedPair(GlooPair):
    """Gloo with every tensor passed through the staging buffer, as CUDA tensors are."""

    def __init__(self, *args, **more):
        super().__init__(*args, **more)
        self.staging.are_needed = lambda tensors: True


MEETINGS = {}


def tcp(store, prefix, server, timeout_s, hostname, *, staged=False, sealed=False, **more):
    """Meet over a socket; what a door does for real is tested in test_door.py."""
    meeting = MEETINGS.setdefault((store.port, prefix), Future())
    if server:
        with socket.create_server((hostname, 0)) as listener:
            meeting.set_result(listener.getsockname())
            listener.settimeout(timeout_s)
            sock, _ = listener.accept()
    else:
        sock = socket.create_connection(meeting.result(timeout_s), timeout_s)
        del MEETINGS[store.port, prefix]
    keys = (b"s" * 32, b"c" * 32) if server else (b"c" * 32, b"s" * 32)
    pair = TcpPair(sock, timeout_s, seal=RecordCipher(*keys) if sealed else None, **more)
    if staged:
        pair._frames.staging.are_needed = lambda tensors: True
    return pair


TRANSPORTS = {
    "gloo": GlooPair.connect,
    "staged": StagedPair.connect,
    "chosen": connect,  # of two ends without GPUs: Gloo
    "tcp": tcp,
    "staged tcp": partial(tcp, staged=True),
    "sealed tcp": partial(tcp, sealed=True),
}


def new_store():
    return dist.TCPStore(HOST, 0, None, True, timeout=timedelta(seconds=10), wait_for_workers=False)


def join(how, store=None, prefix="pair/1/0", timeout_s=10.0, **more):
    store = store or new_store()
    with ThreadPoolExecutor(2) as pool:
        ends = [pool.submit(how, store, prefix, server, timeout_s, HOST, **more) for server in (True, False)]
        return tuple(end.result() for end in ends)


@pytest.fixture(params=TRANSPORTS)
def how(request):
    return TRANSPORTS[request.param]


@pytest.fixture
def ends(how):
    server, client = join(how)
    with server, client:
        yield server, client


@pytest.fixture
def pool():
    with ThreadPoolExecutor(4) as pool:
        yield pool


def flat(**tensors):
    return FlatTensors.from_named(tensors)


def random_flat(numel):
    generator = torch.Generator().manual_seed(numel)
    return flat(w=torch.randn(numel, generator=generator))


def nothing(kind, assignment, meta):
    return None


def into(target):
    return lambda kind, assignment, meta: target


def refuse(kind, assignment, meta):
    raise Refused("unknown-assignment", "by the test")


def exchange(pool, sender, receiver, message, expect=nothing, **more):
    sent = pool.submit(sender.send, message)
    try:
        received = receiver.recv(expect, 10, **more)
    finally:
        num_bytes = sent.result(10)
        assert num_bytes == receiver.received_bytes
    return received


def still_works(pool, sender, receiver):
    tensors = random_flat(10)
    target = FlatTensors.zeros(tensors.layout)
    got = exchange(pool, sender, receiver, Message(Kind.UPDATE, 77, 0, {"again": 1}, tensors), into(target))
    assert (got.assignment, got.meta) == (77, {"again": 1}) and target.fingerprint() == tensors.fingerprint()


MANY_DTYPES = {
    name: torch.arange(1, 4).to(dtype) if dtype != torch.bool else torch.tensor([True, False, True])
    for name, dtype in codec.DTYPES.items()
}
CHUNK = CHUNK_BYTES // 4  # float32 elements
CONTENTS = {
    "none": lambda: None,
    "empty": lambda: flat(),
    "empty tensor": lambda: flat(w=torch.zeros(0, 3)),
    "one element": lambda: flat(w=torch.tensor(2.5)),
    "every dtype": lambda: flat(**MANY_DTYPES),
    # 56 + len('{"meta":{"a":1},"buffers":[["float32",16356]]}') + 4 * 16356 + 8 = 65534 of 65536 bytes
    "just inline": lambda: random_flat(16356),
    "just not inline": lambda: random_flat(gloo.FIRST_BYTES // 4),
    "one piece": lambda: random_flat(CHUNK),
    "one piece and a bit": lambda: random_flat(CHUNK + 1),
    "more pieces than are staged": lambda: random_flat(6 * CHUNK + 3),
    "pieces of three dtypes": lambda: flat(
        a=torch.randn(CHUNK + 5), b=torch.arange(CHUNK), c=torch.ones(2 * CHUNK + 1).to(torch.bfloat16), d=torch.ones(3)
    ),
}  # fmt: skip


@pytest.mark.parametrize("content", CONTENTS)
def test_round_trip(ends, pool, content):
    tensors = CONTENTS[content]()
    for sender, receiver in (ends, ends[::-1]):
        target = None if tensors is None else FlatTensors.empty(tensors.layout)
        message = Message(Kind.ASSIGN, 3, 2, {"a": 1}, tensors)
        got = exchange(pool, sender, receiver, message, into(target), finite=True)
        assert (got.kind, got.assignment, got.incarnation, got.meta) == (Kind.ASSIGN, 3, 2, {"a": 1})
        assert got.tensors is target
        assert tensors is None or target.fingerprint() == tensors.fingerprint()


@pytest.mark.parametrize("length", [gloo.FIRST_BYTES - 100, gloo.FIRST_BYTES, 1_000_000])
@pytest.mark.parametrize("numel", [0, 5, 2 * CHUNK])
def test_long_json(ends, pool, length, numel):
    tensors = random_flat(numel)
    target = FlatTensors.empty(tensors.layout)
    got = exchange(pool, *ends, Message(Kind.UPDATE, 1, 0, {"x": "y" * length}, tensors), into(target))
    assert got.meta == {"x": "y" * length} and target.fingerprint() == tensors.fingerprint()


@pytest.mark.parametrize("numel", [1, 3 * CHUNK + 1])
def test_refused_by_expect_then_usable(ends, pool, numel):
    message = Message(Kind.UPDATE, 9, 0, {"m": 1}, random_flat(numel))
    for _ in range(2):
        with pytest.raises(Refused) as caught:
            exchange(pool, *ends, message, refuse)
        assert caught.value.reason == "unknown-assignment" and caught.value.message.assignment == 9
        still_works(pool, *ends)


@pytest.mark.parametrize("numel", [1, 2 * CHUNK])
def test_wrong_layout_then_usable(ends, pool, numel):
    target = FlatTensors.zeros(Layout.pack([("w", (numel + 1,), torch.float32)]))
    for expect in (into(target), nothing):
        with pytest.raises(Refused, match="wrong-layout"):
            exchange(pool, *ends, Message(Kind.UPDATE, 9, 0, {}, random_flat(numel)), expect)
    assert not target.buffers[torch.float32].any()
    still_works(pool, *ends)


@pytest.mark.parametrize("numel", [2, 2 * CHUNK + 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_is_refused_where_asked(pool, numel, dtype, value):
    with GlooPairs() as ends:
        tensors = flat(a=torch.ones(3), w=torch.zeros(numel, dtype=dtype))
        tensors["w"][-1] = value
        message = Message(Kind.UPDATE, 1, 0, {}, tensors)
        target = FlatTensors.empty(tensors.layout)
        with pytest.raises(Refused, match="non-finite"):
            exchange(pool, *ends, message, into(target), finite=True)
        exchange(pool, *ends, message, into(target))
        still_works(pool, *ends)


class GlooPairs:
    def __enter__(self):
        self.ends = join(GlooPair.connect)
        return self.ends

    def __exit__(self, *error):
        for end in self.ends:
            end.close()


def test_large_finite_values_whose_sum_overflows_are_finite(ends, pool):
    tensors = flat(w=torch.full((100,), 3e38), h=torch.full((CHUNK,), 6e4, dtype=torch.float16))
    target = FlatTensors.empty(tensors.layout)
    exchange(pool, *ends, Message(Kind.UPDATE, 1, 0, {}, tensors), into(target), finite=True)


@pytest.mark.parametrize("numel", [2, CHUNK * 4])
def test_a_bool_that_is_none_is_refused(ends, pool, numel):
    tensors = flat(b=torch.zeros(numel, dtype=torch.bool))
    tensors.buffers[torch.bool].view(torch.uint8)[-1] = 7
    with pytest.raises(Refused, match="bad-value"):
        exchange(pool, *ends, Message(Kind.ASSIGN, 1, 0, {}, tensors), into(FlatTensors.empty(tensors.layout)))
    still_works(pool, *ends)


@pytest.mark.parametrize("numel", [5, 2 * CHUNK])
def test_damaged_payload_is_refused_then_usable(ends, pool, numel, monkeypatch):
    message = Message(Kind.UPDATE, 4, 0, {}, random_flat(numel))
    footer = codec.Checksum.footer

    def wrong_where_sent(self):
        return footer(self) if threading.current_thread() is threading.main_thread() else bytes(8)

    with monkeypatch.context() as patch:
        patch.setattr(codec.Checksum, "footer", wrong_where_sent)
        with pytest.raises(Refused, match="bad-checksum") as caught:
            exchange(pool, *ends, message, into(FlatTensors.empty(message.tensors.layout)))
    assert caught.value.message.assignment == 4
    still_works(pool, *ends)


def test_refused_payload_over_the_limit_closes_the_pair(how, pool):
    server, client = join(how, drain_bytes=CHUNK_BYTES)
    with server, client:
        sent = pool.submit(client.send, Message(Kind.UPDATE, 9, 0, {}, random_flat(8 * CHUNK)))
        with pytest.raises(Refused, match="unknown-assignment"):
            server.recv(refuse, 10)
        assert server.closed
        with pytest.raises(PeerLost):
            sent.result(5)


@pytest.mark.alone
def test_refused_payloads_do_not_grow_memory(pool):
    with GlooPairs() as ends:
        message = Message(Kind.UPDATE, 9, 0, {}, random_flat(8 * CHUNK))
        sizes = []
        for _ in range(6):
            with pytest.raises(Refused):
                exchange(pool, *ends, message, refuse)
            sizes.append(psutil.Process().memory_info().rss)
        assert sizes[-1] - sizes[1] < CHUNK_BYTES


def test_an_error_in_expect_closes_the_pair(ends, pool):
    sent = pool.submit(ends[0].send, Message(Kind.UPDATE, 1, 0, {}, random_flat(CHUNK)))
    with pytest.raises(ZeroDivisionError):
        ends[1].recv(lambda *args: 1 // 0, 10)
    assert ends[1].closed
    with pytest.raises(PeerLost):
        sent.result(5)


def test_bytes_that_are_no_frame_close_the_pair(ends):
    client, server = ends
    if isinstance(client, TcpPair):
        client._stream.write([b"x" * 100])
    else:
        client._out_memory[:100] = b"x" * 100
        client._send_first(100, 5)
    with pytest.raises(Refused, match="bad-magic"):
        server.recv(nothing, 5)
    assert server.closed


@pytest.mark.parametrize("how", ["gloo", "staged", "chosen"], indirect=True)
def test_an_old_header_is_not_taken_for_a_new_one(ends, pool):
    client, server = ends
    exchange(pool, client, server, Message(Kind.UPDATE, 5, 0, {}, None))
    client._send_first(4, 5)  # only the magic; the rest of the receiving buffer is what the last message left there
    with pytest.raises(Refused):
        server.recv(nothing, 5)


def test_both_may_send_before_either_receives(ends):
    for end in ends:
        end.send(Message(Kind.KEEPALIVE), timeout_s=5)
    for end in ends:
        assert end.recv(nothing, 5).kind is Kind.KEEPALIVE


def test_the_last_words_arrive_after_close(ends):
    server, client = ends
    server.send(Message(Kind.STOP, meta={"reason": "done"}))
    server.close()
    time.sleep(0.1)
    assert client.recv(nothing, 5).meta == {"reason": "done"}
    with pytest.raises(PeerLost):
        client.recv(nothing, 5)


@pytest.mark.alone
def test_a_silent_peer_is_a_timeout_at_the_deadline(ends):
    start = time.monotonic()
    with pytest.raises(PeerTimeout):
        ends[0].recv(nothing, 0.5)
    assert 0.4 < time.monotonic() - start < 2
    assert ends[0].closed
    with pytest.raises(PeerLost):
        ends[0].recv(nothing, 5)
    start = time.monotonic()
    with pytest.raises(PeerLost):
        ends[1].recv(nothing, 5)
    assert time.monotonic() - start < 2


def test_a_send_that_nobody_receives_is_a_timeout(ends):
    with pytest.raises(PeerTimeout):
        ends[0].send(Message(Kind.ASSIGN, 1, 0, {}, random_flat(CHUNK)), timeout_s=0.5)


def test_a_wait_may_outlast_the_timeout_of_the_pair(pool):
    server, client = join(GlooPair.connect, timeout_s=1.0)
    with server, client:
        waiting = pool.submit(server.recv, nothing, 10)
        time.sleep(1.6)
        client.send(Message(Kind.KEEPALIVE))
        assert waiting.result(5).kind is Kind.KEEPALIVE


@pytest.mark.alone
@pytest.mark.parametrize("what", ["recv", "send"])
def test_close_wakes_a_waiter_and_is_idempotent(ends, pool, what):
    server, _ = ends
    if what == "recv":
        waiting = pool.submit(server.recv, nothing, 30)
    else:
        waiting = pool.submit(server.send, Message(Kind.ASSIGN, 1, 0, {}, random_flat(CHUNK)), 30)
    time.sleep(0.3)
    start = time.monotonic()
    for _ in range(3):
        server.close()
    with pytest.raises(PeerLost) as caught:
        waiting.result(5)
    assert caught.value.reason == "closed-here" and time.monotonic() - start < 1
    for call in (lambda: server.send(Message(Kind.STOP)), lambda: server.recv(nothing, 1)):
        with pytest.raises(PeerLost, match="closed-here"):
            call()


DYING_CLIENT = """
import sys, time
from datetime import timedelta
from functools import partial
import torch, torch.distributed as dist
from raafl.runtime.transport import Kind, Message
from raafl.runtime.transport.gloo import GlooPair
from raafl.submodel.flat import FlatTensors
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), None, False, timeout=timedelta(seconds=20))
pair = GlooPair.connect(store, "pair/1/0", False, 20, "127.0.0.1")
tensors = FlatTensors.from_named({"w": torch.zeros(64 << 20)})
pair.send(Message(Kind.HELLO))
if sys.argv[2] == "sending":
    pair.send(Message(Kind.UPDATE, 1, 0, {}, tensors))
time.sleep(60)
"""


@pytest.mark.alone
@pytest.mark.parametrize("doing", ["idle", "sending", "receiving"])
def test_a_killed_process_is_noticed_at_once(doing, tmp_path, pool):
    store = new_store()
    script = tmp_path / "client.py"
    script.write_text(DYING_CLIENT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    client = subprocess.Popen([sys.executable, str(script), str(store.port), doing], env=environment)
    killed_s = []

    def kill(*args):
        killed_s.append(time.monotonic())
        client.send_signal(signal.SIGKILL)
        client.wait(5)

    try:
        with GlooPair.connect(store, "pair/1/0", True, 30, HOST) as server:
            assert server.recv(nothing, 20).kind is Kind.HELLO
            if doing == "sending":

                def expect(kind, assignment, meta):
                    kill()
                    return FlatTensors.empty(Layout.pack([("w", (64 << 20,), torch.float32)]))

            else:
                expect = nothing
                threading.Timer(0.3, kill).start()
            with pytest.raises(PeerLost):
                if doing == "receiving":
                    server.send(Message(Kind.ASSIGN, 1, 0, {}, random_flat(CHUNK)), 30)
                else:
                    server.recv(expect, 30)
            assert time.monotonic() - killed_s[0] < 1.0 and server.closed
    finally:
        client.kill()
        client.wait()


@pytest.mark.alone
def test_a_missing_peer_blocks_nobody_else(pool):
    store = new_store()
    missing = pool.submit(GlooPair.connect, store, "pair/2/0", True, 3.0, HOST)
    time.sleep(0.3)
    start = time.monotonic()
    for end in join(GlooPair.connect, store, "pair/3/0"):
        end.close()
    assert time.monotonic() - start < 2
    with pytest.raises(PeerTimeout, match="pair/2/0"):
        missing.result(20)


def test_a_peer_comes_back_under_a_new_prefix(how, pool):
    store = new_store()
    for incarnation in range(3):
        server, client = join(how, store, f"pair/1/{incarnation}")
        client.close()
        with pytest.raises(PeerLost):
            server.recv(nothing, 5)


@pytest.mark.alone
def test_threads_and_descriptors_return_to_their_level(how, pool):
    store = new_store()

    def level():
        gc.collect()
        return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))

    def once(index):
        ends = join(how, store, f"pair/1/{index}")
        still_works(pool, *ends)
        for end in ends:
            end.close()

    once(0)
    list(pool.map(time.sleep, [0.05] * 4))  # so that the pool has all its threads
    before = level()
    for index in range(1, 6):
        once(index)
    deadline = time.monotonic() + 3
    while level() != before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert level() == before


def test_the_name_of_a_device_decides():
    one, two = "cuda:GPU-1", "cuda:GPU-2"
    assert nccl.nccl_problem("cpu", two) == "the server's tensors are on cpu"
    assert nccl.nccl_problem(one, "cpu") == "the client's tensors are on cpu"
    assert nccl.nccl_problem(one, one) == "both ends share one GPU"
    expected = None if dist.is_nccl_available() else "this torch is built without NCCL"
    assert nccl.nccl_problem(one, two) == expected
    assert nccl.identity(torch.device("cpu")) == "cpu"


def test_nccl_without_a_gpu_is_an_error_that_names_the_remedy():
    with GlooPairs() as (server, _), pytest.raises(RuntimeError, match=r"cpu.*use GlooPair"):
        NcclPair(server, new_store(), "pair/1/0", torch.device("cpu"))


def test_ends_without_gpus_choose_gloo():
    server, client = join(connect)
    with server, client:
        assert type(server) is GlooPair and type(client) is GlooPair


def test_the_word_sum_finds_lost_and_altered_words():
    piece = torch.arange(1, 12, dtype=torch.int32)  # 44 bytes: five words of 8 and 4 bytes
    by_hand = sum(low + (high << 32) for low, high in ((1, 2), (3, 4), (5, 6), (7, 8), (9, 10))) + 11
    assert nccl._sum(piece) == by_hand
