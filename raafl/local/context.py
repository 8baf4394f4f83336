"""Define what surrounds a task: who may stop it, whom it talks to, and which processes train it together."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from raafl.core.types import Assignment

if TYPE_CHECKING:
    from raafl.core.exchange import ClientLink
    from raafl.local.client_group import ClientProcesses


@dataclass(slots=True)
class Progress:
    """Position of a task in its data, for messages about failures."""

    place: str = ""  # description of the current batch, such as "batch 3", for error messages


@dataclass(frozen=True, slots=True)
class TaskContext:
    """Environment of a task; it does not influence the task's result."""

    # once this event is set, the task raises `Stopped` before its next batch; None = the task cannot be stopped
    stop: threading.Event | None = None
    # connection by which the task exchanges messages with the server; None = the method exchanges none
    link: ClientLink | None = None
    process_group: ClientProcesses | None = None  # processes that train this client together; None = one process
    progress: Progress = field(default_factory=Progress)  # position of the task in its data, updated during training
    # waits for the assignment of a task that began before it arrived, and returns it; None = it has arrived
    receive: Callable[[], Assignment] | None = None

    @property
    def is_stopped(self) -> bool:
        """Whether the task's result is no longer needed."""
        return self.stop is not None and self.stop.is_set()


ALONE = TaskContext()
"""Context of a task that this process trains on its own, without server or other processes."""


class Stopped(Exception):
    """Raised to end a task early, because its result is no longer needed."""
