"""Serve one client: a connection, and a thread that performs the steps of the client's session."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from raafl.core.types import NO_SPACE, Assignment, ClientInfo, Lost
from raafl.errors import GpuLost, TaskFailed
from raafl.local.train import Stopped
from raafl.runtime.protocol import GPU_LOST, Reason
from raafl.runtime.server import session_protocol as needs
from raafl.runtime.server.link import HandedOver, Inbox, SessionLink
from raafl.runtime.server.session_protocol import SessionProtocol, SessionSetup, Steps, T, Task
from raafl.sanitize import sanitize_text
from raafl.submodel import FlatTensors
from raafl.submodel.tensor_files import NoRoom
from raafl.transport import Connection, Kind, Message, PeerLost, PeerTimeout, Refused

_LOOK_S = 0.5  # seconds between two checks of an idle session whether its client is still connected
_BRANCH_LOOK_S = 0.1  # seconds between two checks of a branch that waits for a task whether it is still wanted


class Session(threading.Thread):
    """The server's session with one client, on a thread of its own: it performs the steps of a `SessionProtocol`.

    Each event is put into the inbox. The loop calls `assign`, `fail` and `stop`.
    """

    def __init__(
        self,
        client: int,
        incarnation: int,
        connect: Callable[[], Connection],
        setup: SessionSetup,
        inbox: Inbox,
        known: ClientInfo | None = None,
    ) -> None:
        """Store the arguments; `start` connects.

        `connect`: makes the connection. `known`: the client's share of the data and its profile, as the run has them;
        None = neither.
        """
        super().__init__(name=f"client-{client}", daemon=True)
        self.client, self.incarnation = client, incarnation
        self._connect, self._inbox, self._waits = connect, inbox, setup.waits
        self._outbox: queue.SimpleQueue[Task | NoRoom | str] = queue.SimpleQueue()
        self._pair: Connection | None = None
        # Both this thread and `stop`, called on the run's loop, may send to the client, but only one at a time.
        # `_stopping` is set before trying the lock, and checked after releasing it, so exactly one of the two sends the
        # stop message.
        self._sending = threading.Lock()
        self._stopping: str | None = None
        self._told = False
        self._heard_s = time.monotonic()  # time at which the client was last sent a message or became idle
        self._branches: list[_BranchThread] = []
        self.protocol = SessionProtocol(client, incarnation, setup, inbox.put, self, known)
        self.link = SessionLink(
            client,
            incarnation,
            inbox.put,
            self._waits.resume_s,
            lambda: None if self.protocol.out is None else self.protocol.out.id,
            lambda: self.stopping,
        )

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

    def stop(self, reason: str, wait_s: float | None = None) -> None:
        """Tell the client to stop, even in the middle of a task.

        Args:
            reason: reason that the client gets.
            wait_s: seconds to wait for a client that does not receive; None = the default.
        """
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
        """Close the connection of a session whose thread did not end in time; the client sees a lost connection."""
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

    @property
    def stopping(self) -> bool:
        """Whether the session has been told to stop."""
        return self._stopping is not None

    # ---- on the session's thread ----

    def run(self) -> None:
        """Serve the client until the session ends; a `Lost` event reports the end, unless the client was told to stop."""
        pair: Connection | None = None
        failure: TaskFailed | None = None
        counts = False
        try:
            pair = self._pair = self.link.over(self._connect())
            self._say_if_stopping()
            self.perform(self.protocol.run())
            reason = "stopped"
        except GpuLost as lost:
            reason = f"{GPU_LOST}: {lost.where}: {lost.error}"
        except HandedOver:
            pair = None
            return
        except TaskFailed as failed:
            failure, reason = failed, f"failed: {failed.where}: {failed.error}"
            self._part(failed, reason)
        except PeerTimeout as error:
            reason, counts = f"timeout: {error}", self.protocol.out is not None
        except NoRoom as error:
            reason, counts = f"{NO_SPACE}: {error}", True
        except (PeerLost, Refused, OSError, RuntimeError) as error:
            reason = f"disconnected: {error}"
        except Exception as error:  # whatever the error is, the run must learn that the session has ended
            reason = f"failed: {type(error).__name__}: {sanitize_text(error)}"
        finally:
            self.link.end()
            if pair is not None:
                pair.close()
            for branch in self._branches:  # the connection is closed, so they cannot send any more
                branch.stop(self._waits.stop_s)
        if self._stopping is None and failure is None:
            self._inbox.put(Lost(self.client, reason, self.incarnation, counts=counts))

    def _part(self, failure: TaskFailed, reason: str) -> None:
        """Report a failure, and tell the client to stop once the run has recorded the failure."""
        self.protocol.out = None
        if self._stopping is None:
            self._inbox.put(Lost(self.client, reason, self.incarnation, failure))
        with suppress(queue.Empty):
            self._outbox.get(timeout=self._waits.stop_s)
        self._say_stop(reason)

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
            case needs.Work(function):
                return function(self.perform)
            case needs.Beside(steps):
                self._branches = [other for other in self._branches if other.is_alive()]
                self._branches.append(_BranchThread(self, steps))
                return self._branches[-1]
            case needs.Join(beside):
                assert isinstance(beside, _BranchThread)
                return beside.end()
            case needs.HandOver(message):
                if self.link.hand_over(message):
                    self._pair = None  # the connection now belongs to the earlier session
                    raise HandedOver
            case needs.Confirm(assignment):
                self.link.confirm(assignment)
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
                command = self._outbox.get(timeout=_LOOK_S)
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
                command = self._outbox.get(timeout=_BRANCH_LOOK_S)
            except queue.Empty:
                continue
            if isinstance(command, NoRoom):
                raise command
            if not isinstance(command, str):
                return command
            self._outbox.put(command)
        raise Stopped

    def _wait_for(self, pair: Connection, source: queue.SimpleQueue[Any]) -> Any:
        while True:
            with suppress(queue.Empty):
                return source.get(timeout=_LOOK_S)
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
        message = Message(Kind.STOP, 0, self.incarnation, Reason(reason).to_meta())
        with suppress(PeerLost, PeerTimeout):
            self._pair.send(message, self._waits.stop_s if wait_s is None else wait_s)


class _BranchThread(threading.Thread):
    """Thread that performs a branch: protocol steps that run beside the session's own."""

    def __init__(self, session: Session, steps: Steps[Any]) -> None:
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
