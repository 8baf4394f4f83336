"""Transfer bytes over TLS from two threads at once, and explain in words why a handshake failed.

OpenSSL forbids SSL_read and SSL_write of one connection in two threads at once (openssl#20446), and a connection here is read
by one thread while another writes. So the socket does not block, a lock is held within each call, and waiting is outside of it.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any

from raafl.transport.codec import Refused
from raafl.transport.connection import PeerLost
from raafl.transport.tcp.stream import (
    AHEAD_BYTES,
    SocketStream,
    TimeBudget,
    Waits,
    connection_ended,
    connection_lost,
)

WRITE_BYTES = 256 << 10
"""Bytes for one SSL_write, which makes records of 16 KiB; fewer cost more calls, more hold the lock longer."""

READ_BYTES = 256 << 10
"""Bytes read under one lock: a fifth less CPU for a long message than a lock, a poll and a count for each record."""

RECORD_BYTES = 16 << 10
"""Longest plaintext of a TLS record."""

REFUSED_THERE = "the other end does not accept this end's certificate or offer"
"""Prefix of the explanation if a TLS alert came from the other side."""

_SAME_CA = "both ends need the same ca.crt"
_ALERTS = {
    "UNKNOWN_CA": ("bad-certificate", f"its authority is not known there: {_SAME_CA}"),
    "CERTIFICATE_EXPIRED": ("bad-certificate", "it has expired, or a clock is wrong: `raafl certs renew`"),
    "CERTIFICATE_REVOKED": ("bad-certificate", "it was revoked"),
    "UNSUPPORTED_CERTIFICATE": ("bad-certificate", "it was issued for another purpose"),
    "BAD_CERTIFICATE": (
        "bad-certificate",
        "by the clock there it is not valid yet, or it is not for the name that was called: the other end's log says which",
    ),
    "CERTIFICATE_UNKNOWN": ("bad-certificate", "it is not accepted"),
    "CERTIFICATE_REQUIRED": ("no-certificate", "there is none"),
    "PROTOCOL_VERSION": ("bad-version", "TLS 1.3 is asked for"),
}
_REMEDIES = {
    **dict.fromkeys((7, 18, 19, 20, 21), _SAME_CA),
    9: "compare the clocks of both machines",
    10: "have it renewed with `raafl certs renew`, or compare the clocks of both machines",
    **dict.fromkeys((62, 64), "use a name that its certificate has, or give it this one with `raafl certs server`"),
}
"""Remedy by OpenSSL's X509_V_ERR code, for what the other end's certificate lacks; see openssl-verification-options(1)."""

_NO_TLS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "HTTPS_PROXY_REQUEST", "UNKNOWN_PROTOCOL", "RECORD_LAYER_FAILURE")
_OLD_TLS = ("UNSUPPORTED_PROTOCOL", "VERSION_TOO_LOW", "NO_PROTOCOLS_AVAILABLE")


class TlsStream(SocketStream):
    """Byte stream over a TLS socket; one thread may read while another writes. Bytes are counted before encryption."""

    def __init__(self, sock: ssl.SSLSocket, budget: TimeBudget, ahead_bytes: int = AHEAD_BYTES) -> None:
        """Create a stream on a TLS socket, before or after its handshake; see `SocketStream`."""
        super().__init__(sock, budget, ahead_bytes)
        self._tls, self._lock = sock, Lock()
        self._has_opened = sock.version() is not None

    def shaking_hands(self) -> Waits[None]:
        """Do the TLS handshake within the time budget for reading.

        Raises:
            Refused: one side does not accept the certificate of the other.
            PeerLost: the other side closed the connection.
            PeerTimeout: the time budget is used up.
        """
        yield from self._attempt(self._tls.do_handshake, self.reading)
        self._has_opened = True

    @property
    def pending(self) -> bool:
        """Whether decrypted bytes wait to be read; polling the socket does not show this."""
        return self._start < self._end or self._tls.pending() > 0

    def check(self) -> bool:
        """Raise `PeerLost` if the peer has closed the connection; received bytes are kept. See `SocketStream.check`."""
        if self.pending or not self.poll(False, 0):
            return self.pending
        first = bytearray(1)  # to read one byte makes OpenSSL decrypt the whole record
        try:
            with self._lock:
                got = self._tls.recv_into(first)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return False
        except OSError as error:
            raise problem_of(error, self._has_opened) from None
        if got == 0:
            raise connection_ended()
        self._ahead, self._start, self._end = memoryview(first), 0, 1
        return True

    def writing_all(self, parts: Sequence[memoryview | bytes]) -> Waits[None]:
        """Write all parts: short parts together, long parts in pieces of `WRITE_BYTES`. See `Stream.write`."""
        if sum(map(len, parts)) <= WRITE_BYTES:
            yield from self._sending(memoryview(b"".join(parts)))
            return
        for part in parts:
            view = memoryview(part)
            for start in range(0, len(view), WRITE_BYTES):
                yield from self._sending(view[start : start + WRITE_BYTES])

    def _sending(self, view: memoryview) -> Waits[None]:
        """Send all of ``view``; TLS requires that an interrupted call is repeated with the same bytes."""
        if not len(view):
            return
        _, credited = yield from self._attempt(lambda: self._tls.send(view), self.writing)
        self.writing.moved(max(len(view) - credited, 0))
        self.num_written += len(view)

    def _receiving(self, view: memoryview) -> Waits[int]:
        got: int = (yield from self._attempt(lambda: self._read_records(view), self.reading))[0]
        if got == 0:
            raise connection_ended()
        self.reading.moved(got)
        return got

    def _read_records(self, view: memoryview) -> int:
        """Read all records that have arrived, up to `READ_BYTES`, and return the number of bytes."""
        filled, most = 0, min(len(view), READ_BYTES)
        while True:
            try:
                got = self._tls.recv_into(view[filled:])
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                if not filled:
                    raise
                return filled
            filled += got
            # a short record is mostly the last one, so another call would be in vain
            if got < RECORD_BYTES or filled >= most:
                return filled

    def _attempt(self, call: Callable[[], Any], budget: TimeBudget) -> Waits[tuple[Any, int]]:
        """Repeat a TLS call until it need not wait for the socket; return its result, and the bytes sent while it waited."""
        credited = 0
        while True:
            try:
                with self._lock:
                    return call(), credited
            except ssl.SSLWantReadError:
                yield from self._waiting(False, budget)
            except ssl.SSLWantWriteError:
                before = self.num_queued()
                yield from self._waiting(True, budget)
                # SSL_write does not report partial progress, so the kernel's queue is measured: a slow peer is not a
                # silent one
                if (taken := before - self.num_queued()) > 0:
                    budget.moved(taken)
                    credited += taken
            except OSError as error:
                raise problem_of(error, self._has_opened) from None


def problem_of(error: OSError, has_opened: bool) -> Refused | PeerLost:
    """Convert an error of the TLS library to `Refused` or `PeerLost`, with an explanation in words."""
    if not isinstance(error, ssl.SSLError):
        return connection_lost(error)
    reason = error.reason or ""
    if isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError) or reason == "UNEXPECTED_EOF_WHILE_READING":
        return connection_ended()
    if isinstance(error, ssl.SSLCertVerificationError):
        remedy = _REMEDIES.get(error.verify_code)
        words = [error.verify_message.rstrip("."), *([remedy] if remedy else [])]
        return Refused("bad-certificate", f"the other end's certificate is not accepted: {': '.join(words)}")
    if "_ALERT_" in reason:
        name = reason.partition("_ALERT_")[2]
        if name == "BAD_RECORD_MAC":
            return Refused("bad-record", "the other end got a TLS record that was changed on its way")
        kind, why = _ALERTS.get(name, ("tls-failed", name.lower().replace("_", " ")))
        return Refused(kind, f"{REFUSED_THERE}: {why}")
    if has_opened:
        return Refused("bad-record", "a TLS record was changed, repeated or left out on its way")
    if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return Refused("no-certificate", "the other end has none")
    if reason in _NO_TLS:
        return Refused("bad-magic", "the other end speaks no TLS")
    if reason in _OLD_TLS:
        return Refused("bad-version", "the other end does not speak TLS 1.3")
    return Refused("tls-failed", reason.lower().replace("_", " ") or type(error).__name__)
