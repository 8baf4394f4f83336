"""Perform the sessions of all clients over TCP on one thread, that of their sockets (`SocketLoop`).

Two kinds of steps have threads of their own: tensors are encoded and decoded by a small pool (`Compute`), and a task that the
server trains together with its client has a thread while it lasts (`Work`).
"""

from __future__ import annotations

import asyncio
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

from raafl.core.types import ClientInfo
from raafl.local.context import Stopped
from raafl.runtime.protocol import Resume
from raafl.runtime.server import session_protocol as needs
from raafl.runtime.server.link import Away, Back, HandedOver, Inbox, LinkStep, Resumption, Unassigned
from raafl.runtime.server.session import Session
from raafl.runtime.server.session_protocol import Branch, SessionSetup, Steps, T
from raafl.transport import Kind, Message, PeerLost, PeerTimeout, Refused
from raafl.transport.codec import Expect
from raafl.transport.tcp.connection import TcpConnection
from raafl.transport.tcp.loop import TICK_S, Mailbox, SocketLoop
from raafl.transport.tcp.resumable import LINK, SUCCEEDED, Position, Progress
from raafl.transport.tcp.stream import Waits

_CONFIRM_S = 0.25  # seconds after which an update is confirmed, if the next task has not done so
_BRIEFLY_S = 0.02  # seconds between two checks whether another coroutine has replaced a broken connection


