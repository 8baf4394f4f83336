"""Start the ranks 1, 2, ... of a run on this machine, with this process as rank 0, as torchrun would."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any

_END_S, _FAILED_S = 20.0, 3.0
"""Seconds that the other ranks get to end after rank 0 has ended, and after it has failed."""


@contextlib.contextmanager
def local_ranks(
    command: Sequence[str],
    num_ranks: int,
    *,
    environment: Mapping[str, str] | None = None,
    stdout: IO[bytes] | int | None = None,
    stderr: IO[bytes] | int | None = None,
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start the other ranks for the duration of a ``with`` block, and yield their processes; they end soon after the block.

    In the block this process has torchrun's variables of rank 0.

    `stdout`: file for their output, as for `subprocess.Popen`; None = this process's own.
    """
    store, meeting = _meeting(num_ranks)
    before = {name: os.environ.get(name) for name in (*meeting, "RANK", "LOCAL_RANK")}
    ranks: list[subprocess.Popen[bytes]] = []
    patience_s = _FAILED_S
    try:
        for rank in range(1, num_ranks):
            own = {**os.environ, **meeting, **(environment or {}), "RANK": str(rank), "LOCAL_RANK": str(rank)}
            ranks.append(subprocess.Popen(command, stdout=stdout, stderr=stderr, env=own))
        os.environ.update(meeting, RANK="0", LOCAL_RANK="0")
        yield ranks
        patience_s = _END_S
    except SystemExit as ended:
        patience_s = _FAILED_S if ended.code else _END_S
        raise
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        del store  # closing the store tells connected ranks that still wait that the run has ended
        _end(ranks, time.monotonic() + patience_s)


def _meeting(num_ranks: int) -> tuple[object, dict[str, str]]:
    """Open a store for the ranks, reachable only from this machine; return it with the environment variables that name it."""
    from torch import distributed

    dist: Any = distributed  # most of it has no type annotations
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(128)
        port = listener.getsockname()[1]
        store = dist.TCPStore(
            "127.0.0.1", port, num_ranks, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
    return store, {
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def _end(ranks: Sequence[subprocess.Popen[bytes]], deadline_s: float) -> None:
    try:
        for process in ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline_s - time.monotonic(), 0.0))
    finally:
        for process in ranks:
            process.kill()
        for process in ranks:
            process.wait()
