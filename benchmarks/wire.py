"""One task's round trip over the wire against the raw Gloo transfer of the same bytes.

A task is an assignment out and an update back, with every check: header, JSON, checksum of both payloads, finiteness of
the update. It goes over `GlooConnection` (torchrun), `TcpConnection` between processes of one machine (fit --local), and over
TLS 1.3 (serve and join). "raw" is one Gloo send and receive of one buffer each way, "raw tcp" the same bytes over a plain socket.
All run between the same two processes, in turn, one thread each for torch; a row holds the medians, the CPU seconds of both ends
together, and the ratio to raw. The last row is what a TLS session holds in memory, both ends together.

`python -m benchmarks.wire counts` has another table, which needs no time: how often a task between two GPUs is copied and
waited for, by the number of its pieces, on the emulated GPUs of `tests/helpers/emulated_cuda.py`. `synchronisations` hold
the CPU up until all of a GPU's work is done; an event is waited for alone, by then mostly there: that of the piece that goes
next, or of the slot that is used again.
"""

from __future__ import annotations

import itertools
import json
import queue
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as _distributed

from benchmarks.common import Row, main
from raafl.sites.authority import Authority, request
from raafl.sites.credentials import TlsFiles
from raafl.submodel.flat import FlatTensors, Layout
from raafl.transport import Connection, Kind, Message
from raafl.transport.gloo import GlooConnection
from raafl.transport.tcp.connection import TcpConnection
from raafl.transport.tcp.credentials import Credentials, LocalToken
from raafl.transport.tcp.listener import Listener, connect

SIZES = {4 << 10: 400, 64 << 10: 400, 4 << 20: 100, 344 << 20: 5}
"""Bytes each way, and how often."""

_TIMEOUT_S = 60.0
_HOST = "127.0.0.1"
dist: Any = _distributed


def rows() -> list[Row]:
    """Measure round trips with a second process as the client, and the memory of a TLS session."""
    return [*trips(), sessions()]


def trips(device: str = "cpu", sizes: dict[int, int] = SIZES, only: str | None = None) -> list[Row]:
    """Measure round trips with a second process as the client.

    `device`: device of the tensors over Gloo and TCP. `sizes`: repeats by number of bytes. `only`: the one transport to
    measure beside the raw transfer; None = all.
    """
    store = dist.TCPStore(_HOST, 0, None, True, timeout=timedelta(seconds=_TIMEOUT_S), wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        certify(Path(folder))
        told = json.dumps([device, list(sizes.items()), only, folder])
        client = subprocess.Popen([sys.executable, "-m", "benchmarks.wire", "client", str(store.port), told])
        try:
            measured, cpu = _run(store, True, device, sizes, only, folder)
            theirs = json.loads(store.get("cpu"))
            client.wait(_TIMEOUT_S)
        finally:
            client.kill()
    made = []
    for num_bytes, times in measured.items():
        raw = times.pop("raw")
        for name, seconds in {"raw gloo": raw, **times}.items():
            both = [
                ours + other for ours, other in zip(cpu[num_bytes, name], theirs[f"{num_bytes} {name}"], strict=True)
            ]
            made.append({**_row(name, num_bytes, seconds, raw), "cpu_seconds": statistics.median(both)})
    return made


def sessions(number: int = 100) -> Row:
    """Measure the memory of TLS sessions, both ends together, after a message each way."""
    admitted: queue.SimpleQueue[Connection] = queue.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        certify(Path(folder))
        pairs: list[Connection] = []
        with Listener(f"{_HOST}:0", _files(folder, "server"), lambda pair, _: admitted.put(pair), print) as door:

            def open_some(count: int) -> None:
                for _ in range(count):
                    client = connect(door.address, 1, _files(folder, "site").client_login(), timeout_s=_TIMEOUT_S)
                    server = admitted.get(timeout=_TIMEOUT_S)
                    for one, other in ((client, server), (server, client)):
                        one.send(Message(Kind.KEEPALIVE))
                        other.recv(lambda *_: None, _TIMEOUT_S)
                    pairs.extend((client, server))

            open_some(10)
            before = psutil.Process().memory_info().rss
            open_some(number)
            each = (psutil.Process().memory_info().rss - before) / number
        for pair in pairs:
            pair.close()
    return {"transport": "tls", "sessions": number, "bytes_a_session": round(each)}


def certify(folder: Path) -> None:
    """Create an authority, and certificates of a server on this machine and of a site."""
    authority = Authority.create(folder, "benchmark")
    authority.issue_server([_HOST])
    authority.sign(request(folder, "site"))


def _files(folder: str, name: str) -> TlsFiles:
    return TlsFiles(*(Path(folder) / file for file in ("ca.crt", f"{name}.crt", f"{name}.key")))


def pinned_s(num_bytes: int, device: str) -> float:
    """Time a copy from a GPU to pinned memory and back, which staging cannot avoid."""
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    there, taken = host.to(device), []
    for _ in range(4):
        start = time.perf_counter()
        host.copy_(there)
        there.copy_(host)
        torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - start)
    return min(taken)


