"""Connect to a server through an HTTP proxy by CONNECT (RFC 9110, section 9.3.6); the proxy cannot read the TLS inside."""

from __future__ import annotations

import base64
import ipaddress
import socket
import time
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from raafl.errors import BadInput
from raafl.transport.connection import PeerLost

_MAX_HEAD_BYTES = 16 << 10


def proxy_for(host: str, given: str | None) -> str | None:
    """Choose the proxy for a host: the given one, else the proxy that the environment sets for HTTPS (HTTPS_PROXY, NO_PROXY).

    `given`: URL of the proxy; "none" = no proxy; None = as the environment says.

    Raises:
        BadInput: the value is not the URL of an HTTP proxy.
    """
    if given == "none" or (given is None and (_is_this_machine(host) or proxy_bypass(host))):
        return None
    url = given or getproxies().get("https")
    if not url:
        return None
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        sound = parts.scheme == "http" and parts.hostname and parts.port
    except ValueError:
        sound = False
    if not sound:
        raise BadInput(f"proxy is '{url}': give http://HOST:PORT, or none")
    return parts.geturl()


def tunnel(proxy: str, host: str, port: int, timeout_s: float) -> socket.socket:
    """Connect to ``host:port`` through a proxy; return the connected socket.

    Raises:
        PeerLost: the proxy refuses the connection, or its answer is invalid.
        TimeoutError: the proxy was too slow.
        OSError: the proxy cannot be reached.
    """
    parts, until = urlsplit(proxy), time.monotonic() + timeout_s
    assert parts.hostname is not None and parts.port is not None
    target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    head = f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n"
    if parts.username:
        login = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
        head += f"Proxy-Authorization: Basic {base64.b64encode(login).decode()}\r\n"
    sock = socket.create_connection((parts.hostname, parts.port), timeout_s)
    try:
        sock.sendall(f"{head}\r\n".encode())
        answer = bytearray()
        while not answer.endswith(b"\r\n\r\n"):
            sock.settimeout(max(until - time.monotonic(), 0.001))
            byte = sock.recv(1)  # no byte more than the head: what follows is the server's
            if not byte or len(answer) >= _MAX_HEAD_BYTES:
                raise PeerLost(
                    "connection-broken", f"the proxy at {parts.hostname}:{parts.port} does not answer CONNECT"
                )
            answer += byte
        words = bytes(answer).split(b"\r\n", 1)[0].split(b" ", 2)
        if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or words[1] != b"200":
            status = words[1][:3].decode("ascii", "replace") if len(words) > 1 else "none"
            raise PeerLost(
                "connection-refused",
                f"the proxy at {parts.hostname}:{parts.port} does not lead to {target}: status {status}",
            )
        return sock
    except BaseException:
        sock.close()
        raise


def _is_this_machine(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
