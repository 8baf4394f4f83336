"""Send a client its next task while the update of the last one still arrives."""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass
from typing import Any

from raafl.compression.streams import Scratch, UplinkCodec
from raafl.core.types import Assignment, Sending
from raafl.runtime.exchange import Conversation
from raafl.runtime.fields import SignedHead
from raafl.runtime.protocol import Assign
from raafl.runtime.server.session import Session
from raafl.runtime.server.terms import Task
from raafl.submodel import FlatTensors
from raafl.submodel.tensor_files import NoRoom
from raafl.transport import Connection, Kind, Message, Refused

_LOOK_S = 0.1  # how often a thread that waits for the next task looks whether it is still wanted


@dataclass(frozen=True, slots=True)
class _Sent:
    """A task that the client has been sent, and its values as the client has them where an update is decoded by them."""

    assignment: Assignment
    talk: Conversation
    received: FlatTensors | None


class OverlappedSession(Session):
    """The server's session with a client that trains its next task while the update of the last one is being sent.

    An update that begins to arrive shows that the client has finished training its task. While the session's thread
    receives the update, another thread sends the next task as soon as the coordinator assigns one. That thread ends
    before the next update is received. Two updates may wait for the coordinator, so there is storage for two.
    """

    def __init__(self, *args: Any, **more: Any) -> None:
        """Prepare; see `Session`."""
        super().__init__(*args, **more)
        self._other_scratch = Scratch(self._terms.storage)
        self._other_up = UplinkCodec(self._plan, self._other_scratch)
        self._ahead: _Ahead | None = None

    def run(self) -> None:
        """Serve the client until the session ends; see `Session.run`."""
        super().run()
        if self._ahead is not None:  # the connection is closed: it can send no more
            self._ahead.stop(self._waits.stop_s)

    def _task(self, pair: Connection, task: Task) -> None:
        """Send a task and take in its answer, then those of the tasks that were sent meanwhile."""
        sent: _Sent | None = self.send(pair, task)
        while sent is not None:
            sent = self._take_answer(pair, sent)

    def send(self, pair: Connection, task: Task) -> _Sent:
        """Send a task; return the data that are needed to receive its update."""
        assignment = task.assignment
        if self._out is None:
            self._out = assignment
        talk = Conversation(
            pair,
            assignment,
            self._waits.task_s,
            lambda message: self._send(pair, message),
            lambda: self._stopping is not None,
        )
        packed = self._down.pack(assignment, task.snapshot)
        head = None if task.head is None else SignedHead.sign(task.head, assignment.id, self._terms.signer)
        talk.send(Kind.ASSIGN, Assign(assignment, head=head, ahead=True).to_meta(), packed)
        if not self._plan.sender_unpacks:
            return _Sent(assignment, talk, None)
        received = self._down.unpack(assignment, packed)
        # Uncompressed values stay as they are until the answer; the codec's storage is used again by the next task.
        return _Sent(assignment, talk, received if self._plan.down is None else received.clone())

    def _take_answer(self, pair: Connection, sent: _Sent) -> _Sent | None:
        """Take in the answer to a task; return the task that was sent meanwhile, or None."""
        assignment = sent.assignment
        self._out, self._received = assignment, sent.received
        ahead = self._ahead = _Ahead(self, pair)
        layout = self._plan.layout(assignment.spec, "trained", assignment.extra)

        def into(meta: dict[str, Any]) -> FlatTensors:
            self._inbox.put(Sending(self.client, self.incarnation, assignment.id))
            ahead.start()
            return self._buffer(layout)

        try:
            update = self._update(sent.talk.recv(Kind.UPDATE, into), assignment)
        except Refused as refused:
            update = self._refused(assignment, refused)
        self._arrived(pair, update, sent.talk)
        self._scratch, self._other_scratch = self._other_scratch, self._scratch
        self._up, self._other_up = self._other_up, self._up
        following = ahead.end()
        if following is not None:
            with self._sending:  # the client may have waited long for a word; of the next task it says nothing
                pair.send(Message(Kind.KEEPALIVE, 0, self.incarnation, {"confirms": assignment.id}))
        return following

    def next_task(self) -> Task | None:
        """Take the next task from the queue; return None after a short wait without one, or if asked to stop.

        Raises:
            NoRoom: there is too little memory or disk space for the values of the next task.
        """
        try:
            command = self._outbox.get(timeout=_LOOK_S)
        except queue.Empty:
            return None
        if isinstance(command, NoRoom):
            raise command
        if isinstance(command, str):
            self._outbox.put(command)
            return None
        return command

    @property
    def is_stopping(self) -> bool:
        """Whether the session has been told to stop."""
        return self._stopping is not None


class _Ahead:
    """Thread that sends the next task while an update arrives."""

    def __init__(self, session: OverlappedSession, pair: Connection) -> None:
        self._session, self._pair = session, pair
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"ahead-{session.client}", daemon=True)
        self._sent: _Sent | None = None
        self._error: Exception | None = None

    def start(self) -> None:
        """Start the thread, which waits for the next task."""
        self._thread.start()

    def _run(self) -> None:
        while not self._over.is_set() and not self._session.is_stopping:
            try:
                if (task := self._session.next_task()) is None:
                    continue
                self._sent = self._session.send(self._pair, task)
            except Exception as error:
                self._error = error
            return

    def end(self) -> _Sent | None:
        """Wait for the thread; return the task that it has sent, or None. An error of sending is raised here."""
        self.stop()
        if self._error is not None:
            raise self._error
        return self._sent

    def stop(self, timeout_s: float | None = None) -> None:
        """Tell the thread to stop waiting for a task, and wait until the thread has ended."""
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=timeout_s)