def counts(pieces: Sequence[int] = (1, 4, 40)) -> list[Row]:
    """Count copies, bytes and waits of a task between two emulated GPUs, whose payload has ``pieces`` pieces each way."""
    import pytest

    from raafl.transport import frames
    from tests.helpers.emulated_cuda import emulation

    sizes = {"gloo": frames.CHUNK_BYTES, "tcp": frames.PIECE_BYTES}
    found = []
    with pytest.MonkeyPatch.context() as patch, emulation(patch) as gpus, ThreadPoolExecutor(2) as pool:
        for name, ends in {"gloo": _gloo_ends(pool), "tcp": _tcp_ends()}.items():
            for number in pieces:
                layout = Layout.pack([("weight", (number * sizes[name] // 4,), torch.float32)])
                tensors = [FlatTensors.zeros(layout, device) for device in ("cuda:1", "cuda:1", "cuda:0", "cuda:0")]
                gpus.counts.clear(), gpus.num_bytes.clear()
                one, other = _serve_task(ends[0], *tensors[:2]), _answer_task(ends[1], *tensors[2:])
                served, answered = pool.submit(one), pool.submit(other)
                served.result(_TIMEOUT_S), answered.result(_TIMEOUT_S)
                found.append(
                    {
                        "transport": name,
                        "pieces": number,
                        "bytes": layout.num_bytes,
                        "copies_to_host": gpus.counts["to host"],
                        "copies_to_device": gpus.counts["to device"],
                        "copied_bytes": gpus.num_bytes.total(),
                        "synchronisations": gpus.counts["waits"],
                        "events_waited_for": gpus.counts["events"],
                    }
                )
            for end in ends:
                end.close()
    return found


def _gloo_ends(pool: ThreadPoolExecutor) -> list[Connection]:
    store = dist.TCPStore(_HOST, 0, None, True, timeout=timedelta(seconds=_TIMEOUT_S), wait_for_workers=False)
    meeting = [
        pool.submit(GlooConnection.connect, store, "pair", server, _TIMEOUT_S, _HOST) for server in (True, False)
    ]
    return [one.result() for one in meeting]


def _tcp_ends() -> list[Connection]:
    return [TcpConnection(one, _TIMEOUT_S) for one in socket.socketpair()]


def _row(name: str, num_bytes: int, seconds: list[float], raw_seconds: list[float]) -> Row:
    ours, raw = statistics.median(seconds), statistics.median(raw_seconds)
    best = {"best_seconds": min(seconds), "best_raw_seconds": min(raw_seconds), "repeats": len(seconds)}
    return {"transport": name, "bytes": num_bytes, "seconds": ours, "raw_seconds": raw, "ratio": ours / raw, **best}


def _run(
    store: Any, server: bool, device: str, sizes: dict[int, int], only: str | None, folder: str
) -> tuple[dict[int, dict[str, list[float]]], dict[tuple[int, str], list[float]]]:
    torch.set_num_threads(1)
    raw_group = _raw_group(store, 0 if server else 1)
    raw_socket = _raw_socket(store, server)
    measured: dict[int, dict[str, list[float]]] = {}
    cpu: dict[tuple[int, str], list[float]] = {}
    pairs = {
        "gloo": GlooConnection.connect(store, "pair", server, _TIMEOUT_S, _HOST),
        **_tcp_pairs(store, server, folder),
    }
    for name in [name for name in pairs if only not in (None, name)]:
        pairs.pop(name).close()
    for num_bytes, repeats in sizes.items():
        layout = Layout.pack([("weight", (num_bytes // 4,), torch.float32)])
        down, up = (
            FlatTensors.from_named({"weight": torch.randn(num_bytes // 4)}, layout).to(device) for _ in range(2)
        )
        raw = [torch.randn(num_bytes // 4) for _ in range(2)]
        trip = _serve_task if server else _answer_task
        steps = {name: trip(pair, down, up) for name, pair in pairs.items()}
        steps["raw"] = _raw_trip(raw_group, *raw, server)
        if only is None:
            steps["raw tcp"] = _raw_tcp_trip(raw_socket, num_bytes, server)
        times = measured[num_bytes] = {name: [] for name in steps}
        for repeat, (name, step) in itertools.product(range(-2, repeats), steps.items()):
            start, busy = time.perf_counter(), time.process_time()
            step()
            if repeat >= 0:  # the first two repeats are the warm-up
                times[name].append(time.perf_counter() - start)
                cpu.setdefault((num_bytes, "raw gloo" if name == "raw" else name), []).append(
                    time.process_time() - busy
                )
    for pair in pairs.values():
        pair.close()
    raw_socket.close()
    if not server:
        store.set("cpu", json.dumps({f"{num_bytes} {name}": seconds for (num_bytes, name), seconds in cpu.items()}))
    return measured, cpu


def _raw_socket(store: Any, server: bool) -> socket.socket:
    if not server:
        return socket.create_connection((_HOST, int(store.get("raw tcp"))), _TIMEOUT_S)
    with socket.create_server((_HOST, 0)) as listener:
        store.set("raw tcp", str(listener.getsockname()[1]))
        return listener.accept()[0]


def _raw_tcp_trip(sock: socket.socket, num_bytes: int, server: bool) -> Callable[[], None]:
    out, into = memoryview(bytearray(num_bytes)), memoryview(bytearray(num_bytes))

    def recv() -> None:
        filled = 0
        while filled < num_bytes:
            filled += sock.recv_into(into[filled:])

    def step() -> None:
        if server:
            sock.sendall(out)
        recv()
        if not server:
            sock.sendall(out)

    return step


def _tcp_pairs(store: Any, server: bool, folder: str) -> dict[str, Connection]:
    """Connect this end's connections through a listener: one within the machine, and one over TLS."""
    token, pairs = LocalToken(bytes(32)), dict[str, Connection]()
    for name, certified in (("tcp", False), ("tls", True)):
        if not server:
            theirs: Credentials = _files(folder, "site") if certified else token
            pairs[name] = connect(store.get(name).decode(), 1, theirs.client_login(), timeout_s=_TIMEOUT_S)
            continue
        admitted: queue.SimpleQueue[Connection] = queue.SimpleQueue()
        ours: Credentials = _files(folder, "server") if certified else token
        with Listener(f"{_HOST}:0", ours, lambda pair, _, q=admitted: q.put(pair), print) as door:
            store.set(name, door.address)
            pairs[name] = admitted.get(timeout=_TIMEOUT_S)
    return pairs


def _raw_group(store: Any, rank: int) -> Any:
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=_TIMEOUT_S)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=_HOST)]
    return dist.ProcessGroupGloo(dist.PrefixStore("raw", store), rank, 2, options)


def _raw_trip(group: Any, down: torch.Tensor, up: torch.Tensor, server: bool) -> Callable[[], None]:
    def send(tensor: torch.Tensor) -> None:
        group.send([tensor], 1 if server else 0, 0).wait(timedelta(seconds=_TIMEOUT_S))

    def recv(tensor: torch.Tensor) -> None:
        group.recv([tensor], 1 if server else 0, 0).wait(timedelta(seconds=_TIMEOUT_S))

    def serve() -> None:
        send(down)
        recv(up)

    def answer() -> None:
        recv(down)
        send(up)

    return serve if server else answer


_META = {"id": 1, "client": 1, "incarnation": 0, "task": 0, "version": 1, "region": 0, "seed": 1 << 61, "spec": {}}


def _serve_task(pair: Connection, down: FlatTensors, up: FlatTensors) -> Callable[[], None]:
    def step() -> None:
        pair.send(Message(Kind.ASSIGN, 1, 0, _META, down))
        pair.recv(lambda kind, assignment, meta: up, _TIMEOUT_S, finite=True)

    return step


def _answer_task(pair: Connection, down: FlatTensors, up: FlatTensors) -> Callable[[], None]:
    def step() -> None:
        pair.recv(lambda kind, assignment, meta: down, _TIMEOUT_S)
        pair.send(Message(Kind.UPDATE, 1, 0, {"num_samples": 600, "metrics": {"loss": 0.5}}, up))

    return step


if __name__ == "__main__":
    if sys.argv[1:2] == ["client"]:
        port, (on, counts, chosen, certs) = int(sys.argv[2]), json.loads(sys.argv[3])
        store = dist.TCPStore(_HOST, port, None, False, timeout=timedelta(seconds=_TIMEOUT_S))
        _run(store, False, on, dict(counts), chosen, certs)
    else:
        has_counts = sys.argv[1:2] == ["counts"]
        main("wire", counts if has_counts else rows, sys.argv[2:] if has_counts else None)
