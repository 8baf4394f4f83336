"""Hold the terms of a session: what a client must agree on with the server, and what the server does for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from raafl.runfolder.signing import Signer
from raafl.runtime.server.site_rules import ANYTHING, SiteRules


@dataclass(frozen=True, slots=True)
class Terms:
    """Terms on which a client must agree with the server.

    Attributes:
        config_yaml: the run's config, for a client that has none.
        sections: digest of each section of it that both must have alike; None = not compared (they share one file).
        own_data: whether it may train on data of its own.
        site: rules of the client's site.
        masked: whether it masks its updates (docs/secure-aggregation.md).
        signer: signs the journal's head that goes with each assignment; None = unsigned.
    """

    config_yaml: str = ""
    sections: Mapping[str, str] | None = None
    own_data: bool = True
    site: SiteRules = ANYTHING
    masked: bool = False
    signer: Signer | None = None
