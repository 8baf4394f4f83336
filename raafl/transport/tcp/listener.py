"""Listen on a port, and admit clients that authenticate.

Callers that have not authenticated yet occupy a limited number of places. When all are taken, the caller that has waited longest,
of the host with most places, gives up its place, so that silent callers cannot keep out one that speaks. Each costs a socket and
the buffers of its handshake.
"""

from __future__ import annotations

import base64
import ipaddress
import logging
import socket
import ssl
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from raafl.errors import BadInput, parse_address
from raafl.sanitize import sanitize_text
from raafl.transport.codec import Refused
from raafl.transport.connection import PeerLost, PeerTimeout
from raafl.transport.tcp.connection import TcpConnection
from raafl.transport.tcp.credentials import TOKEN_BYTES, ClientLogin, Credentials, ServerLogin
from raafl.transport.tcp.handover import PASSED, PassOn, passing
from raafl.transport.tcp.loop import SocketLoop
from raafl.transport.tcp.stream import SocketStream, TimeBudget, Waits, draining, hang_up, shut
from raafl.transport.tcp.tls import TlsStream

# Authenticate both ends of a new connection: by TLS or a token, the client's id, and the server's answer in words.

MAGIC, VERSION = b"RAJN", 2
MAX_TEXT_BYTES = 1000
_HELLO = struct.Struct(f"<4sHHI{TOKEN_BYTES}s")
_ANSWER = struct.Struct("<4sHH")
_FOR_NOW = ("busy", "too-often", "stopped", "failed")
"""Reasons for which a client should try again later."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A client that wants to connect, with what the server knows about it so far."""

    client: int  # id that the client asks for
    # site in the client's certificate; None = the client has a token, as a process of the same command
    site: str | None
    serial: int  # serial number of the client's certificate; 0 without one
    address: str  # ``HOST:PORT`` from which the client connects


def opening_stream(sock: socket.socket, timeout_s: float) -> SocketStream:
    """Return a stream over a plain or TLS socket, used only until the client is admitted.

    It takes from the socket only the bytes that are asked for, so that later bytes are left for the connection.
    """
    budget = TimeBudget(timeout_s)
    return TlsStream(sock, budget, 0) if isinstance(sock, ssl.SSLSocket) else SocketStream(sock, budget, 0)


def server_opening(
    stream: SocketStream, login: ServerLogin, address: str, authorize: Callable[[Peer], None]
) -> Waits[Peer]:
    """Run the server's side of the authentication, yielding what to wait for; return the authenticated client.

    Raises:
        Refused: the client was refused.
        PeerLost: the client closed the connection.
        PeerTimeout: the client was too slow.
    """
    proof = yield from login.begin(stream)
    hello = bytearray(_HELLO.size)
    yield from stream.reading_into(memoryview(hello)[:4])
    if hello[:4] != MAGIC:
        raise Refused("bad-magic", f"{bytes(hello[:4])!r} is no raafl client")
    yield from stream.reading_into(memoryview(hello)[4:])
    _, version, _, client, token = _HELLO.unpack(hello)
    try:
        if version != VERSION:
            raise Refused("bad-version", f"the client speaks version {version} of the protocol, this server {VERSION}")
        site, serial = proof(token)
        peer = Peer(client, site, serial, address)
        authorize(peer)
    except Refused as refused:
        yield from stream.writing_all([_answer(f"{refused.reason}: {refused.detail}")])
        raise
    yield from stream.writing_all([_answer("")])
    return peer


