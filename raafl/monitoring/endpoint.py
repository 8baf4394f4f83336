"""Answer short HTTP requests on a port and thread of their own, for monitoring tools.

Nothing here waits for the run, and no caller can make the run wait: a request has a bounded size, a caller a bounded time, and
of too many callers the oldest goes. So a caller that never finishes its request keeps nobody else out.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Literal

from raafl.core.coordinator import Coordinator
from raafl.core.hooks import RunHooks
from raafl.core.types import Event
from raafl.errors import BadInput, parse_address

MAX_REQUEST_BYTES = 8192
MAX_CALLERS = 32
CALLER_S = 5.0
"""Seconds that a caller has to send its request and to take the reply."""

_BACKLOG = 4 * MAX_CALLERS
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply to an HTTP request: status, body and content type."""

    status: HTTPStatus
    body: bytes
    content_type: str = "text/plain; charset=utf-8"


def listening_socket(field: str, address: str) -> socket.socket:
    """Return a socket that listens at ``HOST:PORT``.

    Raises:
        BadInput: this machine cannot listen at the address.
    """
    try:
        host, port = parse_address(address)
        family, kind, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(where)
            listener.listen(_BACKLOG)
        except OSError:
            listener.close()
            raise
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise BadInput(
            f"{field} is '{address}', on which this machine cannot listen ({why}): name another HOST:PORT"
        ) from None
    return listener


class Endpoint:
    """HTTP server for short requests: a listening socket, and the thread that answers.

    `address`: ``HOST:PORT`` at which the server listens.
    """

    def __init__(self, listener: socket.socket, routes: Mapping[str, Callable[[], Reply]]) -> None:
        """Start the thread that answers requests at ``listener``."""
        host, port = listener.getsockname()[:2]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._listener, self._routes = listener, routes
        self._callers: dict[asyncio.Task[None], asyncio.StreamWriter] = {}  # ordered by the start of the connection
        self._loop, self._closing = asyncio.new_event_loop(), asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="monitor", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close the port and end the thread; a second call does nothing."""
        with suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join(timeout=CALLER_S)
        self._listener.close()

    def _run(self) -> None:
        loop = self._loop
        loop.set_exception_handler(lambda _, context: _log.debug("monitor: %s", context.get("message")))
        try:
            loop.run_until_complete(self._answer())
        finally:
            loop.close()

    async def _answer(self) -> None:
        """Answer callers until the endpoint is closed."""
        server = await asyncio.start_server(self._serve, sock=self._listener, limit=MAX_REQUEST_BYTES, backlog=_BACKLOG)
        await self._closing.wait()
        server.close()
        callers = [*self._callers]
        for caller in callers:
            caller.cancel()
        await asyncio.gather(*callers, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._callers) >= MAX_CALLERS:
            next(iter(self._callers.values())).transport.abort()
            del self._callers[next(iter(self._callers))]
        self._callers[task] = writer
        try:
            async with asyncio.timeout(CALLER_S):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(self._reply(head))
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (TimeoutError, asyncio.LimitOverrunError, asyncio.IncompleteReadError, OSError):
            pass  # the request timed out, was too long, or the peer has closed the connection
        finally:
            writer.transport.abort()
            self._callers.pop(task, None)

    def _reply(self, head: bytes) -> bytes:
        """Return the reply to a request, as bytes."""
        method, _, rest = head.partition(b"\r\n")[0].partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0].decode("latin-1")
        if method not in (b"GET", b"HEAD"):
            reply = _plain(HTTPStatus.METHOD_NOT_ALLOWED)
        elif path not in self._routes:
            reply = _plain(HTTPStatus.NOT_FOUND)
        else:
            try:
                reply = self._routes[path]()
            except Exception as error:  # an error in raafl's answer must not end this thread or the run
                _log.warning(f"{path} failed: {type(error).__name__}: {error}")
                reply = _plain(HTTPStatus.INTERNAL_SERVER_ERROR)
        lines = (
            f"HTTP/1.1 {reply.status.value} {reply.status.phrase}",
            f"Content-Type: {reply.content_type}",
            f"Content-Length: {len(reply.body)}",
            "Cache-Control: no-store",
            "Connection: close",
            "",
            "",
        )
        return "\r\n".join(lines).encode() + (b"" if method == b"HEAD" else reply.body)


def _plain(status: HTTPStatus) -> Reply:
    return Reply(status, f"{status.phrase}\n".encode())


class Health(RunHooks):
    """Observer that records each iteration of the run's main loop, for a health check.

    `state`: "starting" before the first iteration, then "running", and "ending" once the run has finished its work.
    """

    def __init__(self, stall_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Start in state "starting"; without an iteration for ``stall_s`` seconds the run counts as stalled."""
        self._stall_s, self._clock = stall_s, clock
        self._version, self._turned_at = 0, clock()
        self.state: Literal["starting", "running", "ending"] = "starting"

    def stop_asked(self) -> str | None:
        """Record an iteration of the run's main loop, which calls this method each time; return None, so that the loop goes on."""
        self._turned_at = self._clock()
        if self.state == "starting":
            self.state = "running"
        return None

    def on_event(self, event: Event, coordinator: Coordinator, now: float) -> None:
        """Record the model's version, and whether the run has finished its work; see `RunHooks.on_event`."""
        self._version = coordinator.state.version
        if coordinator.finished is not None:
            self.state = "ending"

    @property
    def idle_s(self) -> float:
        """Seconds since the last iteration of the run's main loop."""
        return self._clock() - self._turned_at

    def report(self) -> Reply:
        """Return the reply to a health check: status 503 if the main loop has made no iteration for too long, else 200.

        It can be called on any thread.
        """
        idle_s = self.idle_s
        stalled = self.state == "running" and idle_s > self._stall_s
        body = {"status": "stalled" if stalled else self.state, "version": self._version, "idle_s": round(idle_s, 3)}
        status = HTTPStatus.SERVICE_UNAVAILABLE if stalled else HTTPStatus.OK
        return Reply(status, json.dumps(body).encode() + b"\n", "application/json")
