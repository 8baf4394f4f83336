"""Measure how many clients one server bears: `python -m benchmarks.load --json`. TLS on loopback, real sessions.

`raafl serve` coordinates FedAsync on a small model (60 kB each way) on one core. A process on another core plays the clients: each
has a TLS session of its own, says HELLO, and answers every assignment with a prepared update after a wait, which stands for its
training. So 10,000 clients cost a process, not 10,000, and the server cannot tell the difference.

A row is a phase of one of two servers. On the first one client works at a time: *join* (all come), *idle* (all wait). On the
second all work: *closed* (they answer at once, as many updates as the server takes), *paced* (each trains for a while; the delay is
from the update's last byte to the next assignment's last byte), *storm* (all connections break at once, and all clients come back
as real ones do, by RESUME; then their tasks must still be there), *large* (few clients, updates of 1 MB and 100 MB). *runs*: all
come, one at work, through the port of a server for many runs, which passes each connection to the run's own process.
CPU seconds are the server's and hardly depend on what else the machine does; the clock does.

    python -m benchmarks.load --clients 100 500 2000 10000 --out load.json --resume

Each phase is written to the file once measured; with ``--resume`` those of the same clients that it has are left out.
"""

from __future__ import annotations

import argparse
import csv
import heapq
import json
import os
import resource
import selectors
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from benchmarks.common import Row, report, table

CLIENTS = (100, 500, 2000, 10_000)
RATES = (125, 250, 500)
"""Updates a second of the paced phases."""
LARGE = ((20, 3_333), (8, 333_333))
"""Clients and units of the model, 300 bytes each, of the phases with large updates: 1 MB and 100 MB."""
_THINK_S = 20.0  # longest wait of a client in a paced phase, in seconds
_GOLDEN_RATIO = 0.6180339887  # its multiples are spread evenly over the unit interval
_SETTLED_PER_S = 500  # first answers that the server certainly takes in a second
_AT_ONCE = 16  # number of clients that join at the same time
_TIMEOUT_S = 120.0
_CONFIG = """\
name: load
clients: {clients}
model:
  class_path: model_zoo.MLP
  init_args: {{in_features: 64, hidden: [{hidden}], num_classes: 10}}
data:
  class_path: raafl.data.GaussianClusters
  init_args: {{batch_size: 32, num_features: 64, num_classes: 10, num_train: {num_train}, num_test: 80}}
partition: {{class_path: raafl.data.Iid}}
algorithm: {{class_path: raafl.fed_async, init_args: {{concurrency: {at_work}}}}}
train: {{num_epochs: 1}}
emulate: false
max_time: 1h
eval_every: 1000000000
"""


@dataclass
class Tally:
    """Counts of a phase.

    `num_updates`: updates sent. `delays`: seconds from an update to the next assignment.
    """

    num_updates: int = 0
    delays: list[float] = field(default_factory=list)


