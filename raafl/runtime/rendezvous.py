"""How the ranks that torchrun started find each other: its environment, its store, and a pair for each client."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as _distributed

from raafl.errors import BadInput
from raafl.foreign import foreign
from raafl.local.train import FabricOptions
from raafl.runtime.transport import Pair, PeerLost, PeerTimeout, connect

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from raafl.config.experiment import Experiment

dist: Any = _distributed  # much of it is not typed

_LET_GO, _READY, _BEAT = "let-go", "ready", "beat"
_SLACK_S = 5.0
_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Rendezvous:
    """A rank's place among the others.

    Attributes:
        rank: 0 coordinates, 1..N are clients.
        world_size: N + 1.
        store: shared by all ranks.
        local: all ranks are on this machine.
        experiment: whose run it is.
    """

    rank: int
    world_size: int
    store: Store
    local: bool
    experiment: Experiment

    @classmethod
    def from_environment(cls, experiment: Experiment) -> Rendezvous:
        """Read torchrun's environment and connect to its store.

        Raises:
            BadInput: not started by torchrun, or with a number of ranks that does not fit the config.
        """
        missing = [name for name in _VARIABLES if name not in os.environ]
        if missing:
            raise BadInput(
                f"fit needs ranks, and {missing[0]} is not set: start it with `torchrun --nproc-per-node "
                f"{experiment.clients + 1} -m raafl fit ...`, or use `raafl fit ... --local {experiment.clients}`, which starts "
                "its own, or `raafl simulate` for one process"
            )
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if rank >= world_size:
            raise BadInput(f"RANK is {rank}, but WORLD_SIZE is {world_size}: ranks are 0 to {world_size - 1}")
        if world_size != experiment.clients + 1:
            raise BadInput(
                f"clients is {experiment.clients}, but torchrun started {world_size} ranks (1 aggregator and "
                f"{world_size - 1} clients): start {experiment.clients + 1} ranks, or use --clients {max(world_size - 1, 1)}"
            )
        local = os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return cls(
            rank,
            world_size,
            dist.PrefixStore(f"raafl/{attempt}", _store(rank, world_size, experiment)),
            local,
            experiment,
        )

    def connector(self, client: int, device: torch.device | str, incarnation: int = 0) -> Callable[[], Pair]:
        """Make the function that connects this rank's end of ``client``'s pair; ``device`` is where its tensors lie."""

        def connect_pair() -> Pair:
            return connect(
                self.store, f"pair/{client}/{incarnation}", server=self.rank == 0,
                timeout_s=self.experiment.waits.join_s, hostname="127.0.0.1" if self.local else None, device=device,
            )  # fmt: skip

        return connect_pair

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Have the clients wait, for as long as the block takes, until rank 0 listens; it may have to evaluate a large model."""
        ended = threading.Event()
        beats = threading.Thread(target=self._beat, args=(ended,), name="preparing", daemon=True)
        beats.start()
        try:
            yield
            self.store.set(_READY, "1")
        finally:
            ended.set()
            beats.join()

    def _beat(self, ended: threading.Event) -> None:
        """Say now and then that rank 0 is there."""
        number = 0
        with suppress(RuntimeError):  # the store may go with the agent that holds it
            while not ended.is_set():
                number += 1
                self.store.set(_BEAT, str(number))
                ended.wait(min(self.experiment.waits.join_s / 5, 1.0))

    def await_server(self) -> None:
        """Wait until rank 0 listens.

        Raises:
            PeerTimeout: it has said nothing for ``waits.join_s``.
            PeerLost: the store is gone.
        """
        join_s, heard, wait_s = self.experiment.waits.join_s, b"", 0.01
        since = time.monotonic()
        try:
            while not self.store.check([_READY]):
                beat = bytes(self.store.get(_BEAT)) if self.store.check([_BEAT]) else b""
                if beat != heard:
                    heard, since = beat, time.monotonic()
                if time.monotonic() - since > join_s:
                    raise PeerTimeout(f"rank 0 has not been heard of for {join_s:g} s (waits.join_s)")
                time.sleep(wait_s)
                wait_s = min(2 * wait_s, 0.2)
        except RuntimeError as error:
            raise PeerLost("connection-closed", str(error).splitlines()[0]) from None

    def announce(self, client: int | None, reason: str) -> None:
        """Leave word why ``client`` (None = everybody) is let go, for one whose pair breaks before it hears so."""
        with suppress(RuntimeError):
            self.store.set(_LET_GO if client is None else f"{_LET_GO}/{client}", reason or "ended")

    def let_go(self) -> str | None:
        """Return the reason for which this client was let go, or None when nobody has left word."""
        with suppress(RuntimeError):  # the store may go with the rank, or the agent, that holds it
            for key in (_LET_GO, f"{_LET_GO}/{self.rank}"):
                if self.store.check([key]):
                    return foreign(self.store.get(key).decode(errors="replace"))
        return None

    def fabric_options(self) -> FabricOptions:
        """Return the client's Fabric options: each rank takes the GPU of its local rank (shared when there are fewer)."""
        return self.experiment.fabric.on_this_machine()


def _store(rank: int, world_size: int, experiment: Experiment) -> Store:
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    hosts = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    wait_s = experiment.waits.join_s
    found: Future[Store] = Future()

    def open_store() -> None:
        try:
            timeout = timedelta(seconds=wait_s)
            store = dist.TCPStore(address, port, world_size, is_master=hosts, timeout=timeout, wait_for_workers=False)
            found.set_result(store)
        except BaseException as error:
            found.set_exception(error)

    # In a thread, since its timeout does not cover a port where something listens and says nothing.
    threading.Thread(target=open_store, daemon=True).start()
    try:
        return found.result(wait_s + _SLACK_S)
    except TimeoutError:
        raise BadInput(
            f"what listens at {address}:{port} (MASTER_ADDR, MASTER_PORT) is no store of torch's: choose a free port"
        ) from None
    except RuntimeError as error:
        if hosts and "EADDRINUSE" in str(error):
            raise BadInput(f"MASTER_PORT is {port}, which is in use on {address}: choose a free port") from None
        raise BadInput(
            f"no store at {address}:{port} (MASTER_ADDR, MASTER_PORT): {str(error).splitlines()[0]}"
        ) from None
