"""The global model: its values, its version, how often each region was merged, and what the merge remembers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from raafl.core.client_state import ClientState
from raafl.submodel import FlatTensors, Submodels


@dataclass(slots=True)
class GlobalState:
    """The server's model. Updated in place by the coordinator's merges; everyone else reads or copies.

    Attributes:
        submodels: axes, layouts and costs of the model.
        values: every parameter and buffer, in flat storage.
        version: number of merges so far, t.
        counts: merges per region, q(j).
        memory: what the merge keeps between updates (accumulators, server optimiser moments).
        clients: what is kept for each client.
        num_clients: of the run.
        scratch: storage that a merge has used and will use again; nothing in it is meant to be read, or saved.
    """

    submodels: Submodels
    values: FlatTensors
    version: int = 0
    counts: dict[int, int] = field(default_factory=dict)
    memory: dict[str, Any] = field(default_factory=dict)
    scratch: dict[str, Any] = field(default_factory=dict)
    clients: ClientState = field(default_factory=ClientState)
    num_clients: int = 1
