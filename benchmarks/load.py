"""Measure how many honest clients one server bears: `python -m benchmarks.load --json`. TLS on loopback, real sessions.

`raafl serve` coordinates FedAsync on the quick start's model (60 kB each way) on one core. A process on another core plays the
clients: each has a TLS session of its own, says HELLO, and answers every assignment with a prepared update after a wait, which
stands for its training. So 500 clients cost a process, not 500, and the server cannot tell the difference.

A row is a phase of the same server. *Closed*: clients answer at once, as many updates as the server takes. *Paced*: each trains
for a while first; the delay is from the update's last byte to the next assignment's last byte. *Idle*: all are there, and one is
at work. CPU seconds are the server's and hardly depend on what else the machine does; the clock does.
"""

from __future__ import annotations

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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.common import Row, main

CLIENTS = 500
_TIMEOUT_S = 120.0
_CONFIG = """\
name: load
clients: {clients}
model:
  class_path: model_zoo.MLP
  init_args: {{in_features: 64, hidden: [{hidden}], num_classes: 10}}
data:
  class_path: raafl.data.Digits
  init_args: {{batch_size: 32}}
partition: {{class_path: raafl.data.Iid}}
algorithm: {{class_path: raafl.fed_async, init_args: {{concurrency: {at_work}}}}}
train: {{num_epochs: 1}}
emulate: false
max_time: 1h
eval_every: 1000000000
"""


@dataclass
class Tally:
    """Counts of a phase of the clients.

    Attributes:
        num_updates: sent.
        delays: seconds from an update to the next assignment.
    """

    num_updates: int = 0
    delays: list[float] = field(default_factory=list)


class Players:
    """Clients of one process: sessions that answer with a prepared update."""

    def __init__(self, config: Path, address: str, certs: Path) -> None:
        """Build what a client knows of the run, once for all.

        Args:
            config: config of the run.
            address: ``HOST:PORT`` of the server.
            certs: folder with the site's certificate.
        """
        from raafl.config.parse import parse
        from raafl.runtime.client.setup import ClientSetup
        from raafl.runtime.setup import client_infos, load_data
        from raafl.sites.credentials import TlsFiles

        parsed = parse("join", ["--config", str(config)])
        self._site = ClientSetup.build(parsed.experiment, parsed.config_yaml, 1, own_data=False)
        self._infos = client_infos(parsed.experiment, load_data(parsed.experiment))
        files = TlsFiles.find(certs, server=False, given=dict.fromkeys(("ca", "cert", "key", "crl")))
        self._login = files.client_login()
        self._address, self._selector = address, selectors.DefaultSelector()
        self._due: list[tuple[float, int, int]] = []  # when, client, assignment
        self._sent_s: dict[int, float] = {}
        self._pairs: dict[int, Any] = {}
        self._tensors: Any = None
        self._think_s, self._tally = 0.0, Tally()

    def join(self, client: int) -> None:
        """Open the session of a client and take its first assignment when it comes."""
        from raafl.runtime.identity import Identity
        from raafl.runtime.protocol import Hello
        from raafl.transport import Kind, Message, PeerLost
        from raafl.transport.tcp.listener import connect

        for _ in range(20):
            try:
                pair = connect(self._address, client, self._login, timeout_s=_TIMEOUT_S)
                break
            except PeerLost:  # busy
                time.sleep(0.1)
        hello = Hello.of_client(Identity.of(self._site.submodels, self._site.sections), self._infos[client - 1])
        pair.send(Message(Kind.HELLO, meta=hello.to_meta()))
        self._pairs[client] = pair
        self._selector.register(pair._socket.sock, selectors.EVENT_READ, client)

    def play(self, seconds: float, think_s: float) -> Tally:
        """Answer assignments for a while; return what was counted. What is due later is answered in the next phase.

        Args:
            seconds: duration of the phase.
            think_s: wait before an answer.
        """
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
        """Hang up, so that the server loses its clients."""
        for pair in self._pairs.values():
            pair.close()

    def _hear(self, client: int) -> None:
        """Receive all that has come for a client; the first of several messages may be read together with the next."""
        from raafl.transport import Kind

        pair = self._pairs[client]
        while True:
            message = pair.recv(self._expect, _TIMEOUT_S)
            now = time.monotonic()
            if message.kind is Kind.ASSIGN:
                if (sent_s := self._sent_s.pop(client, None)) is not None:
                    self._tally.delays.append(now - sent_s)
                heapq.heappush(self._due, (now + self._think_s, client, message.assignment))
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
        return self._tensors  # each time the same: what came is the answer, too

    def _answer(self, client: int, assignment: int) -> None:
        from raafl.runtime.protocol import Answer
        from raafl.transport import Kind, Message

        meta = Answer(self._infos[client - 1].num_samples, 1, {"loss": 1.0}).to_meta()
        self._pairs[client].send(Message(Kind.UPDATE, assignment, 0, meta, self._tensors))
        self._tally.num_updates += 1
        self._sent_s[client] = time.monotonic()


