"""Speak the server's side of one client's session: messages in, messages out, without a socket or a thread.

A session is a generator. It yields what it needs next (`Send`, `Receive`, `NextTask`, ...), and is resumed with the result or
with the error. Who drives it decides how: `raafl.runtime.server.session_loop` drives all sessions over TCP on one thread,
`raafl.runtime.server.session.ThreadSession` one over a connection that blocks, and a test does so from a list of messages.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

import torch

from raafl.compression.plan import CompressionPlan
from raafl.compression.streams import DownlinkCodec, Scratch, UplinkCodec
from raafl.config.options import Timeouts
from raafl.core.local import Local
from raafl.core.payload import Payload
from raafl.core.roster import DAMAGED
from raafl.core.state import ClientState
from raafl.core.subfederation import with_contributions
from raafl.core.types import POLICY, Arrived, Assignment, ClientInfo, Joined, Update
from raafl.errors import InvalidPayload
from raafl.local.context import Stopped
from raafl.runfolder.seals import Signer
from raafl.runtime.executors.base import unanswered
from raafl.runtime.identity import Identity, agree, client_info, in_words
from raafl.runtime.protocol import (
    DRY_RUN,
    Answer,
    Assign,
    Config,
    Failed,
    Hello,
    Meta,
    Reason,
    SignedHead,
    Welcome,
    no_tensors,
)
from raafl.runtime.server.link import Item
from raafl.sanitize import sanitize_text
from raafl.submodel import FlatTensors, Layout, Spec, SpecError, Submodels
from raafl.submodel.tensor_files import PayloadRoom
from raafl.transport import GIVEN_UP, Expect, Kind, Message, PeerLost, Refused
from raafl.transport.tcp.loop import Mailbox

MAX_DAMAGED = 3
"""Damaged messages in a row after which a connection is given up."""

NOT_JOINING: Mapping[str, str] = {POLICY: "its site does not allow this run", DRY_RUN: "it was a dry run"}
"""Reasons of a FAILED in the place of a HELLO, in words for the log."""


T = TypeVar("T")

# ---- what a session is given ----


@dataclass(frozen=True, slots=True)
class Task:
    """A task for a client: assignment, values of the submodel, and hash of the journal once it contains the assignment."""

    assignment: Assignment
    snapshot: FlatTensors
    head: str | None = None


@dataclass(frozen=True, slots=True)
class Terms:
    """Terms on which a client must agree with the server."""

    config_yaml: str = ""  # text of the run's config, for clients without one
    # digest of each section of the config that must be equal; None = not compared, since both read one file
    sections: Mapping[str, str] | None = None
    own_data: bool = True  # whether the client may train on data of its own
    max_below: int = 0  # largest number of clients for which a subfederation may stand; 0 = no client may be one
    signer: Signer | None = None  # signs the journal's hash; None = this user's key
    # allocator of the session's tasks and updates, in memory or in files
    storage: PayloadRoom = field(default_factory=PayloadRoom)


# ---- requests of the protocol to who drives the session ----


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message; the result is the number of bytes sent."""

    message: Message


@dataclass(frozen=True, slots=True)
class Receive:
    """Receive the next message; the result is the message, raises as `Connection.recv`."""

    expect: Expect
    wait_s: float  # seconds until a message begins
    finite: bool = False


@dataclass(frozen=True, slots=True)
class NextTask:
    """Wait for the next task; the result is None once the client has been told to stop."""


@dataclass(frozen=True, slots=True)
class Await:
    """Wait for an item that the loop puts into a queue, and let the client know meanwhile that it is not forgotten.

    Raises `Stopped` where the run has ended.
    """

    source: Mailbox[Any]


@dataclass(frozen=True, slots=True)
class Compute:
    """Encode or decode tensors, which takes a processor's time but waits for nobody; the result is the function's."""

    function: Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Work:
    """Do work that also waits for the client; the result is the function's, which is given what performs further steps."""

    function: Callable[[Callable[[Steps[Any]], Any]], Any]


@dataclass(frozen=True, slots=True)
class Beside:
    """Prepare other steps that are performed beside these; the result is their `Branch`."""

    steps: Steps[Any]


