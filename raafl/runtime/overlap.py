"""Let clients train while an update travels (``overlap``): the next task is sent meanwhile, or begun before it arrives.

The client, the server's session and the virtual clock each have an extension here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from raafl.compression.streams import Scratch, UplinkCodec
from raafl.core.restoring import assignment_from_json
from raafl.core.saving import assignment_to_json
from raafl.core.select import SelectContext
from raafl.core.types import OUT_OF_MEMORY, Assignment, ClientInfo, Sending, Update, Work
from raafl.data.federated import ClientData
from raafl.errors import BadInput, GpuLost, InvalidPayload, TaskFailed
from raafl.local.context import Stopped, TaskContext
from raafl.local.evaluate import peak_bytes
from raafl.local.train import LocalTrainer
from raafl.runtime.client.worker import Arrival, Client, ClientExtension, Item, TrainedTask
from raafl.runtime.executors.base import attempt
from raafl.runtime.protocol import Assign
from raafl.runtime.server.session_protocol import (
    Beside,
    Confirm,
    Join,
    NextTask,
    Sent,
    SessionExtension,
    SessionProtocol,
    Steps,
    Task,
)
from raafl.runtime.simulation import ARRIVED, ClockExtension, Due, Simulation
from raafl.submodel import FlatTensors
from raafl.transport import Kind, Refused


class EarlySteps:
    """Record of when each client began to make the first steps of its next task: when its last update began to travel.

    A real client does the same (`EarlyTask`): it makes `Traits.steps_ahead` steps of the task that it
    expects, and they count if that task comes.
    """

    def __init__(self) -> None:
        self._since: dict[int, tuple[float, Assignment]] = {}

    def begin(self, assignment: Assignment, trained_s: float) -> None:
        """Record that a client begins its next task when ``assignment`` is trained, at ``trained_s``, if it may."""
        expected = expected_next(assignment)
        if expected is not None:
            self._since[assignment.client] = trained_s, expected

    def saved_s(
        self, assignment: Assignment, client: ClientInfo, fleet: SelectContext, received_s: float, compute_s: float
    ) -> float:
        """Return the seconds of a task's computing that are over when it is received."""
        since_s, expected = self._since.pop(assignment.client, (received_s, None))
        if expected is None or not begins_alike(expected, assignment):
            return 0.0
        work = Work(assignment.spec, assignment.region, assignment.num_epochs, assignment.num_steps, assignment.extra)
        return min(_early_share(fleet, client, work) * compute_s, received_s - since_s)

    def forget(self, client: int) -> None:
        """Forget what a client has begun, since it was lost, or since its update cannot be used."""
        self._since.pop(client, None)

    def save(self) -> list[Any]:
        """Return the record as plain data."""
        return [[at, assignment_to_json(expected)] for at, expected in self._since.values()]

    def restore(self, data: list[Any]) -> None:
        """Restore the record from the result of `save`."""
        both = [(at, assignment_from_json(expected)) for at, expected in data]
        self._since = {expected.client: (at, expected) for at, expected in both}


def _early_share(fleet: SelectContext, client: ClientInfo, work: Work) -> float:
    """Return the share of a task's computing that ``client`` may do before the task arrives; see `Traits.steps_ahead`."""
    samples, ahead = fleet.samples(client.num_samples, work), fleet.local.traits.steps_ahead
    early = min(fleet.samples(client.num_samples, Work(num_steps=ahead)), samples)
    # forward passes without backward are counted as a third of a training step, as in `raafl.core.select.time_on`
    return early / (samples + fleet.tested(client, work.extra) / 3)


class OverlappedClock(ClockExtension):
    """Simulated clients that train while they send: their whole next task, or the first steps of one they expect."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__(simulation)
        # True = an update is sent beside the next task; False = the next task begins before it is assigned
        self._overlaps = simulation.coordinator.overlap
        self._uplink_free: dict[int, float] = {}  # by client: time at which its last update will have been sent
        self._early = EarlySteps()

    def uplink_free_s(self, client: int) -> float:
        """Return the time until which an earlier update takes the client's uplink."""
        return self._uplink_free.get(client, 0.0)

    def saved_s(self, assignment: Assignment, received_s: float, compute_s: float) -> float:
        """Return the seconds of a task's computing that are over when it is received."""
        coordinator = self.simulation.coordinator
        client = coordinator.roster.clients[assignment.client]
        return self._early.saved_s(assignment, client, coordinator.fleet, received_s, compute_s)

    def assigned(self, due: Due, trained_s: float, at_s: float) -> None:
        """Queue the moment at which the client begins to send, and may have its next task."""
        assignment, client = due.assignment, due.assignment.client
        self._early.begin(assignment, trained_s)
        if not self._overlaps:
            return
        free_s, self._uplink_free[client] = self.uplink_free_s(client), at_s
        if due.time.up_s > 0:  # queued before the arrival, so that it comes first if both are due at once
            sending = Sending(client, assignment.incarnation, assignment.id)
            self.simulation.push(min(max(trained_s, free_s), at_s), ARRIVED, sending)

    def refused(self, client: int) -> None:
        """Forget the early steps of a client whose update cannot be used: it does not go on from it."""
        self._early.forget(client)

    def let_go(self, client: int) -> None:
        """Drop the other of a client's two tasks."""
        if self._overlaps:
            self.simulation.cancel(client)

    def cancelled(self, client: int, tasks: Iterable[int]) -> None:
        """Forget a client that was lost."""
        self._uplink_free.pop(client, None)
        self._early.forget(client)

    def save(self) -> dict[str, Any]:
        """Return the early steps; when uplinks are free follows from the tasks."""
        return {"early": self._early.save()}

    def restore(self, data: dict[str, Any]) -> list[Due]:
        """Restore the early steps."""
        self._early.restore(data.get("early", []))
        return []

    def resumed(self, client: int, at_s: float) -> None:
        """Take the client's uplink until its answer is there."""
        if self._overlaps:
            self._uplink_free[client] = max(at_s, self.uplink_free_s(client))


