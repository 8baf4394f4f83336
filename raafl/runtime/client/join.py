"""Work as a client for a server on another machine, and connect again when the connection breaks.

The client retries for as long as ``waits.alone_s``, so it survives a server that is restarted with ``--resume``, after a crash
or after SIGTERM, also as another version of the package. A server that refuses the client is asked three times.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from raafl.config.options import Timeouts
from raafl.config.trust import from_server
from raafl.errors import Replaced, RunFailed, TaskFailed
from raafl.runtime.client.setup import ClientSetup
from raafl.runtime.client.worker import Client, Gate, TaskRefused
from raafl.runtime.extensions import extension, named_by_config
from raafl.runtime.protocol import PAUSED, Config, Failed, Reason, Resume, ToldToStop, no_tensors
from raafl.transport import TRANSPORTS, Connection, ConnectOptions, Kind, Message, PeerLost, PeerTimeout, Refused
from raafl.transport.tcp.connection import TcpConnection
from raafl.transport.tcp.credentials import Credentials
from raafl.transport.tcp.handover import RUN_ENDED, RUN_FAILED
from raafl.transport.tcp.resumable import Position, ResumableConnection
from raafl.units import duration

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.2, 5.0
_SURE = 3  # successive refusals before a client gives up; fewer may come from a server that ends, or from a flipped bit
_FIRST_NOTE_S = 60.0  # seconds of a search until the user is reminded of it; then twice as many each time
_CONFIG_S, _PARTING_S, _RESUME_S = 30.0, 5.0, 30.0
_WORKS = threading.Lock()
"""Lock of this process's client: tasks of two, in several threads, would draw from the same generators."""
_CLOSED = "connection-closed"  # reason code of a connection that the peer closed


def join(
    address: str,
    client: int,
    credentials: Credentials,
    make_site: Callable[[str | None], ClientSetup],
    *,
    needs_config: bool,
    proxy: str | None = None,
    alone_s: float | None = None,
    say: Callable[[str], None] = lambda text: None,
    gate: Gate | None = None,
) -> str:
    """Work as a client until the server tells it to stop; return the server's reason.

    `make_site`: function that builds the client; its argument is the text of the server's config, or None if the
    client has a config of its own.
    `alone_s`: seconds after which to give up if the server is absent; None = `Timeouts.alone_s`, by its default until the
        server's config is known.
    `gate`: gate that checks tasks against the policy of the client's site; None = no policy.

    Raises:
        BadInput: the address, the credentials or the config is wrong.
        Replaced: another client with the same id has joined.
        RunFailed: the server refused the client, or was absent for ``alone_s`` seconds.
        TaskRefused: the site's policy does not allow the run.
    """
    gate = gate or Gate()
    transport = TRANSPORTS["tcp"](ConnectOptions(address=address, credentials=credentials, client=client, proxy=proxy))
    follows_server = alone_s is None
    unsent: int | None = None
    num_refused = 0
    site = None if needs_config else _told(make_site(None), say, certified=credentials.certified)
    search = _Search(transport.connect, address, Timeouts().alone_s if alone_s is None else alone_s, say, gate.wait)
    while True:
        try:
            link = _Link(search, say)
        except ToldToStop as told:
            return _ended(client, told.reason)
        pair = gate.connection(link.connection)
        try:
            site = site or _told(make_site(_ask_config(pair)), say, certified=credentials.certified)
            if follows_server:
                search.alone_s = site.experiment.waits.alone_s
            worker = link.worker = site.client(
                pair, unsent=unsent, on_welcome=search.succeeded, credentials=credentials
            )
            reason = _work(worker, site, say)
        except ToldToStop as told:
            reason = told.reason
        except TaskRefused as refusal:
            unsent = None
            _part(refusal, pair, link.worker, say)
            continue
        except (PeerLost, PeerTimeout, Refused) as error:
            num_refused = (0 if link.worker and link.worker.num_answered else num_refused) + isinstance(error, Refused)
            if num_refused >= _SURE:
                raise RunFailed(
                    f"client {client}: the server at {address} does not speak raafl's protocol ({error}): check the address"
                ) from None
            say(f"the connection to {address} broke ({_cause(error)}); trying again for {search.alone_s:g} s")
            unsent = unsent if link.worker is None else link.worker.unsent
            search.pause()
            continue
        finally:
            pair.close()
        # without certificates one command has started server and clients, and ends both
        if reason != PAUSED or not credentials.certified:
            return _ended(client, reason)
        say(f"the server at {address} was interrupted; waiting {search.alone_s:g} s for one that resumes the run")
        search.pause()


