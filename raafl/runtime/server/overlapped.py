"""Send a client its next task while the update of the last one still arrives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from raafl.compression.streams import Scratch, UplinkCodec
from raafl.core.types import Sending
from raafl.runtime.protocol import Assign
from raafl.runtime.server.session_protocol import (
    Beside,
    Join,
    NextTask,
    Send,
    Sent,
    SessionExtension,
    SessionProtocol,
    Steps,
    Task,
)
from raafl.submodel import FlatTensors
from raafl.transport import Kind, Message, Refused


class OverlappedSession(SessionExtension):
    """A session whose client trains its next task while the update of the last one is being sent.

    An update that begins to arrive shows that the client has finished training its task. While it is received, the next task is
    sent beside, as soon as the coordinator assigns one; that ends before the next update is received. Two updates may wait for
    the coordinator, so there is storage for two.
    """

    def __init__(self, session: SessionProtocol) -> None:
        super().__init__(session)
        self._other_scratch = Scratch(session.setup.terms.storage)
        self._other_up = UplinkCodec(session.plan, self._other_scratch)

    def before(self, task: Task, message: Assign, values: FlatTensors) -> tuple[Assign, FlatTensors]:
        """Let the client know that its next task may come while it sends."""
        return replace(message, ahead=True), values

    def around(self, task: Task, plain: Callable[[Task], Steps[None]]) -> Steps[None]:
        """Send a task and take in its answer, then those of the tasks that were sent meanwhile."""
        sent: Sent | None = yield from self._send(task)
        while sent is not None:
            sent = yield from self._take_answer(sent)

    def _send(self, task: Task) -> Steps[Sent]:
        sent = yield from self.session.send(task)
        # the next task reuses the codec's storage, whereas uncompressed values stay until the answer
        used_again = sent.received is not None and self.session.plan.down is not None
        return replace(sent, received=sent.received.clone()) if used_again and sent.received is not None else sent

    def _send_next(self) -> Steps[Sent]:
        task: Task = yield NextTask()
        return (yield from self._send(task))

    def _take_answer(self, sent: Sent) -> Steps[Sent | None]:
        """Receive a task's update; return the next task, if one was sent in the meantime, else None."""
        session, assignment = self.session, sent.assignment
        session.out = assignment
        ahead = yield Beside(self._send_next())
        layout = session.plan.layout(assignment.spec, "trained", assignment.extra)

        def into(meta: dict[str, Any]) -> FlatTensors:
            session.report(Sending(session.client, session.incarnation, assignment.id))
            ahead.start()
            return session.buffer(layout)

        try:
            message = yield from sent.talk.recv(Kind.UPDATE, into)
            update = yield from session.update(message, sent)
        except Refused as refused:
            update = session.refused(assignment, refused)
        yield from session.arrived(update, sent.talk)
        session.scratch, self._other_scratch = self._other_scratch, session.scratch
        session.up, self._other_up = self._other_up, session.up
        following: Sent | None = yield Join(ahead)
        if following is not None:  # confirm the update here: messages of the next task do not
            confirms = {"confirms": assignment.id}
            yield Send(Message(Kind.KEEPALIVE, 0, session.incarnation, confirms))
        return following
