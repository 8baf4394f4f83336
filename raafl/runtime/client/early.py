"""Train while an update travels (``overlap``): send it beside the next task, or begin that task before it arrives."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

from raafl.core.types import OUT_OF_MEMORY, Assignment, Update
from raafl.data.federated import ClientData
from raafl.errors import BadInput, GpuLost, InvalidPayload, TaskFailed
from raafl.local.context import Stopped, TaskContext
from raafl.local.evaluate import peak_bytes
from raafl.local.train import LocalTrainer
from raafl.runtime.client.worker import Arrival, Client, ClientExtension, Item, Work
from raafl.runtime.early import begins_alike, expected_next
from raafl.runtime.executors.base import attempt
from raafl.submodel import FlatTensors


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

    def train(self, arrival: Arrival, plain: Callable[[Arrival], Work]) -> Work:
        """Return the result of a task that was begun early, if it came as expected."""
        early, self._begun = self._begun, None
        update = None if early is None else early.result()
        return plain(arrival) if early is None or update is None else Work(arrival, early.values, update)

    def send(self, work: Work, plain: Callable[[Work], None]) -> None:
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
