"""A run folder that shows what is written to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from raafl.runfolder.record import MeasuredFolder
from raafl.watch.state import RunState


class ShownFolder(MeasuredFolder):
    """A run folder whose rows a `RunState` is told of.

    Attributes:
        state: who is told, if anybody.
    """

    state: RunState | None = None

    def event(self, event: Mapping[str, Any]) -> None:
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
        """Append one finished task; see `MeasuredFolder.client`."""
        super().client(row)
        if self.state is not None:
            self.state.client(row)