def client_opening(stream: SocketStream, client: int, login: ClientLogin) -> None:
    """Run the client's side of the authentication; return once the server has admitted this client.

    Raises:
        Refused: the server does not belong to this federation, or does not admit this client.
        PeerLost: the server closed the connection, or has no room now.
        PeerTimeout: the server was too slow.
    """
    token = login.begin(stream)
    stream.write([_HELLO.pack(MAGIC, VERSION, 0, client, token)])
    head = bytearray(_ANSWER.size)
    stream.read_into(memoryview(head)[:4])
    if head[:4] != MAGIC:
        raise Refused("bad-magic", f"what answers is no raafl server, or expects a certificate ({bytes(head[:4])!r})")
    stream.read_into(memoryview(head)[4:])
    _, version, length = _ANSWER.unpack(head)
    if length > MAX_TEXT_BYTES:
        raise Refused("bad-length", f"an answer of {length} bytes")
    text = bytearray(length)
    stream.read_into(memoryview(text))
    if text:
        reason, _, detail = sanitize_text(text.decode(errors="replace"), MAX_TEXT_BYTES).partition(": ")
        if reason in _FOR_NOW:
            raise PeerLost("connection-refused", f"{reason}: {detail}")
        raise Refused(reason, detail)
    if version != VERSION:
        raise Refused("bad-version", f"the server speaks version {version} of the protocol, this client {VERSION}")


def _answer(text: str) -> bytes:
    data = text.encode()[:MAX_TEXT_BYTES]
    return _ANSWER.pack(MAGIC, VERSION, len(data)) + data


HANDSHAKE_S = 5.0
"""Seconds that a caller may take for its part of the handshake."""

MAX_CALLERS = 256
"""Most callers that are being admitted at once."""

_BACKLOG = 1024
_LINGER_S = 1.0
_JOIN_S = 10.0
_RETRY_S = 0.1
_DRAIN_BYTES = 64 << 10
# pause in seconds before a client that connects too often is answered, so that it cannot keep the listener busy
_BREATH_S = 0.04

_NOTABLE = ("bad-version", "bad-certificate", "no-certificate", "failed")
_MAX_TOLD = 10

_log = logging.getLogger(__name__)

Admit = Callable[[TcpConnection, Peer], None]