@dataclass(frozen=True, slots=True)
class Join:
    """Wait for the end of a branch; the result is its own, None where it was given up, and its errors are raised."""

    branch: Branch


@dataclass(frozen=True, slots=True)
class HandOver:
    """Let an earlier session of the client go on over this connection; where there is one, this session ends."""

    message: Message


@dataclass(frozen=True, slots=True)
class Confirm:
    """Tell a client whose connection can resume that its answer has arrived."""

    assignment: int


@dataclass(frozen=True, slots=True)
class TurnAway:
    """Tell the client why it is not let in."""

    reason: str


Need = Send | Receive | NextTask | Await | Compute | Work | Beside | Join | HandOver | Confirm | TurnAway
Steps = Generator[Need, Any, T]
"""Generator that yields requests of a session, and gets their results; T is its own result."""


class Branch(ABC):
    """Steps that are performed beside a session's own.

    `over`: whether no task is wanted any more.
    """

    over = False

    @property
    @abstractmethod
    def is_running(self) -> bool:
        """Whether the steps have begun and not ended."""

    @abstractmethod
    def start(self) -> None:
        """Begin; returns at once."""

    @abstractmethod
    async def end(self) -> Any:
        """Wait for the end; return the steps' result, None if they were given up, or raise their error."""

    @abstractmethod
    async def stop(self, timeout_s: float) -> None:
        """Say that no task is wanted any more, and wait for the end; ignore errors."""


class Line(Protocol):
    """The connection as a session may look at it."""

    @property
    def closed(self) -> bool:
        """Whether the connection has ended."""

    @property
    def received_bytes(self) -> int:
        """Size of the last received message in bytes."""

    @property
    def stopping(self) -> bool:
        """Whether the run no longer needs the client."""


# ---- one task ----


class Conversation:
    """Messages between server and client during one task, with their bytes and times.

    `down_bytes`, `up_bytes`: number of bytes sent and received.
    `down_s`: seconds that sending took.
    `up_s`: seconds spent receiving, from the first byte of each message to its last.
    """

    def __init__(self, session: SessionProtocol, assignment: Assignment) -> None:
        self._session, self._assignment, self._left_s = session, assignment, session.setup.waits.task_s
        self.down_bytes = self.up_bytes = 0
        self.down_s = self.up_s = 0.0

    def send(self, kind: Kind, meta: dict[str, Any], tensors: FlatTensors | None = None) -> Steps[None]:
        """Send a message of this task."""
        number, incarnation, since = self._assignment.id, self._assignment.incarnation, time.monotonic()
        sent = yield Send(Message(kind, number, incarnation, meta, tensors))
        self.down_bytes += sent
        self.down_s += time.monotonic() - since
        self._session.setup.moved(sent, 0)

    def recv(self, wanted: Kind, into: Callable[[dict[str, Any]], FlatTensors]) -> Steps[Message]:
        """Receive a message of this task; raises the same errors as `Connection.recv`."""
        # time at which the header arrived, before which the client may have trained for long
        begun: float | None = None

        def expect(kind: Kind, assignment: int, meta: dict[str, Any]) -> FlatTensors:
            nonlocal begun
            begun = time.monotonic()
            if kind not in (wanted, Kind.FAILED):
                raise Refused("bad-kind", f"expected {wanted.name}, got {kind.name}")
            if assignment != self._assignment.id:
                raise Refused("unknown-assignment", f"expected {self._assignment.id}, got {assignment}")
            if kind is Kind.FAILED:
                raise Refused(GIVEN_UP, "", Message(kind, assignment, meta=meta))
            return into(meta)

        since = time.monotonic()
        try:
            message: Message = yield Receive(expect, max(self._left_s, 1e-3), finite=True)
            return message
        finally:
            now = time.monotonic()
            self._left_s -= now - since
            self.up_s += 0.0 if begun is None else now - begun
            self.up_bytes += self._session.line.received_bytes


@dataclass(frozen=True, slots=True)
class Sent:
    """A task that the client has been sent."""

    task: Task
    talk: Conversation
    received: FlatTensors | None = None  # values to which the client's update is relative, if it is

    @property
    def assignment(self) -> Assignment:
        """Assignment of the task."""
        return self.task.assignment


