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

    place: str = ""  # description of the current batch, for error messages


@dataclass(frozen=True, slots=True)
class TaskContext:
    """Environment of a task; it does not influence the task's result."""

    # once set, this event ends the task before its next batch by raising `Stopped`; None = the task cannot be stopped
    stop: threading.Event | None = None
    # connection over which the task exchanges messages with the server; None = there is none
    link: ClientLink | None = None
    process_group: ClientProcesses | None = None  # processes that train this client together; None = only this process
    progress: Progress = field(default_factory=Progress)  # position of the task in its data, updated while it trains
    # waits until the task that was begun early has arrived, and returns it; None = the task has arrived
    receive: Callable[[], Assignment] | None = None

    @property
    def is_stopped(self) -> bool:
        """Whether the task's result is no longer needed."""
        return self.stop is not None and self.stop.is_set()


ALONE = TaskContext()
"""Context of a task that this process trains on its own, without server or other processes."""
