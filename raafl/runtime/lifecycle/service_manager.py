"""Tell systemd the state of a service (ready, alive, stopping) by the protocol of sd_notify(3)."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Self

from raafl.core.hooks import RunHooks

_SEND_S = 1.0  # seconds; systemd reads at once, and a socket that nobody reads must not block the run
_MAX_STATUS = 200  # length in characters


class ServiceManager(RunHooks):
    """Observer that reports a run's state to systemd; it does nothing unless systemd started the process with `Type=notify`.

    It sends signs of life from the run's main loop, so that systemd's watchdog restarts a server that hangs.
    """

    def __init__(
        self, address: str = "", watchdog_s: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Create a notifier that sends datagrams to the socket ``address``.

        `watchdog_s`: seconds without a notification after which systemd restarts the service; None = no restart.
        """
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        self._every_s = None if watchdog_s is None else watchdog_s / 2
        self._clock, self._next_s = clock, 0.0

    @classmethod
    def here(cls, environment: Mapping[str, str] = os.environ) -> Self:
        """Create the observer that reports to systemd, from the environment variables that systemd set for this process."""
        watched = environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        microseconds = environment.get("WATCHDOG_USEC", "")
        watchdog_s = int(microseconds) / 1e6 if watched and microseconds.isdecimal() and int(microseconds) else None
        return cls(environment.get("NOTIFY_SOCKET", ""), watchdog_s)

    def ready(self, status: str) -> None:
        """Report that the service is ready, with a text that says what it does."""
        self._send("READY=1", _status(status))

    def status(self, status: str) -> None:
        """Report what the service does, for `systemctl status`."""
        self._send(_status(status))

    def stopping(self) -> None:
        """Report that the service is stopping: `TimeoutStopSec` counts from now on, and the watchdog is off."""
        self._send("STOPPING=1")

    def stop_asked(self) -> str | None:
        """Send a sign of life to systemd if it is time for one; the run calls this often. See `RunHooks.stop_asked`."""
        if self._every_s is not None and self._clock() >= self._next_s:
            self._next_s = self._clock() + self._every_s
            self._send("WATCHDOG=1")
        return None

    def _send(self, *lines: str) -> None:
        if not self._address:
            return
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.settimeout(_SEND_S)
            sender.sendto("\n".join(lines).encode(), self._address)


def _status(text: str) -> str:
    return f"STATUS={' '.join(text.split())[:_MAX_STATUS]}"
