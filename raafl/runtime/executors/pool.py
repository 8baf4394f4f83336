"""Train tasks in worker processes on this machine, which are forked so that they share the model and the data."""

from __future__ import annotations

import gc
import multiprocessing as mp
import os
import signal
import socket
import threading
import traceback
from collections.abc import Callable, Sequence
from functools import partial

import torch

from raafl.errors import BadInput
from raafl.local.evaluate import Evaluator
from raafl.local.malloc import keep_freed
from raafl.local.train import LocalTrainer
from raafl.runtime.executors.base import Executor
from raafl.runtime.executors.rank_worker import FOR_EVER_S, work
from raafl.runtime.executors.ranks import RankExecutor
from raafl.transport import PeerLost, PeerTimeout, Refused
from raafl.transport.tcp.connection import TcpConnection

Work = Callable[[TcpConnection], None]
# sent to all processes by a terminal or cluster, and handled by the parent alone
_PASSED_OVER = (signal.SIGINT, signal.SIGTERM)


class Pool(RankExecutor):
    """Executor that trains in ``num_processes`` processes, this one included.

    The other processes are forked; this works only on a CPU, and not on Windows.
    """

    def __init__(
        self, trainer: LocalTrainer, inner: Executor, num_processes: int, evaluator: Callable[[], Evaluator]
    ) -> None:
        """Fork the worker processes, before this process has other threads; each creates its own ``evaluator``."""
        super().__init__(trainer, inner)
        # create these variants before the fork, so that the workers share their memory
        for base in trainer.submodels.bases.names:
            trainer.submodels.bases.values(base)
        context, pairs = mp.get_context("fork"), [socket.socketpair() for _ in range(num_processes - 1)]
        does, num_threads = partial(work, trainer=trainer, inner=inner, evaluator=evaluator), torch.get_num_threads()
        self._processes = [
            context.Process(target=_worker, args=(place, pairs, does, num_threads), daemon=True)
            for place in range(len(pairs))
        ]
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_OVER)  # block these until the workers ignore them
        try:
            for process in self._processes:
                process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for number, (ours, theirs) in enumerate(pairs, start=1):
            theirs.close()
            self.take_on(f"worker process {number}", partial(TcpConnection, ours, FOR_EVER_S))

    def close(self) -> None:
        """End the worker processes; tasks that they are training are abandoned."""
        self._end()
        processes, self._processes = self._processes, []
        for process in processes:
            process.kill()
        super().close()
        for process in processes:
            process.join(timeout=10)


def _worker(place: int, pairs: Sequence[tuple[socket.socket, socket.socket]], does: Work, num_threads: int) -> None:
    """Serve the parent's requests in a worker process, until the run ends or the parent is gone."""
    # never finalize the parent's garbage in this process, such as connections whose threads exist only in the parent
    gc.freeze()
    for number in _PASSED_OVER:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_OVER)
    # close copies of other workers' connections, without which the end of a worker would go unnoticed
    for ours, theirs in pairs:
        ours.close()
        if theirs is not pairs[place][1]:
            theirs.close()
    keep_freed()  # call this before any thread exists
    # Use a new thread: if the forking thread has used OpenMP, OpenMP would wait here for threads that exist in the
    # parent only.
    thread = threading.Thread(target=_work, args=(pairs[place][1], does, num_threads))
    thread.start()
    thread.join()


def _work(end: socket.socket, does: Work, num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    try:
        with TcpConnection(end, FOR_EVER_S) as pair:
            does(pair)
    except (BadInput, PeerLost, PeerTimeout, Refused):  # the parent is gone, or gets the same error itself
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)
