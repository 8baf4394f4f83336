"""Offer several runs of one federation at one port: start their processes, pass clients on to them, answer questions about them.

A run's process is a server as `raafl serve` runs it, kept by a supervisor of its own, so that neither needs this process once
they have started. A question is a frame of `raafl.transport.codec` over TLS, one on each connection.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, Self, cast, get_args

from raafl.config.remote_options import check_run_name
from raafl.errors import BadInput, RunFailed
from raafl.runtime.protocol import no_tensors
from raafl.runtime.supervisor import Child, RestartPolicy, exit_in_words
from raafl.sanitize import sanitize_text, sanitize_tree
from raafl.sites.certificates import write
from raafl.sites.credentials import stamp_of
from raafl.sites.hosted_runs import MAX_CONFIG, STATES, HostedRun, configs, removed, state_folder_of
from raafl.sites.server import Sites
from raafl.transport import Kind, Message, PeerLost, PeerTimeout, Refused
from raafl.transport.tcp.connection import TcpConnection
from raafl.transport.tcp.credentials import ClientLogin, Credentials
from raafl.transport.tcp.handover import RUN_ENDED, RUN_FAILED, digest_of
from raafl.transport.tcp.listener import Listener, Peer, TokenBucket, connect
from raafl.transport.tcp.loop import SocketLoop
from raafl.watch.progress import plain
from raafl.watch.state import follow

_QUESTION_S, _PARTING_S, _CHECK_S = 30.0, 5.0, 300.0
_MAX_ANSWERING = 64  # largest number of questions that are answered at the same time
_MAX_LISTED = 2000
_MAX_RUNS = 10_000  # largest number of configs in the folder; a further one is refused
_LOG_LINES = 20
_log = logging.getLogger(__name__)

Verb = Literal["list", "show", "submit", "stop", "resume"]


@dataclass(frozen=True, slots=True)
class Question:
    """Question to a server for many runs; all but ``list`` are answered to operators alone."""

    do: Verb
    run: str = ""  # name of the run; empty with ``list``
    config: str = ""  # text of the config that is submitted
    min_clients: int | None = None  # number of clients with which the submitted run starts; None = all

    def to_meta(self) -> dict[str, Any]:
        """Convert the question to its JSON fields."""
        return {"do": self.do, "run": self.run, "config": self.config, "min_clients": self.min_clients}

    @classmethod
    def from_meta(cls, meta: Mapping[str, Any]) -> Self:
        """Read the question; raise `Refused` for anything that is none."""
        do, run, config, num = (meta.get(name) for name in ("do", "run", "config", "min_clients"))
        if do not in get_args(Verb):
            raise Refused("bad-meta", f"do is {sanitize_text(do, 40)}")
        if not isinstance(run, str) or not isinstance(config, str) or len(run) > 200:
            raise Refused("bad-meta", "run or config is no text")
        if len(config) > MAX_CONFIG:
            raise Refused("bad-meta", f"the config has {len(config):,} characters: at most {MAX_CONFIG:,}")
        if num is not None and not (type(num) is int and 1 <= num <= 10**9):
            raise Refused("bad-meta", f"min_clients is {sanitize_text(num, 40)}")
        return cls(cast(Verb, do), run, config, num)


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer of a server for many runs."""

    problem: str = ""  # why the server did not do what it was asked; empty = it did
    runs: list[dict[str, Any]] = field(default_factory=list)  # a row for each run that the question is about
    details: dict[str, Any] = field(default_factory=dict)  # of ``show``: progress, and the last lines of the log

    def to_meta(self) -> dict[str, Any]:
        """Convert the answer to its JSON fields."""
        return {"problem": self.problem, "runs": self.runs, "details": self.details}

    @classmethod
    def from_meta(cls, meta: Mapping[str, Any]) -> Self:
        """Read the answer, every text fit to be printed; raise `Refused` for anything that is none."""
        problem, runs, details = (meta.get(name) for name in ("problem", "runs", "details"))
        if not isinstance(problem, str) or not isinstance(runs, list) or not isinstance(details, dict):
            raise Refused("bad-meta", "no answer about runs")
        for row in runs:
            if not isinstance(row, dict) or not isinstance(row.get("id"), str) or row.get("state") not in STATES:
                raise Refused("bad-meta", "a row of no run")
            try:
                check_run_name(str(row.get("run")))
            except BadInput as error:
                raise Refused("bad-meta", str(error)) from None
        return cls(sanitize_text(problem, 2000), sanitize_tree(runs), sanitize_tree(details))


