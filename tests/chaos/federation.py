"""A server and its clients under a supervisor, with a fault proxy between them; and what may be done to them."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

from raafl.commands.fit_local import NOTE, TOKEN, ServerCommand, child_environment
from raafl.runtime.supervisor import Child, RestartPolicy, Supervisor
from tests.chaos.faults import Fault
from tests.chaos.proxy import FaultProxy, Link
from tests.helpers.certificates import CertifiedSites

HERE = Path(__file__).parent
CONFIG = HERE / "chaos.yaml"
TASK_S, IDLE_S = 6.0, 6.0  # deadlines in chaos.yaml
MARK = "RAAFL_CHAOS"
_QUIET_S, _QUIET_LOOKS_S = 0.7, 6.0  # until a server has noticed that its clients are gone; how long it is looked at
_GARBAGE = (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"\0" * 4096)
Undo = Callable[[], object]


class Federation:
    """What the script of faults acts on. The supervisor runs in the main thread, the faults come from another.

    Attributes:
        supervisor: of the server and the clients.
        quiet: what the server held whenever all clients were gone: (pid, threads, open files, bytes of memory).
        strangers: twins and knockers: name, process, exit codes that are right.
    """

    def __init__(
        self, out: Path, num_clients: int, max_updates: int, seed: int, *, tls: bool = False, restart_s: float = 0.3
    ) -> None:
        """Prepare; entering makes the sockets, `supervisor.run` starts."""
        self.out, self.seed = out, seed
        self._before = {child.pid for child in psutil.Process().children()}
        self.mark, token = uuid.uuid4().hex, "" if tls else secrets.token_hex(32)
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port = self.listener.getsockname()[1]
        self.proxy = FaultProxy(self.port, seed)
        self.quiet: list[tuple[int, int, int, int]] = []
        self.strangers: list[tuple[str, subprocess.Popen[bytes], tuple[int, ...]]] = []
        self.said = (out / "supervisor.log").open("w", buffering=1)
        self._server_log = (out / "server.log").open("ab")
        self._certs = ["--certs", str(out / "certs")] if tls else []
        options = [
            "--config",
            str(CONFIG),
            "--clients",
            str(num_clients),
            "--max_updates",
            str(max_updates),
            "--seed",
            str(seed),
            "--progress",
            "plain",
            *self._certs,
        ]
        if tls:
            for folder in ("certs", "others"):
                CertifiedSites(out / folder).site()
        environment = {**child_environment(os.environ, token), MARK: self.mark}
        self.server = ServerCommand([*options, "--output", str(out / "run")], self.listener, out / "note")
        (out / "clients").mkdir()
        self.supervisor = Supervisor(
            Child(
                "the server",
                self.server.command,
                {**environment, NOTE: str(out / "note")},
                out / "server.log",
                fds=(self.listener.fileno(),),
            ),
            {
                number: Child(
                    f"client {number}",
                    lambda number=number: self.join(number),
                    environment,
                    out / "clients" / f"client-{number}.log",
                )
                for number in range(1, num_clients + 1)
            },
            RestartPolicy(max_restarts=10**6, first_s=restart_s, longest_s=max(1.0, restart_s), leave_s=20.0),
            self._say,
            begun=(out / "note").is_file,
            listener=self.listener,
        )
        self._environment = environment

    def __enter__(self) -> Federation:
        self.proxy.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        for _, process, _ in self.strangers:
            if process.poll() is None:
                process.kill()
            process.wait()
        self.proxy.__exit__(*error)
        self.listener.close()
        self.said.close()
        self._server_log.close()

    def _say(self, text: str) -> None:
        self.said.write(f"{time.strftime('%H:%M:%S')} {text}\n")

    def join(self, number: int) -> list[str]:
        """How to start a client."""
        return [
            sys.executable,
            "-m",
            "raafl",
            "join",
            "--address",
            f"127.0.0.1:{self.proxy.port}",
            "--client",
            str(number),
            *self._certs,
        ]

    # ---- how the run is doing ----

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.out / "run"

    def merged(self) -> int:
        """How many updates are in the model, as far as the journal's last assignment tells."""
        versions = re.findall(rb'"event":"assigned".*?"version":(\d+)', self._tail())
        return int(versions[-1]) if versions else 0

    def _tail(self) -> bytes:
        try:
            with (self.folder / "events.jsonl").open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 16384))
                return file.read()
        except OSError:
            return b""

    # ---- faults ----

    def inject(self, fault: Fault) -> tuple[str, float, Undo] | None:
        """Do it; return what was done, and after how many seconds what undoes it. None = there was nobody to do it to."""
        kind, _, more = fault.kind.partition(" ")
        method: Callable[[Fault, str], tuple[str, float, Undo] | None] = getattr(self, f"_{kind}")
        return method(fault, more)

    def _victim(self, fault: Fault, whom: str) -> Child:
        return self.supervisor.server if whom == "server" else self.supervisor.clients[fault.client]

    def _kill(self, fault: Fault, whom: str) -> tuple[str, float, Undo] | None:
        return self._signal(self._victim(fault, whom), signal.SIGKILL)

    def _pause(self, fault: Fault, whom: str) -> tuple[str, float, Undo] | None:
        return self._stop(fault, whom, 0.5 + 0.3 * fault.share * IDLE_S)

    def _stall(self, fault: Fault, whom: str) -> tuple[str, float, Undo] | None:
        return self._stop(fault, whom, (IDLE_S if whom == "server" else TASK_S) * (1.2 + 0.5 * fault.share))

    def _stop(self, fault: Fault, whom: str, seconds: float) -> tuple[str, float, Undo] | None:
        victim = self._victim(fault, whom)
        done = self._signal(victim, signal.SIGSTOP)
        return done and (f"{done[0]}, for {seconds:.1f} s", seconds, lambda: victim.send(signal.SIGCONT))

    def _signal(self, victim: Child, number: signal.Signals) -> tuple[str, float, Undo] | None:
        process = victim.process
        if process is None or process.poll() is not None:
            return None
        victim.send(number)
        return f"{number.name} to {victim.name}, process {process.pid}", 0.0, lambda: None

    def _link(self, fault: Fault) -> Link | None:
        links = self.proxy.links()
        return links[int(fault.share * 0.999 * len(links))] if links else None

    def _reset(self, fault: Fault, more: str) -> tuple[str, float, Undo] | None:
        return self._cut(fault, reset=True)

    def _hang(self, fault: Fault, more: str) -> tuple[str, float, Undo] | None:
        return self._cut(fault, reset=False)

    def _cut(self, fault: Fault, *, reset: bool) -> tuple[str, float, Undo] | None:
        link = self._link(fault)
        if link is None:
            return None
        link.cut(reset=reset)
        return f"connection {link.number}", 0.0, lambda: None

    def _change(self, fault: Fault, seconds: float, **fields: float | bool) -> tuple[str, float, Undo] | None:
        link = self._link(fault)
        if link is None:
            return None
        for side in (link.up, link.down):
            for name, value in fields.items():
                setattr(side, name, value)

        def undo() -> None:
            link.up.clear()
            link.down.clear()

        shown = ", ".join(f"{name} {value:g}" for name, value in fields.items())
        return f"connection {link.number}, {shown}, for {seconds:.1f} s", seconds, undo

    def _delay(self, fault: Fault, more: str) -> tuple[str, float, Undo] | None:
        return self._change(fault, 5.0, delay_s=0.1 + fault.share)

    def _throttle(self, fault: Fault, more: str) -> tuple[str, float, Undo] | None:
        return self._change(fault, 5.0, bytes_per_s=2000 + 30000 * fault.share)

    def _hold(self, fault: Fault, more: str) -> tuple[str, float, Undo] | None:
        return self._change(fault, 2 * TASK_S + 1, held=True)

    def _corrupt(self, fault: Fault, more: str) -> tuple[str, float, Undo] | None:
        link = self._link(fault)
        if link is None:
            return None
        side = link.up if more == "up" else link.down
        side.flip = 1
        return f"connection {link.number}, one bit of the next chunk {more}", 0.0, lambda: None

    def _twin(self, fault: Fault, more: str) -> tuple[str, float, Undo] | None:
        # Whichever is told to go is right: the supervisor's own client comes back and replaces the twin in its turn.
        self._stranger(f"twin of client {fault.client}", self.join(fault.client), self._environment, (0, 1, 3))
        return f"a second client {fault.client}", 0.0, lambda: None

    def _wrong(self, fault: Fault, more: str) -> tuple[str, float, Undo] | None:
        token = self._environment[TOKEN]
        environment = {**self._environment, TOKEN: token and secrets.token_hex(32)}
        others = ["--certs", str(self.out / "others")] if not token else []
        self._stranger("client of another federation", [*self.join(fault.client), *others], environment, (1, 2))
        return f"as client {fault.client}", 0.0, lambda: None

    def _stranger(self, name: str, command: list[str], environment: Mapping[str, str], codes: tuple[int, ...]) -> None:
        with (self.out / "clients" / f"stranger-{len(self.strangers) + 1}.log").open("wb") as log:
            process = subprocess.Popen(
                command,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.strangers.append((name, process, codes))

    def _garbage(self, fault: Fault, more: str) -> tuple[str, float, Undo] | None:
        for data in (*_GARBAGE, os.urandom(64 + int(4000 * fault.share))):
            with contextlib.suppress(OSError), self._caller() as caller:
                caller.sendall(data)
        return f"{len(_GARBAGE) + 1} callers", 0.0, lambda: None

    def _silent(self, fault: Fault, more: str) -> tuple[str, float, Undo] | None:
        callers = []
        for _ in range(5 + int(20 * fault.share)):
            with contextlib.suppress(OSError):
                callers.append(self._caller())

        def undo() -> None:
            for caller in callers:
                caller.close()

        return f"{len(callers)} callers", 7.0, undo

    def _caller(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=5)

    def _vanish(self, fault: Fault, more: str) -> tuple[str, float, Undo] | None:
        """Kill every client at once, and look at what the server holds then."""
        num = sum(self._signal(child, signal.SIGKILL) is not None for child in self.supervisor.clients.values())
        for name, process, _ in self.strangers:
            if "twin" in name and process.poll() is None:
                process.kill()
        for link in self.proxy.links():
            link.cut()
        self._look()
        return f"SIGKILL to {num} clients", 0.0, lambda: None

    def _look(self) -> None:
        """Note the least that the server holds before the first of the new clients comes."""
        least: list[tuple[int, int, int, int]] = []
        began = time.monotonic()
        while time.monotonic() - began < _QUIET_LOOKS_S:
            time.sleep(0.05)
            if time.monotonic() - began < _QUIET_S:
                continue
            if self.proxy.links():
                break
            with contextlib.suppress(psutil.Error, AttributeError):
                server = psutil.Process(self.supervisor.server.process.pid)  # type: ignore[union-attr]
                with server.oneshot():
                    least.append((server.pid, server.num_threads(), server.num_fds(), server.memory_info().rss))
        if least:
            self.quiet.append(tuple(min(column) for column in zip(*least, strict=True)))  # type: ignore[arg-type]

    def orphans(self) -> list[str]:
        """Processes of this federation that still run: by what they were started with, and children of this one."""
        found = []
        mine = {child.pid for child in psutil.Process().children(recursive=True)} - self._before
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                ours = process.pid in mine or process.environ().get(MARK) == self.mark
                if ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(f"process {process.pid}: {' '.join(process.cmdline())[:100]}")
        return found


def leaks(quiet: list[tuple[int, int, int, int]], slack: int = 2) -> list[str]:
    """What a server holds more of when all clients are gone than the first time they were; of each server process."""
    problems = []
    for pid in dict.fromkeys(sample[0] for sample in quiet):
        first, *_, last = [*(sample for sample in quiet if sample[0] == pid)] * 2
        for place, what in ((1, "threads"), (2, "open files")):
            if last[place] > first[place] + slack:
                problems.append(f"server {pid} held {first[place]} {what} without clients, later {last[place]}")
    return problems


def exit_codes(strangers: list[tuple[str, subprocess.Popen[bytes], tuple[int, ...]]], wait_s: float) -> list[str]:
    """Strangers that did not end in time, or not as they should; those killed by the script are right."""
    problems: list[str] = []
    deadline = time.monotonic() + wait_s
    for name, process, codes in strangers:
        try:
            code: Any = process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            code = None
        if code not in (*codes, -signal.SIGKILL):
            problems.append(f"{name}: exit code {code}, not one of {codes}")
    return problems