class LoopSession(Session):
    """A session over TCP, on the thread of a `SocketLoop`."""

    def __init__(
        self,
        loop: SocketLoop,
        client: int,
        incarnation: int,
        pair: TcpConnection,
        setup: SessionSetup,
        inbox: Inbox,
        known: ClientInfo | None = None,
    ) -> None:
        """Create a session of the sockets' thread over the connection ``pair``; see `Session`."""
        super().__init__(client, incarnation, setup, inbox, known)
        self.loop = loop
        self.line = SessionLine(pair, self, self._waits.resume_s, inbox.put)
        self._owns_line = True  # False once an earlier session has taken over the connection
        self._sends, self._begun, self._is_over = False, False, False
        self._runs = threading.Lock()  # held until the session has ended; an event takes 1 kB more
        self._reminders = loop.reminders(self._waits.idle_s / 3)
        self._awaited: list[Mailbox[Any]] = []  # mailboxes on which the session and its branches wait now
        # assignment of an update that has arrived, of which the client does not know yet; 0 = none
        self._unconfirmed = 0
        # whether a task may be sent before the last update has arrived, so that it confirms nothing
        self._is_ahead = False

    # ---- called on the run's loop ----

    def start(self) -> None:
        """Begin; see `Session.start`."""
        self._begun = self._runs.acquire()
        self.loop.post(lambda: self.loop.begin(self._serve()))

    def join(self, timeout: float | None = None) -> None:
        """Wait until the session has ended; see `Session.join`."""
        if self._runs.acquire(timeout=-1 if timeout is None else timeout):
            self._runs.release()

    def is_alive(self) -> bool:
        """Check whether the session was started and has not ended."""
        return self._begun and not self._is_over

    def stop(self, reason: str, wait_s: float | None = None) -> None:
        """Tell the client to stop; see `Session.stop`."""
        self._stopping = reason
        self._outbox.put(reason)
        self.loop.post(self._stop_now, reason, wait_s)

    def offer(self, pair: TcpConnection, position: Position) -> bool:
        """Offer the client's next connection; see `Session.offer`."""
        return self.line.offer(pair, position)

    def abandon(self) -> None:
        """Close the connection; see `Session.abandon`."""
        if self._owns_line:
            self.line.close()

    # ---- called by the protocol ----

    @property
    def closed(self) -> bool:
        """Whether the connection has ended."""
        return self.line.closed or self._is_over

    @property
    def received_bytes(self) -> int:
        """Size of the last received message in bytes."""
        return self.line.received_bytes

    # ---- on the loop's thread ----

    async def _open(self) -> None:
        """Do nothing, since the connection exists from the start."""

    def _close(self) -> None:
        if self._owns_line:
            self.line.end()

    def _ended(self, error: Exception | None) -> None:
        super()._ended(error)
        self._is_over = True
        self._runs.release()

    async def _write(self, message: Message, wait_s: float | None = None) -> int:
        return await self.line.send(message, wait_s)

    async def _read(self, expect: Expect, wait_s: float, finite: bool) -> Message:
        return await self.line.recv(expect, wait_s, finite)

    async def _send(self, message: Message) -> int:
        self._sends = True
        try:
            sent = await super()._send(message)
        finally:
            self._sends = False
        if message.kind is Kind.ASSIGN:
            self._is_ahead, self._unconfirmed = message.meta.get("ahead") is True, 0
        return sent

    async def _idle(self, mailbox: Mailbox[T], seconds: float) -> T:
        if self._unconfirmed and mailbox.is_empty:
            with suppress(queue.Empty):
                return await self._take(mailbox, min(seconds, _CONFIRM_S), watches=True)
            await self._confirm()
        return await self._take(mailbox, seconds, watches=True)

    async def _confirm(self) -> None:
        assignment, self._unconfirmed = self._unconfirmed, 0
        await self.line.confirm(self.incarnation, assignment)

    def _beat(self) -> None:
        self.line.beat(Message(Kind.KEEPALIVE, 0, self.incarnation))

    async def _take(self, mailbox: Mailbox[T], seconds: float, *, watches: bool = False) -> T:
        if mailbox.is_empty:
            with self.awaiting(mailbox):
                await (self.line.watch(seconds, mailbox) if watches else self.loop.pause(seconds, mailbox))
        return mailbox.get()

    @contextmanager
    def awaiting(self, mailbox: Mailbox[Any]) -> Iterator[None]:
        """Have `nudge` wake who waits for ``mailbox`` in the ``with`` block."""
        self._awaited.append(mailbox)
        try:
            yield
        finally:
            self._awaited.remove(mailbox)

    def nudge(self) -> None:
        """Have each wait of the session look again whether it is still wanted."""
        for mailbox in self._awaited:
            mailbox.nudge()

    async def _compute(self, function: Callable[[], Any]) -> Any:
        return await self.loop.compute(function)

    async def _work(self, function: Callable[[Callable[[Steps[Any]], Any]], Any]) -> Any:
        return await self.loop.work(lambda: function(lambda steps: self.loop.wait_for(self.perform(steps))))

    def _branch(self, steps: Steps[Any]) -> Branch:
        return _LoopBranch(self, steps)

    async def _meet(self, need: needs.Need, branch: Branch | None) -> Any:
        match need:
            case needs.HandOver(message):
                if await self.line.hand_over(message):
                    self._owns_line = False
                    raise HandedOver
            case needs.Confirm(assignment):
                self._unconfirmed = assignment
                if self._is_ahead:
                    await self._confirm()
            case needs.NextTask() | needs.Await() if branch is None:
                self._reminders.add(self._beat)
                try:
                    return await super()._meet(need, branch)
                finally:
                    self._reminders.discard(self._beat)
            case _:
                return await super()._meet(need, branch)
        return None

    def _stop_now(self, reason: str, wait_s: float | None) -> None:
        """Send the stop message, unless the session is about to do so itself."""
        self.nudge()
        if self._owns_line and not self._sends and self._hears_late:
            self.loop.begin(self._say_stop(reason, wait_s))


class _LoopBranch(Branch):
    """Branch (steps that run beside a session's own) that is an asyncio task."""

    def __init__(self, session: LoopSession, steps: Steps[Any]) -> None:
        self._session, self._steps = session, steps
        self._task: asyncio.Task[Any] | None = None

    @property
    def is_running(self) -> bool:
        return self._task is not None and not self._task.done()

    def start(self) -> None:
        self._task = self._session.loop.begin(self._session.perform(self._steps, self))

    async def end(self) -> Any:
        self.over = True
        self._session.nudge()
        if self._task is None:
            return None
        with suppress(Stopped):
            return await self._task
        return None

    async def stop(self, timeout_s: float) -> None:
        with suppress(Exception):
            await asyncio.wait_for(self.end(), timeout_s)