def ask(address: str, question: Question, login: ClientLogin, *, proxy: str | None = None) -> Answer:
    """Ask a server for many runs, and return its answer.

    `login`: how this side proves itself, by a site's certificate, or an operator's.

    Raises:
        RunFailed: the server refused.
        BadInput: a file of the certificate is of no use.
        PeerLost, PeerTimeout: the server is gone or absent.
        Refused: this side is not admitted, or what answers is no server for many runs.
    """
    with connect(address, 0, login, timeout_s=10.0, proxy=proxy) as connection:
        connection.send(Message(Kind.RUNS, meta=question.to_meta()))
        answer = connection.recv(no_tensors, _QUESTION_S + (_CHECK_S if question.do == "submit" else 0.0))
    if answer.kind is not Kind.RUNS:
        raise Refused("bad-kind", "the server has one run: leave --server, --any and --run out")
    found = Answer.from_meta(answer.meta)
    if found.problem:
        raise RunFailed(found.problem)
    return found


class RunServer:
    """Server for many runs; as a context manager it listens and answers on threads of its own.

    Leaving it ends no run. `look` is to be called again and again on one thread: it starts what has to run.
    """

    def __init__(
        self,
        folder: Path,
        address: str | socket.socket,
        credentials: Credentials,
        sites: Sites,
        operators: Collection[str],
        *,
        options: Sequence[str] = (),
        trusts: bool = False,
        max_runs: int | None = None,
    ) -> None:
        """Listen at ``address``.

        `operators`: sites whose certificates may submit, show, stop and resume runs. `options`: command-line options of each
        run's process, without the run's name. `trusts`: whether submitted configs may name any class. `max_runs`: most runs
        at a time; None = no limit.
        """
        self._folder, self._sites, self._operators = folder, sites, frozenset(operators)
        self._options, self._trusts, self._max_runs = tuple(options), trusts, max_runs
        self._lock, self._checks = threading.Lock(), threading.Lock()
        self._runs: dict[str, HostedRun] = {}
        self._digests: dict[bytes, HostedRun] = {}
        self._children: dict[str, Child] = {}
        self._stamps: dict[str, tuple[int, ...]] = {}
        self._told: set[str] = set()  # warnings that were logged
        self._gone: set[str] = set()  # runs whose files the last look did not find any more
        self._num_answering = 0
        self._turns = TokenBucket()  # limits the questions of each site
        self._loop = SocketLoop()
        self._listener = Listener(
            address,
            credentials,
            self._admit,
            lambda reason: None,
            authorize=self._authorize,
            loop=self._loop,
            pass_on=self._pass_on,
        )
        self.address = self._listener.address

    def __enter__(self) -> Self:
        self._loop.start()
        self._listener.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        self._loop.close()

    # ---- processes of the runs ----

    def look(self) -> None:
        """Find new configs, and start the process of each run that should have one and has none."""
        with self._lock:
            self._find()
            others = {name: run for name, run in self._runs.items() if not (run.is_kept or self._starts(name))}
            num = len(self._runs) - len(others)
            for name, run in others.items():
                if self._max_runs is not None and num >= self._max_runs:
                    break
                try:
                    num += self._start(name, run)
                except OSError as error:  # memory, descriptors or disk space are used up: the next look tries again
                    self._warn_once(f"run '{name}': its process cannot be started: {error}")

    @property
    def num_running(self) -> int:
        """Number of runs that have a process."""
        with self._lock:
            return sum(run.is_kept for run in self._runs.values())

    def _find(self) -> None:
        for file in self._folder.glob("*.yaml"):
            try:
                check_run_name(file.stem)
            except BadInput as error:
                self._warn_once(f"{file} is no run: {error}")
        found: dict[str, HostedRun] = {}
        for run in configs(self._folder):
            if run.asked is None:
                _, size, *_ = stamp = stamp_of(run.config)
                # a config is read after two looks have found it unchanged, and not empty: somebody may still be writing it
                if self._stamps.get(run.name) != stamp or not size:
                    self._stamps[run.name] = stamp
                    continue
                try:
                    run.ask_first()
                except OSError as error:
                    self._warn_once(f"run '{run.name}' cannot be begun: {error}")
                    continue
                _log.info("run '%s': found its config in %s", run.name, self._folder)
            found[run.name] = run
        self._runs, self._digests = found, {digest_of(name): run for name, run in found.items()}
        self._forget_removed()

    def _forget_removed(self) -> None:
        """Forget runs of which neither config nor run folder is left at two looks, so that their names are free again."""
        gone = {run.name for run in removed(self._folder, self._runs)}
        for name in gone & self._gone:
            try:
                HostedRun(self._folder, name).forget()
            except OSError as error:
                self._warn_once(f"run '{name}' cannot be forgotten: {error}")
                continue
            self._children.pop(name, None)
            _log.info("run '%s': forgotten, since its files were removed", name)
        self._gone = gone - self._gone

    def _warn_once(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            _log.warning("%s", text)

    def _starts(self, name: str) -> bool:
        """Check whether a run's process was started and is still alive; at first it does not hold the run's lock yet."""
        child = self._children.get(name)
        return child is not None and child.process is not None and child.due_s is None and child.exit_code() is None

    def _start(self, name: str, run: HostedRun) -> bool:
        """Start the process of a run that has none, unless it is over or waits for its restart; return whether it was started."""
        if run.state_without_process != "submitted":
            return False
        child = self._children.get(name)
        if child is None:
            command = [sys.executable, "-m", "raafl", "serve", "--keep", name, *self._options]
            child = Child(f"run '{name}'", lambda: command, dict(os.environ), run.log, dies_with_parent=False)
            self._children[name] = child
        elif child.due_s is None:
            code = child.exit_code()
            wait_s = child.start_again(RestartPolicy())
            how = "" if code is None else f" {exit_in_words(code, child.last_words(1))};"
            _log.warning("run '%s':%s its process is started again in %g s", name, how, wait_s)
        if child.due_s is not None and child.due_s > time.monotonic():
            return False
        child.start()
        _log.info("run '%s': started, its log is %s", name, run.log)
        return True

    # ---- connections of clients and operators ----

    def _authorize(self, peer: Peer) -> None:
        self._sites.rules_of(peer, others=self._operators)
        if not self._turns.take(str(peer.site)):
            raise Refused("too-often", f"site '{peer.site}': try again later")

    def _pass_on(self, connection: socket.socket, digest: bytes) -> bool:
        run = self._digests.get(digest)
        if run is None:
            raise Refused("no-run", f"the server offers no such run: it has {self._offered()}")
        if run.pass_on(connection):
            return True
        if (state := run.state) in ("running", "submitted"):
            return False
        reason = RUN_FAILED if state == "failed" else RUN_ENDED
        raise Refused(reason, f"run '{run.name}' has {state}: the server offers {self._offered()}")

    def _offered(self) -> str:
        names = [name for name, run in self._runs.items() if run.is_kept]
        return ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "") or "none now"

    def _admit(self, connection: TcpConnection, peer: Peer) -> None:
        if self._num_answering >= _MAX_ANSWERING:
            connection.close()
            return
        self._num_answering += 1
        self._loop.begin(self._serve(connection, peer))

    async def _serve(self, connection: TcpConnection, peer: Peer) -> None:
        try:
            async with asyncio.timeout(_QUESTION_S):  # a peer that sends byte by byte must not occupy a place for hours
                asked = await self._loop.drive(connection.receiving(no_tensors, _QUESTION_S))
            if asked.kind is not Kind.RUNS:
                problem = "this server has several runs: join one with --run NAME, or all with --any"
                meta: dict[str, Any] = {"reason": f"refused: {problem}"}
                answer = Message(Kind.STOP, meta=meta)
            else:
                question = Question.from_meta(asked.meta)
                found = await self._loop.work(lambda: self.answer(question, peer))
                answer = Message(Kind.RUNS, meta=found.to_meta())
            async with asyncio.timeout(_QUESTION_S):
                await self._loop.drive(connection.sending(answer))
                # wait until the peer closes, so that it can read the whole answer
                await self._loop.drive(connection.receiving(no_tensors, _PARTING_S))
        except Refused as refused:
            _log.warning("a question of %s was refused: %s", sanitize_text(peer.site, 80), refused)
        except (PeerLost, PeerTimeout, TimeoutError):
            pass
        finally:
            connection.close()
            self._num_answering -= 1

    # ---- answers to operators' questions ----

    def answer(self, question: Question, peer: Peer) -> Answer:
        """Answer a question of an authenticated peer."""
        is_operator = peer.site in self._operators
        if question.do != "list" and not is_operator:
            return Answer(
                f"site '{sanitize_text(peer.site, 80)}' may not {question.do} runs: use the certificate of an operator "
                f"({', '.join(sorted(self._operators))})"
            )
        try:
            if question.do == "submit":
                with self._checks:  # one check at a time, outside the lock that the other questions need
                    check_config(self._folder, check_run_name(question.run), question.config, trusted=self._trusts)
            with self._lock:
                if question.do == "list":
                    return Answer(runs=[_row(run, whole=is_operator) for run in self._latest()])
                return self._do(question, str(peer.site))
        except (BadInput, OSError) as error:
            return Answer(str(error))

    def _latest(self) -> list[HostedRun]:
        return list(self._runs.values())[-_MAX_LISTED:]

    def _do(self, question: Question, site: str) -> Answer:
        name = check_run_name(question.run)
        if question.do == "submit":
            return self._submit(HostedRun(self._folder, name), question, site)
        run = self._runs.get(name)
        if run is None:
            raise BadInput(f"run is '{name}', which this server does not have: `raafl runs list` shows its runs")
        if question.do == "stop":
            run.stop()
            _log.info("run '%s': stopped by '%s'", name, site)
        elif question.do == "resume":
            if (state := run.state) not in ("stopped", "failed"):
                raise BadInput(f"run '{name}' is {state}: only a run that was stopped or has failed can be resumed")
            run.resume()
            _log.info("run '%s': resumed by '%s'", name, site)
        return Answer(runs=[_row(run)], details=_details(run) if question.do == "show" else {})

    def _submit(self, run: HostedRun, question: Question, site: str) -> Answer:
        if run.config.exists() or run.run_folder.exists() or run.asked is not None:
            raise BadInput(f"run '{run.name}' exists: give another --name")
        if len(self._runs) >= _MAX_RUNS:
            raise BadInput(f"the server has {_MAX_RUNS:,} runs: move old ones out of its folder")
        # before the config is written: a config without this record counts as put there by the server's owner
        run.ask_first(site, question.min_clients)
        write(run.config, question.config.encode())
        _log.info("run '%s': submitted by '%s'", run.name, site)
        return Answer(runs=[_row(run)])


