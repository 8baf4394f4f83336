"""Run a client on one connection: receive a submodel, train it, send the update, until the server ends this."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from raafl.compression.plan import CompressionPlan
from raafl.compression.streams import DownlinkCodec, UplinkCodec
from raafl.config.options import Timeouts
from raafl.core.payload import Payload
from raafl.core.state import ClientState
from raafl.core.types import OUT_OF_MEMORY, Assignment, ClientInfo, Update
from raafl.data.federated import ClientData
from raafl.errors import InvalidPayload, RunFailed, TaskFailed
from raafl.local.client_group import ClientProcesses
from raafl.local.context import Stopped, TaskContext
from raafl.local.evaluate import PEAK, peak_bytes
from raafl.local.malloc import give_back
from raafl.local.train import LocalTrainer
from raafl.log import warn_once
from raafl.runtime.executors.base import attempt
from raafl.runtime.extensions import extension
from raafl.runtime.identity import Identity
from raafl.runtime.lifecycle.divergence import left_out, logged_not_finite
from raafl.runtime.protocol import Answer, Assign, Failed, Hello, Reason, SignedHead, Welcome
from raafl.sanitize import sanitize_text
from raafl.submodel import FlatTensors, Layout, SpecError, Submodels
from raafl.transport import Connection, Kind, Message, PeerLost, PeerTimeout, Refused

if TYPE_CHECKING:
    from raafl.transport.tcp.credentials import Credentials

_log = logging.getLogger(__name__)

Freedom = Literal["begin early", "send beside", "send logs", "send as trained"]
"""Permissions of a client without extensions: begin a task early, train while it sends, send log lines, send trained values."""


class Arrival(NamedTuple):
    """A task that has arrived."""

    assignment: Assignment
    tensors: FlatTensors  # values of the submodel as received
    head: SignedHead | None = None  # signed hash of the server's journal
    ahead: bool = False  # whether the server may send the next task before this task's update has arrived
    since: float = 0.0  # time at which the task began to arrive, by `time.perf_counter`


Item = Arrival | str | Exception
"""Item that a client receives: a task, the reason for a stop, or an error."""


@dataclass
class TrainedTask:
    """A task that a client has trained, on its way to the server."""

    arrival: Arrival
    received: FlatTensors  # values of the submodel before training
    update: Update
    answer: Answer | None = None  # fields that are sent with the update's tensors
    settles: bool = False  # whether to wait after sending until the server confirms the update
    notes: dict[str, Any] = field(default_factory=dict)  # data that extensions store about this task

    @property
    def assignment(self) -> Assignment:
        """Assignment of the task."""
        return self.arrival.assignment


class TaskRefused(RunFailed):
    """Raised by an extension that does not let a client train a task, or send its update.

    `then`: next action of the client: take the next task; leave until it may work again; leave for good.
    """

    server_reason = "policy"  # reason code for the server

    def __init__(self, text: str, then: Literal["go on", "wait", "end"] = "end") -> None:
        super().__init__(text)
        self.then = then


class ClientExtension:
    """Extension of tasks by an optional feature, at the client's end: before, around and after each. This base adds nothing.

    `raafl.runtime.extensions` lists them. The receiving thread calls `layout`, `announced`, `asks`, `expect`, `hear`, `given_up`
    and `ended`, the training thread the others; `sent` comes on the thread that sends.

    `forbids`: what a client with this extension may not do.
    """

    forbids: frozenset[Freedom] = frozenset()

    def __init__(self, client: Client) -> None:
        self.client = client

    @classmethod
    def notes(cls, *, certified: bool) -> list[str]:
        """Return lines to show before the client joins. ``certified``: whether both ends have certificates."""
        return []

    @classmethod
    def of(cls, setup: Any, credentials: Credentials | None) -> Callable[[Client], ClientExtension]:
        """Return a function that creates this extension for each connection of a client.

        `setup`: the client's `raafl.runtime.client.setup.ClientSetup`.
        `credentials`: certificates or token of the client's site; None = none.
        """
        return cls

    # ---- while messages arrive ----

    def layout(self, assignment: Assignment) -> Layout | None:
        """Return the layout of what comes down for a task; None = as without this extension.

        Raises:
            SpecError: the task names parts that the model does not have.
        """
        return None

    def splits(self, assignment: Assignment) -> bool:
        """Check whether the server trains a part of a task."""
        return False

    def announced(self, assignment: Assignment) -> None:
        """Take note of a task that begins to arrive."""

    def asks(self, assignment: int) -> bool:
        """Check whether the server's reply is awaited in the middle of this task."""
        return False

    def expect(self) -> FlatTensors | None:
        """Return the storage for the reply's tensors."""
        return None

    def hear(self, message: Message) -> None:
        """Take a reply."""

    def given_up(self, assignment: int) -> None:
        """Take note of a task that the server has given up."""

    def ended(self) -> None:
        """Take note that nothing more will be received."""

    # ---- for each task ----

    def take(self, plain: Callable[[], Item]) -> Item:
        """Wait for the next item of the connection."""
        return plain()

    def train(self, arrival: Arrival, plain: Callable[[Arrival], TrainedTask]) -> TrainedTask:
        """Train a task; ``plain`` does it as without this extension."""
        return plain(arrival)

    def before(self, assignment: Assignment) -> None:
        """Raise `TaskRefused` for a task that is not to be trained."""

    def begin(
        self, assignment: Assignment, trainer: LocalTrainer, context: TaskContext
    ) -> tuple[LocalTrainer, TaskContext]:
        """Return the trainer of a task and its context."""
        return trainer, context

    def after(self, work: TrainedTask) -> None:
        """See or change the update of a task; raises `TaskRefused` where it is not to be sent."""

    def answer(self, answer: Answer) -> Answer:
        """Return the fields that are sent with an update's tensors, which an extension may change."""
        return answer

    def send(self, work: TrainedTask, plain: Callable[[TrainedTask], None]) -> None:
        """Send the update of a task; ``plain`` does it as without this extension."""
        plain(work)

    def sent(self, work: TrainedTask) -> None:
        """Take note of an update that was sent."""

    def failure(self, error: TaskFailed, told: Failed) -> Failed:
        """Return the message about a failure of the user's code, from which an extension may leave out details."""
        return told

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait until nothing of this client's is being sent, or ``timeout_s`` seconds have passed."""

    @property
    def is_busy(self) -> bool:
        """Whether an update is being sent beside the next task."""
        return False