class Players:
    """Clients of one process: sessions that answer each assignment with a prepared update."""

    def __init__(self, config: Path, address: str, certs: Path, run: str | None = None) -> None:
        """Build once what all clients know of the run.

        `address`: ``HOST:PORT`` of the server. `certs`: folder with the site's certificate. `run`: name of the run at a
        server for many; None = the server has one.
        """
        from raafl.config.parse import parse
        from raafl.runtime.client.setup import ClientSetup
        from raafl.runtime.setup import client_infos, load_data
        from raafl.sites.credentials import TlsFiles

        parsed = parse("join", ["--config", str(config)])
        self._site = ClientSetup.build(parsed.experiment, parsed.config_yaml, 1, own_data=False)
        self._infos = client_infos(parsed.experiment, load_data(parsed.experiment))
        files = TlsFiles.find(certs, server=False, given=dict.fromkeys(("ca", "cert", "key", "crl")))
        self._login = replace(files, run=run).client_login()
        self._address, self._selector = address, selectors.DefaultSelector()
        self._due: list[tuple[float, int, int]] = []  # time at which an answer is due, client, assignment
        self._sent_s: dict[int, float] = {}
        self._pairs: dict[int, Any] = {}
        self._progress: dict[int, Any] = {}
        self._incarnations: Counter[int] = Counter()
        self._tensors: Any = None
        self._think_s, self._tally = 0.0, Tally()
        self._shifted: set[int] = set()  # clients whose first wait of a new length has begun
        self._pool = ThreadPoolExecutor(_AT_ONCE)  # threads, since a handshake waits for the server

    def join(self, first: int, last: int) -> None:
        """Open the sessions of clients ``first`` to ``last``; messages are taken later, by `play`."""
        for client in self._pool.map(self._join, range(first, last + 1)):
            self._listen(client)

    def storm(self) -> Row:
        """Break all connections, then connect all clients again; return how many resumed, and how many joined anew."""
        for pair in self._pairs.values():
            self._selector.unregister(pair._socket.sock)
            pair.close()
        outcomes = Counter[str]()
        for client, outcome in self._pool.map(self._return, list(self._pairs)):
            self._listen(client)
            outcomes[outcome] += 1
        return dict(outcomes)

    def _listen(self, client: int) -> None:
        self._selector.register(self._pairs[client]._socket.sock, selectors.EVENT_READ, client)

    def _connect(self, client: int) -> Any:
        from raafl.transport import PeerLost
        from raafl.transport.tcp.listener import connect

        for _ in range(100):
            try:
                return connect(self._address, client, self._login, timeout_s=_TIMEOUT_S)
            except PeerLost:  # the server is busy
                time.sleep(0.1)
        raise RuntimeError(f"the server is busy for client {client}")

    def _join(self, client: int) -> int:
        self._pairs[client] = self._connect(client)
        self._hello(client)
        return client

    def _hello(self, client: int) -> None:
        from raafl.runtime.identity import Identity
        from raafl.runtime.protocol import Hello
        from raafl.transport import Kind, Message
        from raafl.transport.tcp.resumable import Progress

        hello = Hello.of_client(Identity.of(self._site.submodels, self._site.sections), self._infos[client - 1])
        self._pairs[client].send(Message(Kind.HELLO, meta=hello.to_meta()))
        self._progress[client] = Progress()

    def _return(self, client: int) -> tuple[int, str]:
        """Continue a client's session over a new connection, as a real client does; join anew if the session has ended."""
        from raafl.runtime.protocol import Resume, no_tensors
        from raafl.transport import Kind, Message

        pair = self._pairs[client] = self._connect(client)
        progress = self._progress[client]
        pair.send(Message(Kind.RESUME, 0, self._incarnations[client], Resume(progress.here(None)).to_meta()))
        answer = pair.recv(no_tensors, _TIMEOUT_S)
        if answer.kind is not Kind.WELCOME:
            self._hello(client)
            return client, "joined"
        progress.go_on(Resume.from_meta(answer.meta).position)
        if progress.first is not None:
            pair.send(progress.last, first_chunk=progress.first)
        return client, "resumed"

    def play(self, seconds: float, think_s: float) -> Tally:
        """Answer assignments for ``seconds``, each after ``think_s``; return the counts.

        An answer that is due later is sent in the next phase. Where ``think_s`` is new, each client's first wait is a
        share of it that differs from the others', so that their answers come evenly from then on.
        """
        if think_s != self._think_s:
            self._shifted.clear()
        self._think_s, self._tally = think_s, Tally()
        self._sent_s.clear()
        until = time.monotonic() + seconds
        while (now := time.monotonic()) < until:
            while self._due and self._due[0][0] <= now:
                self._answer(*heapq.heappop(self._due)[1:])
            wait_s = min(self._due[0][0], until) - now if self._due else until - now
            for key, _ in self._selector.select(max(wait_s, 0.0)):
                self._hear(key.data)
        return self._tally

    def close(self) -> None:
        """Close all connections, so that the server loses its clients."""
        for pair in self._pairs.values():
            pair.close()

    def _hear(self, client: int) -> None:
        """Receive all messages that have arrived for a client; several may have been read at once."""
        from raafl.transport import Kind

        pair = self._pairs[client]
        while True:
            message = pair.recv(self._expect, _TIMEOUT_S)
            self._progress[client].take(message)
            now = time.monotonic()
            if message.kind is Kind.ASSIGN:
                self._incarnations[client] = message.incarnation
                if (sent_s := self._sent_s.pop(client, None)) is not None:
                    self._tally.delays.append(now - sent_s)
                wait_s = self._think_s
                if client not in self._shifted:
                    self._shifted.add(client)
                    wait_s *= client * _GOLDEN_RATIO % 1.0
                heapq.heappush(self._due, (now + wait_s, client, message.assignment))
            elif message.kind is Kind.STOP:
                raise RuntimeError(f"the server let client {client} go: {message.meta}")
            if not pair._socket.pending:
                return

    def _expect(self, kind: Any, assignment: int, meta: dict[str, Any]) -> Any:
        from raafl.runtime.protocol import Assign
        from raafl.submodel import FlatTensors
        from raafl.transport import Kind

        if kind is not Kind.ASSIGN:
            return None
        if self._tensors is None:
            layout = self._site.submodels.layout(Assign.from_meta(meta).assignment.spec, "sent")
            self._tensors = FlatTensors.zeros(layout)
        return self._tensors  # the same tensors for all, since the received values are also the answer

    def _answer(self, client: int, assignment: int) -> None:
        from raafl.runtime.protocol import Answer
        from raafl.transport import Kind, Message

        meta = Answer(self._infos[client - 1].num_samples, 1, {"loss": 1.0}).to_meta()
        message = Message(Kind.UPDATE, assignment, self._incarnations[client], meta, self._tensors)
        self._progress[client].begin(message)
        self._pairs[client].send(message)
        self._tally.num_updates += 1
        self._sent_s[client] = time.monotonic()


