"""Run real ranks in tests: each client is a forked process, and the server runs in the test's own process."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing as mp
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import psutil
import torch._dynamo  # noqa: F401  the first optimiser does: here it is done for all ranks
import torch.distributed as dist

from raafl.config.experiment import Experiment
from raafl.core.types import Event
from raafl.errors import RunFailed
from raafl.local import malloc
from raafl.runtime.over_ranks import take_part, train
from raafl.runtime.run import simulate
from raafl.runtime.server.host import host
from raafl.runtime.server.link import Inbox
from raafl.transport import Admit, Transport
from raafl.transport import torchrun as transport
from tests.helpers import cached_models
from tests.helpers.small_runs import Finished, finish

HOST = "127.0.0.1"
PY_SPY = os.path.join(os.path.dirname(sys.executable), "py-spy")
READY_S = 20.0
RANK = 0
"""The client that this process is; 0 in the test's own."""


class _AllThere(transport.TorchrunTransport):
    """Observer that waits until all ranks have joined."""

    def listen(self, admit: Admit, *more: Any) -> None:
        here = threading.Semaphore(0)

        def admitted(client: int, peer: str, connect: Callable[[], Any]) -> None:
            def connected() -> Any:
                pair = connect()
                here.release()
                return pair

            admit(client, peer, connected)

        super().listen(admitted, *more)
        for _ in range(self._num_clients):
            assert here.acquire(timeout=READY_S)


def _transport(experiment: Experiment, rank: int, store: Any, simulating: int = 0) -> Transport:
    kind = _AllThere if simulating else transport.TorchrunTransport
    wait_s, shared = experiment.waits.join_s, dist.PrefixStore("test", store)
    return kind(rank, simulating or experiment.clients, shared, wait_s, local=True)


def _rank(
    experiment: Experiment,
    rank: int,
    told: Connection,
    ready: Connection,
    before: Callable[[int], None] | None,
    simulating: int,
) -> None:
    global RANK
    RANK = rank
    gc.freeze()  # objects of the parent are left out of garbage collection, which is half of a small rank's cost
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        port = told.recv()
    except EOFError:
        os._exit(1)
    store = dist.TCPStore(HOST, port, None, False, timeout=timedelta(seconds=10))
    ready.send(True)
    ready.close()
    if before is not None:
        before(rank)
    try:
        if simulating:
            train(experiment, _transport(experiment, rank, store, simulating))
        elif rank == 0:
            host(experiment, "", _transport(experiment, 0, store))
        else:
            take_part(experiment, _transport(experiment, rank, store))
    except (RunFailed, SystemExit) as error:
        print(error, file=sys.stderr)
        os._exit(1)
    os._exit(0)


class Ranks:
    """Processes of an experiment's clients, and the store at which they meet."""

    def __init__(
        self,
        experiment: Experiment,
        before: Callable[[int], None] | None = None,
        *,
        fork_server: bool = False,
        simulating: int = 0,
    ) -> None:
        """Fork the clients and, with ``fork_server``, rank 0; each calls ``before(rank)`` first.

        With ``simulating`` that many ranks, beside this process, train what it simulates. All are forked before there
        is a store: the store's thread looks up names, and a process forked meanwhile waits forever for the resolver's
        lock. If one is caught by another thread's look-up all the same, it does not reach the store, and another
        process takes its place.
        """
        self.experiment, self._before, self._simulating = experiment, before, simulating
        self.processes: dict[int, Any] = {}
        gc.collect()  # delete stores of earlier tests with their threads
        malloc.give_back()  # free memory need not be copied, nor given back by each rank after each task
        pipes = {
            rank: self._fork(rank) for rank in range(0 if fork_server else 1, (simulating or experiment.clients) + 1)
        }
        self.store = dist.TCPStore(HOST, 0, None, True, timeout=timedelta(seconds=10), wait_for_workers=False)
        for telling, _ in pipes.values():
            telling.send(self.store.port)
        for rank, (_, ready) in pipes.items():
            for _ in range(3):
                if ready.poll(READY_S):  # the rank has arrived or died, and the test will notice which
                    break
                self.processes[rank].kill()
                self.processes[rank].join()
                telling, ready = self._fork(rank)
                telling.send(self.store.port)

    def _fork(self, rank: int) -> tuple[Connection, Connection]:
        """Fork a rank; return the pipe that tells it the store's port, and the pipe by which it reports its arrival."""
        context = mp.get_context("fork")
        told, telling = context.Pipe(duplex=False)
        ready, getting_ready = context.Pipe(duplex=False)
        args = (self.experiment, rank, told, getting_ready, self._before, self._simulating)
        self.processes[rank] = process = context.Process(target=_rank, args=args, daemon=True)
        process.start()
        told.close()
        getting_ready.close()
        return telling, ready

    def serve(self, inbox: Inbox | None = None) -> Finished:
        """Run the server to the end of the run."""
        return Finished(*host(self.experiment, "", _transport(self.experiment, 0, self.store), inbox=inbox))

    def simulate(self) -> Finished:
        """Simulate the run to its end, on these ranks and in this process."""
        with _transport(self.experiment, 0, self.store, self._simulating) as there:
            return finish(self.experiment, partial(simulate, transport=there))

    def send(self, rank: int, number: signal.Signals) -> None:
        """Send a signal to a client."""
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, number)

    def exit_codes(self, timeout_s: float = 40.0) -> dict[int, int | None]:
        """Return the exit code of each client; None = it still runs after ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        for process in self.processes.values():
            process.join(timeout=max(deadline - time.monotonic(), 0.0))
        for process in self.processes.values():
            if process.exitcode is None:  # to see where it hangs
                subprocess.run([PY_SPY, "dump", "--native", "--pid", str(process.pid)], timeout=20)
        return {rank: process.exitcode for rank, process in self.processes.items()}

    def close(self) -> None:
        """Kill all processes that still run."""
        for process in self.processes.values():
            with contextlib.suppress(ValueError):
                process.kill()
                process.join(timeout=5)
                process.close()
        del self.store


@contextmanager
def ranks(
    experiment: Experiment,
    before: Callable[[int], None] | None = None,
    *,
    fork_server: bool = False,
    simulating: int = 0,
) -> Iterator[Ranks]:
    """Run an experiment's clients on real ranks, or ranks that train for a simulation; all are killed at the end.

    `before`: called first in each rank, with its number. `fork_server`: fork rank 0, too; else the test is rank 0.
    `simulating`: number of ranks of a simulation; 0 = a run of real clients.
    """
    with cached_models.reuse_findings():
        started = Ranks(experiment, before, fork_server=fork_server, simulating=simulating)
        try:
            yield started
        finally:
            started.close()


class Watched(Inbox):
    """An inbox that reports each event when the server takes it, and records when each was put in."""

    def __init__(self, seen: Callable[[Event], None] | None = None) -> None:
        super().__init__()
        self.seen, self.put_at = seen, []

    def put(self, event: Event) -> None:
        self.put_at.append((time.perf_counter(), event))
        super().put(event)

    def get(self, timeout_s: float) -> Event | None:
        event = super().get(timeout_s)
        if event is not None and self.seen is not None:
            self.seen(event)
        return event


def held() -> tuple[int, int, int]:
    """Return the numbers of Python's threads, of the process's threads, and of its open files."""
    gc.collect()
    process = psutil.Process()
    return threading.active_count(), process.num_threads(), process.num_fds()
