"""Send an update over a slow link that is cut again and again: `python -m benchmarks.cut_link`. Loopback only; eleven minutes.

`raafl serve` and `raafl join` do one task of 758 MB over mutual TLS, through a relay that passes 10 Mbit/s upwards and breaks every
connection by a reset once a minute. Measured: seconds, bytes that crossed the link beyond the update's own, the server's memory.
"""

from __future__ import annotations

import contextlib
import json
import math
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Self

import psutil

from benchmarks.common import Row, main
from benchmarks.wire import certify

CONFIG = str(Path(__file__).resolve().parent.parent / "configs" / "quickstart.yaml")
NUM_BYTES, MBIT_PER_S, EVERY_S = 758_000_000, 10.0, 60.0
_HOST, _RESET = "127.0.0.1", struct.pack("ii", 1, 0)
_UNIT_BYTES = 4 * (64 + 1 + 10)  # bytes of a hidden unit: weights of 64 inputs, a bias, weights of 10 outputs
_TIMEOUT_S = 3600.0
_BUSY_BYTES = 100_000


class Relay:
    """Relay that forwards connections to a port at a limited rate upwards, and breaks them all at intervals.

    `up_bytes`, `down_bytes`: bytes received from the callers and from the port. `num_cuts`: cuts while data was in
    transit.
    """

    def __init__(
        self,
        target: int,
        bytes_per_s: float,
        every_s: float | None,
        until_bytes: float = math.inf,
        down_bytes_per_s: float | None = None,
    ) -> None:
        """Listen on a port; entering the context starts the relay.

        `target`: port of the server on this machine. `bytes_per_s`: rate from caller to server. `every_s`: seconds
        between cuts, None = never. `until_bytes`: bytes sent upwards after which nothing is cut. `down_bytes_per_s`:
        rate from server to caller, None = unlimited.
        """
        self._until_bytes = until_bytes
        self.target, self._rate, self._down_rate, self._every_s = target, bytes_per_s, down_bytes_per_s, every_s
        self._listener = socket.create_server((_HOST, 0))
        # the system doubles this; like a router's queue, it loses its content at a cut
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 32 << 10)
        self.port: int = self._listener.getsockname()[1]
        self.up_bytes = self.down_bytes = self.num_cuts = 0
        self._links: dict[int, tuple[socket.socket, socket.socket]] = {}
        self._stop = threading.Event()

    def __enter__(self) -> Self:
        """Begin to listen."""
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        if self._every_s is not None:
            self._threads.append(threading.Thread(target=self._cut_again, daemon=True))
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join()

    def cut(self) -> None:
        """Break all connections, by a reset."""
        for ends in list(self._links.values()):
            for end in ends:
                with contextlib.suppress(OSError):
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                    end.shutdown(socket.SHUT_RDWR)

    def _cut_again(self) -> None:
        before = 0
        while not self._stop.wait(self._every_s):
            if before + _BUSY_BYTES < self.up_bytes < self._until_bytes:  # otherwise nothing is in transit
                self.num_cuts += 1
                self.cut()
            before = self.up_bytes

    def _accept(self) -> None:
        number = 0
        while not self._stop.is_set():
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection((_HOST, self.target))
            except OSError:
                near.close()
                continue
            number += 1
            self._links[number] = near, far
            up = threading.Thread(target=self._pump, args=(number, near, far, self._rate, True), daemon=True)
            down = threading.Thread(target=self._pump, args=(number, far, near, self._down_rate), daemon=True)
            self._threads += [up, down]
            up.start(), down.start()

    def _pump(
        self, number: int, source: socket.socket, sink: socket.socket, rate: float | None, up: bool = False
    ) -> None:
        due = time.monotonic()
        with contextlib.suppress(OSError):
            while data := source.recv(8192 if rate is not None else 65536):
                if up:
                    self.up_bytes += len(data)
                else:
                    self.down_bytes += len(data)
                if rate is not None:
                    due = max(due, time.monotonic() - 0.1) + len(data) / rate
                    time.sleep(max(due - time.monotonic(), 0.0))
                sink.sendall(data)
        self._links.pop(number, None)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def model(num_bytes: int) -> list[str]:
    """Return options of a run whose only client does one task, with an update of about ``num_bytes``."""
    return [
        "--config",
        CONFIG,
        "--clients=1",
        "--devices=null",
        "--algorithm=fed_avg",
        "--max_updates=1",
        "--progress=plain",
        f"--model.hidden=[{num_bytes // _UNIT_BYTES}]",
        "--train.num_epochs=null",
        "--train.num_steps=1",
        "--data.batch_size=2",
        "--eval_every=100",
    ]


