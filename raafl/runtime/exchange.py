"""Run tasks that are split between client and server, on real ranks: both sides of `raafl.core.exchange`.

The server's side of a task runs on the thread of the client's session, on a copy of its part of the model. The client waits for
each reply; the server waits at most ``waits.task_s`` in total. Invalid questions are refused, and the client is told.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from raafl.core.algorithm import Local, Training
from raafl.core.exchange import Exchange, server_seed
from raafl.core.options import FabricOptions
from raafl.core.types import Assignment, Update
from raafl.errors import BadInput, InvalidPayload
from raafl.local.context import Stopped, TaskContext
from raafl.local.train import LocalTrainer
from raafl.rng import RngStream
from raafl.runtime.client.worker import Client, ClientExtension
from raafl.runtime.protocol import Assign, Meta, Question
from raafl.runtime.server.session_protocol import Conversation, Sent, SessionExtension, SessionProtocol, Steps, Work
from raafl.runtime.server.session_protocol import Task as ServerTask
from raafl.submodel import FlatTensors, Layout, SpecError
from raafl.transport import Kind, Message, PeerLost, PeerTimeout, Refused

MAX_BYTES = 1 << 31
"""Largest size of a question."""


# ---- the client's side ----


class Questions(ClientExtension):
    """Client's side of questions to the server in the middle of a task.

    The training thread asks and waits; the receiving thread passes it the reply.
    """

    def __init__(self, client: Client, device: torch.device | str = "cpu", wait_s: float | None = None) -> None:
        """Create the extension by which a running task sends a request to the server and waits for its reply.

        Args:
            client: client whose tasks send such requests.
            device: device on which the tensors of replies are allocated.
            wait_s: seconds to wait for a reply before the connection is closed; None = no limit: the server's
                heartbeats show that it is alive, and a reply may have to wait for slow clients.
        """
        super().__init__(client)
        self._pair, self._reply_device, self._wait_s = client.pair, device, wait_s
        self._assignment: Assignment | None = None
        self._expected: Layout | None = None
        self._is_asking = False
        # replies of the server; the id of a task = no more replies for that task; None = none for any task
        self._replies: queue.SimpleQueue[tuple[Meta, FlatTensors | None] | int | None] = queue.SimpleQueue()

    def _ask(self, meta: Meta, tensors: FlatTensors, answer: Layout | None) -> tuple[Meta, FlatTensors | None]:
        """Send a question of the task to the server, and return the reply; raises `Stopped` if the task has ended."""
        assert self._assignment is not None
        number, incarnation = self._assignment.id, self._assignment.incarnation
        self._expected, self._is_asking = answer, True
        try:
            self._pair.send(Message(Kind.QUESTION, number, incarnation, dict(meta), tensors))
            while isinstance(reply := self._replies.get(timeout=self._wait_s), int):
                if reply == number:
                    raise Stopped
        except (PeerLost, PeerTimeout):  # the receiving thread reports this
            raise Stopped from None
        except queue.Empty:
            self._pair.close()
            raise Stopped from None
        if reply is None:
            self._replies.put(None)  # put back, since a further call must stop, too
            raise Stopped
        return reply

    def asks(self, assignment: int) -> bool:
        """Check whether this task waits for a reply."""
        return self._is_asking and self._assignment is not None and assignment == self._assignment.id

    def expect(self) -> FlatTensors | None:
        """Return the storage for the reply's tensors."""
        self._is_asking = False
        return None if self._expected is None else FlatTensors.empty(self._expected, self._reply_device)

    def hear(self, message: Message) -> None:
        """Pass the server's reply to the task that waits for it."""
        self._replies.put((message.meta, message.tensors))

    def given_up(self, assignment: int) -> None:
        """Wake up a task that waits for a reply which will not come."""
        self._replies.put(assignment)

    def ended(self) -> None:
        """Wake up any task that waits for a reply, and later ones."""
        self._replies.put(None)