def expected_next(assignment: Assignment) -> Assignment | None:
    """Predict a client's next task, so that it can begin early; ``id``, ``version`` and ``extra`` are not known yet.

    Returns:
        The expected task; None = the client may not begin it early.
    """
    if assignment.next_seed is None:
        return None
    return replace(
        assignment, task=assignment.task + 1, seed=assignment.next_seed, lr_scale=assignment.next_lr_scale, pace_s=0.0
    )


def begins_alike(expected: Assignment, actual: Assignment) -> bool:
    """Check whether the first steps of two tasks of one client are the same, up to `Traits.steps_ahead`."""
    names = ("client", "incarnation", "task", "spec", "num_epochs", "num_steps", "seed", "lr_scale")
    return all(getattr(expected, name) == getattr(actual, name) for name in names)


class EarlyTask:
    """A task that a client expects, trained up to the step that needs what it receives, and then on once it has arrived.

    If anything but the expected task arrives, or if training fails before, nothing of it remains: what has arrived is then
    trained from its first step, with the same result as without this.

    `expected`: the expected task.
    `values`: payload of the task: the client's copy at first, completed when the task arrives.
    `stop`: event that ends the early steps, set when they can no longer count.
    `item`: item that the connection has brought meanwhile; None = none was taken from it.
    `update`: result of the task; None = it has to be trained anew.
    `failure`: error of the user's code after the task had arrived; None = there was none.
    """

    def __init__(
        self,
        expected: Assignment,
        values: FlatTensors,
        take: Callable[[], Item],
        unpack: Callable[[Assignment, FlatTensors, FlatTensors], object],
    ) -> None:
        self.expected, self.values, self.stop = expected, values, threading.Event()
        self.item: Item | None = None
        self.update: Update | None = None
        self.failure: Exception | None = None
        self._take, self._unpack = take, unpack
        self._arrived: Assignment | None = None  # the expected task, once it has arrived and its values are in `values`

    def watch(self, arrived: Assignment) -> None:
        """End the early steps if the task that begins to arrive is not the expected one."""
        if not begins_alike(self.expected, arrived):
            self.stop.set()

    def result(self) -> Update | None:
        """Return the update of the task, None if it has to be trained anew; raises the error of the user's code, if any."""
        if self.failure is not None:
            raise self.failure
        return self.update

    def train(self, trainer: LocalTrainer, data: ClientData, context: TaskContext) -> None:
        """Train the task, as far as is possible.

        Raises:
            GpuLost: the GPU had an error from which it cannot recover.
        """
        try:
            update = attempt(
                trainer, self.expected, self.values, data, replace(context, stop=self.stop, receive=self._receive)
            )
        except GpuLost:
            raise  # the GPU is unusable, so later tasks would fail as well
        except (TaskFailed, BadInput) as error:
            self.failure = None if self._arrived is None else error
            return
        except Stopped:
            return
        if self._arrived is not None and update.refusal != OUT_OF_MEMORY:
            update.assignment = self._arrived.id
            self.update = update

    def _receive(self) -> Assignment:
        item = self.item = self._take()
        if not isinstance(item, tuple) or not begins_alike(self.expected, item[0]):
            raise Stopped
        try:
            self._unpack(item[0], item[1], self.values)
        except InvalidPayload:
            raise Stopped from None
        self._arrived = item[0]
        return self._arrived