def check_config(folder: Path, name: str, text: str, *, trusted: bool) -> None:
    """Check a submitted config in a process of its own, since the check imports the classes that the config names.

    The run's own process checks it again. `trusted`: whether it may name any class.

    Raises:
        BadInput: the config is refused.
    """
    with TemporaryDirectory(prefix="submitted-", dir=state_folder_of(folder)) as scratch:
        file = Path(scratch) / f"{name}.yaml"
        write(file, text.encode())
        trust = ["--trust_config"] if trusted else []
        command = [sys.executable, "-m", "raafl", "serve", "--submitted", str(file), *trust, "--print_config"]
        try:
            found = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_CHECK_S)
        except subprocess.TimeoutExpired:
            raise BadInput(
                f"the config of run '{name}' could not be checked within {_CHECK_S:g} s: try again"
            ) from None
    if found.returncode != 0:
        lines = found.stderr.decode(errors="replace").replace(scratch, "").strip().splitlines() or ["it is refused"]
        raise BadInput("\n".join(lines[-10:]).removeprefix("raafl: "))


def _row(run: HostedRun, *, whole: bool = True) -> dict[str, Any]:
    asked = run.asked
    row: dict[str, Any] = {"run": run.name, "id": asked.id if asked else "", "state": run.state}
    if whole and asked:
        row |= {"since": asked.since, "by": asked.by, "exit_code": run.exit_code}
    return row


def _details(run: HostedRun) -> dict[str, Any]:
    watched = follow(run.run_folder)
    progress: dict[str, Any] = {}
    if run.run_folder.is_dir():
        watched.look()
        if watched.begun:
            progress = {name: value for name, value in plain(watched.state.snapshot(None)).items() if name != "clients"}
    return {"folder": str(run.run_folder), "progress": progress, "log": run.last_lines(_LOG_LINES)}
