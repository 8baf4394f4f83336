"""Measure what sessions with long updates take of a server's memory: `python -m benchmarks.session_memory`. TLS on loopback.

`raafl serve` coordinates FedAsync; four clients, played by one process (`benchmarks.load`), answer at once. Each merge makes a new
version, so that each session has a task and an update of its own. A row is a server: with all payloads in memory, and with long
ones in files. Memory counts from the moment before the second client joins, when one has sent and been sent what it ever holds, and
anonymous memory is told from mapped files, which the system takes back when it is short.
"""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import psutil

from benchmarks.common import Row, main
from benchmarks.load import Stage, stage

UNITS = 1_000_000
"""Of the model: 300 MB."""
CLIENTS = 4


def rows(hidden: int = UNITS, clients: int = CLIENTS) -> list[Row]:
    """Measure one server with all payloads in memory, and one with default settings.

    `hidden`: units of the model, 300 bytes each. `clients`: number of clients.
    """
    return [measure(hidden, clients, options) for options in (["--payload_memory_bytes=null"], [])]


def measure(hidden: int, clients: int, options: list[str]) -> Row:
    """Measure how much a server's memory grows for each client after the first; ``options``: options of the server."""
    with stage(clients, hidden=hidden, options=["--checkpoint_s=null", *options]) as on:
        on.ask("join 1 1")
        work(on, 2)
        before = resident(on.server)
        on.ask(f"join 2 {clients}")
        with Peak(on.server) as peak:
            num_updates = work(on, 3 * clients)
        on.server.kill()  # killed, since it would save its model first
        anonymous, mapped = ((most - first) / (clients - 1) for most, first in zip(peak.most, before, strict=True))
        return {
            "held": "in memory" if options else "in files",
            "clients": clients,
            "update_bytes": 300 * hidden + 40,
            "updates": num_updates,
            "anonymous_bytes_a_session": round(anonymous),
            "mapped_bytes_a_session": round(mapped),
        }


def work(on: Stage, num_updates: int) -> int:
    """Let the clients work until they have sent ``num_updates`` updates; return their number."""
    sent = 0
    while sent < num_updates:
        sent += json.loads(on.ask("play 2 0"))["num_updates"]
    return sent


def resident(process: psutil.Process) -> tuple[int, int]:
    """Return the bytes of anonymous memory, and of mapped files, that a process has in memory."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    sizes = {line.partition(":")[0]: int(line.split()[1]) << 10 for line in lines if line.startswith("Rss")}
    return sizes["RssAnon"], sizes["RssFile"] + sizes["RssShmem"]


class Peak:
    """Sample a process's memory within the block.

    `most`: largest values of `resident`.
    """

    def __init__(self, process: psutil.Process) -> None:
        self._process, self.most, self._stop = process, (0, 0), threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Peak:
        """Start to sample."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.is_set():
            anonymous, mapped = resident(self._process)
            self.most = max(self.most[0], anonymous), max(self.most[1], mapped)
            time.sleep(0.02)


if __name__ == "__main__":
    main("session_memory", rows)
