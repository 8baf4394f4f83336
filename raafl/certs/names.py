"""Name the holder of a certificate: a URI in its subject alternative names states federation and site.

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
    """Holder of a certificate: a site of a federation, or its server.

    Attributes:
        federation: name of the federation.
        site: name of the site; None = the server.
    """

    federation: str
    site: str | None = None

    @property
    def uri(self) -> str:
        """URI that names the holder in a certificate."""
        return f"raafl://{self.federation}/" + ("server" if self.site is None else f"site/{self.site}")


def holder_of(uris: Iterable[str]) -> Holder | None:
    """Return the holder that a certificate's URIs name; None if raafl's URI is missing or not the only one."""
    holders = []
    for uri in uris:
        if found := _SITE.fullmatch(uri):
            holders.append(Holder(found[1], found[2]))
        elif found := _SERVER.fullmatch(uri):
            holders.append(Holder(found[1]))
    return holders[0] if len(holders) == 1 else None


def check_name(field: str, name: str) -> str:
    """Return the name of a site or federation; raise `BadInput` if a certificate or a file cannot contain it."""
    if not re.fullmatch(_NAME, name) or name in RESERVED:
        raise BadInput(
            f"{field} is '{name}': give 1 to 63 of the characters a-z, A-Z, 0-9, '.', '_' and '-', not "
            f"{' or '.join(RESERVED)}"
        )
    return name