class SessionExtension:
    """Extension of tasks by an optional feature, at the server's end: before, around and after each. This base adds nothing.

    `raafl.runtime.extensions` lists them, and says which config names which.
    """

    def __init__(self, session: SessionProtocol) -> None:
        self.session = session

    def check(self, info: ClientInfo) -> None:
        """Raise `Refused` for a client that may not join as it says it is."""

    def before(self, task: Task, message: Assign, values: FlatTensors) -> tuple[Assign, FlatTensors]:
        """Change the message of a task, or its values, before they are sent."""
        return message, values

    def around(self, task: Task, plain: Callable[[Task], Steps[None]]) -> Steps[None]:
        """Have a task done, from sending it to its answer; ``plain`` does it as without this extension."""
        return plain(task)

    def answer(self, sent: Sent, plain: Callable[[Sent], Steps[Update | None]]) -> Steps[Update | None]:
        """Take the answer to a task; None = it is reported otherwise, or not at all."""
        return plain(sent)

    def refusal(self, failed: Failed) -> str | None:
        """Return the reason of a refused update if a client's FAILED means one; None = it means what it says."""
        return None

    def after(self, message: Answer | Failed) -> None:
        """Take what a client sends beside its update."""


@dataclass(frozen=True, slots=True)
class SessionSetup:
    """Setup that all sessions of a run share."""

    submodels: Submodels
    waits: Timeouts = field(default_factory=Timeouts)
    # called with the bytes sent to the client, and those received
    moved: Callable[[int, int], None] = lambda down, up: None
    device: torch.device | str = "cpu"  # device of received tensors
    terms: Terms = field(default_factory=Terms)
    plan: CompressionPlan | None = None  # None = no compression
    local: Local = field(default_factory=Local)
    extensions: Sequence[Callable[[SessionProtocol], SessionExtension]] = ()


