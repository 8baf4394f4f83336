"""Hold the global model: its values, version, merges of each region, and the merge's memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from raafl.core.client_state import ClientState
from raafl.submodel import FlatTensors, Submodels


@dataclass(slots=True)
class GlobalState:
    """The server's model. Merges change it in place; everything else reads or copies it.

    Attributes:
        submodels: axes, layouts and costs of the model.
        values: every parameter and buffer, in flat storage.
        version: number of merges so far, t.
        counts: region -> merges that covered it, q(j).
        memory: the merge's state between updates, such as accumulators and moments of a server optimiser.
        clients: tensors stored for each client.
        num_clients: N.
        scratch: storage that merges reuse; its contents are never read or saved.
    """

    submodels: Submodels
    values: FlatTensors
    version: int = 0
    counts: dict[int, int] = field(default_factory=dict)
    memory: dict[str, Any] = field(default_factory=dict)
    scratch: dict[str, Any] = field(default_factory=dict)
    clients: ClientState = field(default_factory=ClientState)
    num_clients: int = 1
