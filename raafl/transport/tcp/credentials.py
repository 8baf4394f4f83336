"""Define what a process proves itself by on new connections, and the simplest form: a token between processes of one command.

Certificates are the other form (`raafl.sites.credentials`).
"""

from __future__ import annotations

import hmac
import os
import ssl
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from raafl.errors import BadInput
from raafl.transport.codec import Refused
from raafl.transport.tcp.stream import SocketStream, Waits

TOKEN_BYTES = 32
TOKEN_VARIABLE = "RAAFL_LOCAL_TOKEN"
"""Environment variable by which `raafl fit --local` hands its processes the token of their run."""

Proof = tuple[str | None, int]
"""Name of the site of a client, and the serial number of its certificate; None and 0 without a certificate."""


class ServerLogin:
    """Server's side of the authentication on each new connection: it proves itself and checks the client."""

    def context(self) -> ssl.SSLContext | None:
        """Return the TLS context of the next connection; None = plain TCP."""
        return None

    def begin(self, stream: SocketStream) -> Waits[Callable[[bytes], Proof]]:
        """Check what the client proves before it sends a token; return the function that checks its token.

        Both raise `Refused`; the client gets the reason of the second one in words.
        """
        raise NotImplementedError


class ClientLogin:
    """Client's side of the authentication on each new connection; `context` is called before `begin`."""

    preamble: bytes = b""
    """Bytes that are sent before anything else: which run of a server for many is asked for (`raafl.transport.tcp.handover`)."""

    def context(self) -> ssl.SSLContext | None:
        """Return the TLS context of the next connection; None = plain TCP."""
        return None

    def begin(self, stream: SocketStream) -> bytes:
        """Check what the server proves, and return the token to send, zeros where it has been proven otherwise.

        Raises:
            Refused: the server is not of this federation.
        """
        raise NotImplementedError

    def explain(self, refused: Refused) -> str:
        """Return this end's explanation of a refusal, which is added to the message; "" = none."""
        return ""


class Credentials(ABC):
    """Means by which a process authenticates: certificates, or a token that the processes of one command share."""

    certified: ClassVar[bool] = False
    """Whether both ends have certificates, so that other machines may connect; else only this machine may."""

    key: Path | None = None
    """Private key of this side; None = it has none."""

    @abstractmethod
    def server_login(self) -> ServerLogin:
        """Return the server's side of the authentication; raises `BadInput` if a file cannot be used."""

    @abstractmethod
    def client_login(self) -> ClientLogin:
        """Return the client's side of the authentication; raises `BadInput` if a file cannot be used."""


@dataclass(frozen=True)
class LocalToken(Credentials):
    """Random token shared by the processes that one command started on this machine; accepted on the loopback interface only."""

    token: bytes = field(repr=False)  # 32 random bytes

    @classmethod
    def from_environment(cls) -> LocalToken | None:
        """Return the token that the parent process passed on in an environment variable; None if there is none.

        Raises:
            BadInput: the environment variable has no valid token.
        """
        text = os.environ.get(TOKEN_VARIABLE)
        if not text:
            return None
        try:
            token = bytes.fromhex(text)
        except ValueError:
            token = b""
        if len(token) != TOKEN_BYTES:
            raise BadInput(f"{TOKEN_VARIABLE} is set, but not by `raafl fit --local`: unset it")
        return cls(token)

    def server_login(self) -> ServerLogin:
        """Return the server's side of the authentication, which only reads the client's token."""
        return _ServerToken(self.token)

    def client_login(self) -> ClientLogin:
        """Return the client's side of the authentication, which sends the token."""
        return _ClientToken(self.token)


class _ServerToken(ServerLogin):
    def __init__(self, token: bytes) -> None:
        self._token = token

    def begin(self, stream: SocketStream) -> Waits[Callable[[bytes], Proof]]:
        def check(token: bytes) -> Proof:
            if not hmac.compare_digest(token, self._token):
                raise Refused("wrong-token", "the server was started by another command")
            return None, 0

        yield from ()  # never yields, but makes this function a generator
        return check


class _ClientToken(ClientLogin):
    def __init__(self, token: bytes) -> None:
        self._token = token

    def begin(self, stream: SocketStream) -> bytes:
        return self._token
