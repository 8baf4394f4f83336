"""What tells a `RunState` the rows of its run: the run itself as it writes them, or its folder as it grows."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from raafl.runfolder.following import Following
from raafl.runfolder.journal import RunFolder
from raafl.runfolder.schema import JournalRow
from raafl.watch.state import RunState


class ShownFolder(RunFolder):
    """A run folder whose rows a `RunState` is told of."""

    state: RunState | None = None

    def event(self, event: JournalRow) -> None:
        """Append one object to the journal; see `RunFolder.event`."""
        super().event(event)
        if self.state is not None:
            self.state.event(event)

    def metrics(self, row: Mapping[str, Any]) -> None:
        """Append one evaluation; see `RunFolder.metrics`."""
        super().metrics(row)
        if self.state is not None:
            self.state.metrics(row)

    def client(self, row: Mapping[str, Any]) -> None:
        """Append one finished task; see `RunFolder.client`."""
        super().client(row)
        if self.state is not None:
            self.state.client(row)


class Watched(Following[RunState]):
    """A run folder and how the run in it stands."""

    def __init__(
        self, path: Path, say: Callable[[str], None] | None = None, clock: Callable[[], float] = time.time
    ) -> None:  # fmt: skip
        """Look at nothing yet; ``say`` is told each event that comes after the first look."""
        super().__init__(path, lambda: RunState(clock=clock), clock)
        self._say = say

    def look(self) -> bool:
        """Take in what is new; return whether anything was."""
        news = super().look()
        self.state.say = self._say
        return news