class SessionLine:
    """Connection of a session to its client. Over TLS it can be replaced: if it breaks, the session continues on the next one.

    All but `offer` and `close` runs on the thread of the sessions' loop. As over a `ResumableConnection`, only who holds the
    receiving lock replaces the connection, since the receiver may be in the middle of a message that the next is to continue.

    `pair`: the present connection.
    `received_bytes`: size in bytes of the last received message.
    """

    def __init__(
        self, pair: TcpConnection, session: LoopSession, resume_s: float, put: Callable[[LinkStep], None]
    ) -> None:
        """Create a session's line over ``pair``; ``put`` tells the run's loop when the connection breaks and goes on."""
        self.pair, self._session, self._put = pair, session, put
        self._drive, self._resumes = session.loop.drive, bool(resume_s) and pair.resumes
        self._sending, self._receiving = asyncio.Lock(), asyncio.Lock()
        self._progress = Progress()
        self.received_bytes = self._num_repeated_bytes = 0
        self._is_closed = False
        self._next: Mailbox[tuple[TcpConnection, Position]] = Mailbox()
        self._resume_s, self._left_s, self._before = resume_s, resume_s, (Position(), Position())
        # The lock orders the session's end and new connections: each is either taken, or told that the session is over.
        self._lock, self._has_ended = threading.Lock(), False

    @property
    def closed(self) -> bool:
        """Whether the session has ended; over a connection that cannot be replaced, whether that has."""
        return self._is_closed or (not self._resumes and self.pair.closed)

    # ---- messages ----

    async def send(self, message: Message, timeout_s: float | None = None) -> int:
        """Send a message, on a new connection if this one breaks; see `Connection.send`.

        The tensors of a task message must stay unchanged until the next message is received.
        """
        if self._sending.locked() and timeout_s is not None:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._sending.acquire(), timeout_s)
                self._sending.release()
            if self._sending.locked():
                raise PeerTimeout("another message is still being sent")
        async with self._sending:
            if not self._resumes or not message.assignment:
                return await self._drive(self.pair.sending(message, timeout_s))
            self._progress.begin(message)
            return await self._send_rest(message)

    async def _send_rest(self, message: Message) -> int:
        """Send the chunks of a message that the client lacks; the caller holds the sending lock."""
        num_bytes, self._num_repeated_bytes = self._num_repeated_bytes, 0
        while (first := self._progress.first) is not None:
            pair, self._progress.first = self.pair, None
            before = pair.sent_bytes
            try:
                await self._drive(pair.sending(message, None, first))
            except (PeerLost, PeerTimeout) as error:
                await self._replace(pair, error)
            finally:
                num_bytes += pair.sent_bytes - before
        return num_bytes

    async def recv(self, expect: Expect, timeout_s: float, finite: bool) -> Message:
        """Receive a message, on a new connection if this one breaks; see `Connection.recv`."""
        self.received_bytes = 0
        async with self._receiving:
            return await self._recv(expect, timeout_s, finite)

    async def _recv(self, expect: Expect, timeout_s: float, finite: bool) -> Message:
        until, left_s = time.monotonic() + timeout_s, timeout_s
        while True:
            pair = self.pair
            try:
                return await self._received(pair, expect, left_s, finite)
            except (PeerLost, PeerTimeout) as error:
                if not self._resumes:
                    raise
                lost = error
            finally:
                self.received_bytes += pair.received_bytes
            if isinstance(lost, PeerTimeout) and pair.in_step and pair.partial is None:
                self.close()  # no byte of a message has arrived in time
                raise lost
            await self._replace(pair, lost, receives=True)
            await self._repeat()
            left_s = until - time.monotonic()

    async def _received(self, pair: TcpConnection, expect: Expect, left_s: float, finite: bool) -> Message:
        # the deadline ends with a message's first byte; each further piece has a timeout of its own
        left_s = max(left_s, 1e-3 if pair.partial is None else pair.timeout_s)
        try:
            message = await self._drive(pair.receiving(expect, left_s, finite))
        except Refused as refused:
            self._progress.refuse(refused)
            if pair.closed:
                self.close()
            raise
        self._progress.take(message)
        return message

    async def watch(self, timeout_s: float, mailbox: Mailbox[Any]) -> None:
        """Wait until ``mailbox`` has an item, for so long at most; if the client's connection breaks, wait for its next one."""
        pair = self.pair
        try:
            await self._drive(pair.watching(timeout_s), mailbox)
        except PeerLost as error:
            if not self._resumes:
                raise
            await self._replace(pair, error)
            await self._repeat()

    async def confirm(self, incarnation: int, assignment: int) -> None:
        """Tell a client whose connection can resume that its answer has arrived, so that the client may discard the answer."""
        # such a client waits for it, and does not know whether this server would wait for its next connection
        if self.pair.resumes and not self.closed:
            with suppress(PeerLost, PeerTimeout):  # the coroutine that receives notices the lost connection
                await self.send(Message(Kind.KEEPALIVE, 0, incarnation, {"confirms": assignment}))

    def beat(self, message: Message) -> None:
        """Send a short message at once, as a sign of life, unless something else is on its way to the client."""
        if self.closed or self.pair.has_unsent or not self._take_turn():
            return
        steps = self.pair.sending(message)
        try:
            next(steps)
        except (StopIteration, PeerLost, PeerTimeout):  # the coroutine that waits notices a lost connection
            self._sending.release()
        else:  # the system lacks buffers, so send the rest later, and nothing else in between
            self._session.loop.begin(self._finish(steps))

    def _take_turn(self) -> bool:
        """Acquire the sending lock, unless a coroutine has it or is the next to have it; return whether it was acquired."""
        acquiring = self._sending.acquire()
        try:
            acquiring.send(None)  # where it need not wait, it ends at once
        except StopIteration:
            return True
        acquiring.close()
        return False

    async def _finish(self, steps: Waits[int]) -> None:
        try:
            with suppress(PeerLost, PeerTimeout):
                await self._drive(steps)
        finally:
            self._sending.release()

    def close(self) -> None:
        """End the connection; callable from any thread."""
        self._is_closed = True
        self.pair.close()
        self._look_again()

    def _look_again(self) -> None:
        self._session.loop.post(self._session.nudge)

    # ---- the next connection ----

    async def hand_over(self, message: Message) -> bool:
        """Let the client's earlier session continue on this new connection; return whether it does.

        Raises:
            Refused: the message has invalid numbers.
        """
        position, session = Resume.from_meta(message.meta).position, self._session
        if not self._resumes:
            return False
        step = Resumption(session.client, session.incarnation, message.incarnation, self.pair, position)
        self.pair.on_close = self._look_again
        is_taken = await self._answer(step, step.is_taken, lambda: self.pair.closed)
        self.pair.on_close = None  # the connection may be another session's now
        return bool(is_taken)

    async def _answer(self, step: LinkStep, mailbox: Mailbox[T], is_over: Callable[[], bool]) -> T | None:
        """Ask the run's loop and return its answer; None if the session ends first, or ``is_over``."""
        session = self._session
        self._put(step)
        with session.loop.patience.asking(), session.awaiting(mailbox):
            # once the session stops, the run's loop may have ended
            while mailbox.is_empty and not session.stopping and not is_over():
                await session.loop.pause(math.inf, mailbox)
        return None if mailbox.is_empty else mailbox.get()

    def offer(self, pair: TcpConnection, position: Position) -> bool:
        """Offer the client's next connection to the session; return whether it continues on it. Callable from any thread.

        The session may not have noticed yet that its present connection is dead.
        """
        with self._lock:
            if self._has_ended or not self._resumes or self._is_closed:
                return False
            old = self.pair  # read first, since the loop's thread may replace it at once
            self._next.put((pair, position))
            old.cut(SUCCEEDED, "the client has come back by another connection")
            return True

    def end(self) -> None:
        """Accept no further connection, close those that are waiting to be accepted, and this one."""
        with self._lock:
            self._has_ended = True
        while not self._next.is_empty:
            self._next.get()[0].close()
        self.close()

    async def _replace(self, pair: TcpConnection, error: PeerLost | PeerTimeout, *, receives: bool = False) -> None:
        """Wait until another connection has replaced ``pair``; raises ``error`` if the session ends before.

        ``receives``: whether the caller holds the receiving lock.
        """
        if isinstance(error, PeerLost) and error.reason not in LINK:
            self.close()
        # this also wakes all others that use the connection
        pair.cut("connection-broken", "another user found it so")
        while self.pair is pair:
            if self._is_closed:
                raise error
            if not receives and self._receiving.locked():
                # the lock's holder may take the next connection, and then need this sender to end
                await asyncio.sleep(_BRIEFLY_S)
                continue
            async with nullcontext() if receives else self._receiving:
                await self._take_next(pair, error)

    async def _take_next(self, old: TcpConnection, error: PeerLost | PeerTimeout) -> None:
        """Get the client's next connection, and continue the session on it; the caller holds the receiving lock."""
        try:
            pair, theirs = await self._renew(self._progress.here(old.partial), error)
            pair.partial, self.pair = old.partial, pair
            self._progress.go_on(theirs)
        except BaseException:
            self.close()
            raise
        if self._is_closed:
            pair.close()
            raise error

    async def _repeat(self) -> None:
        """Send the chunks that the client lacks, unless another coroutine is sending them."""
        progress = self._progress
        while progress.first is not None and not self._is_closed:
            if self._sending.locked():
                await asyncio.sleep(_BRIEFLY_S)
                continue
            async with self._sending:
                if progress.last is not None:
                    self._num_repeated_bytes += await self._send_rest(progress.last)

    async def _renew(self, here: Position, error: Exception) -> tuple[TcpConnection, Position]:
        """Wait until the client connects again; return the connection, and what the client has received so far."""
        session, out, since = self._session, self._session.protocol.out, time.monotonic()
        number = None if out is None else out.id
        if number is None and self._next.is_empty:
            number = await self._assigned()
        if number is None and self._next.is_empty:
            raise error
        if number is not None:
            self._put(Away(session.client, session.incarnation, number, str(error), self._left_s))
        clock = session.loop.patience
        with clock.running(), session.awaiting(self._next):
            until_s = clock.now + self._left_s
            while (following := await self._following(until_s)) is not None:
                pair, theirs = following
                try:
                    await self._drive(
                        pair.sending(Message(Kind.WELCOME, 0, session.incarnation, Resume(here).to_meta()))
                    )
                except (PeerLost, PeerTimeout):
                    continue
                away_s = time.monotonic() - since
                self._put(Back(session.client, session.incarnation, number, here.num_chunks, away_s))
                self._charge(until_s - clock.now, here, theirs)
                return pair, theirs
        raise error

    async def _assigned(self) -> int | None:
        """Return which task the run's loop has given to a client that had none when its connection broke; None = none."""
        question = Unassigned(self._session.client, self._session.incarnation)
        return await self._answer(question, question.assignment, lambda: self._is_closed)

    async def _following(self, until_s: float) -> tuple[TcpConnection, Position] | None:
        """Return the client's next connection, with what the client has; None if it does not come, or nobody waits for it.

        ``until_s``: time on the clock of the server's patience.
        """
        session = self._session
        self.pair.on_close = self._look_again  # if the client's site is removed meanwhile
        while not session.stopping:
            left_s = until_s - session.loop.patience.now
            with suppress(queue.Empty):
                return self._next.get()
            if (why := self.pair.why_closed).reason not in LINK:
                raise why
            if left_s <= 0 or self._is_closed:
                break
            await session.loop.pause(max(left_s, TICK_S), self._next)
        return None

    def _charge(self, left_s: float, here: Position, theirs: Position) -> None:
        """Store how long the client may still be without a connection, in seconds; progress renews that time.

        A client that reconnects without progress has ``resume_s`` seconds in all. Training, in which nothing is
        transferred, is limited by the task's deadline (``Timeouts.task_s``) alone.
        """
        is_training = self.pair.partial is None and theirs.num_messages == self._progress.num_sent
        has_moved = (here, theirs) != self._before
        self._left_s = self._resume_s if is_training or has_moved else left_s
        self._before = (here, theirs)
