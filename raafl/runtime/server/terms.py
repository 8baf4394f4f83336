"""Define the terms between the server and a client: settings that must be equal, and services such as signing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from raafl.core.types import Assignment
from raafl.runfolder.signing import Signer
from raafl.submodel import FlatTensors
from raafl.submodel.tensor_files import PayloadRoom


@dataclass(frozen=True, slots=True)
class Task:
    """A task for a client: assignment, values of the submodel, and hash of the journal once it contains the assignment."""

    assignment: Assignment
    snapshot: FlatTensors
    head: str | None = None


@dataclass(frozen=True, slots=True)
class Terms:
    """Terms on which a client must agree with the server."""

    config_yaml: str = ""  # config of the run as text, for a client without a config
    # digest of each config section that must be equal; None = not compared, since both read the same file
    sections: Mapping[str, str] | None = None
    own_data: bool = True  # whether the client may train on data of its own
    signer: Signer | None = None  # holder of the server's key; None = this user's own
    # storage for the session's tasks and updates, in memory or in files
    storage: PayloadRoom = field(default_factory=PayloadRoom)
