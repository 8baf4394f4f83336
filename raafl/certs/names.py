"""Write the name of a site and its federation into a certificate, as a URI among its subject alternative names, and read it.

A site is ``raafl://FEDERATION/site/SITE``, a server ``raafl://FEDERATION/server``. Certificates of another authority are taken
as well where they have such a URI.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from raafl.errors import BadInput

_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}"
_SITE = re.compile(rf"raafl://({_NAME})/site/({_NAME})")
_SERVER = re.compile(rf"raafl://({_NAME})/server")
RESERVED = ("ca", "server")
"""Names of files in the folder of certificates, which no site can have."""


@dataclass(frozen=True, slots=True)
class Holder:
    """Holder of a certificate: a site of a federation, or its server."""

    federation: str  # name of the federation
    site: str | None = None  # name of the site; None = the server

    @property
    def uri(self) -> str:
        """URI with the names of federation and site, written into the certificate."""
        return f"raafl://{self.federation}/" + ("server" if self.site is None else f"site/{self.site}")


def holder_of(uris: Iterable[str]) -> Holder | None:
    """Return the site or server that a certificate's URIs name; None unless exactly one of them is raafl's."""
    holders = []
    for uri in uris:
        if found := _SITE.fullmatch(uri):
            holders.append(Holder(found[1], found[2]))
        elif found := _SERVER.fullmatch(uri):
            holders.append(Holder(found[1]))
    return holders[0] if len(holders) == 1 else None


def check_name(field: str, name: str) -> str:
    """Check the name of a site or federation, and return it; raise `BadInput` if it has characters that are not allowed."""
    if not re.fullmatch(_NAME, name) or name in RESERVED:
        raise BadInput(
            f"{field} is '{name}': give 1 to 63 of the characters a-z, A-Z, 0-9, '.', '_' and '-', not "
            f"{' or '.join(RESERVED)}"
        )
    return name