def measure(num_bytes: int, mbit_per_s: float, every_s: float | None) -> Row:
    """Run a task through a relay, and return its seconds and bytes.

    `num_bytes`: approximate size of the update. `mbit_per_s`: upward rate in 10**6 bit/s. `every_s`: seconds between
    cuts; None = none.
    """
    with tempfile.TemporaryDirectory() as place, contextlib.ExitStack() as stack:
        folder = Path(place)
        certify(folder / "certs")
        (folder / "certs" / "sites.yaml").write_text("site: {clients: [1]}\n")
        port = _free_port()
        relay = stack.enter_context(Relay(port, mbit_per_s * 1e6 / 8, every_s, 0.98 * num_bytes))
        certs = ["--certs", str(folder / "certs")]
        run = ["serve", *model(num_bytes), "--output", str(folder / "run"), "--address", f"{_HOST}:{port}", *certs]
        server = stack.enter_context(_raafl(*run))
        stack.callback(server.kill)
        client = stack.enter_context(_raafl("join", "--address", f"{_HOST}:{relay.port}", "--client=1", *certs))
        stack.callback(client.kill)
        payload = num_bytes // _UNIT_BYTES * _UNIT_BYTES + 40  # 40: biases of the last layer
        memory = _watch(server, relay)
        if server.wait(_TIMEOUT_S):
            raise RuntimeError(f"the server ended with {server.returncode}")
        return {
            "mbit_per_s": mbit_per_s,
            "cut_every_s": every_s,
            "cuts": relay.num_cuts,
            **memory,
            **_found(folder / "run", relay, payload),
        }


def _raafl(*words: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "raafl", *words], stdout=subprocess.DEVNULL)


def _free_port() -> int:
    with socket.create_server((_HOST, 0)) as listener:
        return int(listener.getsockname()[1])


def _watch(server: subprocess.Popen[bytes], relay: Relay) -> Row:
    """Watch the server until it ends; return its memory when the upload began, and the most memory during the upload."""
    process, before, most = psutil.Process(server.pid), 0, 0
    while server.poll() is None:
        with contextlib.suppress(psutil.Error):
            rss = process.memory_info().rss
            if relay.up_bytes < 5_000_000:
                before = max(before, rss)
            most = max(most, rss)
        time.sleep(0.1)
    return {"server_bytes_before": before, "server_bytes_most": most}


def _found(folder: Path, relay: Relay, payload: int) -> Row:
    rows = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    kinds = [row["event"] for row in rows]
    (assigned,) = [row for row in rows if row["event"] == "assigned"]
    (arrived,) = [row for row in rows if row["event"] == "arrived"]
    return {
        "update_bytes": payload,
        "link_bytes": relay.up_bytes,
        "sent_twice": relay.up_bytes / payload - 1,
        "task_s": arrived["time_s"] - assigned["time_s"],
        "away": kinds.count("away"),
        "lost": kinds.count("lost"),
        "refusal": arrived["refusal"],
    }


if __name__ == "__main__":
    main("cut_link", lambda: [measure(NUM_BYTES, MBIT_PER_S, EVERY_S)])