def _cause(error: Exception) -> str:
    """Return the reason of a connection error in words for users, without the transport's reason code."""
    text = str(error).removeprefix(f"{error.reason}: ") if isinstance(error, PeerLost) else str(error)
    return text.replace("the peer ended the connection", "the server ended it")


def _ended(client: int, reason: str) -> str:
    """Return the reason for which the server ended the session; raises `Replaced` or `RunFailed` if it is an error."""
    if reason.startswith("replaced"):
        raise Replaced(f"client {client}: {reason}")
    if reason.startswith(("refused", "failed")):
        raise RunFailed(f"client {client}: {reason}")
    return "interrupted" if reason == PAUSED else reason


def _work(worker: Client, site: ClientSetup, say: Callable[[str], None]) -> str:
    """Run the client; if its code fails on its own data, show the traceback here, since the server does not get it."""
    if not _WORKS.acquire(blocking=False):
        raise RunFailed(
            f"client {worker.info.id}: another client works in this process, and both would draw from the same random "
            "generators: give each client a process of its own"
        )
    try:
        return worker.run()
    except TaskFailed as failed:
        if site.info.own_data:
            say(failed.traceback)
        raise
    finally:
        _WORKS.release()


def _part(refusal: TaskRefused, pair: Connection, worker: Client | None, say: Callable[[str], None]) -> None:
    """Leave a server whose run or task the site's policy refuses; raises the refusal if it is final."""
    if worker is None:
        _tell_not_joining(pair, refusal.server_reason)
    if refusal.then == "end":
        raise refusal
    say(str(refusal))


def _told(site: ClientSetup, say: Callable[[str], None], *, certified: bool) -> ClientSetup:
    for note in site.notes:
        say(note)
    for name in named_by_config(site.experiment):
        for note in extension(name, "client").notes(certified=certified):
            say(note)
    return site


class _Search:
    """Search for a server, with growing pauses, which fails after ``alone_s`` seconds without one.

    `alone_s`: seconds without a server after which to give up.
    """

    def __init__(
        self,
        connect: Callable[[], Connection],
        address: str,
        alone_s: float,
        say: Callable[[str], None],
        wait: Callable[[], bool] = lambda: False,
    ) -> None:
        self._wait = wait  # waits until the site accepts work, and returns whether it had to wait
        self._connect, self._address, self.alone_s, self._say = connect, address, alone_s, say
        self._taken_in = False
        self._begin()
        # connection made to resume a session that the server no longer has; it is used for a new session
        self.spare: Connection | None = None

    def _begin(self) -> None:
        self._since, self._wait_s, self._next_note_s = time.monotonic(), _FIRST_WAIT_S, _FIRST_NOTE_S

    def succeeded(self, how: str = "joined") -> None:
        """Record and show that the server has admitted the client, so that a later search has ``alone_s`` seconds again."""
        self._taken_in = True
        self._say(f"{how} {self._address}")

    def find(self) -> Connection:
        """Connect to the server, with further attempts until one succeeds.

        Raises:
            RunFailed: the server has refused this client three times, or was not found within ``alone_s`` seconds.
            ToldToStop: the port is that of many runs, of which this client's is over.
        """
        doubts, told = 0, False
        spare, self.spare = self.spare, None
        if spare is not None:
            return spare
        while True:
            if self._wait():
                self._begin()
            try:
                return self._connect()
            except Refused as refused:
                if refused.reason in (RUN_ENDED, RUN_FAILED):
                    raise ToldToStop(("failed: " if refused.reason == RUN_FAILED else "") + refused.detail) from None
                doubts += 1
                if doubts >= _SURE:
                    raise RunFailed(f"the server at {self._address} refuses this client: {refused}") from None
                problem = str(refused)
                told = told or self._tell(
                    f"the server at {self._address} refuses this client: {problem}; trying again, until it has "
                    f"refused {_SURE} times"
                )
            except (PeerLost, PeerTimeout, OSError) as error:
                problem = _cause(error)
                closed = isinstance(error, PeerLost) and error.reason == _CLOSED
                told = told or self._tell(
                    f"the server at {self._address} ends each connection before it admits this client: it is busy or about to "
                    f"stop, or this client comes back too often; trying again for up to {self.alone_s:g} s"
                    if closed
                    else f"no server at {self._address} yet ({problem}); waiting for up to {self.alone_s:g} s"
                )
            self.pause(problem)

    def _tell(self, what: str) -> bool:
        self._say(what)
        return True

    def pause(self, problem: str = "") -> None:
        """Wait before the next attempt to connect, longer each time; raises RunFailed after ``alone_s`` without a server."""
        if self._taken_in:
            self._taken_in = False
            self._begin()
        passed_s = time.monotonic() - self._since
        left, why = self.alone_s - passed_s, f" ({problem})" if problem else ""
        if left <= 0:
            raise RunFailed(
                f"no server answered at {self._address} for {self.alone_s:g} s{why}: start the server, or check the "
                "address"
            )
        if passed_s >= self._next_note_s:
            self._next_note_s *= 2
            self._say(
                f"no server at {self._address} for {duration(passed_s)}{why}; giving up in {duration(left)}: if the run is over, "
                "end this client (Ctrl-C)"
            )
        time.sleep(min(self._wait_s * random.uniform(0.8, 1.2), left))
        self._wait_s = min(2 * self._wait_s, _LONGEST_WAIT_S)


