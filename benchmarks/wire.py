"""One task's round trip over the wire against the raw Gloo transfer of the same bytes.

A task is an assignment out and an update back through `GlooPair`, with every check: header, JSON, checksum of both
payloads, finiteness of the update. Raw is one Gloo send and receive of one buffer each way. Both run between the same
two processes, in turn, one thread each for torch; a row holds the medians and the ratio of the two.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as _distributed

from benchmarks.common import Row, main
from raafl.runtime.transport import GlooPair, Kind, Message
from raafl.submodel.flat import FlatTensors, Layout

SIZES = {4 << 10: 400, 4 << 20: 100, 344 << 20: 15}
"""Bytes each way, and how often."""

_TIMEOUT_S = 60.0
_HOST = "127.0.0.1"
dist: Any = _distributed


def rows() -> list[Row]:
    """Measure with a second process as the client."""
    store = dist.TCPStore(_HOST, 0, None, True, timeout=timedelta(seconds=_TIMEOUT_S), wait_for_workers=False)
    client = subprocess.Popen([sys.executable, "-m", "benchmarks.wire", "client", str(store.port)])
    try:
        measured = _run(store, server=True)
        client.wait(_TIMEOUT_S)
    finally:
        client.kill()
    return [_row(num_bytes, *times) for num_bytes, times in measured.items()]


def _row(num_bytes: int, seconds: list[float], raw_seconds: list[float]) -> Row:
    ours, raw = statistics.median(seconds), statistics.median(raw_seconds)
    best = {"best_seconds": min(seconds), "best_raw_seconds": min(raw_seconds), "repeats": len(seconds)}
    return {"bytes": num_bytes, "seconds": ours, "raw_seconds": raw, "ratio": ours / raw, **best}


def _run(store: Any, server: bool) -> dict[int, tuple[list[float], list[float]]]:
    torch.set_num_threads(1)
    raw_group = _raw_group(store, 0 if server else 1)
    measured: dict[int, tuple[list[float], list[float]]] = {}
    with GlooPair.connect(store, "pair", server, _TIMEOUT_S, _HOST) as pair:
        for num_bytes, repeats in SIZES.items():
            layout = Layout.pack([("weight", (num_bytes // 4,), torch.float32)])
            down, up = (FlatTensors.from_named({"weight": torch.randn(num_bytes // 4)}, layout) for _ in range(2))
            task = _serve_task(pair, down, up) if server else _answer_task(pair, down, up)
            raw = _raw_trip(raw_group, down.buffers[torch.float32], up.buffers[torch.float32], server)
            measured[num_bytes] = ([], [])
            for repeat in range(-2, repeats):
                for step, times in zip((task, raw), measured[num_bytes], strict=True):
                    start = time.perf_counter()
                    step()
                    if repeat >= 0:  # the first two warm up
                        times.append(time.perf_counter() - start)
    return measured


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


def _serve_task(pair: GlooPair, down: FlatTensors, up: FlatTensors) -> Callable[[], None]:
    def step() -> None:
        pair.send(Message(Kind.ASSIGN, 1, 0, _META, down))
        pair.recv(lambda kind, assignment, meta: up, _TIMEOUT_S, finite=True)

    return step


def _answer_task(pair: GlooPair, down: FlatTensors, up: FlatTensors) -> Callable[[], None]:
    def step() -> None:
        pair.recv(lambda kind, assignment, meta: down, _TIMEOUT_S)
        pair.send(Message(Kind.UPDATE, 1, 0, {"num_samples": 600, "metrics": {"loss": 0.5}}, up))

    return step


if __name__ == "__main__":
    if sys.argv[1:2] == ["client"]:
        port = int(sys.argv[2])
        _run(dist.TCPStore(_HOST, port, None, False, timeout=timedelta(seconds=_TIMEOUT_S)), server=False)
    else:
        main("wire", rows)