def work(config: str, address: str, certs: str, run: str | None = None) -> None:
    """Run clients as lines of standard input say: ``join FIRST LAST``, ``play SECONDS THINK_S``, ``storm``."""
    import torch

    torch.set_num_threads(1)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a socket for each client
    players = Players(Path(config), address, Path(certs), run)
    print("ready", flush=True)
    for line in sys.stdin:
        name, *numbers = line.split()
        start = time.process_time()
        told: Row = {}
        if name == "join":
            players.join(int(numbers[0]), int(numbers[1]))
        elif name == "storm":
            told = players.storm()
        else:
            tally = players.play(float(numbers[0]), float(numbers[1]))
            told = {"num_updates": tally.num_updates, "delays": tally.delays}
        print(json.dumps({**told, "cpu_s": time.process_time() - start}), flush=True)
    players.close()


# ---- the measurement ----


@dataclass
class Stage:
    """A server with its run folder, and the process that plays its clients."""

    server: psutil.Process
    players: subprocess.Popen[str]
    run: Path

    def ask(self, line: str) -> str:
        """Send a line to the clients' process; return its reply."""
        assert self.players.stdin and self.players.stdout
        self.players.stdin.write(line + "\n")
        self.players.stdin.flush()
        reply = self.players.stdout.readline()
        if not reply:
            raise RuntimeError(f"the clients' process has ended after '{line}'")
        return reply

    def measured(self, line: str) -> tuple[Row, float, float]:
        """Send a line to the clients' process; return its reply, the seconds it took, and the server's CPU seconds."""
        before, began = cpu_seconds(self.server), time.monotonic()
        told = json.loads(self.ask(line))
        return told, time.monotonic() - began, cpu_seconds(self.server) - before

    def phase(self, name: str, clients: int, seconds: float, think_s: float) -> Row:
        """Let the clients work, at first until each has answered about once; return the row of the phase.

        `clients`: clients that have joined. `seconds`: duration. `think_s`: wait of a client before an answer.
        """
        if name != "idle":  # what they send at first is not yet the rate that the server sustains
            self.ask(f"play {1.0 + think_s + clients / _SETTLED_PER_S} {think_s}")
        told, took_s, cpu_s = self.measured(f"play {seconds} {think_s}")
        return {
            "phase": name,
            "clients": clients,
            "think_s": think_s,
            **figures(told["num_updates"], told["delays"], took_s, cpu_s),
            "clients_cpu_share": told["cpu_s"] / took_s,
            **self.state(),
        }

    def state(self) -> Row:
        """Return the server's threads and memory, and how busy the machine is."""
        return {
            "server_threads": self.server.num_threads(),
            "server_rss_bytes": self.server.memory_info().rss,
            "machine_load": os.getloadavg()[0],
        }

    def join(self, clients: int) -> Row:
        """Let all clients join; return the row of the phase."""
        before = self.server.memory_info().rss
        row, _ = self.arrival("join", f"join 1 {clients}", clients)
        state = self.state()
        return {
            **row,
            "bytes_a_session": round((state["server_rss_bytes"] - before) / clients),
            **state,
        }

    def arrival(self, name: str, line: str, clients: int) -> tuple[Row, dict[str, Any]]:
        """Let all clients connect; return the row of the phase, and the reply of the clients' process."""
        told, took_s, cpu_s = self.measured(line)
        row = {
            "phase": name,
            "clients": clients,
            "seconds": took_s,
            "joins_per_s": clients / took_s,
            "join_cpu_ms": cpu_s / clients * 1e3,
            "clients_cpu_share": told["cpu_s"] / took_s,
        }
        return row, told

    def storm(self, clients: int, think_s: float) -> Row:
        """Break all connections, let all clients return and work; return the row, with the number of tasks that the server lost."""
        row, told = self.arrival("storm", "storm", clients)
        after = self.phase("storm", clients, 5.0, think_s)
        with (self.run / "clients.csv").open(newline="") as file:
            lost = sum(row["outcome"].startswith(("lost", "refused")) for row in csv.DictReader(file))
        return {
            **row,
            "resumed": told.get("resumed", 0),
            "joined_anew": told.get("joined", 0),
            "tasks_lost": lost,
            "updates_per_s": after["updates_per_s"],
            **self.state(),
        }


