"""What the server keeps for each client from one task to the next: control variates, gradients, a model's last values.

A client keeps nothing itself, so a task stays a pure function of what is sent: a client may die and come back anywhere, a
checkpoint has all there is, and a replay rebuilds it from the journal.
"""

from __future__ import annotations

import torch

from raafl.submodel.flat import FlatTensors, Layout


class ClientState:
    """Flat tensors by name and client. Changed in place by merges, in the thread of the loop; part of every checkpoint.

    Attributes:
        kept: name -> client -> tensors.
    """

    def __init__(self) -> None:
        """Start with nothing kept."""
        self.kept: dict[str, dict[int, FlatTensors]] = {}

    def find(self, name: str, client: int) -> FlatTensors | None:
        """Return what is kept for a client under ``name``, or None."""
        return self.kept.get(name, {}).get(client)

    def of(self, name: str, client: int, layout: Layout, device: torch.device | str = "cpu") -> FlatTensors:
        """Return what is kept for a client under ``name``, to be changed in place: zeros in ``layout`` at first."""
        kept = self.kept.setdefault(name, {})
        if client not in kept:
            kept[client] = FlatTensors.zeros(layout, device)
        return kept[client]
