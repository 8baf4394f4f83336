"""Keep a client's payload on the client between its tasks, so that only the values that a task names travel.

Both ends know whether the client has a copy: it lives as long as an incarnation of the client, like the state of
`raafl.compression.streams`. The first task of an incarnation brings all values, and bundles of zeros. The copy lies in a
`ClientState`: the client's own, or, for a simulated client, the run's, which is checkpointed. A real server keeps none.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from raafl.core.payload import Payload
from raafl.core.state import ClientState
from raafl.core.types import Assignment
from raafl.submodel import FlatTensors, Layout

RESIDENT = "resident payload"
"""In `ClientState`."""


class ResidentPayload:
    """Tensors that a client keeps between its tasks, so that the server need not send all of them for each task.

    One object serves one client. Server and client each have one, and so agree on which tensors are sent.
    """

    def __init__(self, payload: Payload, kept: ClientState, client: int) -> None:
        """Continue from what ``kept`` has of the client."""
        self._payload, self._kept, self._client = payload, kept, client
        self._sent: Layout | None = None  # of the last task, on a server, which has no copy

    def layout(self, assignment: Assignment) -> Layout:
        """Return the layout of the tensors that the client receives for a task, before compression.

        A client that has kept nothing yet receives all values; any other client receives only those that the task
        names.
        """
        copy = self._kept.find(RESIDENT, self._client)
        return self._travelling(assignment, None if copy is None else copy.layout)

    def layout_sent(self, assignment: Assignment) -> Layout:
        """Return the layout of the tensors to send to the client for a task, before compression.

        The first layout contains all values; the client then has a copy, so later layouts contain only values that the
        task names.
        """
        copy = self._kept.find(RESIDENT, self._client)
        layout = self._travelling(assignment, self._sent if copy is None else copy.layout)
        self._sent = self._payload.layout(assignment.spec, "sent")
        return layout

    def _travelling(self, assignment: Assignment, copy: Layout | None) -> Layout:
        known = copy == self._payload.layout(assignment.spec, "sent")
        return self._payload.travelling(assignment.spec, "sent", assignment.extra if known else None)

    def own(
        self, assignment: Assignment, storage: Callable[[str, Layout, torch.device], FlatTensors], device: torch.device
    ) -> FlatTensors | None:
        """Return the client's copy, in the payload's layout; None = it has no copy for the task's submodel."""
        copy, layout = self._kept.find(RESIDENT, self._client), self._payload.layout(assignment.spec, "sent")
        return None if copy is None or copy.layout != layout else storage("received", layout, device).copy_(copy)

    def complete(self, assignment: Assignment, part: FlatTensors, out: FlatTensors) -> FlatTensors:
        """Combine the received tensors with those that the client kept; return all tensors of the task, in ``out``."""
        layout = self._payload.layout(assignment.spec, "sent")
        copy = self._kept.find(RESIDENT, self._client)
        if copy is not None and copy.layout != layout:
            self._kept.forget(RESIDENT, self._client)
        copy = self._kept.of(RESIDENT, self._client, layout, part.device)
        return out.copy_(copy.take_(part))

    def keep(self, assignment: Assignment, trained: FlatTensors) -> None:
        """Keep a task's trained bundles (extra tensors of the method) for the client's next task.

        Parameters are not kept as trained: the client's copy of them stays as the server sent it.
        """
        copy = self._kept.find(RESIDENT, self._client)
        assert copy is not None  # `complete` was called for this task
        _, stored = self._payload.split(copy, assignment.spec, "sent")
        _, bundles = self._payload.split(trained, assignment.spec, "trained")
        for name, bundle in bundles.items():
            stored[name].copy_(bundle)
