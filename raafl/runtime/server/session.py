"""Serve one client: what all sessions do, and a session on a thread of its own, over a connection that blocks.

A session is one coroutine. Over TCP its waits suspend it, so that one thread serves all clients
(`raafl.runtime.server.session_loop`); under torchrun its waits block, and each session has a thread.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from raafl.core.types import NO_SPACE, Assignment, ClientInfo, Lost
from raafl.errors import GpuLost, TaskFailed
from raafl.local.context import Stopped
from raafl.runtime.protocol import GPU_LOST, Reason
from raafl.runtime.server import session_protocol as needs
from raafl.runtime.server.link import HandedOver, Inbox
from raafl.runtime.server.session_protocol import Branch, SessionProtocol, SessionSetup, Steps, T, Task
from raafl.sanitize import sanitize_text
from raafl.submodel import FlatTensors
from raafl.submodel.tensor_files import NoRoom
from raafl.transport import Connection, Expect, Kind, Message, PeerLost, PeerTimeout, Refused
from raafl.transport.tcp.connection import TcpConnection
from raafl.transport.tcp.loop import Mailbox
from raafl.transport.tcp.resumable import Position

_CHECK_S = 0.5  # seconds between two checks by an idle session with a thread whether its client is connected
_BRANCH_LOOK_S = 0.1  # seconds between two checks by a branch with a thread whether it is still needed


class Session(ABC):
    """The server's session with one client: it performs the steps of a `SessionProtocol`.

    Each event is put into the inbox. The run's loop calls `assign`, `fail`, `stop` and `offer`.
    """

    def __init__(
        self, client: int, incarnation: int, setup: SessionSetup, inbox: Inbox, known: ClientInfo | None = None
    ) -> None:
        """Create a session, which `start` begins.

        `known`: the client's profile and share of the data, as the run has them; None = both are unknown.
        """
        self.client, self.incarnation = client, incarnation
        self._inbox, self._waits = inbox, setup.waits
        self._outbox: Mailbox[Task | NoRoom | str] = Mailbox()
        self._stopping: str | None = None
        self._told = False
        self._branches: list[Branch] = []
        self._branch_look_s = setup.waits.idle_s
        self.protocol = SessionProtocol(client, incarnation, setup, inbox.put, self, known)

    # ---- called on the run's loop ----

    def assign(self, assignment: Assignment, snapshot: FlatTensors, head: str | None = None) -> None:
        """Queue a task to be sent to the client; return at once.

        Args:
            assignment: description of the task.
            snapshot: values of the submodel; they must not change until the client's answer.
            head: hash of the journal after the task was recorded; None = there is none.
        """
        self._outbox.put(Task(assignment, snapshot, head))

    def fail(self, error: NoRoom) -> None:
        """End the session, since the server has too little memory or disk space for the client's task; return at once."""
        self._outbox.put(error)

    @abstractmethod
    def stop(self, reason: str, wait_s: float | None = None) -> None:
        """Tell the client to stop, even in the middle of a task.

        Args:
            reason: reason that the client gets.
            wait_s: seconds to wait for a client that does not receive; None = the default.
        """

    def offer(self, pair: TcpConnection, position: Position) -> bool:
        """Offer the client's next connection to the session; return whether the session continues on it."""
        return False

    @abstractmethod
    def abandon(self) -> None:
        """Close the connection of a session that did not end in time; the client sees a lost connection."""

    @abstractmethod
    def start(self) -> None:
        """Begin; return at once."""

    @abstractmethod
    def join(self, timeout: float | None = None) -> None:
        """Wait until the session has ended, at most ``timeout`` seconds."""

    @abstractmethod
    def is_alive(self) -> bool:
        """Check whether the session was started and has not ended."""

    # ---- called by the protocol ----

    @property
    @abstractmethod
    def closed(self) -> bool:
        """Whether the connection has ended."""

    @property
    @abstractmethod
    def received_bytes(self) -> int:
        """Size of the last received message in bytes."""

    @property
    def stopping(self) -> bool:
        """Whether the session has been told to stop."""
        return self._stopping is not None

    def _ended(self, error: Exception | None) -> None:
        """Report the end of the session by a `Lost` event, unless the server has ended it or its failure is known."""
        counts = False
        match error:
            case None:
                reason = "stopped"
            case GpuLost():
                reason = f"{GPU_LOST}: {error.where}: {error.error}"
            case HandedOver() | TaskFailed():
                return
            case PeerTimeout():
                reason, counts = f"timeout: {error}", self.protocol.out is not None
            case NoRoom():
                reason, counts = f"{NO_SPACE}: {error}", True
            case PeerLost() | Refused() | OSError() | RuntimeError():
                reason = f"disconnected: {error}"
            case _:  # whatever the error, the run must learn of the session's end
                reason = f"failed: {type(error).__name__}: {sanitize_text(error)}"
        if self._stopping is None:
            self._inbox.put(Lost(self.client, reason, self.incarnation, counts=counts))

    def _report(self, failure: TaskFailed) -> str:
        """Report a failure of the client's code; return the reason that the client gets with its stop message."""
        reason = f"failed: {failure.where}: {failure.error}"
        self.protocol.out = None
        if self._stopping is None:
            self._inbox.put(Lost(self.client, reason, self.incarnation, failure))
        return reason

    # ---- the coroutine ----

    async def _serve(self) -> None:
        """Perform the protocol, and report the session's end."""
        error: Exception | None = None
        try:
            await self._open()
            await self._say_if_stopping()
            await self.perform(self.protocol.run())
        except TaskFailed as failed:
            error = failed
            if not isinstance(failed, GpuLost):
                reason = self._report(failed)
                with suppress(queue.Empty):  # tell the client only once the run has recorded the failure
                    await self._take(self._outbox, self._waits.stop_s)
                await self._say_stop(reason)
        except Exception as raised:
            error = raised
        finally:
            self._close()
            for branch in self._branches:  # they can no longer send, since the connection is closed
                await branch.stop(self._waits.stop_s)
            self._ended(error)

    async def perform(self, steps: Steps[T], branch: Branch | None = None) -> T:
        """Perform steps of the session; return their result, or raise their error.

        `branch`: the branch whose steps they are; None = the session's own.
        """
        result: Any = None
        error: Exception | None = None
        while True:
            try:
                need = steps.send(result) if error is None else steps.throw(error)
            except StopIteration as end:
                done: T = end.value
                return done
            finally:
                # ends a reference cycle of frame and error, which would keep the task's tensors alive
                result = error = None
            try:
                result = await self._meet(need, branch)
            except Exception as raised:
                error = raised
            del need  # frees its tensors before the next request allocates some

    async def _meet(self, need: needs.Need, branch: Branch | None) -> Any:
        """Perform a request of the protocol, and return the result."""
        match need:
            case needs.Send(message):
                return await self._send(message)
            case needs.Receive(expect, wait_s, finite):
                return await self._read(expect, wait_s, finite)
            case needs.NextTask():
                return await (self._next_task() if branch is None else self._branch_task(branch))
            case needs.Await(source):
                return await self._wait_for(source)
            case needs.Compute(compute):
                return await self._compute(compute)
            case needs.Work(function):
                return await self._work(function)
            case needs.Beside(steps):
                self._branches = [other for other in self._branches if other.is_running]
                self._branches.append(self._branch(steps))
                return self._branches[-1]
            case needs.Join(beside):
                return await beside.end()
            case needs.HandOver() | needs.Confirm():  # only connections that can be resumed replace one another
                pass
            case needs.TurnAway(reason):
                await self._say_stop(reason)
        return None

    async def _send(self, message: Message) -> int:
        sent = await self._write(message)
        await self._say_if_stopping()  # `stop` could not send while this message was being sent
        return sent

    async def _next_task(self) -> Task | None:
        while True:
            with suppress(queue.Empty):
                command = await self._idle(self._outbox, math.inf)
                break
        if isinstance(command, str):
            await self._say_stop(command)
            return None
        if isinstance(command, NoRoom):
            raise command
        return command

    async def _branch_task(self, branch: Branch) -> Task:
        """Wait for the next task of a branch; raises `Stopped` once the branch is no longer needed."""
        while not branch.over and not self.stopping:
            try:
                command = await self._take(self._outbox, self._branch_look_s)
            except queue.Empty:
                continue
            if isinstance(command, NoRoom):
                raise command
            if not isinstance(command, str):
                return command
            self._outbox.put(command)
        raise Stopped

    async def _wait_for(self, source: Mailbox[Any]) -> Any:
        while not self.stopping or not source.is_empty:
            with suppress(queue.Empty):
                return await self._idle(source, math.inf)  # a stop wakes it, or a check of the connection
        raise Stopped

    @property
    def _hears_late(self) -> bool:
        """Whether the client trains or builds its model, so that it would notice a stop message late."""
        return self.protocol.out is not None or not self.protocol.welcomed

    async def _say_if_stopping(self) -> None:
        """Send the stop message if `stop` could not, for lack of a connection or during another message."""
        if self._stopping is not None:
            await self._say_stop(self._stopping)

    async def _say_stop(self, reason: str, wait_s: float | None = None) -> None:
        """Send the client a stop message, if it has got none."""
        if self._told or self.closed:
            return
        self._told = True
        message = Message(Kind.STOP, 0, self.incarnation, Reason(reason).to_meta())
        with suppress(PeerLost, PeerTimeout):
            await self._write(message, self._waits.stop_s if wait_s is None else wait_s)

    # ---- how the coroutine waits ----

    @abstractmethod
    async def _open(self) -> None:
        """Connect to the client, unless there is a connection already."""

    @abstractmethod
    def _close(self) -> None:
        """Close the connection, if no other session has taken it over."""

    @abstractmethod
    async def _write(self, message: Message, wait_s: float | None = None) -> int:
        """Send a message, and return its size in bytes; see `Connection.send`."""

    @abstractmethod
    async def _read(self, expect: Expect, wait_s: float, finite: bool) -> Message:
        """Receive a message of the client; see `Connection.recv`."""

    @abstractmethod
    async def _idle(self, mailbox: Mailbox[T], seconds: float) -> T:
        """Wait for an item of a mailbox like `_take`, while the connection is checked and heartbeats are sent."""

    @abstractmethod
    async def _take(self, mailbox: Mailbox[T], seconds: float, *, watches: bool = False) -> T:
        """Wait for an item of a mailbox; raises `queue.Empty` after ``seconds``, or earlier.

        ``watches``: whether to raise `PeerLost` if the connection breaks meanwhile.
        """

    @abstractmethod
    async def _compute(self, function: Callable[[], Any]) -> Any:
        """Call ``function``, which encodes or decodes tensors, without blocking other sessions."""

    @abstractmethod
    async def _work(self, function: Callable[[Callable[[Steps[Any]], Any]], Any]) -> Any:
        """Call ``function(perform)`` without blocking other sessions; ``perform(steps)`` sends and receives for it."""

    @abstractmethod
    def _branch(self, steps: Steps[Any]) -> Branch:
        """Create a branch, which performs steps at the same time as the session's own."""


