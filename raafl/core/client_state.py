"""Store tensors for each client on the server from one task to the next: control variates, gradients, last values.

Clients store nothing themselves, so a task stays a pure function of what is sent: a client may die and come back on another
machine, a checkpoint is complete, and a replay rebuilds the store from the journal.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from raafl.submodel.flat import FlatTensors, Layout, is_merged
from raafl.submodel.tensor_files import is_in_files, release, zeros_in


class ClientState:
    """Flat tensors by name and client. Changed in place by merges, in the thread of the loop; part of every checkpoint.

    Attributes:
        values: name -> client -> tensors.
    """

    def __init__(self) -> None:
        self.values: dict[str, dict[int, FlatTensors]] = {}
        self._changed: dict[tuple[str, int], FlatTensors | None] | None = None

    @contextmanager
    def recording(self, changed: dict[tuple[str, int], FlatTensors | None]) -> Iterator[None]:
        """Copy entries into ``changed``, by name and client, just before their first change; None = the entry did not exist."""
        self._changed = changed
        try:
            yield
        finally:
            self._changed = None

    def find(self, name: str, client: int) -> FlatTensors | None:
        """Return the tensors of ``client`` under ``name``, or None."""
        return self.values.get(name, {}).get(client)

    def of(
        self, name: str, client: int, layout: Layout, device: torch.device | str = "cpu", folder: str | None = None,
        fill: float = 0.0,
    ) -> FlatTensors:  # fmt: skip
        """Return the tensors of ``client`` under ``name``, to be changed in place; create them where they are missing.

        Args:
            name: of the entry.
            client: its id.
            layout: of the tensors.
            device: where new tensors lie.
            folder: store them in files there (`raafl.submodel.tensor_files`), with the same bits; None = in memory.
            fill: initial value of floating-point elements; integers start at 0.
        """
        kept = self.everyone(name, folder)
        self._record(name, client)
        if client not in kept:
            kept[client] = FlatTensors.zeros(layout, device) if folder is None else zeros_in(folder, layout)
            for buffer in kept[client].buffers.values() if fill != 0 else ():
                if is_merged(buffer.dtype):
                    buffer.fill_(fill)
        return kept[client]

    def forget(self, name: str, client: int) -> None:
        """Delete the entry of ``client`` under ``name``."""
        self._record(name, client)
        self.values.get(name, {}).pop(client, None)

    def _record(self, name: str, client: int) -> None:
        if self._changed is not None and (name, client) not in self._changed:
            before = self.find(name, client)
            self._changed[name, client] = None if before is None else before.clone()

    def everyone(self, name: str, folder: str | None = None) -> dict[int, FlatTensors]:
        """Return all entries under ``name`` by client; with a ``folder``, entries from a checkpoint move to files there first."""
        kept = self.values.setdefault(name, {})
        if folder is not None and not all(map(is_in_files, [*kept.values()][:1])):  # all are from a checkpoint
            for client, flat in kept.items():
                kept[client] = zeros_in(folder, flat.layout).copy_(flat)
                release(kept[client])
        return kept