def work(config: str, address: str, certs: str) -> None:
    """Play clients as the lines of standard input say: ``join FIRST LAST``, ``play SECONDS THINK_S``.

    Args:
        config: file of the run's config.
        address: ``HOST:PORT`` of the server.
        certs: folder with the site's certificate.
    """
    import torch

    torch.set_num_threads(1)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a socket for each client
    players = Players(Path(config), address, Path(certs))
    print("ready", flush=True)
    for line in sys.stdin:
        name, first, second = line.split()
        if name == "join":
            for client in range(int(first), int(second) + 1):
                players.join(client)
            print("joined", flush=True)
            continue
        start = time.process_time()
        tally = players.play(float(first), float(second))
        told = {"num_updates": tally.num_updates, "delays": tally.delays, "cpu_s": time.process_time() - start}
        print(json.dumps(told), flush=True)
    players.close()


# ---- the measurement ----


@dataclass
class Stage:
    """Server, and the process that plays its clients."""

    server: psutil.Process
    players: subprocess.Popen[str]

    def ask(self, line: str) -> str:
        """Tell the players something; return their reply."""
        assert self.players.stdin and self.players.stdout
        self.players.stdin.write(line + "\n")
        self.players.stdin.flush()
        reply = self.players.stdout.readline()
        if not reply:
            raise RuntimeError(f"the clients' process has ended after '{line}'")
        return reply

    def phase(self, name: str, clients: int, seconds: float, think_s: float) -> Row:
        """Let the clients work, after a second to settle; return the row of the phase.

        Args:
            name: name of the phase.
            clients: number of clients that have joined.
            seconds: duration of the phase.
            think_s: wait of a client before an answer.
        """
        self.ask(f"play 1 {think_s}")
        before, began = self.server.cpu_times(), time.monotonic()
        told = json.loads(self.ask(f"play {seconds} {think_s}"))
        after, took_s = self.server.cpu_times(), time.monotonic() - began
        cpu_s = after.user + after.system - before.user - before.system
        return {
            "phase": name,
            "clients": clients,
            "think_s": think_s,
            **figures(told["num_updates"], told["delays"], took_s, cpu_s),
            "clients_cpu_share": told["cpu_s"] / took_s,
            "server_threads": self.server.num_threads(),
            "server_rss_bytes": self.server.memory_info().rss,
            "machine_load": os.getloadavg()[0],
        }


def figures(num_updates: int, delays: list[float], took_s: float, cpu_s: float) -> Row:
    """Return rates, delays in milliseconds, and CPU of a phase.

    Args:
        num_updates: sent in it.
        delays: seconds from an update to the next assignment.
        took_s: its duration.
        cpu_s: CPU seconds of the server in it.
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
    """Start a server on the first core and the clients' process on the others.

    Args:
        clients: number of clients of the run.
        at_work: largest number of them that work at once; None = all.
        hidden: units of the model, 300 bytes each.
        options: options of the server, beside those of the load.
    """
    cores = sorted(os.sched_getaffinity(0))
    from benchmarks.wire import certify  # it imports torch

    with tempfile.TemporaryDirectory() as name, socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        folder = Path(name)
        (folder / "load.yaml").write_text(
            _CONFIG.format(clients=clients, at_work="null" if at_work is None else at_work, hidden=hidden)
        )
        certify(folder / "certs")
        (folder / "certs" / "sites.yaml").write_text(f"site: {{clients: {list(range(1, clients + 1))}}}\n")
        listener.set_inheritable(True)
        serve = [sys.executable, "-m", "raafl", "serve", "--config", str(folder / "load.yaml"), "--min_clients", "1"]
        serve += ["--certs", str(folder / "certs"), "--output", str(folder / "run"), "--progress", "quiet", *options]
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        server = subprocess.Popen(
            [*serve, "--address", f"fd:{listener.fileno()}"],
            env=environment,
            pass_fds=[listener.fileno()],
            preexec_fn=lambda: os.sched_setaffinity(0, cores[:1]),
        )
        players = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "benchmarks.load",
                "--work",
                str(folder / "load.yaml"),
                address,
                str(folder / "certs"),
            ],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: os.sched_setaffinity(0, cores[1:] or cores),
        )
        try:
            assert players.stdout is not None
            players.stdout.readline()
            yield Stage(psutil.Process(server.pid), players)
        finally:
            players.kill()
            server.terminate()
            for process in (players, server):
                process.wait(timeout=60)


def rows(clients: int = CLIENTS, seconds: float = 5.0) -> list[Row]:
    """Measure one client, then all: as fast as they can, paced, and idle; the last row has the cost of a session.

    Args:
        clients: number of them.
        seconds: duration of a phase.
    """
    with stage(clients) as on:
        on.ask("join 1 1")
        found = [on.phase("closed", 1, seconds, 0.0)]
        before = on.server.memory_info().rss
        start_s, start = time.monotonic(), on.server.cpu_times()
        on.ask(f"join 2 {clients}")
        joined_s, end = time.monotonic() - start_s, on.server.cpu_times()
        join_cpu_s = (end.user + end.system - start.user - start.system) / (clients - 1)
        found.append(on.phase("closed", clients, seconds, 0.0))
        held = on.server.memory_info().rss - before
        found += [on.phase("paced", clients, seconds, think_s) for think_s in (4.0, 2.0, 1.0)]
    with stage(clients, at_work=1) as on:
        on.ask(f"join 1 {clients}")
        found.append(on.phase("idle", clients, seconds, seconds))
    session = {"joins_per_s": (clients - 1) / joined_s, "join_cpu_s": join_cpu_s}
    return [*found, {"phase": "session", "clients": clients, "bytes_a_session": round(held / (clients - 1)), **session}]


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(*sys.argv[2:5])
    else:
        main("load", rows)