class Gate:
    """Policy of a client's site; this base class allows everything."""

    def extensions(self) -> Iterable[Callable[[Client], ClientExtension]]:
        """Return functions that create this gate's extensions of a client."""
        return ()

    def wait(self) -> bool:
        """Wait until the site's policy allows work; return whether it was necessary to wait."""
        return False

    def connection(self, pair: Connection) -> Connection:
        """Wrap a connection so that its traffic can be counted."""
        return pair

    def logs_kept(self) -> AbstractContextManager[None]:
        """Return a context that collects log lines for the server; without a policy of the site, it collects none."""
        return nullcontext()


class Client:
    """Client on one connection to a server: receives tasks, trains them and sends the updates.

    One thread always receives, so that a stop message or a broken connection interrupts the present task, whose result
    is no longer needed. The other thread trains and sends. During a task the server sends nothing but stop and
    keepalive messages, and replies if the task is split between client and server; a task that was begun before it
    arrived is sent while it is trained.

    Attributes:
        unsent: id of a task whose answer could not be sent; None = none.
        num_answered: number of tasks answered on this connection.
        incarnation: number of times that this client has joined, as counted by the server.
    """

    def __init__(
        self,
        info: ClientInfo,
        pair: Connection,
        submodels: Submodels,
        trainer: LocalTrainer,
        data: ClientData,
        waits: Timeouts,
        *,
        config: Mapping[str, str] | None = None,
        unsent: int | None = None,
        on_welcome: Callable[[], None] = lambda: None,
        plan: CompressionPlan | None = None,
        process_group: ClientProcesses | None = None,
        extensions: Iterable[Callable[[Client], ClientExtension]] = (),
    ) -> None:
        """Create a client on a connection; `run` sends its HELLO message.

        Args:
            info: description of the client.
            pair: connection to the server.
            submodels: submodels of the model, without values.
            trainer: trainer that runs the tasks.
            data: data of the client.
            waits: timeouts of the connection.
            config: digest of each config section, which the server compares; None = not compared.
            unsent: id of a task whose answer was lost with an earlier connection; None = none.
            on_welcome: called once the server has admitted the client.
            plan: compression of transfers; None = no compression.
            process_group: processes that train this client together; None = only this one.
            extensions: functions that make the extensions, outermost first.
        """
        self.info, self.pair, self.submodels, self.trainer = info, pair, submodels, trainer
        self.data, self.waits, self._config, self.plan = data, waits, config, plan
        travels = plan or CompressionPlan(Payload(submodels))
        # both codecs use what the client stores between tasks
        kept = ClientState()
        self.down, self._up = DownlinkCodec(travels, kept=kept), UplinkCodec(travels, kept=kept)
        self.stop = threading.Event()
        self.context = TaskContext(self.stop, process_group=process_group)
        self.unsent, self._on_welcome, self._is_welcome = unsent, on_welcome, False
        self.num_answered, self.incarnation = 0, 0
        # The receiving thread writes into `_storage`; the training thread reads it, and sets `_free` when it is done.
        # `out` is cleared before an update is sent, since the next task may arrive before that call returns.
        self._storage: tuple[Layout, FlatTensors] | None = None
        self.out: Arrival | None = None  # task that is arriving or in training
        self._free = threading.Event()
        self._free.set()
        self.received: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._overlaps = False
        self._extensions = [make(self) for make in extensions]

    def run(self) -> str:
        """Work until the server tells the client to stop; return the server's reason, with the connection closed.

        Raises:
            TaskFailed: the user's code failed; the server was told.
            TaskRefused: the policy of the site ends the session; the server was told.
            PeerLost: the connection was lost.
            PeerTimeout: the server sent nothing for ``Timeouts.idle_s``.
            Refused: the server sent an invalid message.
        """
        hello = Hello.of_client(Identity.of(self.submodels, self._config), self.info, self.unsent)
        self.pair.send(Message(Kind.HELLO, 0, self.info.incarnation, hello.to_meta()))
        reader = threading.Thread(target=self._read, name="reader", daemon=True)
        reader.start()
        try:
            while True:
                item = self._around("take", self.received.get)
                # the last item is the server's reason for the end, or an error
                if isinstance(item, str):
                    self.flush(self.waits.stop_s)
                    return item
                if isinstance(item, Exception):
                    raise item
                self._work(item)
                del item  # frees the task's tensors before the next task arrives
                self._free.set()
        finally:
            self.pair.close()
            reader.join(timeout=self.waits.stop_s)
            self.flush(self.waits.stop_s)

    @property
    def has_task(self) -> bool:
        """Whether a task is being received or trained, or an update sent beside the next task."""
        return self.out is not None or any(one.is_busy for one in self._extensions)

    def may(self, what: Freedom) -> bool:
        """Check whether no extension forbids something of a plain client."""
        return not any(what in one.forbids for one in self._extensions)

    def trains_whole(self, assignment: Assignment) -> bool:
        """Check whether this client trains all of a task, so that the server trains none of it."""
        return not any(one.splits(assignment) for one in self._extensions)

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait until nothing is being sent, or ``timeout_s`` seconds have passed; None = no limit."""
        for one in self._extensions:
            one.flush(timeout_s)

    def _around(self, hook: Literal["take", "train", "send"], plain: Callable[..., Any], *arguments: Any) -> Any:
        """Call a hook of all extensions, each of which wraps the next; the innermost call is ``plain``."""
        for one in reversed(self._extensions):
            plain = _bound(getattr(one, hook), plain)
        return plain(*arguments)

    # ---- the receiving thread ----

    def _read(self) -> None:
        """Receive messages until the server stops this client or the connection breaks."""
        wait_s = self.waits.join_s
        try:
            while True:
                message = self.pair.recv(self._expect, wait_s)
                self.incarnation = message.incarnation
                wait_s = self.waits.idle_s  # heartbeats come at least this often
                if message.kind is Kind.WELCOME:
                    self._take_welcome(Welcome.from_meta(message.meta))
                if message.kind is Kind.STOP:
                    self.received.put(Reason.from_meta(message.meta).reason)
                    break
                if message.kind is Kind.ASSIGN and self.out is not None and message.tensors is not None:
                    self.received.put(_of_its_frame(self.out, message))
                    wait_s += self.waits.task_s  # the server sends nothing while it waits for an update
                if message.kind is Kind.REPLY:
                    self._pass_on(message)
                    wait_s += self.waits.task_s
                if message.kind is Kind.REFUSED:
                    self._take_refusal(message)
        except Exception as error:
            self.received.put(error)
        self.stop.set()
        for one in self._extensions:
            one.ended()

    def _take_welcome(self, welcome: Welcome) -> None:
        if self._is_welcome:  # a second WELCOME could change the axes during a task
            raise Refused("bad-kind", "the server says WELCOME again")
        self._is_welcome, self.unsent = True, None
        welcome.apply_to(self.submodels)
        self._on_welcome()

    def _pass_on(self, reply: Message) -> None:
        for one in self._extensions:
            one.hear(reply)

    def _take_refusal(self, message: Message) -> None:
        """Drop the current task, which the server has refused; the session goes on with the next one."""
        self._up.forget()  # safe, since no update is encoded while messages of a task are exchanged
        if self.out is None or self.out.assignment.id != message.assignment:
            return
        reason = Reason.from_meta(message.meta).reason
        warn_once(_log, f"client {self.info.id}: the server refuses a task: {reason}")
        self.out = None
        for one in self._extensions:
            one.given_up(message.assignment)

    def _expect(self, kind: Kind, assignment: int, meta: dict[str, Any]) -> FlatTensors | None:
        if kind is Kind.REPLY:
            asking = next((one for one in self._extensions if one.asks(assignment)), None)
            if asking is None:
                raise Refused("bad-kind", f"a reply for assignment {assignment}, which waits for none")
            return asking.expect()
        if kind is not Kind.ASSIGN:
            return None
        if self.out is not None:
            raise Refused("bad-kind", f"assignment {assignment} came before {self.out.assignment.id} was answered")
        since = time.perf_counter()
        try:
            message = Assign.from_meta(meta)
            found = message.assignment
            if found.id != assignment:
                raise Refused("bad-json", f"assignment {assignment} names another, {found.id}")
            layouts = (layout for one in self._extensions if (layout := one.layout(found)) is not None)
            # the previous task was answered, so the stored values on which the layout depends are up to date
            layout = next(layouts, None) or self.down.layout(found)
        except (SpecError, TypeError, KeyError) as error:
            raise Refused("bad-json", f"assignment {assignment}: {sanitize_text(error)}") from None
        # the first task that needs it turns on overlapping transfers
        if not self._overlaps and (message.ahead or found.next_seed is not None):
            self._overlaps = True
            self._extensions.append(extension("overlap", "client")(self))
        self._free.wait(self.waits.stop_s)
        self._free.clear()
        if self._storage is None or self._storage[0] != layout:
            self._storage = None  # frees the old submodel before the new one is allocated
            self._storage = (layout, FlatTensors.empty(layout, self.trainer.fabric.device))
        self.out = Arrival(found, self._storage[1], message.head, message.ahead, since)
        for one in self._extensions:
            one.announced(found)
        return self._storage[1]

    # ---- the training thread ----

    def _trained(self, arrival: Arrival) -> TrainedTask:
        peak_bytes(self.trainer.fabric.device, anew=True)
        assignment, trainer, context = arrival.assignment, self.trainer, self.context
        # even if the task is then refused: the server takes for known what it has sent, and sends the next task relative to it
        received = self.down.unpack(assignment, arrival.tensors)
        for one in self._extensions:
            one.before(assignment)
        for one in self._extensions:
            trainer, context = one.begin(assignment, trainer, context)
        return TrainedTask(arrival, received, attempt(trainer, assignment, received, self.data, context))

    def _work(self, arrival: Arrival) -> None:
        assignment = arrival.assignment
        try:
            work: TrainedTask = self._around("train", self._trained, arrival)
            left = assignment.pace_s - (time.perf_counter() - arrival.since)
            if left > 0 and self.stop.wait(left):
                raise Stopped
            if work.update.refusal != OUT_OF_MEMORY:
                for one in self._extensions:
                    one.after(work)
        except Stopped:
            return  # the receiving thread has queued the reason for the end
        except InvalidPayload as unsound:
            raise Refused(unsound.reason, str(unsound)) from None
        except TaskRefused as refusal:
            self.give_up(assignment, Failed(refusal.server_reason))
            if refusal.then != "go on":
                raise
            _log.warning(f"client {self.info.id}: {refusal}", extra={"private": True})
            return
        except TaskFailed as failed:
            told = Failed.of(failed, private=self.info.own_data)
            for one in self._extensions:
                told = one.failure(failed, told)
            self.give_up(assignment, told)
            with suppress(queue.Empty):  # waits until the server has handled the failure, before the connection closes
                self.received.get(timeout=self.waits.stop_s)
            raise
        if work.update.refusal == OUT_OF_MEMORY:
            warn_once(_log, f"client {self.info.id}: memory is too small for {assignment.spec}")
            self.give_up(assignment, Failed(OUT_OF_MEMORY))
            return
        work.answer = self._answer(work.update, assignment.spec.base)
        self._around("send", self._send, work)

    def _answer(self, update: Update, base: str | None) -> Answer:
        """Return the fields that are sent with an update: metrics, numbers of samples and steps, digests."""
        if values := logged_not_finite(update.metrics):
            # the warning is private, since it names metrics that may have to stay at the site
            warn_once(_log, left_out(self.info.id, values), private=True)
        metrics = {**update.metrics, PEAK: float(peak_bytes(self.trainer.fabric.device))}
        digest = None if base is None else self.submodels.bases.digest(base)
        answer = Answer(update.num_samples, update.num_steps, metrics, update.extra, digest)
        for one in self._extensions:
            answer = one.answer(answer)
        return answer

    def _send(self, work: TrainedTask) -> None:
        self.deliver(self.message(work, self.pack(work)), work)

    def pack(self, work: TrainedTask) -> FlatTensors:
        """Compress the tensors of an update."""
        return self._up.pack(work.assignment, work.update.tensors, work.received)

    def message(self, work: TrainedTask, tensors: FlatTensors) -> Message:
        """Return the message of an update; from here on the server may send the next task."""
        assert work.answer is not None
        assignment = work.assignment
        self.unsent, self.out = assignment.id, None
        return Message(Kind.UPDATE, assignment.id, assignment.incarnation, work.answer.to_meta(), tensors)

    def deliver(self, message: Message, work: TrainedTask) -> None:
        """Send the message of an update."""
        try:
            self.pair.send(message)
        except (PeerLost, PeerTimeout):
            return
        finally:
            give_back()
        self.unsent = None
        self.num_answered += 1
        for one in self._extensions:
            one.sent(work)
        if work.settles:
            self.pair.settle(self.stop.is_set)

    def give_up(self, assignment: Assignment, failed: Failed) -> None:
        """Tell the server that there will be no answer, and why."""
        self.flush()
        self.out = None
        with suppress(PeerLost, PeerTimeout):
            self.pair.send(Message(Kind.FAILED, assignment.id, assignment.incarnation, failed.to_meta()))


def _bound(hook: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments: hook(*arguments, plain)


def _of_its_frame(arrival: Arrival, message: Message) -> Arrival:
    """Return a task that has arrived; raises `Refused` if its incarnation is not that of the message."""
    named = arrival.assignment.incarnation
    if named != message.incarnation:
        raise Refused("wrong-incarnation", f"{named}, in a frame of {message.incarnation}")
    return arrival
