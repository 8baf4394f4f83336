"""Hold the terms of a session: what a client must agree on with the server, and what the server does for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from raafl.runfolder.signing import Signer
from raafl.runtime.fields import LogLine
from raafl.runtime.server.site_rules import ANYTHING, SiteRules


@dataclass(frozen=True, slots=True)
class Terms:
    """Terms on which a client must agree with the server.

    Attributes:
        config_yaml: config of the run, for a client without one.
        sections: digest of each section of the config that both must have in common; None = not compared (they share
            one file).
        own_data: whether the client may train on data of its own.
        site: rules of the client's site.
        masked: whether the client masks its updates (docs/secure-aggregation.md).
        signer: signer of the journal's head that goes with each assignment; None = unsigned.
        take_logs: called with a client's id and the log lines that it has sent, on any thread.
    """

    config_yaml: str = ""
    sections: Mapping[str, str] | None = None
    own_data: bool = True
    site: SiteRules = ANYTHING
    masked: bool = False
    signer: Signer | None = None
    take_logs: Callable[[int, Sequence[LogLine]], None] = lambda client, lines: None
