"""Define the terms between the server and a client: settings that must be equal, and services such as signing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from raafl.core.types import Assignment
from raafl.runfolder.signing import Signer
from raafl.runtime.fields import LogLine
from raafl.runtime.server.site_rules import ANYTHING, SiteRules
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
    site: SiteRules = ANYTHING  # limits on what the client may claim
    masked: bool = False  # whether the client masks its updates (secure aggregation)
    # holder of the server's key, which signs the journal's hash sent with each task; None = unsigned
    signer: Signer | None = None
    # storage for the session's tasks and updates, in memory or in files
    storage: PayloadRoom = field(default_factory=PayloadRoom)
    # function called on any thread with a client's id and the log lines that it has sent
    take_logs: Callable[[int, Sequence[LogLine]], None] = lambda client, lines: None
