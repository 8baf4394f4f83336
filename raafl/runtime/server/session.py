"""Serve one client: a connection, and a thread that sends tasks and receives updates."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from raafl.compression.plan import CompressionPlan
from raafl.compression.streams import DownlinkCodec, Scratch, UplinkCodec
from raafl.config.options import Timeouts
from raafl.core.admission import NO_SPACE
from raafl.core.exchange import Exchange
from raafl.core.local import Local
from raafl.core.payload import Payload
from raafl.core.roster import DAMAGED
from raafl.core.state import ClientState
from raafl.core.types import POLICY, Arrived, Assignment, ClientInfo, Joined, Lost, Update
from raafl.errors import GpuLost, InvalidPayload, TaskFailed
from raafl.local.failure import unanswered
from raafl.local.train import Stopped
from raafl.log import warn_once
from raafl.parts.protect.secure.fixed_point import OUT_OF_RANGE
from raafl.runtime.exchange import Conversation, ServerSide
from raafl.runtime.fields import SignedHead
from raafl.runtime.identity import Identity, agree, client_info, in_words
from raafl.runtime.protocol import DRY_RUN, GPU_LOST, Answer, Assign, Config, Failed, Hello, Reason, Welcome, no_tensors
from raafl.runtime.secure_groups import NOT_OPENED
from raafl.runtime.server.inbox import Inbox
from raafl.runtime.server.link import HandedOver, SessionLink
from raafl.runtime.server.secure import SecureSession
from raafl.runtime.server.terms import Task, Terms
from raafl.sanitize import sanitize_text
from raafl.submodel import FlatTensors, Layout, Spec, Submodels
from raafl.submodel.tensor_files import NoRoom
from raafl.transport import GIVEN_UP, Connection, Kind, Message, PeerLost, PeerTimeout, Refused

MAX_DAMAGED = 3
"""Damaged messages in a row after which a connection is given up."""

NOT_JOINING: Mapping[str, str] = {POLICY: "its site does not allow this run", DRY_RUN: "it was a dry run"}
"""Reasons of a FAILED in the place of a HELLO, in words for the log."""

_log = logging.getLogger(__name__)
_LOOK_S = 0.5  # how often an idle session looks whether its client is still there


class Session(threading.Thread):
    """The server's session with one client: it sends a task and receives the update, in turn, until the session ends.

    Each event is put into the inbox. Received tensors are stored in this session's own storage, which the next update
    overwrites; that is safe, since the coordinator processes an update before it sends the client a new task.
    """

    def __init__(
        self,
        client: int,
        incarnation: int,
        connect: Callable[[], Connection],
        submodels: Submodels,
        inbox: Inbox,
        waits: Timeouts,
        moved: Callable[[int, int], None],
        device: torch.device | str = "cpu",
        terms: Terms | None = None,
        plan: CompressionPlan | None = None,
        known: ClientInfo | None = None,
        local: Local | None = None,
    ) -> None:
        """Prepare; `start` connects.

        ``connect`` makes the pair; ``moved`` is told of bytes over the link, (down, up); received tensors are to lie on
        ``device``; ``terms`` are what the client must agree on beside the protocol's version and the model; ``known`` is what the
        run has of it: its share of the data, its profile (None = nothing); ``plan`` None = nothing is compressed, ``local``
        None = nothing is exchanged in the middle of a task.
        """
        super().__init__(name=f"client-{client}", daemon=True)
        self.client, self.incarnation = client, incarnation
        self._connect, self._submodels, self._inbox, self._waits, self._moved = connect, submodels, inbox, waits, moved
        self._outbox: queue.SimpleQueue[Task | NoRoom | str] = queue.SimpleQueue()
        self._out: Assignment | None = None
        self._device, self._terms = device, terms or Terms()
        self._pair: Connection | None = None
        self._plan = plan or CompressionPlan(Payload(submodels))
        storage = self._terms.storage
        self._scratch = Scratch(storage)
        self._down = DownlinkCodec(self._plan, Scratch(storage), ClientState(storage))
        self._up = UplinkCodec(self._plan, self._scratch)
        self._received: FlatTensors | None = None  # what the client has been sent, as it has it
        # While it greets and while a task is out two may send, this thread and `stop`, in the loop's: a pair takes one at a time.
        # `_stopping` is set before the lock is tried and looked at after it is given back: one of the two tells the client, once.
        self._sending = threading.Lock()
        self._stopping: str | None = None
        self._told, self._welcomed, self._num_samples, self._num_damaged = False, False, 0, 0
        self._known = known or ClientInfo(client, 0)
        self.link = SessionLink(
            client,
            incarnation,
            inbox.put,
            self._waits.resume_s,
            lambda: None if self._out is None else self._out.id,
            lambda: self._stopping is not None,
        )
        self._local = local or Local()
        self._side = ServerSide(self._local, device, torch.get_num_threads())  # as many as where the run was set up

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
        # While the thread waits for an answer nobody sends; if it is about to, it will find the reason itself.
        if (self._out is not None or not self._welcomed) and self._sending.acquire(blocking=False):
            try:
                self._say_stop(reason, wait_s)
            finally:
                self._sending.release()

    def abandon(self) -> None:
        """Close the connection of a session whose thread did not end in time; the client sees a lost connection."""
        if self._pair is not None:
            self._pair.close()

    def run(self) -> None:
        """Serve the client until the session ends; a `Lost` event reports the end, unless the client was told to stop."""
        pair: Connection | None = None
        failure: TaskFailed | None = None
        counts = False
        try:
            pair = self._pair = self.link.over(self._connect())
            self._say_if_stopping()
            info, hello = self._greet(pair)
            self._num_samples = info.num_samples
            self._inbox.put(Joined(info))
            self._take_late(hello)
            self._serve(pair)
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
            reason, counts = f"timeout: {error}", self._out is not None
        except NoRoom as error:
            reason, counts = f"{NO_SPACE}: {error}", True
        except (PeerLost, Refused, OSError, RuntimeError) as error:
            reason = f"disconnected: {error}"
        except Exception as error:  # whatever it is, the run must hear that nothing more will come
            reason = f"failed: {type(error).__name__}: {sanitize_text(error)}"
        finally:
            self.link.end()
            if pair is not None:
                pair.close()
        if self._stopping is None and failure is None:
            self._inbox.put(Lost(self.client, reason, self.incarnation, counts=counts))

    def _part(self, failure: TaskFailed, reason: str) -> None:
        """Report a failure, and let the client go once the run has taken it in."""
        self._out = None
        if self._stopping is None:
            self._inbox.put(Lost(self.client, reason, self.incarnation, failure))
        with suppress(queue.Empty):
            self._outbox.get(timeout=self._waits.stop_s)
        self._say_stop(reason)

    def _greet(self, pair: Connection) -> tuple[ClientInfo, Hello]:
        """Welcome the client, or tell it why not; return what it is, and its HELLO."""
        try:
            info, hello = self._checked(pair)
        except Refused as refused:  # told, or it would try again and again
            if not pair.closed:
                with self._sending:
                    self._say_stop(f"refused: {refused.detail}")
            raise
        welcome = Welcome(tuple(sorted(self._submodels.refuted)), self.client)
        with self._sending:
            pair.send(Message(Kind.WELCOME, 0, self.incarnation, welcome.to_meta()))
        self._welcomed = True
        return info, hello

    def _checked(self, pair: Connection) -> tuple[ClientInfo, Hello]:
        """Check that the client speaks the same protocol and has the same config and model."""
        message = pair.recv(no_tensors, self._waits.join_s)
        if message.kind is Kind.RESUME:
            if self.link.hand_over(message):
                self._pair = None  # the earlier session's now
                raise HandedOver
            with self._sending:  # it may join anew by this connection
                pair.send(Message(Kind.REFUSED, 0, self.incarnation, Reason("there is no such session").to_meta()))
            message = pair.recv(no_tensors, self._waits.join_s)
        if message.kind is Kind.CONFIG and self._terms.config_yaml:
            with self._sending:
                config = Config(self._terms.config_yaml)
                pair.send(Message(Kind.CONFIG, 0, self.incarnation, config.to_meta()))
            self._say_if_stopping()
            # it now loads its data and builds its model, and a person at its site may have to consent
            message = pair.recv(no_tensors, max(self._waits.join_s, self._waits.alone_s))
        if message.kind is Kind.FAILED and (why := Failed.from_meta(message.meta).reason) in NOT_JOINING:
            raise Refused(why, NOT_JOINING[why])
        if message.kind is not Kind.HELLO:
            raise Refused("incompatible", f"expected HELLO, got {message.kind.name}")
        hello = Hello.from_meta(message.meta)
        if (difference := agree(Identity.of(self._submodels, self._terms.sections), hello.identity)) is not None:
            raise Refused("incompatible", in_words(difference, self.client))
        own_data = self._terms.own_data
        info = client_info(hello.client, hello.num_samples, self._known, self.incarnation, own_data=own_data)
        self._terms.site.check(info)
        return info, hello

    def _take_late(self, hello: Hello) -> None:
        """Report an answer that a client still held when its connection broke; the coordinator refuses it by id."""
        if hello.unsent is not None:
            nothing = FlatTensors.empty(Layout(()))
            self._inbox.put(Arrived(Update(hello.unsent, self.client, self.incarnation, nothing, 0, refusal="late")))

    def _keep_alive(self, pair: Connection) -> None:
        with self._sending:
            pair.send(Message(Kind.KEEPALIVE, 0, self.incarnation))

    def _serve(self, pair: Connection) -> None:
        idle_s = 0.0
        while True:
            try:
                command = self._outbox.get(timeout=_LOOK_S)
            except queue.Empty:
                idle_s += _LOOK_S
                if idle_s >= self._waits.idle_s / 3:
                    self._keep_alive(pair)
                    idle_s = 0.0
                pair.check()
                continue
            if isinstance(command, str):
                with self._sending:
                    self._say_stop(command)
                return
            if isinstance(command, NoRoom):
                raise command
            self._task(pair, command)
            self._out, idle_s = None, 0.0

    def _say_if_stopping(self) -> None:
        """Tell a client that is greeted of a stop that came when there was no pair yet, or when this thread sent."""
        if self._stopping is not None:
            with self._sending:
                self._say_stop(self._stopping)

    def _say_stop(self, reason: str, wait_s: float | None = None) -> None:
        """Send the client the message to stop, unless it was sent before."""
        if self._pair is None or self._told:
            return
        self._told = True
        message = Message(Kind.STOP, 0, self.incarnation, Reason(reason).to_meta())
        with suppress(PeerLost, PeerTimeout):
            self._pair.send(message, self._waits.stop_s if wait_s is None else wait_s)

    def _task(self, pair: Connection, task: Task) -> None:
        """Send a task and take in its answer; where it has an exchange, train the server's side in between."""
        assignment, spec = task.assignment, task.assignment.spec
        exchange = self._local.exchange(self._submodels, assignment.extra)
        talk = Conversation(
            pair,
            assignment,
            self._waits.task_s,
            lambda message: self._send(pair, message),
            lambda: self._stopping is not None,
        )
        values = task.snapshot
        if exchange is not None:
            values = self._terms.storage(exchange.client.layout(spec, "sent"), values.device).take_(values)
        self._out = assignment
        packed = self._down.pack(assignment, values)
        head = None if task.head is None else SignedHead.sign(task.head, assignment.id, self._terms.signer)
        talk.send(Kind.ASSIGN, Assign(assignment, head=head).to_meta(), packed)
        if self._plan.sender_unpacks:
            self._received = self._down.unpack(assignment, packed)
        told, secure = "", self._terms.masked
        try:
            if secure:
                checked, alive = partial(self._checked_answer, spec), partial(self._keep_alive, pair)
                every_s, storage = self._waits.idle_s / 3, self._terms.storage
                SecureSession(self._inbox.put, checked, talk, alive, every_s, storage).run(assignment)
                self._moved(0, talk.up_bytes)
                self.link.confirm(assignment.id)
                return  # the aggregator reports the result
            update = self._answered(exchange, task, talk)
            told = update.refusal or ""
        except Stopped:
            return  # what is next in the outbox says why
        except Refused as refused:
            update, told = self._refused(assignment, refused), str(refused)
        # the client may wait for a reply, and forgets its residual
        if (secure or exchange is not None) and told and not pair.closed:
            talk.send(Kind.REFUSED, Reason(told[:200]).to_meta())
        self._arrived(pair, update, talk)

    def _answered(self, exchange: Exchange | None, task: Task, talk: Conversation) -> Update:
        """Return the client's update, joined with that of the server's side where there is one."""
        assignment, spec = task.assignment, task.assignment.spec
        own = None if exchange is None else self._side.run(exchange, assignment, task.snapshot, talk)
        if exchange is None:
            layout = self._plan.layout(spec, "trained", assignment.extra)
        else:
            plain, up = exchange.client.layout(spec, "trained"), self._plan.up
            layout = plain if up is None else up.layout(plain)
        update = self._update(talk.recv(Kind.UPDATE, lambda meta: self._buffer(layout)), assignment)
        if own is not None:
            whole = self._buffer(self._submodels.layout(spec, "trained"))
            update.tensors = whole.take_(update.tensors).take_(own.tensors)
            update.num_steps, update.refusal = own.num_steps, own.refusal
            update.metrics |= own.metrics  # the loss is known to this side alone
        return update

    def _refused(self, assignment: Assignment, refused: Refused) -> Update:
        """Make the update that stands for a refused answer; raises `TaskFailed` where the client says that its code failed."""
        if refused.reason == GIVEN_UP:
            failed = Failed.from_meta({} if refused.message is None else refused.message.meta)
            self._terms.take_logs(self.client, failed.logs)
            if self._terms.masked and failed.reason in (NOT_OPENED, OUT_OF_RANGE, "non-finite"):
                refused = Refused(failed.reason, failed.error)
                warn_once(_log, f"client {self.client} takes no part in a sum: {refused}")
            elif failed.refusal is None:
                raise failed.to_error(self.client) from None
            else:
                return unanswered(assignment, failed.refusal)
        nothing = self._nothing(assignment.spec)
        return Update(assignment.id, self.client, self.incarnation, nothing, 0, refusal=refused.reason)

    def _send(self, pair: Connection, message: Message) -> int:
        """Send a message of a task; return its bytes."""
        with self._sending:
            sent = pair.send(message)
        if self._stopping is not None:  # while this had the lock, `stop` could not say it
            with self._sending:
                self._say_stop(self._stopping)
        self._moved(sent, 0)
        return sent

    def _arrived(self, pair: Connection, update: Update, talk: Conversation) -> None:
        update.bytes_down, update.bytes_up = talk.down_bytes, talk.up_bytes
        update.down_s, update.up_s = talk.down_s, talk.up_s
        self._moved(0, talk.up_bytes)
        self._inbox.put(Arrived(update))
        self.link.confirm(update.assignment)
        if pair.closed:
            raise PeerLost("connection-broken", f"after a message refused as {update.refusal}")
        self._num_damaged = self._num_damaged + 1 if update.refusal in DAMAGED else 0
        if self._num_damaged >= MAX_DAMAGED:
            raise PeerLost(
                "connection-broken", f"{MAX_DAMAGED} messages in a row were damaged, the last: {update.refusal}"
            )

    def _nothing(self, spec: Spec) -> FlatTensors:
        """Make the tensors of a refused update: as received, or zeros where they travel compressed."""
        if self._plan.up is not None:
            return self._up.nothing(spec, torch.device(self._device))
        return self._buffer(self._plan.payload.returned(spec))

    def _update(self, message: Message, assignment: Assignment) -> Update:
        """Check a client's answer, and unpack its tensors; raises `Refused`."""
        if message.kind is not Kind.UPDATE or message.tensors is None:
            raise Refused("bad-kind", f"expected UPDATE, got {message.kind.name}")
        if message.incarnation != self.incarnation:
            raise Refused("wrong-incarnation", f"expected {self.incarnation}, got {message.incarnation}")
        answer = self._checked_answer(assignment.spec, message.meta)
        self._terms.take_logs(self.client, answer.logs)
        try:
            tensors = self._up.unpack(assignment, message.tensors, self._received)
        except InvalidPayload as unsound:
            raise Refused(unsound.reason, str(unsound)) from None
        return Update(
            message.assignment,
            self.client,
            self.incarnation,
            tensors,
            answer.num_samples,
            answer.num_steps,
            dict(answer.metrics),
            extra=dict(answer.extra),
        )

    def _checked_answer(self, spec: Spec, meta: Mapping[str, Any]) -> Answer:
        """Read an answer, and check it against what the client said of itself; raises `Refused`."""
        answer = Answer.from_meta(meta)
        if answer.num_samples > self._num_samples:
            raise Refused(
                "too-many-samples", f"{answer.num_samples}, of {self._num_samples} that the client has said it has"
            )
        if spec.base is not None and answer.base != self._submodels.bases.digest(spec.base):
            raise Refused("other-base", f"the frozen parameters, held as {spec.base}, are not those of the server")
        return answer

    def _buffer(self, layout: Layout) -> FlatTensors:
        """Return storage for ``layout``, the same each time; only the last few layouts are kept."""
        return self._scratch("answer", layout, torch.device(self._device))
