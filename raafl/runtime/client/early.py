"""Begin a client's next task before it arrives: Streaming DiLoCo's steps while a fragment travels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from raafl.core.local import begins_alike
from raafl.core.types import OUT_OF_MEMORY, Assignment, Update
from raafl.data.federated import ClientData
from raafl.errors import BadInput, InvalidPayload, TaskFailed
from raafl.local.context import TaskContext
from raafl.local.failure import attempt
from raafl.local.train import LocalTrainer, Stopped
from raafl.submodel import FlatTensors

Item = tuple[Assignment, FlatTensors] | str | Exception
"""What a client's connection brings: a task with its values as received, the reason of a stop, or an error."""


class EarlyTask:
    """A task that a client expects, trained up to the step that needs what it receives, and then on once it has arrived.

    If anything but the expected task arrives, or if training fails, nothing of it remains: what has arrived is then trained
    from its first step, with the same result as without this.

    Attributes:
        values: payload of the task: the client's copy at first, completed when the task arrives.
        item: item that the connection has brought meanwhile; None = none was taken from it.
        update: result of the task; None = it has to be trained anew.
    """

    def __init__(
        self, expected: Assignment, values: FlatTensors, take: Callable[[], Item],
        unpack: Callable[[Assignment, FlatTensors, FlatTensors], object],
    ) -> None:  # fmt: skip
        """Prepare.

        Args:
            expected: the expected task.
            values: the client's copy of its payload; changed when the task arrives.
            take: waits for the next item of the connection.
            unpack: writes the values of a task, as received, into ``values``.
        """
        self.values = values
        self.item: Item | None = None
        self.update: Update | None = None
        self._expected, self._take, self._unpack = expected, take, unpack

    def train(self, trainer: LocalTrainer, data: ClientData, context: TaskContext) -> None:
        """Train the task, as far as is possible.

        Args:
            trainer: trainer of the client's tasks.
            data: data of the client.
            context: environment of the client's tasks.
        """
        try:
            update = attempt(trainer, self._expected, self.values, data, replace(context, receive=self._receive))
        except (Stopped, TaskFailed, BadInput):
            return
        if isinstance(self.item, tuple) and update.refusal != OUT_OF_MEMORY:  # else no step has asked for it
            update.assignment = self.item[0].id
            self.update = update

    def _receive(self) -> Assignment:
        item = self.item = self._take()
        if not isinstance(item, tuple) or not begins_alike(self._expected, item[0]):
            raise Stopped
        try:
            self._unpack(*item, self.values)
        except InvalidPayload:
            raise Stopped from None
        return item[0]