class SessionProtocol:
    """The server's side of a session with one client: it greets the client, then sends tasks and takes in the answers, in turn.

    Received tensors are stored in this session's own storage, which the next update overwrites; that is safe, since the
    coordinator processes an update before it sends the client a new task.

    `out`: the task whose answer is awaited; None = none.
    `welcomed`: whether the client was let in.
    """

    def __init__(
        self,
        client: int,
        incarnation: int,
        setup: SessionSetup,
        report: Callable[[Item], None],
        line: Line,
        known: ClientInfo | None = None,
    ) -> None:
        """Create the protocol of one session; `run` returns its steps.

        `report`: called with each event. `known`: the client's profile and share of the data, as the run has them; None
        = both are unknown.
        """
        self.client, self.incarnation, self.setup, self.report, self.line = client, incarnation, setup, report, line
        self.plan = setup.plan or CompressionPlan(Payload(setup.submodels))
        storage = setup.terms.storage
        self.scratch = Scratch(storage)
        self.client_state = ClientState(storage)
        self.down = DownlinkCodec(self.plan, Scratch(storage), self.client_state)
        self.up = UplinkCodec(self.plan, self.scratch, self.client_state)
        self.out: Assignment | None = None
        self.welcomed, self._num_samples, self._below, self._num_damaged = False, 0, 0, 0
        self._known = known or ClientInfo(client, 0)
        self.extensions = [make(self) for make in setup.extensions]

    def run(self) -> Steps[None]:
        """Return the steps of the whole session; they end once the client was told to stop."""
        yield from self._join()
        while (task := (yield NextTask())) is not None:
            steps = self._plain_task
            for extension in reversed(self.extensions):
                steps = partial(extension.around, plain=steps)
            yield from steps(task)
            self.out = None

    # ---- before any task ----

    def _join(self) -> Steps[None]:
        """Admit the client, and report that it has joined; its HELLO, of some kilobytes, is freed with this generator."""
        info, hello = yield from self._greet()
        self._num_samples, self._below = info.num_samples, info.below
        self.report(Joined(info))
        # A result that was lost with the earlier connection is recorded as refused, under the earlier incarnation: its
        # task number comes from the client, and could be that of the task that is sent next.
        if hello.unsent is not None:
            nothing = FlatTensors.empty(Layout(()))
            self.report(Arrived(Update(hello.unsent, self.client, self.incarnation - 1, nothing, 0, refusal="late")))

    def _greet(self) -> Steps[tuple[ClientInfo, Hello]]:
        """Admit the client, or tell it the reason for a refusal; return its description and its HELLO message."""
        try:
            info, hello = yield from self._checked()
        except Refused as refused:  # a client that is told nothing would try again
            if not self.line.closed:
                yield TurnAway(f"refused: {refused.detail}")
            raise
        welcome = Welcome(tuple(sorted(self.setup.submodels.refuted)), self.client)
        yield self._message(Kind.WELCOME, welcome.to_meta())
        self.welcomed = True
        return info, hello

    def _checked(self) -> Steps[tuple[ClientInfo, Hello]]:
        """Receive the client's HELLO, and check that its protocol, config and model are those of the server."""
        waits, terms, submodels = self.setup.waits, self.setup.terms, self.setup.submodels
        message = yield Receive(no_tensors, waits.join_s)
        if message.kind is Kind.RESUME:
            yield HandOver(message)
            # this connection may then begin a new session
            yield self._message(Kind.REFUSED, Reason("there is no such session").to_meta())
            message = yield Receive(no_tensors, waits.join_s)
        if message.kind is Kind.CONFIG and terms.config_yaml:
            yield self._message(Kind.CONFIG, Config(terms.config_yaml).to_meta())
            # the client now loads data and builds its model, and a person at its site may have to agree
            message = yield Receive(no_tensors, max(waits.join_s, waits.alone_s))
        if message.kind is Kind.FAILED and (why := Failed.from_meta(message.meta).reason) in NOT_JOINING:
            raise Refused(why, NOT_JOINING[why])
        if message.kind is not Kind.HELLO:
            raise Refused("incompatible", f"expected HELLO, got {message.kind.name}")
        hello = Hello.from_meta(message.meta)
        if (difference := agree(Identity.of(submodels, terms.sections), hello.identity)) is not None:
            raise Refused("incompatible", in_words(difference, self.client))
        info = client_info(
            hello.client,
            hello.num_samples,
            self._known,
            self.incarnation,
            own_data=terms.own_data,
            max_below=terms.max_below,
        )
        for extension in self.extensions:
            extension.check(info)
        return info, hello

    def _message(self, kind: Kind, meta: dict[str, Any]) -> Send:
        return Send(Message(kind, 0, self.incarnation, meta))

    # ---- one task ----

    def _plain_task(self, task: Task) -> Steps[None]:
        sent = yield from self.send(task)
        try:
            answer: Callable[[Sent], Steps[Update | None]] = self._answer
            for extension in reversed(self.extensions):
                answer = partial(extension.answer, plain=answer)
            update = yield from answer(sent)
        except Stopped:
            return  # the next step reads the reason
        except Refused as refused:
            update = self.refused(task.assignment, refused)
        if update is not None:
            yield from self.arrived(update, sent.talk)

    def send(self, task: Task) -> Steps[Sent]:
        """Send a task to the client."""
        assignment, values = task.assignment, task.snapshot
        message = Assign(assignment, head=None if task.head is None else SignedHead(task.head))
        for extension in self.extensions:
            message, values = extension.before(task, message, values)
        self.out = self.out or assignment
        talk = Conversation(self, assignment)
        packed = yield from self._compute(lambda: self.down.pack(assignment, values))
        yield from talk.send(Kind.ASSIGN, message.to_meta(), packed)
        if not self.plan.sender_unpacks:
            return Sent(task, talk)
        return Sent(task, talk, (yield from self._compute(lambda: self.down.unpack(assignment, packed))))

    def _compute(self, function: Callable[[], T]) -> Steps[T]:
        """Encode or decode tensors by ``function``, on another thread if a codec makes that slow."""
        if self.plan.up is None and self.plan.down is None and not self.plan.payload.is_resident:
            return function()
        result: T = yield Compute(function)
        return result

    def _answer(self, sent: Sent) -> Steps[Update]:
        layout = self.plan.layout(sent.assignment.spec, "trained", sent.assignment.extra)
        message = yield from sent.talk.recv(Kind.UPDATE, lambda meta: self.buffer(layout))
        return (yield from self.update(message, sent))

    def telling(self, sent: Sent, steps: Steps[Update | None]) -> Steps[Update | None]:
        """Take an answer by ``steps``, and tell the client if it is refused, since it may wait for a reply."""
        try:
            update = yield from steps
            told = "" if update is None else update.refusal or ""
        except Refused as refused:
            update, told = self.refused(sent.assignment, refused), str(refused)
        if told and not self.line.closed:
            yield from sent.talk.send(Kind.REFUSED, Reason(told[:200]).to_meta())
        return update

    def refused(self, assignment: Assignment, refused: Refused) -> Update:
        """Make the update that stands for a refused answer; raises `TaskFailed` where the client says that its code failed."""
        reason = refused.reason
        if reason == GIVEN_UP:
            failed = Failed.from_meta({} if refused.message is None else refused.message.meta)
            for extension in self.extensions:
                extension.after(failed)
            means = next((why for one in self.extensions if (why := one.refusal(failed)) is not None), None)
            if means is None and failed.refusal is None:
                raise failed.to_error(self.client) from None
            if means is None:
                assert failed.refusal is not None
                return unanswered(assignment, failed.refusal)
            reason = means
        if self.plan.up is not None:  # the decoder has storage for zeros
            nothing = self.up.nothing(assignment.spec, torch.device(self.setup.device))
        else:
            nothing = self.buffer(self.plan.payload.returned(assignment.spec))
        return Update(assignment.id, self.client, self.incarnation, nothing, 0, refusal=reason)

    def arrived(self, update: Update, talk: Conversation) -> Steps[None]:
        """Report an update; raises `PeerLost` where the connection is of no more use."""
        update.bytes_down, update.bytes_up = talk.down_bytes, talk.up_bytes
        update.down_s, update.up_s = talk.down_s, talk.up_s
        self.setup.moved(0, talk.up_bytes)
        self.report(Arrived(update))
        yield Confirm(update.assignment)
        if self.line.closed:
            raise PeerLost("connection-broken", f"after a message refused as {update.refusal}")
        self._num_damaged = self._num_damaged + 1 if update.refusal in DAMAGED else 0
        if self._num_damaged >= MAX_DAMAGED:
            raise PeerLost(
                "connection-broken", f"{MAX_DAMAGED} messages in a row were damaged, the last: {update.refusal}"
            )

    def update(self, message: Message, sent: Sent) -> Steps[Update]:
        """Check a client's answer, and unpack its tensors; raises `Refused`."""
        packed = message.tensors
        if message.kind is not Kind.UPDATE or packed is None:
            raise Refused("bad-kind", f"expected UPDATE, got {message.kind.name}")
        if message.incarnation != self.incarnation:
            raise Refused("wrong-incarnation", f"expected {self.incarnation}, got {message.incarnation}")
        answer = self.checked_answer(sent.assignment.spec, message.meta)
        for extension in self.extensions:
            extension.after(answer)
        try:
            tensors = yield from self._compute(lambda: self.up.unpack(sent.assignment, packed, sent.received))
        except InvalidPayload as unsound:
            raise Refused(unsound.reason, str(unsound)) from None
        update = Update(
            message.assignment,
            self.client,
            self.incarnation,
            tensors,
            answer.num_samples,
            answer.num_steps,
            dict(answer.metrics),
            extra=dict(answer.extra),
        )
        if self._below:
            try:
                with_contributions(update, self.setup.submodels, sent.assignment.spec, self._below, self._num_samples)
            except (ValueError, SpecError) as error:
                raise Refused("bad-json", sanitize_text(error)) from None
        return update

    def checked_answer(self, spec: Spec, meta: Meta) -> Answer:
        """Read an answer, and check it against what the client said of itself; raises `Refused`."""
        answer = Answer.from_meta(meta)
        if answer.num_samples > self._num_samples:
            raise Refused(
                "too-many-samples", f"{answer.num_samples}, of {self._num_samples} that the client has said it has"
            )
        if spec.base is not None and answer.base != self.setup.submodels.bases.digest(spec.base):
            raise Refused("other-base", f"the frozen parameters, held as {spec.base}, are not those of the server")
        return answer

    def buffer(self, layout: Layout) -> FlatTensors:
        """Return storage for ``layout``, the same each time; only the last few layouts are kept."""
        return self.scratch("answer", layout, torch.device(self.setup.device))
