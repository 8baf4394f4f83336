"""Make certificates for tests: one federation for the whole process, made when a test first asks for it."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

from raafl.sites.authority import Authority, request
from raafl.sites.credentials import TlsFiles
from raafl.transport.tcp.credentials import LocalToken

TOKEN = LocalToken(b"a token for tests only, 32 bytes")
HOSTS = ("localhost", "127.0.0.1", "::1")


class CertifiedSites:
    """Certificate authority with a server, which allows site north to be any client; certificates of sites are made on demand.

    `authority`: the authority. `server`: the server's files.
    """

    def __init__(self, folder: Path, name: str = "tests", hosts: tuple[str, ...] = HOSTS) -> None:
        self.authority = Authority.create(folder, name)
        self.authority.issue_server(hosts)
        (folder / "sites.yaml").write_text(f"north: {{clients: {list(range(1, 21))}}}\n")
        self.server = self._files("server")

    def _files(self, name: str) -> TlsFiles:
        folder = self.authority.folder
        return TlsFiles(folder / "ca.crt", folder / f"{name}.crt", folder / f"{name}.key")

    def site(self, name: str = "north") -> TlsFiles:
        """Return the certificate files of the site ``name``, made at the first call."""
        if not (self.authority.folder / f"{name}.crt").exists():
            self.authority.sign(request(self.authority.folder, name))
        return self._files(name)


_FOLDER: list[tempfile.TemporaryDirectory] = []


@cache
def federation(which: str = "") -> CertifiedSites:
    """Return a federation that tests share, in a folder that is deleted with the process; ``which`` distinguishes several."""
    _FOLDER.append(tempfile.TemporaryDirectory(prefix="raafl-certs-"))
    return CertifiedSites(Path(_FOLDER[-1].name))
