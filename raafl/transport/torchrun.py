"""Transport for ranks that torchrun started; each client shares a process group of two ranks with rank 0.

A store waits in C++ and blocks every other user of the same handle, so each thread that may wait has a handle of its own
(`GlooConnection.connect`).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import distributed as _distributed

from raafl.errors import BadInput
from raafl.sanitize import sanitize_text
from raafl.transport.connection import Connection, PeerLost, PeerTimeout
from raafl.transport.nccl import connect
from raafl.transport.transport import Admit, ConnectOptions, Transport

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

dist: Any = _distributed  # untyped: most of torch.distributed has no annotations

_LET_GO, _READY, _BEAT, _HERE, _MEETS = "let-go", "ready", "beat", "here", "meets"
_LONGEST_S = 0.1  # longest pause in seconds between two checks for a client
_SLACK_S = 5.0
_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class TorchrunTransport(Transport):
    """Transport under torchrun: rank 0 is the server, and ranks 1..N are the clients; a lost rank does not come back."""

    def __init__(
        self, rank: int, num_clients: int, store: Store, wait_s: float, *, local: bool, nccl: bool = False
    ) -> None:
        """Create the transport of one rank, over a key-value store that all ranks share."""
        self.client, self.store, self.local, self._nccl = rank, store, local, nccl
        self._num_clients, self._wait_s = num_clients, wait_s
        self._prepared, self._let_go = threading.Event(), set[int | None]()
        self._beats = threading.Thread(target=self._beat, name="preparing", daemon=True)

    @classmethod
    def from_environment(cls, meeting: ConnectOptions) -> TorchrunTransport:
        """Connect to torchrun's store, whose address is in the environment.

        Raises:
            BadInput: torchrun did not start this process, or the number of ranks does not match the config.
        """
        missing, clients = [name for name in _VARIABLES if name not in os.environ], meeting.num_clients
        if missing:
            raise BadInput(
                f"{' and '.join(missing)} is not set: start the command with `torchrun --nproc-per-node "
                f"{clients + 1} -m raafl fit ...`, or use `raafl fit ... --local {clients}`, which starts its own "
                "processes, or `raafl simulate` for one process"
            )
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if rank >= world_size:
            raise BadInput(
                f"RANK is {rank}, but WORLD_SIZE is {world_size}: set RANK to a number from 0 to {world_size - 1}"
            )
        if world_size != clients + 1:
            raise BadInput(
                f"clients is {clients}, but the run has {world_size} ranks (1 server and {world_size - 1} "
                f"clients): start {clients + 1} ranks, or use --clients {max(world_size - 1, 1)}"
            )
        local = os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]
        # after a restart by torchrun the store still has the keys of the previous attempt
        prefix = f"raafl/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        store = dist.PrefixStore(prefix, _store(rank, world_size, meeting.wait_s))
        return cls(rank, clients, store, meeting.wait_s, local=local, nccl=meeting.nccl)

    def __enter__(self) -> Self:
        """Start a thread that tells the clients that rank 0 is alive, since it may evaluate a large model before it listens."""
        self._beats.start()
        return self

    def listen(self, admit: Admit, refused: Callable[[str], None], device: torch.device | str = "cpu") -> None:
        """Call ``admit`` for every client; a connection is made once the client's process connects. See `Transport.listen`."""
        for client in range(1, self._num_clients + 1):
            admit(client, f"rank {client}", partial(self._meet, client, device))
        self.store.set(_READY, "1")
        self._prepared.set()

    def __exit__(self, *_: object) -> None:
        """Stop the thread that announces that rank 0 is alive."""
        self._prepared.set()
        self._beats.join()

    def _beat(self) -> None:
        """Announce in the shared store that rank 0 is alive, until it listens."""
        number = 0
        with suppress(RuntimeError):  # the store may vanish with the process that hosts it
            while not self._prepared.is_set():
                number += 1
                self.store.set(_BEAT, str(number))
                self._prepared.wait(min(self._wait_s / 5, 1.0))

    def connect(self, device: torch.device | str = "cpu") -> Connection:
        """Wait until rank 0 is listening, then connect to it.

        Raises:
            PeerTimeout: rank 0 has not answered for ``wait_s``.
            PeerLost: rank 0 is gone, or has ended the run before it met this client (see `let_go`).
        """
        self._await_server()
        try:
            self.store.set(f"{_HERE}/{self.client}", "1")
            key = f"{_MEETS}/{self.client}"
            if not self._is_set(key):
                raise PeerTimeout(f"rank 0 has not met this rank for {self._wait_s:g} s (waits.join_s)")
            is_met = self.store.get(key) == b"1"
        except RuntimeError as error:
            raise PeerLost("connection-closed", str(error).splitlines()[0]) from None
        if not is_met:
            raise PeerLost("connection-closed", "it was let go before it connected")
        return self._meet(self.client, device)

    def _meet(self, client: int, device: torch.device | str) -> Connection:
        host = "127.0.0.1" if self.local else None
        nccl, is_server = self._nccl, self.client == 0
        if is_server:
            self._await_client(client)
        return connect(self.store, f"pair/{client}", is_server, self._wait_s, host, device=device, nccl=nccl)

    def _await_client(self, client: int) -> None:
        """Wait until a client's process is about to connect, since creating a process group cannot be interrupted.

        Both sides then do so, or neither: the client waits for what is decided here.
        """
        try:
            is_here = self._is_set(f"{_HERE}/{client}", lambda: not self._let_go.isdisjoint((None, client)))
            self.store.set(f"{_MEETS}/{client}", "1" if is_here else "0")
        except RuntimeError as error:
            raise PeerLost("connection-closed", str(error).splitlines()[0]) from None
        if not is_here and self._let_go.isdisjoint((None, client)):
            raise PeerTimeout(f"rank {client} has not come for {self._wait_s:g} s (waits.join_s)")
        if not is_here:
            raise PeerLost("connection-closed", "it was let go before it connected")

    def _is_set(self, key: str, is_over: Callable[[], bool] = lambda: False) -> bool:
        """Wait until a key of the store is set, ``wait_s`` at most, or until ``is_over``; return whether it is set."""
        wait_s, deadline = 0.01, time.monotonic() + self._wait_s
        while not self.store.check([key]):
            if is_over() or time.monotonic() > deadline:
                return False
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_S)
        return True

    def _await_server(self) -> None:
        heard, wait_s, since = b"", 0.01, time.monotonic()
        try:
            while not self.store.check([_READY]):
                beat = bytes(self.store.get(_BEAT)) if self.store.check([_BEAT]) else b""
                if beat != heard:
                    heard, since = beat, time.monotonic()
                if time.monotonic() - since > self._wait_s:
                    raise PeerTimeout(f"rank 0 has not answered for {self._wait_s:g} s (waits.join_s)")
                time.sleep(wait_s)
                wait_s = min(2 * wait_s, 0.2)
        except RuntimeError as error:
            raise PeerLost("connection-closed", str(error).splitlines()[0]) from None

    def announce(self, client: int | None, reason: str) -> None:
        """Store the reason why a client must stop; see `Transport.announce`."""
        self._let_go.add(client)
        with suppress(RuntimeError):
            self.store.set(_LET_GO if client is None else f"{_LET_GO}/{client}", reason or "ended")

    def let_go(self) -> str | None:
        """Return the stored reason why this client must stop, or None; see `Transport.let_go`."""
        with suppress(RuntimeError):  # the store may vanish with the process that hosts it
            for key in (_LET_GO, f"{_LET_GO}/{self.client}"):
                if self.store.check([key]):
                    return sanitize_text(self.store.get(key).decode(errors="replace"))
        return None


def _store(rank: int, world_size: int, wait_s: float) -> Store:
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    hosts = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    found: Future[Store] = Future()

    def open_store() -> None:
        try:
            timeout = timedelta(seconds=wait_s)
            store = dist.TCPStore(address, port, world_size, is_master=hosts, timeout=timeout, wait_for_workers=False)
            found.set_result(store)
        except BaseException as error:
            found.set_exception(error)

    # open it in a thread, since the store's timeout does not cover a port that accepts and stays silent
    threading.Thread(target=open_store, daemon=True).start()
    try:
        return found.result(wait_s + _SLACK_S)
    except TimeoutError:
        raise BadInput(
            f"another program listens at {address}:{port} (MASTER_ADDR, MASTER_PORT): choose a free port"
        ) from None
    except RuntimeError as error:
        if hosts and "EADDRINUSE" in str(error):
            raise BadInput(f"MASTER_PORT is {port}, which is in use on {address}: choose a free port") from None
        raise BadInput(
            f"torchrun's store does not answer at {address}:{port} (MASTER_ADDR, MASTER_PORT): "
            f"{str(error).splitlines()[0]}: start rank 0 there, or correct the address"
        ) from None