class _Link:
    """Connection of a session to the server, which is replaced by a new one when it breaks."""

    def __init__(self, search: _Search, say: Callable[[str], None]) -> None:
        """Find the server and connect to it; ``say`` shows a line to the user."""
        self._search, self._say = search, say
        self.worker: Client | None = None
        pair = search.find()
        self.connection: Connection = pair
        if isinstance(pair, TcpConnection) and pair.resumes:
            self.connection = ResumableConnection(pair, self._renew)

    def _renew(self, mine: Position, error: Exception) -> tuple[TcpConnection, Position]:
        """Resume the session on a new connection, after ``error`` broke the old one; raises ``error`` if nothing is to be resumed.

        Raises PeerLost if the server has ended the session, and RunFailed if no server answers.
        """
        worker, link = self.worker, self.connection
        assert isinstance(link, ResumableConnection)
        if worker is None or not (worker.has_task or link.is_unconfirmed):
            raise error
        self._say(f"the connection broke ({_cause(error)}); the task goes on, and the client connects again")
        self._search.pause()
        pair = self._search.find()
        assert isinstance(pair, TcpConnection)
        try:
            pair.send(Message(Kind.RESUME, 0, worker.incarnation, Resume(mine).to_meta()))
            answer = pair.recv(no_tensors, _RESUME_S)
            if answer.kind is Kind.WELCOME:
                theirs = Resume.from_meta(answer.meta).position
                self._search.succeeded("back at")
                return pair, theirs
            if answer.kind is Kind.STOP:
                raise ToldToStop(Reason.from_meta(answer.meta).reason)
        except BaseException:
            pair.close()
            raise
        self._search.spare = pair
        raise PeerLost(_CLOSED, "the server does not have the session any more")


def _tell_not_joining(pair: Connection, reason: str) -> None:
    """Tell a server that this client does not join, and wait until it closes the connection."""
    with suppress(PeerLost, PeerTimeout, Refused, TaskRefused):  # the user has been told the reason
        pair.send(Message(Kind.FAILED, meta=Failed(reason).to_meta()))
        pair.recv(no_tensors, _PARTING_S)


def _ask_config(pair: Connection) -> str:
    """Request the run's config from the server, check it, and return it.

    Raises ToldToStop if the run has ended or the server rejects this client, and RunFailed if the config has more than
    names and plain values.
    """
    pair.send(Message(Kind.CONFIG))
    answer = pair.recv(no_tensors, _CONFIG_S)
    if answer.kind is Kind.STOP:
        raise ToldToStop(Reason.from_meta(answer.meta).reason or "refused")
    config = Config.from_meta(answer.meta)
    if answer.kind is not Kind.CONFIG or config.config_yaml is None:
        raise Refused("bad-kind", f"expected CONFIG, got {answer.kind.name}")
    return from_server(config.config_yaml)
