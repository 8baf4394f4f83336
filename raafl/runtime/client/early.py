"""Begin a client's next task before it arrives: Streaming DiLoCo's steps while a fragment travels."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

from raafl.core.task import begins_alike
from raafl.core.types import OUT_OF_MEMORY, Assignment, Update
from raafl.data.federated import ClientData
from raafl.errors import BadInput, GpuLost, InvalidPayload, TaskFailed
from raafl.local.context import TaskContext
from raafl.local.failure import attempt
from raafl.local.train import LocalTrainer, Stopped
from raafl.submodel import FlatTensors

Item = tuple[Assignment, FlatTensors] | str | Exception
"""What a client's connection brings: a task with its values as received, the reason of a stop, or an error."""


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
        """Prepare."""
        self.expected, self.values, self.stop = expected, values, threading.Event()
        self.item: Item | None = None
        self.update: Update | None = None
        self.failure: Exception | None = None
        self._take, self._unpack = take, unpack
        self._arrived: Assignment | None = None  # the task, once its values are in `values`

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
            raise  # no task can be trained any more
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
            self._unpack(*item, self.values)
        except InvalidPayload:
            raise Stopped from None
        self._arrived = item[0]
        return self._arrived
