"""Serve one client: what all sessions have in common, and a session on a thread of its own, over a connection that blocks."""

from __future__ import annotations

import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from raafl.core.types import NO_SPACE, Assignment, ClientInfo, Lost
from raafl.errors import GpuLost, TaskFailed
from raafl.local.train import Stopped
from raafl.runtime.protocol import GPU_LOST, Reason
from raafl.runtime.server import session_protocol as needs
from raafl.runtime.server.link import HandedOver, Inbox
from raafl.runtime.server.session_protocol import SessionProtocol, SessionSetup, Steps, T, Task
from raafl.sanitize import sanitize_text
from raafl.submodel import FlatTensors
from raafl.submodel.tensor_files import NoRoom
from raafl.transport import Connection, Kind, Message, PeerLost, PeerTimeout, Refused
from raafl.transport.tcp.connection import TcpConnection
from raafl.transport.tcp.loop import Mailbox
from raafl.transport.tcp.resumable import Position

_LOOK_S = 0.5  # seconds between two checks of an idle session whether its client is still connected
_BRANCH_LOOK_S = 0.1  # seconds between two checks of a branch that waits for a task whether it is still wanted


class Session(ABC):
    """The server's session with one client: it performs the steps of a `SessionProtocol`.

    Each event is put into the inbox. The run's loop calls `assign`, `fail`, `stop` and `offer`.
    """

    def __init__(
        self, client: int, incarnation: int, setup: SessionSetup, inbox: Inbox, known: ClientInfo | None = None
    ) -> None:
        """Store the arguments; `start` connects.

        `known`: the client's share of the data and its profile, as the run has them; None = neither.
        """
        self.client, self.incarnation = client, incarnation
        self._inbox, self._waits = inbox, setup.waits
        self._outbox: Mailbox[Task | NoRoom | str] = Mailbox()
        self._stopping: str | None = None
        self._told = False
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
        """Return whether the session was started and has not ended."""

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
        """Report the session's end by a `Lost` event, unless the client was told to stop, or its failure was reported."""
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
            case _:  # whatever the error is, the run must learn that the session has ended
                reason = f"failed: {type(error).__name__}: {sanitize_text(error)}"
        if self._stopping is None:
            self._inbox.put(Lost(self.client, reason, self.incarnation, counts=counts))

    def _report(self, failure: TaskFailed) -> str:
        """Report that the client's code failed; return the reason with which to let the client go."""
        reason = f"failed: {failure.where}: {failure.error}"
        self.protocol.out = None
        if self._stopping is None:
            self._inbox.put(Lost(self.client, reason, self.incarnation, failure))
        return reason

    def _stop_message(self, reason: str) -> Message:
        return Message(Kind.STOP, 0, self.incarnation, Reason(reason).to_meta())


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
        """Store the arguments; see `Session`. ``connect`` makes the connection, on the session's thread."""
        super().__init__(client, incarnation, setup, inbox, known)
        self._thread = threading.Thread(target=self.run, name=f"client-{client}", daemon=True)
        self._connect = connect
        self._pair: Connection | None = None
        # Both this thread and `stop`, called on the run's loop, may send to the client, but only one at a time.
        # `_stopping` is set before trying the lock, and checked after releasing it, so exactly one of the two sends the
        # stop message.
        self._sending = threading.Lock()
        self._heard_s = time.monotonic()  # time at which the client was last sent a message or became idle
        self._branches: list[_BranchThread] = []

    # ---- called on the run's loop ----

    def start(self) -> None:
        """Begin; see `Session.start`."""
        self._thread.start()

    def join(self, timeout: float | None = None) -> None:
        """Wait until the session has ended; see `Session.join`."""
        self._thread.join(timeout)

    def is_alive(self) -> bool:
        """Return whether the session goes on; see `Session.is_alive`."""
        return self._thread.is_alive()

    def stop(self, reason: str, wait_s: float | None = None) -> None:
        """Tell the client to stop; see `Session.stop`."""
        self._stopping = reason
        self._outbox.put(reason)
        # Send the reason from here only if the session's thread waits for an answer; if it is about to send, it sends the
        # reason itself.
        protocol = self.protocol
        if (protocol.out is not None or not protocol.welcomed) and self._sending.acquire(blocking=False):
            try:
                self._say_stop(reason, wait_s)
            finally:
                self._sending.release()

    def abandon(self) -> None:
        """Close the connection; see `Session.abandon`."""
        if self._pair is not None:
            self._pair.close()

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
        error: Exception | None = None
        try:
            self._pair = self._connect()
            self._say_if_stopping()
            self.perform(self.protocol.run())
        except TaskFailed as failed:
            error = failed
            if not isinstance(failed, GpuLost):
                reason = self._report(failed)
                with suppress(queue.Empty):  # the client is told once the run has recorded the failure
                    self._outbox.get(self._waits.stop_s)
                self._say_stop(reason)
        except Exception as raised:
            error = raised
        finally:
            if self._pair is not None:
                self._pair.close()
            for branch in self._branches:  # the connection is closed, so they cannot send any more
                branch.stop(self._waits.stop_s)
        self._ended(error)

    def perform(self, steps: Steps[T], branch: _BranchThread | None = None) -> T:
        """Perform steps of the session on this thread; return their result, or raise their error.

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
                # breaks a reference cycle of frame and error, which would keep the task's tensors in memory
                result = error = None
            try:
                result = self._meet(need, branch)
            except Exception as raised:
                error = raised
            del need  # free its tensors before the next request allocates some

    def _meet(self, need: needs.Need, branch: _BranchThread | None) -> Any:
        """Perform what a protocol step requests; return the result."""
        pair = self._pair
        assert pair is not None
        match need:
            case needs.Send(message):
                return self._send(pair, message)
            case needs.Receive(expect, wait_s, finite):
                return pair.recv(expect, wait_s, finite=finite)
            case needs.NextTask():
                return self._next_task(pair) if branch is None else self._branch_task(branch)
            case needs.Await(source):
                return self._wait_for(pair, source)
            case needs.Compute(compute):
                return compute()
            case needs.Work(function):
                return function(self.perform)
            case needs.Beside(steps):
                self._branches = [other for other in self._branches if other.is_alive()]
                self._branches.append(_BranchThread(self, steps))
                return self._branches[-1]
            case needs.Join(beside):
                assert isinstance(beside, _BranchThread)
                return beside.end()
            case needs.HandOver() | needs.Confirm():  # such a connection cannot be replaced by another
                pass
            case needs.TurnAway(reason):
                with self._sending:
                    self._say_stop(reason)
        return None

    def _send(self, pair: Connection, message: Message) -> int:
        with self._sending:
            sent = pair.send(message)
        self._heard_s = time.monotonic()
        self._say_if_stopping()  # `stop` could not send while this thread held the lock
        return sent

    def _keep_alive(self, pair: Connection) -> None:
        """Check that the client is connected, and send it a sign of life from time to time."""
        if time.monotonic() - self._heard_s >= self._waits.idle_s / 3:
            with self._sending:
                pair.send(Message(Kind.KEEPALIVE, 0, self.incarnation))
            self._heard_s = time.monotonic()
        pair.check()

    def _next_task(self, pair: Connection) -> Task | None:
        self._heard_s = time.monotonic()
        while True:
            try:
                command = self._outbox.get(_LOOK_S)
            except queue.Empty:
                self._keep_alive(pair)
                continue
            if isinstance(command, str):
                with self._sending:
                    self._say_stop(command)
                return None
            if isinstance(command, NoRoom):
                raise command
            return command

    def _branch_task(self, branch: _BranchThread) -> Task:
        """Return the next task for a branch; raises `Stopped` if the branch is no longer wanted."""
        while not branch.over.is_set() and not self.stopping:
            try:
                command = self._outbox.get(_BRANCH_LOOK_S)
            except queue.Empty:
                continue
            if isinstance(command, NoRoom):
                raise command
            if not isinstance(command, str):
                return command
            self._outbox.put(command)
        raise Stopped

    def _wait_for(self, pair: Connection, source: Mailbox[Any]) -> Any:
        while True:
            with suppress(queue.Empty):
                return source.get(_LOOK_S)
            if self.stopping:
                raise Stopped
            self._keep_alive(pair)

    def _say_if_stopping(self) -> None:
        """Send a stop message that `stop` could not send, because there was no connection yet or this thread was sending."""
        if self._stopping is not None:
            with self._sending:
                self._say_stop(self._stopping)

    def _say_stop(self, reason: str, wait_s: float | None = None) -> None:
        """Send the client the stop message, unless it was sent before."""
        if self._pair is None or self._told:
            return
        self._told = True
        with suppress(PeerLost, PeerTimeout):
            self._pair.send(self._stop_message(reason), self._waits.stop_s if wait_s is None else wait_s)


class _BranchThread(threading.Thread):
    """Thread that performs a branch: protocol steps that run beside the session's own."""

    def __init__(self, session: ThreadSession, steps: Steps[Any]) -> None:
        super().__init__(name=f"beside-{session.client}", daemon=True)
        self._session, self._steps, self.over = session, steps, threading.Event()
        self._result: Any = None
        self._error: Exception | None = None

    def run(self) -> None:
        try:
            self._result = self._session.perform(self._steps, self)
        except Stopped:
            pass
        except Exception as error:
            self._error = error

    def end(self) -> Any:
        """Wait for the branch; return its result, None if it was given up, or raise its error."""
        self.stop()
        if self._error is not None:
            raise self._error
        return self._result

    def stop(self, timeout_s: float | None = None) -> None:
        """Tell the branch that no task is wanted any more, and wait until it has ended."""
        self.over.set()
        if self.ident is not None:
            self.join(timeout=timeout_s)
