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
    """Terms on which a client must agree with the server.

    Attributes:
        config_yaml: config of the run as text, for a client without a config.
        sections: digest of each config section that must be equal; None = not compared, since both read the same file.
        own_data: whether the client may train on data of its own.
        site: limits on what the client may claim.
        masked: whether the client masks its updates (secure aggregation).
        signer: holder of the server's key, which signs the journal's hash sent with each task; None = unsigned.
        storage: storage for the session's tasks and updates, in memory or in files.
        take_logs: function called on any thread with a client's id and the log lines that it has sent.
    """

    config_yaml: str = ""
    sections: Mapping[str, str] | None = None
    own_data: bool = True
    site: SiteRules = ANYTHING
    masked: bool = False
    signer: Signer | None = None
    storage: PayloadRoom = field(default_factory=PayloadRoom)
    take_logs: Callable[[int, Sequence[LogLine]], None] = lambda client, lines: None