class Sender:
    """Sender of a client's updates, one at a time, in the background.

    Only the training thread calls these methods. Each update is sent by a thread of its own.
    """

    def __init__(self, on_error: Callable[[Exception], None]) -> None:
        self._on_error = on_error
        self._thread: threading.Thread | None = None
        self._storage: FlatTensors | None = None

    @property
    def is_busy(self) -> bool:
        """Whether an update is being sent."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the last update has been sent, or ``timeout_s`` seconds have passed; None = no limit."""
        if self._thread is not None:
            self._thread.join(timeout=timeout_s)

    def copy(self, tensors: FlatTensors) -> FlatTensors:
        """Copy an update to storage that does not change while the next task is trained; call it only after `wait`."""
        if self._storage is None or self._storage.layout != tensors.layout:
            self._storage = None  # frees the old update before the new one is allocated
            self._storage = FlatTensors.empty(tensors.layout, tensors.device)
        return self._storage.copy_(tensors)

    def start(self, send: Callable[[], None]) -> None:
        """Call ``send`` on a new thread, and return at once; call it only after `wait`."""
        self._thread = threading.Thread(target=self._send, args=(send,), name="sender", daemon=True)
        self._thread.start()

    def _send(self, send: Callable[[], None]) -> None:
        try:
            send()
        except Exception as error:
            self._on_error(error)


class OverlappedClient(ClientExtension):
    """A client that trains while an update travels, where the server's task says that it may, and no extension forbids it."""

    def __init__(self, client: Client) -> None:
        super().__init__(client)
        self._sender = Sender(client.received.put)
        self._expected: Assignment | None = None  # the predicted next task; None = no task may begin before it arrives
        self._early: EarlyTask | None = None  # the predicted task that is being trained and has not arrived
        self._begun: EarlyTask | None = None  # the last predicted task, until the task that arrived was trained

    def announced(self, assignment: Assignment) -> None:
        """End the early steps of another task than the one that begins to arrive."""
        if (early := self._early) is not None:
            early.watch(assignment)

    def ended(self) -> None:
        """End the early steps: no task will come."""
        if (early := self._early) is not None:
            early.stop.set()

    def take(self, plain: Callable[[], Item]) -> Item:
        """Train the next task from before it arrives, if that is possible; return what has arrived."""
        self._begun = early = self._begin()
        return plain() if early is None or early.item is None else early.item

    def _begin(self) -> EarlyTask | None:
        client, (expected, self._expected) = self.client, (self._expected, None)
        device = client.trainer.fabric.device
        own = None if expected is None else client.down.own(expected, device)
        if expected is None or own is None:
            return None
        peak_bytes(device, anew=True)
        early = self._early = EarlyTask(expected, own, client.received.get, client.down.unpack)
        # the task may have begun to arrive before the receiving thread could see `_early`
        if (arrived := client.out) is not None:
            early.watch(arrived.assignment)
        if client.stop.is_set():
            early.stop.set()
        early.train(client.trainer, client.data, client.context)
        self._early = None
        return early

    def train(self, arrival: Arrival, plain: Callable[[Arrival], TrainedTask]) -> TrainedTask:
        """Return the result of a task that was begun early, if it came as expected."""
        early, self._begun = self._begun, None
        update = None if early is None else early.result()
        return plain(arrival) if early is None or update is None else TrainedTask(arrival, early.values, update)

    def send(self, work: TrainedTask, plain: Callable[[TrainedTask], None]) -> None:
        """Send an update beside the next task, where that one may come or be begun meanwhile."""
        client, assignment = self.client, work.assignment
        # a refused update may have non-finite values, on which no next task can be started
        begins = client.may("begin early") and client.context.process_group is None and work.update.refusal is None
        self._expected = expected_next(assignment) if begins else None
        self._sender.wait()  # until the previous update is sent, its storage is in use
        if self._expected is None and not (work.arrival.ahead and client.may("send beside")):
            work.settles = work.arrival.ahead
            plain(work)
            return
        packed = client.pack(work)
        if packed is work.update.tensors:  # the trainer's own tensors, which the next task overwrites
            packed = self._sender.copy(packed)
        message, work.settles = client.message(work, packed), True
        self._sender.start(lambda: client.deliver(message, work))

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait until the last update has been sent."""
        self._sender.wait(timeout_s)

    @property
    def is_busy(self) -> bool:
        """Whether an update is being sent."""
        return self._sender.is_busy


class OverlappedSession(SessionExtension):
    """A session whose client trains its next task while the update of the last one is being sent.

    An update that begins to arrive shows that the client has finished training its task. While it is received, the next task is
    sent beside, as soon as the coordinator assigns one; that ends before the next update is received. Two updates may wait for
    the coordinator, so there is storage for two.
    """

    def __init__(self, session: SessionProtocol) -> None:
        super().__init__(session)
        self._other_scratch = Scratch(session.setup.terms.storage)
        self._other_up = UplinkCodec(session.plan, self._other_scratch, session.client_state)

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
            yield Confirm(assignment.id)
        return following
