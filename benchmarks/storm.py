"""Measure what a client that reconnects as fast as it can costs the others: `python -m benchmarks.storm`. Loopback only.

A server and one honest client work; the holder of client 2's key joins again and again and never closes a connection, so many a
second at the most. In turn it does the same to a listener of its own, so that what its process takes of the machine is in
both figures.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import psutil

from benchmarks.common import Row, main

CONFIG = str(Path(__file__).resolve().parent.parent / "configs" / "quickstart.yaml")
KEPT = 400  # connections that the attacker keeps open at a time
OPTIONS = (
    "--clients",
    "2",
    "--algorithm",
    "fed_async",
    "--max_updates",
    "null",
    "--max_time",
    "1h",
    "--emulate",
    "false",
    "--eval_every",
    "100000",
)


def attack(address: str, folder: str, seconds: float, per_s: float) -> dict[str, Any]:
    """Join as client 2 as often as possible, and count the outcomes.

    `address`: ``HOST:PORT`` of the server. `folder`: folder of the certificates. `seconds`: duration. `per_s`: most
    connections per second.
    """
    from raafl.config.parse import parse
    from raafl.runtime.client.setup import ClientSetup
    from raafl.runtime.identity import Identity
    from raafl.runtime.protocol import Hello
    from raafl.sites.credentials import TlsFiles
    from raafl.transport import Kind, Message, PeerLost, PeerTimeout, Refused
    from raafl.transport.tcp.listener import connect

    parsed = parse("join", ["--config", CONFIG, *OPTIONS])
    site = ClientSetup.build(parsed.experiment, parsed.config_yaml, 2, own_data=False)
    hello = Hello.of_client(Identity.of(site.submodels, site.sections), site.info)
    print("ready", flush=True)
    sys.stdin.readline()
    files = TlsFiles.find(Path(folder), server=False, given=dict.fromkeys(("ca", "cert", "key", "crl")))
    login = files.client_login()
    kept, tried, joined = deque[Any](), 0, 0
    began = time.monotonic()
    while (now := time.monotonic()) < began + seconds:
        tried += 1
        try:
            pair = connect(address, 2, login, timeout_s=2.0)
            pair.send(Message(Kind.HELLO, meta=hello.to_meta()))
            joined += 1
            kept.append(pair)
        except (PeerLost, PeerTimeout, Refused, OSError):
            pass
        if len(kept) > KEPT:
            kept.popleft().close()
        time.sleep(max(0.0, began + tried / per_s - now))
    for pair in kept:
        pair.close()
    return {"tried": tried, "joined": joined}


def dummy() -> tuple[str, socket.socket]:
    """Open a listener that closes every connection at once; return its address and socket."""
    listener = socket.create_server(("127.0.0.1", 0))

    def run() -> None:
        while True:
            try:
                listener.accept()[0].close()
            except OSError:
                return

    threading.Thread(target=run, daemon=True).start()
    return f"127.0.0.1:{listener.getsockname()[1]}", listener


def arrivals(folder: Path, since: int) -> tuple[int, int]:
    """Count the updates of client 1 in the journal from byte ``since`` on; return the count and the journal's size in bytes."""
    with (folder / "events.jsonl").open("rb") as file:
        file.seek(since)
        data = file.read()
    whole = data[: data.rfind(b"\n") + 1]
    rows = [json.loads(line) for line in whole.splitlines() if b'"arrived"' in line]
    return sum(row["event"] == "arrived" and row["client"] == 1 for row in rows), since + len(whole)


def phase(address: str, folder: Path, server: psutil.Process, seconds: float, per_s: float) -> dict[str, Any]:
    """Attack a server; return the honest client's update rate, and the server's threads and open files."""
    command = [sys.executable, "-m", "benchmarks.storm", "--attack", address, str(folder.parent / "certs")]
    command += [str(seconds + 1), str(per_s)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as attacker:
        assert attacker.stdin and attacker.stdout
        attacker.stdout.readline()
        attacker.stdin.write("\n")
        attacker.stdin.flush()
        time.sleep(0.5)
        _, place = arrivals(folder, 0)
        began, threads, files = time.monotonic(), 0, 0
        while time.monotonic() < began + seconds:
            time.sleep(0.1)
            threads, files = max(threads, server.num_threads()), max(files, server.num_fds())
        took = time.monotonic() - began
        num, _ = arrivals(folder, place)
        told = json.loads(attacker.stdout.readline())
    return {"updates_per_s": num / took, "threads": threads, "descriptors": files, **told}


def _wait_for_work(folder: Path) -> None:
    """Wait until the honest client has sent 20 updates."""
    deadline = time.monotonic() + 120
    while not (folder / "events.jsonl").is_file() or arrivals(folder, 0)[0] < 20:
        if time.monotonic() > deadline:
            raise TimeoutError("the honest client has not begun its work within 120 s")
        time.sleep(0.2)


def measure(pairs: int, seconds: float, per_s: float) -> list[dict[str, Any]]:
    """Measure phases of attacks on a bare listener and on the server, in turn; return a row for each, and one that compares.

    `pairs`: phases of each kind. `seconds`: duration of a phase. `per_s`: most connections per second.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    raafl = [sys.executable, "-m", "raafl"]
    from benchmarks.wire import certify  # imported here: it imports torch, which the attacker's process must not

    with tempfile.TemporaryDirectory() as scratch, socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        listener.set_inheritable(True)
        address, folder = f"127.0.0.1:{listener.getsockname()[1]}", Path(scratch) / "run"
        certify(Path(scratch) / "certs")
        certs = ["--certs", str(Path(scratch) / "certs")]
        where = ["--config", CONFIG, *OPTIONS, "--progress", "quiet", *certs]
        serve = [*raafl, "serve", *where, "--min_clients", "1", "--output", str(folder)]
        join = [*raafl, "join", "--config", CONFIG, *OPTIONS, *certs, "--address", address, "--client", "1"]
        server = subprocess.Popen(
            [*serve, "--address", f"fd:{listener.fileno()}"], env=environment, pass_fds=[listener.fileno()]
        )
        client = subprocess.Popen(join, env=environment, stderr=subprocess.DEVNULL)
        elsewhere, sock = dummy()
        try:
            _wait_for_work(folder)
            rows = []
            for name, target in [("a listener", elsewhere), ("the server", address)] * pairs:
                rows.append({"attacked": name, **phase(target, folder, psutil.Process(server.pid), seconds, per_s)})
            return [*rows, compared(rows)]
        finally:
            sock.close()
            server.terminate()
            for process in (server, client):
                process.wait(timeout=60)


def compared(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Compute the honest client's rate during a storm divided by that without one, from medians."""
    rates = {
        name: statistics.median(row["updates_per_s"] for row in rows if row["attacked"] == name)
        for name in ("a listener", "the server")
    }
    return {"attacked": "server / listener", "updates_per_s": rates["the server"] / rates["a listener"]}


def rows(pairs: int = 3, seconds: float = 5.0, per_s: float = 200.0) -> list[Row]:
    """Start a server and measure it; see `benchmarks.storm.measure`."""
    return measure(pairs, seconds, per_s)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--attack"]:
        address, certs, seconds, per_s = *sys.argv[2:4], min(float(sys.argv[4]), 60.0), min(float(sys.argv[5]), 1000.0)
        print(json.dumps(attack(address, certs, seconds, per_s)), flush=True)
    else:
        main("storm", rows)