def _text(address: tuple[str, int] | str) -> str:
    if isinstance(address, str):  # another process accepts the connections and passes them on
        return "the port of the server for many runs"
    host, port = address[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@dataclass(eq=False)
class _Caller:
    """A connection whose client is not admitted yet; ``reason``: why the server has rejected it, else None."""

    sock: socket.socket
    host: str
    address: str
    reason: str | None = None


class Listener:
    """Listening socket that admits clients that authenticate; a context manager.

    All of it but `start` and `close` runs on the loop's thread, so that a caller costs its buffers, not a thread.

    `address`: ``HOST:PORT`` with the actual port.
    """

    def __init__(
        self,
        address: str | socket.socket,
        credentials: Credentials,
        admit: Admit,
        refused: Callable[[str], None],
        *,
        authorize: Callable[[Peer], None] = lambda peer: None,
        timeout_s: float = 30.0,
        max_callers: int = MAX_CALLERS,
        max_per_host: int = MAX_CALLERS,
        turns: TokenBucket | None = None,
        loop: SocketLoop | None = None,
        pass_on: PassOn | None = None,
    ) -> None:
        """Bind the address; connections are accepted once `start` is called.

        `admit`: called on the loop's thread with each admitted client; it must not wait. `turns`: rate limit of each
        client; None = no limit. `loop`: thread that serves the sockets and is already running; None = the listener
        makes one.
        `pass_on`: passes the connection of a caller that asks for a run to its process; None = the server has one run.

        Raises:
            BadInput: the address is not of this machine or is in use, or a file of the credentials cannot be used.
        """
        self._login = credentials.server_login()
        self._admit, self._refused, self._authorize = admit, refused, authorize
        self._timeout_s, self._max_callers, self._max_per_host = timeout_s, max_callers, max_per_host
        self._listener = address if isinstance(address, socket.socket) else _bind(address)
        self._listener.setblocking(False)
        self.address = _text(self._listener.getsockname())
        self._callers: list[_Caller] = []
        self._told: Counter[str] = Counter()
        self._turns, self._pass_on = turns, pass_on
        self._loop, self._owns_loop, self._has_started, self._is_closed = (
            loop or SocketLoop(),
            loop is None,
            False,
            False,
        )

    def start(self) -> Listener:
        """Start to accept connections, and return the listener. Until then, the system refuses connection attempts."""
        try:
            self._listener.listen(_BACKLOG)
        except OSError as error:  # another process may have bound the port since
            raise _unusable(self.address, error) from None
        if self._owns_loop:
            self._loop.start()
        self._has_started = True
        self._loop.post(self._listen)
        return self

    def close(self) -> None:
        """Stop listening, and refuse clients that are still in the handshake; admitted connections stay open.

        The method can be called again.
        """
        if self._is_closed:
            return
        if self._has_started:
            self._loop.wait_for(self._end())
        self._is_closed = True
        if self._owns_loop:
            self._loop.close()
        self._listener.close()

    def __enter__(self) -> Listener:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.close()

    async def _end(self) -> None:
        self._is_closed = True
        self._loop.remove_reader(self._listener)
        for caller in list(self._callers):
            self._turn_out(caller, "stopped")
        until = time.monotonic() + _JOIN_S
        while self._callers and time.monotonic() < until:
            await self._loop.sleep(_RETRY_S / 10)

    def _listen(self) -> None:
        if not self._is_closed:
            self._loop.add_reader(self._listener, self._accept)

    async def _listen_after(self, seconds: float) -> None:
        await self._loop.sleep(seconds)
        self._listen()

    def _rest(self, seconds: float) -> None:
        """Accept no new connections for ``seconds``."""
        self._loop.remove_reader(self._listener)
        self._loop.begin(self._listen_after(seconds))

    def _accept(self) -> None:
        try:
            sock, address = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:  # no file descriptors are left, until connections close
            _log.warning("cannot accept a connection at %s: %s", self.address, error)
            self._rest(_RETRY_S)
            return
        self._enter(_Caller(sock, str(address[0]), _text(address)))

    def _enter(self, caller: _Caller) -> None:
        """Begin the handshake with a new caller; if there are too many callers, reject it or an older one."""
        if (victim := self._in_the_way(caller)) is caller:
            hang_up(caller.sock, abruptly=True)
            self._say(caller, "busy")
            return
        if victim is not None:
            self._turn_out(victim, "busy")
        self._callers.append(caller)
        self._loop.begin(self._answer(caller))

    def _in_the_way(self, caller: _Caller) -> _Caller | None:
        """Return the caller to reject if too many wait: the oldest of the host with the most, or ``caller``; None = room."""
        waiting = [other for other in self._callers if other.reason is None]
        held = Counter(other.host for other in waiting)
        if held[caller.host] >= self._max_per_host:
            host = caller.host
        elif len(waiting) >= self._max_callers:
            host = max(held, key=held.__getitem__)
        else:
            return caller if len(self._callers) >= 2 * self._max_callers else None
        return next(other for other in waiting if other.host == host)

    def _turn_out(self, caller: _Caller, reason: str) -> None:
        """Mark a caller as rejected, and wake its coroutine, which then closes the connection."""
        caller.reason = caller.reason or reason
        # Only that coroutine closes the descriptor, whose number could otherwise be reused while the coroutine waits
        # for it.
        with suppress(OSError):
            # shut down reading only, of which the peer notices nothing until the socket is reset
            shut(caller.sock, socket.SHUT_RD)

    def _may_enter(self, denied: Refused | None, peer: Peer) -> None:
        """Raise `Refused` if an authenticated client is not authorized, connects too often, or was ``denied`` its run."""
        self._authorize(peer)
        if self._turns is not None and not self._turns.take(peer.client):
            raise Refused("too-often", f"client {peer.client}: try again later")
        if denied is not None:
            raise denied

    async def _let_in(self, caller: _Caller) -> bool:
        """Do the handshake with a caller, and admit it or pass it on to its run; False if it was rejected meanwhile."""
        denied: Refused | None = None
        if self._pass_on is not None:
            denied = await self._loop.drive(passing(opening_stream(caller.sock, HANDSHAKE_S), self._pass_on))
            if denied is PASSED:
                self._loop.forget(caller.sock)
                caller.sock.close()  # do not shut it down: the connection goes on in the process that has received it
                return True
        if (context := self._login.context()) is not None:
            caller.sock = context.wrap_socket(caller.sock, server_side=True, do_handshake_on_connect=False)
        stream, may_enter = opening_stream(caller.sock, HANDSHAKE_S), partial(self._may_enter, denied)
        peer = await self._loop.drive(server_opening(stream, self._login, caller.address, may_enter))
        if caller.reason is None:
            self._admit(TcpConnection(caller.sock, self._timeout_s), peer)
        return caller.reason is None

    async def _answer(self, caller: _Caller) -> None:
        """Handle a new caller until it is admitted or rejected; report a rejection once, by ``refused``."""
        reason, detail, abruptly = "failed", "", True
        try:
            if await self._let_in(caller):
                reason = ""
        except Refused as refused:
            reason, detail, abruptly = refused.reason, refused.detail, False
        except PeerTimeout as timeout:
            reason, detail = "timeout", str(timeout)
        except (PeerLost, OSError) as lost:
            reason, detail = "closed", str(lost)
        except Exception as error:
            detail = f"{type(error).__name__}: {error}"
        try:
            if caller.reason is not None:
                reason, abruptly = caller.reason, True
            if reason == "too-often" and not self._is_closed:
                self._rest(_BREATH_S)
            elif reason and not abruptly:
                await self._linger(caller.sock)
            if reason:
                hang_up(caller.sock, abruptly=abruptly)
                self._say(caller, reason, detail)
        finally:
            self._callers.remove(caller)

    async def _linger(self, sock: socket.socket) -> None:
        """Wait briefly until the peer has read its last message, since closing with unread data resets the connection."""
        with suppress(OSError):
            shut(sock, socket.SHUT_WR)
            await self._loop.drive(draining(sock, _LINGER_S, _DRAIN_BYTES))

    def _say(self, caller: _Caller, reason: str, detail: str = "") -> None:
        """Report a rejected caller, and log the first few rejections whose reason an operator can fix as warnings."""
        self._told[reason] += 1
        notable = reason in _NOTABLE and self._told[reason] <= _MAX_TOLD
        level = logging.WARNING if notable else logging.DEBUG
        _log.log(level, "turned away %s: %s%s", caller.address, reason, f": {detail}" if detail else "")
        try:
            self._refused(reason)
        except Exception:  # an error of the callback must not end the thread of all sockets
            _log.exception("could not report a caller turned away as %s", reason)


def connect(
    address: str,
    client: int,
    login: ClientLogin,
    *,
    timeout_s: float,
    pair_timeout_s: float = 30.0,
    proxy: str | None = None,
) -> TcpConnection:
    """Connect to a server's `Listener`, authenticate this client, and return the connection.

    `proxy`: URL of an HTTP proxy; "none" = no proxy; None = the proxy that the environment sets for this host, if
    any.

    Raises:
        Refused: the server does not admit this client, or this client does not trust the server. Another attempt is
            unlikely to succeed.
        PeerLost: no server listens at the address, or the server closed the connection because it is busy or has
            stopped.
        PeerTimeout: the server did not answer in time.
        BadInput: the address or a file is invalid.
    """
    host, port = parse_address(address)
    context = login.context()
    sock = _reach(address, host, port, timeout_s, proxy_for(host, proxy))
    try:
        if login.preamble:
            sock.sendall(login.preamble)
        if context is not None:
            sock = context.wrap_socket(sock, server_hostname=host, do_handshake_on_connect=False)
        client_opening(opening_stream(sock, timeout_s), client, login)
        return TcpConnection(sock, pair_timeout_s)
    except Refused as refused:
        sock.close()
        raise Refused(refused.reason, f"{address}: {refused.detail}{login.explain(refused)}") from None
    except BaseException:
        sock.close()
        raise


def _reach(address: str, host: str, port: int, timeout_s: float, proxy: str | None) -> socket.socket:
    """Connect a socket to the server, through the proxy if there is one; raises `PeerLost` or `PeerTimeout`."""
    try:
        if proxy is not None:
            return tunnel(proxy, host, port, timeout_s)
        return socket.create_connection((host, port), timeout_s)
    except TimeoutError:
        raise PeerTimeout(f"no connection to {address} within {timeout_s:g} s") from None
    except ConnectionRefusedError:
        raise PeerLost("connection-refused", f"nothing listens at {address if proxy is None else proxy}") from None
    except PeerLost:
        raise
    except OSError as error:
        raise PeerLost("connection-broken", f"cannot reach {address}: {error.strerror or error}") from None


def _bind(address: str) -> socket.socket:
    host, port = parse_address(address)
    try:
        family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        sock = socket.socket(family)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.bind(where)
        except OSError:
            sock.close()
            raise
        return sock
    except OSError as error:
        raise _unusable(address, error) from None


def _unusable(address: str, error: OSError) -> BadInput:
    return BadInput(
        f"address is '{address}', on which this machine cannot listen ({error.strerror or error}): give an address of this "
        f"machine and a free port, or port 0"
    )


_MAX_HEAD_BYTES = 16 << 10


def proxy_for(host: str, given: str | None) -> str | None:
    """Choose the proxy for a host: the given one, else the proxy that the environment sets for HTTPS (HTTPS_PROXY, NO_PROXY).

    `given`: URL of the proxy; "none" = no proxy; None = as the environment says.

    Raises:
        BadInput: the value is not the URL of an HTTP proxy.
    """
    if given == "none" or (given is None and (_is_this_machine(host) or proxy_bypass(host))):
        return None
    url = given or getproxies().get("https")
    if not url:
        return None
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        sound = parts.scheme == "http" and parts.hostname and parts.port
    except ValueError:
        sound = False
    if not sound:
        raise BadInput(f"proxy is '{url}': give http://HOST:PORT, or none")
    return parts.geturl()


def tunnel(proxy: str, host: str, port: int, timeout_s: float) -> socket.socket:
    """Connect to ``host:port`` through a proxy; return the connected socket.

    Raises:
        PeerLost: the proxy refuses the connection, or its answer is invalid.
        TimeoutError: the proxy was too slow.
        OSError: the proxy cannot be reached.
    """
    parts, until = urlsplit(proxy), time.monotonic() + timeout_s
    assert parts.hostname is not None and parts.port is not None
    target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    head = f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n"
    if parts.username:
        login = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
        head += f"Proxy-Authorization: Basic {base64.b64encode(login).decode()}\r\n"
    sock = socket.create_connection((parts.hostname, parts.port), timeout_s)
    try:
        sock.sendall(f"{head}\r\n".encode())
        answer = bytearray()
        while not answer.endswith(b"\r\n\r\n"):
            sock.settimeout(max(until - time.monotonic(), 0.001))
            byte = sock.recv(1)  # read byte by byte, since all after the head belongs to the server
            if not byte or len(answer) >= _MAX_HEAD_BYTES:
                raise PeerLost(
                    "connection-broken", f"the proxy at {parts.hostname}:{parts.port} does not answer CONNECT"
                )
            answer += byte
        words = bytes(answer).split(b"\r\n", 1)[0].split(b" ", 2)
        if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or words[1] != b"200":
            status = words[1][:3].decode("ascii", "replace") if len(words) > 1 else "none"
            raise PeerLost(
                "connection-refused",
                f"the proxy at {parts.hostname}:{parts.port} does not lead to {target}: status {status}",
            )
        return sock
    except BaseException:
        sock.close()
        raise


def _is_this_machine(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


AT_ONCE = 10
EVERY_S = 2.0


class TokenBucket:
    """Rate limiter with a token bucket for each client id, or site; thread-safe."""

    def __init__(
        self, at_once: int = AT_ONCE, every_s: float = EVERY_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Create a full bucket of ``at_once`` tokens for each client, refilled by one token every ``every_s`` seconds."""
        self._at_once, self._every_s, self._clock = at_once, every_s, clock
        # by client: tokens left at the time of its last request, and that time
        self._left: dict[int | str, tuple[float, float]] = {}
        self._lock = threading.Lock()

    def take(self, client: int | str) -> bool:
        """Use up one of the client's tokens, which allow it to connect; return False if it has none left."""
        with self._lock:
            left, now = self._now(client)
            self._left[client] = (left - 1 if left >= 1 else left, now)
            return left >= 1

    def has(self, client: int | str) -> bool:
        """Check whether the client has a token left, so that it may connect now."""
        with self._lock:
            return self._now(client)[0] >= 1

    def _now(self, client: int | str) -> tuple[float, float]:
        now = self._clock()
        left, since = self._left.get(client, (float(self._at_once), now))
        return min(left + (now - since) / self._every_s, self._at_once), now