class SplitClient(Questions):
    """Client's side of tasks that are split between client and server, as in split learning."""

    def __init__(self, client: Client) -> None:
        waits = client.waits
        super().__init__(client, client.trainer.fabric.device, waits.idle_s + waits.task_s + waits.stop_s)
        self._whole = client.trainer
        self._built: tuple[Exchange, LocalTrainer] | None = None

    def _exchange(self, assignment: Assignment) -> Exchange | None:
        return self._whole.local.exchange(self._whole.submodels, assignment.extra)

    def splits(self, assignment: Assignment) -> bool:
        """Check whether the server trains a part of a task."""
        return self._exchange(assignment) is not None

    def layout(self, assignment: Assignment) -> Layout | None:
        """Return the layout of the client's part; raises `SpecError` where it is not of the part that is known."""
        exchange = self._exchange(assignment)
        if exchange is None:
            return None
        layout, plan = exchange.client.layout(assignment.spec, "sent"), self.client.plan
        if plan is None:
            return layout
        if layout != plan.submodels.layout(assignment.spec, "sent"):
            raise SpecError("it splits the model elsewhere than this client's config does: give both the same model")
        return self.client.down.layout(assignment)

    def begin(
        self, assignment: Assignment, trainer: LocalTrainer, context: TaskContext
    ) -> tuple[LocalTrainer, TaskContext]:
        """Return the trainer of the client's part of a task, and a task context that is connected to the server."""
        exchange, whole = self._exchange(assignment), self._whole
        if exchange is None:
            return trainer, context
        if self._built is None or self._built[0] is not exchange:
            part = LocalTrainer(
                exchange.client, whole.local, whole.sends, whole.training, whole.options, pools=whole.pools
            )
            self._built = exchange, part
        self._assignment = assignment
        return self._built[1], replace(context, link=self)

    def ask(self, meta: dict[str, Any], tensors: Mapping[str, Tensor], answer: Layout) -> FlatTensors:
        """Send a question to the server and wait for its reply; see `ClientLink.ask`.

        Raises:
            Stopped: the server has ended the task, or the connection is lost.
        """
        options = self._whole.options
        more = Question(str(options.precision), options.accumulate_grad_batches, self._whole.sends).to_meta()
        _, reply = self._ask({**meta, **more}, FlatTensors.from_named(tensors), answer)
        assert reply is not None
        return reply


# ---- the server's side ----


class SplitSession(SessionExtension):
    """A session's tasks that are split: the client is sent its part of the model, and the server trains the rest meanwhile."""

    def __init__(self, session: SessionProtocol) -> None:
        super().__init__(session)
        # the server's side uses as many threads as the process had when the run was set up
        self._side = ServerSide(session.setup.local, session.setup.device, torch.get_num_threads())

    def _exchange(self, assignment: Assignment) -> Exchange | None:
        return self.session.setup.local.exchange(self.session.setup.submodels, assignment.extra)

    def before(self, task: ServerTask, message: Assign, values: FlatTensors) -> tuple[Assign, FlatTensors]:
        """Keep the client's part of the values."""
        exchange = self._exchange(task.assignment)
        if exchange is not None:
            layout = exchange.client.layout(task.assignment.spec, "sent")
            values = self.session.setup.terms.storage(layout, values.device).take_(values)
        return message, values

    def answer(self, sent: Sent, plain: Callable[[Sent], Steps[Update | None]]) -> Steps[Update | None]:
        """Train the server's part while the client asks, then join both parts to one update."""
        exchange = self._exchange(sent.assignment)
        return plain(sent) if exchange is None else self.session.telling(sent, self._joined(exchange, sent))

    def _joined(self, exchange: Exchange, sent: Sent) -> Steps[Update | None]:
        session, spec = self.session, sent.assignment.spec

        def train(perform: Callable[[Steps[Any]], Any]) -> Update:
            link = _SessionLink(session, sent.talk, perform)
            return self._side.run(exchange, sent.assignment, sent.task.snapshot, link)

        own: Update = yield Work(train)
        layout, up = exchange.client.layout(spec, "trained"), session.plan.up
        layout = layout if up is None else up.layout(layout)
        message = yield from sent.talk.recv(Kind.UPDATE, lambda meta: session.buffer(layout))
        update = yield from session.update(message, sent)
        whole = session.buffer(session.setup.submodels.layout(spec, "trained"))
        update.tensors = whole.take_(update.tensors).take_(own.tensors)
        update.num_steps, update.refusal = own.num_steps, own.refusal
        update.metrics |= own.metrics  # only this side computes the loss
        return update


