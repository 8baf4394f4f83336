"""What a person is shown of a run while it goes on."""

from __future__ import annotations

import heapq
from typing import Final

from raafl.core.coordinator import Coordinator
from raafl.runfolder.record import RunRecord
from raafl.watch.progress import ClientProgress, ProgressState

_MAX_SHOWN: Final = 64  # clients a progress view is told of


def view(coordinator: Coordinator, record: RunRecord, now: float) -> ProgressState:
    """Return what a person is shown of a run at ``now``."""
    working = {a.client: a for a in coordinator.roster.active.values()}
    clients = []
    for client in heapq.nsmallest(_MAX_SHOWN, record.participation):
        doing = f"v{working[client].version}  {working[client].spec}" if client in working else ""
        clients.append(ClientProgress(client, doing, record.participation[client]))
    return ProgressState(
        coordinator.state.version, coordinator.merged, now, record.metrics, tuple(clients),
        coordinator.limits.max_updates,
    )  # fmt: skip