def _blocking(steps: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine whose waits all block this thread, and return its result."""
    try:
        steps.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise AssertionError("a wait has not blocked")


class ThreadSession(Session):
    """A session on a thread of its own, over a connection that blocks: those of torchrun, by Gloo or NCCL."""

    def __init__(
        self,
        client: int,
        incarnation: int,
        connect: Callable[[], Connection],
        setup: SessionSetup,
        inbox: Inbox,
        known: ClientInfo | None = None,
    ) -> None:
        """Create a session with a thread, on which ``connect`` makes the connection; see `Session`."""
        super().__init__(client, incarnation, setup, inbox, known)
        self._thread = threading.Thread(target=self.run, name=f"client-{client}", daemon=True)
        self._connect = connect
        self._pair: Connection | None = None
        # Both this thread and `stop`, which runs on the thread of the run's loop, may send to the client, one at a
        # time. `_stopping` is set before the lock is tried, and checked after it is released, so exactly one of both
        # sends the stop message.
        self._sending = threading.RLock()
        self._heard_s = time.monotonic()  # time of the last message to the client, or of the beginning of its idle time
        self._branch_look_s = _BRANCH_LOOK_S  # look often, since nothing wakes a side thread that is no longer needed

    # ---- called on the run's loop ----

    def start(self) -> None:
        """Begin; see `Session.start`."""
        self._thread.start()

    def join(self, timeout: float | None = None) -> None:
        """Wait until the session has ended; see `Session.join`."""
        self._thread.join(timeout)

    def is_alive(self) -> bool:
        """Check whether the session was started and has not ended."""
        return self._thread.is_alive()

    def stop(self, reason: str, wait_s: float | None = None) -> None:
        """Tell the client to stop; see `Session.stop`."""
        self._stopping = reason
        self._outbox.put(reason)
        # The reason is sent from here only if the session's thread waits for an update; else that thread sends it
        # itself.
        if self._hears_late and self._sending.acquire(blocking=False):
            try:
                _blocking(self._say_stop(reason, wait_s))
            finally:
                self._sending.release()

    def abandon(self) -> None:
        """Close the connection; see `Session.abandon`."""
        self._close()

    # ---- called by the protocol ----

    @property
    def closed(self) -> bool:
        """Whether the connection has ended."""
        return self._pair is None or self._pair.closed

    @property
    def received_bytes(self) -> int:
        """Size of the last received message in bytes."""
        return 0 if self._pair is None else self._pair.received_bytes

    # ---- on the session's thread ----

    def run(self) -> None:
        """Serve the client until the session ends."""
        _blocking(self._serve())

    @property
    def _line(self) -> Connection:
        assert self._pair is not None
        return self._pair

    async def _open(self) -> None:
        self._pair = self._connect()

    def _close(self) -> None:
        if self._pair is not None:
            self._pair.close()

    async def _say_stop(self, reason: str, wait_s: float | None = None) -> None:
        with self._sending:  # no other thread may send meanwhile
            await super()._say_stop(reason, wait_s)

    async def _write(self, message: Message, wait_s: float | None = None) -> int:
        with self._sending:
            sent = self._line.send(message, wait_s)
        self._heard_s = time.monotonic()
        return sent

    async def _read(self, expect: Expect, wait_s: float, finite: bool) -> Message:
        return self._line.recv(expect, wait_s, finite=finite)

    async def _next_task(self) -> Task | None:
        self._heard_s = time.monotonic()
        return await super()._next_task()

    async def _idle(self, mailbox: Mailbox[T], seconds: float) -> T:
        due_s = self._waits.idle_s / 3
        if mailbox.is_empty and time.monotonic() - self._heard_s >= due_s:
            await self._write(Message(Kind.KEEPALIVE, 0, self.incarnation))
        left_s = self._heard_s + due_s - time.monotonic()
        return await self._take(mailbox, min(left_s + 1e-3, seconds), watches=True)

    async def _take(self, mailbox: Mailbox[T], seconds: float, *, watches: bool = False) -> T:
        try:
            return mailbox.get(min(seconds, _CHECK_S) if watches else seconds)
        except queue.Empty:
            if watches:
                self._line.check()
            raise

    async def _compute(self, function: Callable[[], Any]) -> Any:
        return function()

    async def _work(self, function: Callable[[Callable[[Steps[Any]], Any]], Any]) -> Any:
        return function(self.perform_here)

    def perform_here(self, steps: Steps[T], branch: Branch | None = None) -> T:
        """Perform steps of the session on this thread; see `Session.perform`."""
        return _blocking(self.perform(steps, branch))

    def _branch(self, steps: Steps[Any]) -> Branch:
        return _BranchThread(self, steps)


class _BranchThread(Branch):
    """Branch (steps that run beside a session's own) on its own thread."""

    def __init__(self, session: ThreadSession, steps: Steps[Any]) -> None:
        self._session, self._steps = session, steps
        self._thread = threading.Thread(target=self._run, name=f"beside-{session.client}", daemon=True)
        self._result: Any = None
        self._error: Exception | None = None

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result = self._session.perform_here(self._steps, self)
        except Stopped:
            pass
        except Exception as error:
            self._error = error

    async def end(self) -> Any:
        await self.stop(None)
        if self._error is not None:
            raise self._error
        return self._result

    async def stop(self, timeout_s: float | None) -> None:
        self.over = True
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
