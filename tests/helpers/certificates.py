"""Certificates for tests: one federation for the whole process, made when it is first asked for."""

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
    """An authority with a server, whose list lets site north be any client; sites are made on demand.

    Attributes:
        authority: it.
        server: files of the server.
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
        """Return the files of a site."""
        if not (self.authority.folder / f"{name}.crt").exists():
            self.authority.sign(request(self.authority.folder, name))
        return self._files(name)


_FOLDER: list[tempfile.TemporaryDirectory] = []


@cache
def federation(which: str = "") -> CertifiedSites:
    """Return a federation that tests share, or another one of the same name; its folder goes with the process."""
    _FOLDER.append(tempfile.TemporaryDirectory(prefix="raafl-certs-"))
    return CertifiedSites(Path(_FOLDER[-1].name))
