"""Define what surrounds a task: who may stop it, whom it talks to, and which processes train it together."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from raafl.core.exchange import ClientLink
from raafl.local.client_group import ClientProcesses


@dataclass(slots=True)
class Progress:
    """Current position of a task in its data.

    Attributes:
        place: description of the current batch, for the message of a failure.
    """

    place: str = ""


@dataclass(frozen=True, slots=True)
class TaskContext:
    """Surroundings of a task that do not influence its result.

    Attributes:
        stop: event that, once set, ends the task before its next batch with `Stopped`; None = it cannot be stopped.
        link: connection to the server in mid-task; None = none.
        process_group: processes that train the client together; None = only this one.
        progress: position in the task, updated while it trains.
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