def cpu_seconds(process: psutil.Process) -> float:
    """Return the CPU seconds that a process has taken so far."""
    times = process.cpu_times()
    return float(times.user + times.system)


def figures(num_updates: int, delays: list[float], took_s: float, cpu_s: float) -> Row:
    """Compute rates, delays in milliseconds, and the server's CPU share of a phase.

    `delays`: seconds from an update to the next assignment. `took_s`, `cpu_s`: seconds of the phase, and of the
    server's CPU.
    """
    cuts = statistics.quantiles(delays, n=100) if len(delays) > 1 else None
    return {
        "updates_per_s": num_updates / took_s,
        "updates_per_cpu_s": num_updates / cpu_s if cpu_s else None,
        "delay_p50_ms": cuts and cuts[49] * 1e3,
        "delay_p99_ms": cuts and cuts[98] * 1e3,
        "server_cpu_share": cpu_s / took_s,
    }


@contextmanager
def stage(clients: int, at_work: int | None = None, hidden: int = 200, options: Sequence[str] = ()) -> Iterator[Stage]:
    """Start a server on the first core, and the clients' process on the others.

    `at_work`: largest number of clients at work; None = all. `hidden`: units of the model, 300 bytes each. `options`:
    further options of the server.
    """
    with tempfile.TemporaryDirectory() as name, socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        folder = _site(Path(name), clients, at_work, hidden)
        listener.set_inheritable(True)
        words = [
            "--config",
            str(folder / "load.yaml"),
            "--output",
            str(folder / "run"),
            "--progress",
            "quiet",
            *options,
        ]
        server = _serve(folder, [*words, "--address", f"fd:{listener.fileno()}"], listener.fileno())
        players = _play(folder, f"127.0.0.1:{listener.getsockname()[1]}")
        try:
            yield Stage(psutil.Process(server.pid), players, folder / "run")
        finally:
            players.kill()
            server.terminate()
            try:
                server.wait(timeout=60)
            except subprocess.TimeoutExpired:  # a busy machine takes long to record the loss of many clients
                server.kill()
            for process in (players, server):
                process.wait()


@contextmanager
def stage_of_runs(clients: int) -> Iterator[tuple[Stage, psutil.Process]]:
    """Start a server for many runs with one run, at which one client works; yield it, and the process of its port."""
    with tempfile.TemporaryDirectory() as name, socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        folder = _site(Path(name), clients, 1, 200)
        (folder / "runs").mkdir()
        (folder / "load.yaml").rename(folder / "runs" / "one.yaml")
        listener.set_inheritable(True)
        words = ["--runs", str(folder / "runs"), "--address", f"fd:{listener.fileno()}"]
        server = _serve(folder, words, listener.fileno())
        port, hosts = psutil.Process(server.pid), list[psutil.Process]()
        players = _play(folder, f"127.0.0.1:{listener.getsockname()[1]}", "one")
        try:
            while not any((folder / "runs").rglob("events.jsonl")):  # the run is not there yet
                time.sleep(0.1)
            hosts = port.children(recursive=True)
            yield Stage(max(hosts, key=cpu_seconds), players, folder / "runs"), port
        finally:
            players.kill()
            server.kill()  # which ends no run
            for host in hosts:
                host.kill()
            psutil.wait_procs(hosts)
            for process in (players, server):
                process.wait()