class ServerSide:
    """Server's side of the tasks that one client splits with the server, as in split learning.

    The module that is built for one task is reused for the next.
    """

    def __init__(self, local: Local, device: torch.device | str, num_threads: int) -> None:
        """Create the server's side of a method's exchanges, which computes on ``device`` with ``num_threads`` threads."""
        self._local, self._device, self._num_threads = local, torch.device(device), num_threads
        self._built: tuple[Exchange, Question, LocalTrainer] | None = None

    def run(self, exchange: Exchange, assignment: Assignment, snapshot: FlatTensors, link: _SessionLink) -> Update:
        """Train the server's part of a task together with a client; return the resulting update.

        Its tensors are valid until the next task.

        Raises:
            Refused: a message of the client was invalid, or no training step can be made with it.
            Stopped: the run has ended.
        """
        torch.set_num_threads(self._num_threads)  # this applies to the calling thread only
        questions = exchange.questions(assignment, link)
        assert link.terms is not None
        trainer = self._trainer(exchange, link.terms)
        layout = exchange.server.layout(assignment.spec, "sent")
        received = FlatTensors.empty(layout, self._device).take_(snapshot)
        try:
            with link.stream:
                return trainer.run(replace(assignment, seed=server_seed(assignment.seed)), received, questions)
        except (Refused, Stopped, OSError, BadInput):
            raise
        # the step works on the server's example batch, so an error here is due to the client's question
        except Exception as error:
            raise Refused("failed-step", f"{type(error).__name__}: {' '.join(str(error).split())}") from error

    def _trainer(self, exchange: Exchange, terms: Question) -> LocalTrainer:
        if self._built is None or self._built[:2] != (exchange, terms):
            options = FabricOptions(self._device.type, self._device.index, terms.precision, None, terms.accumulate)
            trainer = LocalTrainer(exchange.server, self._local, terms.sends, Training(), options, pools=True)
            self._built = exchange, terms, trainer
        return self._built[2]


class _SessionLink:
    """Connection of one split task to its client.

    `terms`: precision, batches per step, and form of the update, which the client's questions state. `stream`: random
    state of the server's side, which other sessions must not use while this one waits for the client.
    """

    def __init__(self, session: SessionProtocol, talk: Conversation, perform: Callable[[Steps[Any]], Any]) -> None:
        self._line, self._talk, self._perform = session.line, talk, perform
        self._device = torch.device(session.setup.device)
        self.stream = RngStream(self._device)
        self.terms: Question | None = None

    def hear(self, expect: Callable[[Mapping[str, Any]], Layout]) -> FlatTensors:
        def into(meta: dict[str, Any]) -> FlatTensors:
            self._agree(meta)
            try:
                layout = expect(meta)
            except InvalidPayload as unsound:
                raise Refused(unsound.reason, unsound.detail) from None
            if layout.num_bytes > MAX_BYTES:
                raise Refused("too-large", f"a question of {layout.num_bytes} bytes, at most {MAX_BYTES}")
            return FlatTensors.empty(layout, self._device)

        with self.stream.suspended():
            tensors: FlatTensors | None = self._perform(self._talk.recv(Kind.QUESTION, into)).tensors
        assert tensors is not None
        return tensors

    def reply(self, tensors: Mapping[str, Tensor]) -> None:
        with self.stream.suspended():
            if self._line.stopping:
                raise Stopped
            self._perform(self._talk.send(Kind.REPLY, {}, FlatTensors.from_named(tensors)))

    def draws(self, seed: int) -> AbstractContextManager[Any]:
        return RngStream(self._device, seed)

    def _agree(self, meta: Mapping[str, Any]) -> None:
        """Store the client's training settings from its first question; refuse a later question with other ones."""
        terms = Question.from_meta(meta)
        if self.terms not in (None, terms):
            raise Refused("bad-json", "precision, accumulate or sends have changed within a task")
        self.terms = terms
