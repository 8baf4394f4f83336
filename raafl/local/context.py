"""Define what surrounds a task: who may stop it, whom it talks to, and which processes train it together."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from raafl.core.exchange import ClientLink
from raafl.local.client_group import ClientProcesses


@dataclass(slots=True)
class Progress:
    """The current position of a task.

    Attributes:
        place: description of the current batch, for the message of a failure.
    """

    place: str = ""


@dataclass(frozen=True, slots=True)
class TaskContext:
    """Surroundings of a task, beside what its result is a function of.

    Attributes:
        stop: once set, the task ends before its next batch, with `Stopped`; None = it cannot be stopped.
        link: connection to the server in the middle of the task; None = none.
        process_group: processes that train the client together; None = only this one.
        progress: updated while the task trains.
    """

    stop: threading.Event | None = None
    link: ClientLink | None = None
    process_group: ClientProcesses | None = None
    progress: Progress = field(default_factory=Progress)

    @property
    def is_stopped(self) -> bool:
        """Whether the task's result is no longer needed."""
        return self.stop is not None and self.stop.is_set()


ALONE = TaskContext()
"""The context of a task that this process trains without server or other processes, to its end."""