def _site(folder: Path, clients: int, at_work: int | None, hidden: int) -> Path:
    """Write the config and certificates of a server, and return the folder."""
    from benchmarks.wire import certify  # imported here, since it imports torch

    text = _CONFIG.format(
        clients=clients,
        at_work="null" if at_work is None else at_work,
        hidden=hidden,
        num_train=max(-(-2 * clients // 80) * 80, 800),
    )
    (folder / "load.yaml").write_text(text)
    certify(folder / "certs")
    (folder / "certs" / "sites.yaml").write_text(f"site: {{clients: {list(range(1, clients + 1))}}}\n")
    return folder


def _serve(folder: Path, words: Sequence[str], listener: int) -> subprocess.Popen[bytes]:
    """Start `raafl serve` on the first core; it inherits the ``listener``."""
    cores = sorted(os.sched_getaffinity(0))
    return subprocess.Popen(
        [sys.executable, "-m", "raafl", "serve", "--min_clients", "1", "--certs", str(folder / "certs"), *words],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        pass_fds=[listener],
        preexec_fn=lambda: os.sched_setaffinity(0, cores[:1]),
    )


def _play(folder: Path, address: str, run: str | None = None) -> subprocess.Popen[str]:
    """Start the clients' process on the other cores, and wait until it is ready."""
    cores = sorted(os.sched_getaffinity(0))
    config = folder / "load.yaml" if run is None else folder / "runs" / f"{run}.yaml"
    words = ["--work", str(config), address, str(folder / "certs"), *([] if run is None else [run])]
    players = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.load", *words],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: os.sched_setaffinity(0, cores[1:] or cores),
    )
    assert players.stdout is not None
    players.stdout.readline()
    return players


def phases(clients: Sequence[int], seconds: float = 5.0) -> Iterator[tuple[str, int, Callable[[], list[Row]]]]:
    """Yield each part of the measurement: its number of clients, and the function that measures its rows.

    `seconds`: duration of a phase; an idle server is measured for four times as long.
    """
    for number in clients:
        yield "idle", number, partial(_idle, number, seconds)
        yield "working", number, partial(_working, number, seconds)
        yield "runs", number, partial(_runs, number)
    for number, hidden in LARGE:
        yield f"large:{300 * hidden}", number, partial(_large, number, hidden, seconds)


def _idle(clients: int, seconds: float) -> list[Row]:
    with stage(clients, at_work=1) as on:
        joined = on.join(clients)
        return [joined, on.phase("idle", clients, 4 * seconds, 4 * seconds)]


def _working(clients: int, seconds: float) -> list[Row]:
    with stage(clients) as on:
        on.join(clients)
        found = [on.phase("closed", clients, seconds, 0.0)]
        found += [on.phase("paced", clients, seconds, clients / rate) for rate in RATES if clients <= rate * _THINK_S]
        return [*found, on.storm(clients, min(clients / RATES[0], _THINK_S))]


def _runs(clients: int) -> list[Row]:
    with stage_of_runs(clients) as (on, port):
        before = cpu_seconds(port)
        row = on.join(clients)
        return [{**row, "phase": "runs", "port_cpu_ms": (cpu_seconds(port) - before) / clients * 1e3}]


def _large(clients: int, hidden: int, seconds: float) -> list[Row]:
    with stage(clients, hidden=hidden, options=["--checkpoint_s=null"]) as on:
        on.join(clients)
        row = on.phase("large", clients, 2 * seconds, 0.0)
        on.server.kill()  # killed, since it would save its model first
    return [{**row, "update_bytes": 300 * hidden, "bytes_per_s": 2 * 300 * hidden * row["updates_per_s"]}]


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.load")
    parser.add_argument("--clients", type=int, nargs="*", default=CLIENTS, help="numbers of clients")
    parser.add_argument("--only", nargs="*", help="parts to measure: idle, working, runs, large:BYTES; none = all")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--out", type=Path, help="write each part to this file once it is measured")
    parser.add_argument("--resume", action="store_true", help="leave out the parts that the file has")
    options = parser.parse_args(argv)
    rows: list[Row] = []
    if options.resume and options.out is not None and options.out.exists():
        rows = json.loads(options.out.read_text())["rows"]
    done = {(row["part"], row["clients"]) for row in rows}
    for part, number, measure in phases(options.clients):
        if (part, number) in done or (options.only and part not in options.only):
            continue
        rows += [{"part": part, **row} for row in measure()]
        if options.out is not None:
            options.out.write_text(json.dumps(report(rows), indent=2) + "\n")
        if not options.json:
            print(table([row for row in rows if (row["part"], row["clients"]) == (part, number)]), flush=True)
    if options.json:
        print(json.dumps(report(rows), indent=2))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(*sys.argv[2:6])
    else:
        main()
