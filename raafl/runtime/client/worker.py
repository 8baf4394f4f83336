"""Run a client on one connection: receive a submodel, train it, send the update, until the server ends this."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from raafl.compression.plan import CompressionPlan
from raafl.compression.streams import DownlinkCodec, UplinkCodec
from raafl.config.options import Timeouts
from raafl.core.payload import Payload
from raafl.core.state import ClientState
from raafl.core.task import expected_next
from raafl.core.types import OUT_OF_MEMORY, POLICY, Assignment, ClientInfo, Update
from raafl.data.federated import ClientData
from raafl.errors import InvalidPayload, TaskFailed
from raafl.local.client_group import ClientProcesses
from raafl.local.context import TaskContext
from raafl.local.evaluation.metrics import PEAK, left_out, logged_not_finite, peak_bytes
from raafl.local.failure import attempt
from raafl.local.malloc import give_back
from raafl.local.train import LocalTrainer, Stopped
from raafl.log import warn_once
from raafl.parts.protect.secure.group import CannotOpen
from raafl.runtime.client.early import EarlyTask
from raafl.runtime.client.receipts import Receipts, receipt_of
from raafl.runtime.client.secure import SecureSide
from raafl.runtime.client.sender import Sender
from raafl.runtime.client.site.gate import Gate, PolicyRefusal
from raafl.runtime.exchange import ClientSide, Questions
from raafl.runtime.fields import SignedHead
from raafl.runtime.identity import Identity
from raafl.runtime.protocol import Answer, Assign, Failed, Hello, Reason, Welcome
from raafl.runtime.secure_groups import NOT_OPENED
from raafl.sanitize import sanitize_text
from raafl.submodel import FlatTensors, Layout, SpecError, Submodels
from raafl.transport import Connection, Kind, Message, PeerLost, PeerTimeout, Refused

_log = logging.getLogger(__name__)


class Client:
    """Client on one connection to a server: receives tasks, trains them and sends the updates.

    One thread always receives, so that a stop message or a broken connection interrupts the present task, whose result
    is no longer needed. The other thread trains and sends. During a task the server sends nothing but stop and
    keepalive messages, and replies if the task is split between client and server; a task that was begun before it
    arrived is sent while it is trained.

    Attributes:
        unsent: id of a task whose answer could not be sent; None = none.
        num_answered: number of tasks answered on this connection.
        gate: gate that checks each task against the policy of the client's site.
        incarnation: number of times that this client has joined, as counted by the server.
        receipts: writer of receipts for sent updates; None = no receipts are written.
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
        secure: SecureSide | None = None,
    ) -> None:
        """Prepare; `run` sends the HELLO.

        Args:
            info: description of the client.
            pair: the connection.
            submodels: of the model, without values.
            trainer: trains tasks.
            data: the client's.
            waits: timeouts.
            config: digest of each section of the config for the server to compare; None = not compared.
            unsent: id of an answer that an earlier connection lost, for the server to count.
            on_welcome: called once the server has admitted the client.
            plan: compression; None = none.
            process_group: processes that train this client together; None = only this one.
            secure: masks updates; None = they go as they are.
        """
        self._plan, self._secure = plan, secure
        self.receipts: Receipts | None = None
        self._head: SignedHead | None = None  # came with `_assignment`
        travels = plan or CompressionPlan(Payload(submodels))
        kept = ClientState()  # of this connection: what stays here between tasks is of both directions
        self._down, self._up = DownlinkCodec(travels, kept=kept), UplinkCodec(travels, kept=kept)
        self._stop = threading.Event()
        self._context = TaskContext(self._stop, process_group=process_group)
        self._side = ClientSide(pair, trainer, waits.idle_s + waits.task_s + waits.stop_s)
        self._questions: Questions = self._side if secure is None else secure
        self._info, self._pair, self._submodels, self._trainer = info, pair, submodels, trainer
        self._data, self._waits, self._config = data, waits, config
        self.unsent, self._on_welcome = unsent, on_welcome
        self.num_answered, self.gate, self.incarnation = 0, Gate(), 0
        # The reader's thread receives into `_storage`, the other trains from it; `_free` hands it back. `_assignment` is cleared
        # before the answer goes out, not after: the next may be here while that send has not returned yet.
        self._storage: tuple[Layout, FlatTensors] | None = None
        self._assignment: Assignment | None = None
        self._since = 0.0
        self._free = threading.Event()
        self._free.set()
        self._received: queue.SimpleQueue[tuple[Assignment, FlatTensors] | str | Exception] = queue.SimpleQueue()
        self._sender, self._goes_ahead = Sender(self._received.put), False  # where the next task may come meanwhile
        self._expected: Assignment | None = None  # the next task, if it may be begun before it arrives
        self._early: EarlyTask | None = None  # begun before it has arrived

    def run(self) -> str:
        """Work until the server tells the client to stop; return the server's reason, with the connection closed.

        Raises:
            TaskFailed: the user's code failed; the server was told.
            PolicyRefusal: the policy of the site ends the session; the server was told.
            PeerLost: the connection was lost.
            PeerTimeout: the server sent nothing for ``Timeouts.idle_s``.
            Refused: the server sent an invalid message.
        """
        self.gate.stopped = self._stop.is_set
        self._pair.send(Message(Kind.HELLO, 0, self._info.incarnation, self._hello().to_meta()))
        reader = threading.Thread(target=self._read, name="reader", daemon=True)
        reader.start()
        try:
            while True:
                early = self._begin_early()
                item = early.item if early is not None and early.item is not None else self._received.get()
                # the reader's last word is a reason or an error
                if isinstance(item, str):
                    self._sender.wait(self._waits.stop_s)
                    return item
                if isinstance(item, Exception):
                    raise item
                self._work(*item, early)
                del item, early  # its submodel goes before the next one comes
                self._free.set()
        finally:
            self._pair.close()
            reader.join(timeout=self._waits.stop_s)
            self._sender.wait(self._waits.stop_s)

    def _read(self) -> None:
        """Receive until the server says stop or is gone."""
        wait_s = self._waits.join_s
        try:
            while True:
                message = self._pair.recv(self._expect, wait_s)
                self.incarnation = message.incarnation
                wait_s = self._waits.idle_s  # it is heard from that often, whatever the others do
                if message.kind is Kind.WELCOME:
                    Welcome.from_meta(message.meta).apply_to(self._submodels)
                    self.unsent = None
                    self._on_welcome()
                if message.kind is Kind.STOP:
                    self._received.put(Reason.from_meta(message.meta).reason)
                    break
                if message.kind is Kind.ASSIGN and self._assignment is not None and message.tensors is not None:
                    self._received.put((_of_its_frame(self._assignment, message), message.tensors))
                    wait_s += self._waits.task_s  # a server that waits for an answer says nothing
                if message.kind is Kind.REPLY:
                    self._questions.deliver(message.meta, message.tensors)
                    wait_s += self._waits.task_s
                if message.kind is Kind.REFUSED:  # of a task with an exchange; nothing is packed now
                    self._up.forget()
                if message.kind is Kind.REFUSED and self._is_out(message.assignment):
                    reason = Reason.from_meta(message.meta).reason
                    warn_once(_log, f"client {self._info.id}: the server refuses a task: {reason}")
                    self._assignment = None  # given up in the middle; the next may come
                    self._questions.stop(message.assignment)
        except Exception as error:
            self._received.put(error)
        self._stop.set()
        if (early := self._early) is not None:
            early.stop.set()
        self._questions.stop()

    @property
    def has_task(self) -> bool:
        """Whether a task is being received or trained, or an update sent beside the next task."""
        return self._assignment is not None or self._sender.is_busy

    def _is_out(self, number: int) -> bool:
        return self._assignment is not None and self._assignment.id == number

    def _hello(self) -> Hello:
        return Hello.of_client(Identity.of(self._submodels, self._config), self._info, self.unsent)

    def _expect(self, kind: Kind, assignment: int, meta: dict[str, Any]) -> FlatTensors | None:
        if kind is Kind.REPLY:
            return self._questions.expect(assignment)
        if kind is not Kind.ASSIGN:
            return None
        if self._assignment is not None:
            raise Refused("bad-kind", f"assignment {assignment} came before {self._assignment.id} was answered")
        self._since = time.perf_counter()
        try:
            message = Assign.from_meta(meta)
            found = message.assignment
            if found.id != assignment:
                raise Refused("bad-json", f"assignment {assignment} names another, {found.id}")
            layout = self._layout(found)  # what came before is unpacked: an answer to it has been sent
        except (SpecError, TypeError, KeyError) as error:
            raise Refused("bad-json", f"assignment {assignment}: {sanitize_text(error)}") from None
        self._free.wait(self._waits.stop_s)
        self._free.clear()
        if self._storage is None or self._storage[0] != layout:
            self._storage = None  # the old submodel goes before the new one comes
            self._storage = (layout, FlatTensors.empty(layout, self._trainer.fabric.device))
        self._assignment, self._head, self._goes_ahead = found, message.head, message.ahead
        if (early := self._early) is not None:
            early.watch(found)
        return self._storage[1]

    def _layout(self, assignment: Assignment) -> Layout:
        """Return the layout of what comes down for a task; raises `SpecError` where it is not of the part that is known."""
        exchange = self._side.exchange(assignment)
        if exchange is not None:
            plain = exchange.client.layout(assignment.spec, "sent")
            if self._plan is None:
                return plain
            if plain != self._plan.submodels.layout(assignment.spec, "sent"):
                raise SpecError(
                    "it splits the model elsewhere than this client's config does: give both the same model"
                )
        return self._down.layout(assignment)

    def _begin_early(self) -> EarlyTask | None:
        """Train the next task from before it arrives, if that is possible; None = wait for it."""
        expected, self._expected = self._expected, None
        device = self._trainer.fabric.device
        own = None if expected is None else self._down.own(expected, device)
        if expected is None or own is None:
            return None
        peak_bytes(device, anew=True)
        early = self._early = EarlyTask(expected, own, self._received.get, self._down.unpack)
        if (arrived := self._assignment) is not None:  # its arrival began before the reader could know of `early`
            early.watch(arrived)
        if self._stop.is_set():
            early.stop.set()
        early.train(self._trainer, self._data, self._context)
        self._early = None
        return early

    def _trained(
        self, assignment: Assignment, wire: FlatTensors, early: EarlyTask | None
    ) -> tuple[Update, FlatTensors]:
        """Return the result of a task, and the values from which it was trained."""
        if early is not None and (update := early.result()) is not None:
            return update, early.values
        peak_bytes(self._trainer.fabric.device, anew=True)
        self.gate.before(assignment)
        received = self._down.unpack(assignment, wire)
        trainer, context = self._side.begin(assignment, self._context)
        return attempt(trainer, assignment, received, self._data, context), received

    def _work(self, assignment: Assignment, wire: FlatTensors, early: EarlyTask | None) -> None:
        try:
            update, received = self._trained(assignment, wire, early)
            left = assignment.pace_s - (time.perf_counter() - self._since)
            if left > 0 and self._stop.wait(left):
                raise Stopped
            trained = "" if self.receipts is None else update.tensors.fingerprint()
            if update.refusal != OUT_OF_MEMORY:
                update = self.gate.after(assignment, update, received)
        except Stopped:
            return  # what the reader has to say comes next
        except InvalidPayload as unsound:
            raise Refused(unsound.reason, str(unsound)) from None
        except PolicyRefusal as refusal:
            self._give_up(assignment, Failed(POLICY))
            if refusal.then != "go on":
                raise
            _log.warning(f"client {self._info.id}: {refusal}", extra={"private": True})
            return
        except TaskFailed as failed:
            told = Failed.of(failed, private=self.gate.hides_tracebacks(self._info.own_data))
            self._give_up(assignment, replace(told, logs=self.gate.log_lines()))
            with suppress(queue.Empty):  # until the server has taken it in
                self._received.get(timeout=self._waits.stop_s)
            raise
        if update.refusal == OUT_OF_MEMORY:
            warn_once(_log, f"client {self._info.id}: memory is too small for {assignment.spec}")
            self._give_up(assignment, Failed(OUT_OF_MEMORY))
            return
        self._answer(assignment, update, received, trained)

    def _answer(self, assignment: Assignment, update: Update, received: FlatTensors, trained: str) -> None:
        """Send an update, masked where updates are, with what the site lets leave beside it.

        Args:
            assignment: its task.
            update: as the site lets it leave.
            received: from which it was trained.
            trained: fingerprint of it before the site's policy; "" where no receipts are kept.
        """
        if values := logged_not_finite(update.metrics):
            warn_once(_log, left_out(self._info.id, values), private=True)  # names metrics that may not leave the site
        head, leaves = self._head, "" if self.receipts is None else update.tensors.fingerprint()
        device, base = self._trainer.fabric.device, assignment.spec.base
        answer = Answer(
            update.num_samples,
            update.num_steps,
            self.gate.metrics({**update.metrics, PEAK: float(peak_bytes(device))}),
            update.extra,
            None if base is None else self._submodels.bases.digest(base),
            logs=() if self._secure is not None else self.gate.log_lines(),
        )
        overlaps = self._goes_ahead
        is_alone = self._context.process_group is None and self._secure is None and not self.gate.asks_first
        is_sound = update.refusal is None  # else its copy may hold values that are not finite
        self._expected = expected_next(assignment) if is_alone and is_sound else None
        goes_ahead = (overlaps and not self.gate.counts_bytes) or self._expected is not None
        if self._secure is None:
            self._sender.wait()  # the last update lies where this one will
            packed = self._up.pack(assignment, update.tensors, received)
            if goes_ahead and packed is update.tensors:  # the next task is trained in its place
                packed = self._sender.copy(packed)
        else:
            answer = replace(answer, metrics={}, extra={})
            revealed = self._masked(self._secure, assignment, update, answer, received)
            if revealed is None:
                return
            packed = revealed
        write_receipt: Callable[[], None] | None = None
        if self.receipts is not None:
            whole = self._side.exchange(assignment) is None  # the server trains nothing of it
            as_it_is = self._plan is None or (self._plan.up is None and not self._plan.payload.is_resident)
            plain = whole and self._secure is None and as_it_is
            sent = leaves if plain else None  # else the server's fingerprint is of other values
            receipt = receipt_of(assignment, head, trained=trained, sent=sent, num_samples=update.num_samples)
            alone = whole and self._context.process_group is None and trained == leaves  # no noise of the site's own
            inputs = self.receipts.draw_inputs(received) if alone else None
            write_receipt = partial(self.receipts.sent, receipt, inputs)
        self.unsent, self._assignment = assignment.id, None  # from here on the server may send the next
        message = Message(Kind.UPDATE, assignment.id, assignment.incarnation, answer.to_meta(), packed)
        if goes_ahead:
            self._sender.start(partial(self._deliver, message, write_receipt, settles=True))
        else:
            self._deliver(message, write_receipt, settles=overlaps)

    def _deliver(self, message: Message, write_receipt: Callable[[], None] | None, *, settles: bool = False) -> None:
        """Send an update.

        Args:
            message: the update.
            write_receipt: called once it has been sent; None = no receipt is written.
            settles: whether to wait until its tensors need not be sent again.
        """
        try:
            self._pair.send(message)
        except (PeerLost, PeerTimeout):
            return
        finally:
            give_back()
        self.unsent = None
        self.num_answered += 1
        if write_receipt is not None:
            write_receipt()
        if settles:
            self._pair.settle(self._stop.is_set)

    def _masked(
        self, secure: SecureSide, assignment: Assignment, update: Update, answer: Answer, received: FlatTensors
    ) -> FlatTensors | None:
        """Send an update masked; return what opens its group's sum, or None where the task has ended without.

        Args:
            secure: this client's side of the protocol.
            assignment: its task.
            update: as the site lets it leave.
            answer: what leaves beside it.
            received: from which it was trained.
        """
        refusal = secure.refusal(update)
        try:
            if refusal is None:
                return secure.mask(assignment, update, answer, received)
            self._give_up(assignment, Failed(refusal))
        except CannotOpen as error:
            warn_once(_log, f"client {self._info.id} takes no part in a sum: {error}")
            self._give_up(assignment, Failed(NOT_OPENED, error=str(error)))
        except Stopped:
            pass  # what the reader has to say comes next
        return None

    def _give_up(self, assignment: Assignment, failed: Failed) -> None:
        """Tell the server that there will be no answer, and why."""
        self._sender.wait()
        self._assignment = None
        with suppress(PeerLost, PeerTimeout):
            self._pair.send(Message(Kind.FAILED, assignment.id, assignment.incarnation, failed.to_meta()))


def _of_its_frame(assignment: Assignment, message: Message) -> Assignment:
    """Return a task's assignment; raise `Refused` if it names another incarnation than the frame in which it came."""
    if assignment.incarnation != message.incarnation:
        raise Refused("wrong-incarnation", f"{assignment.incarnation}, in a frame of {message.incarnation}")
    return assignment
