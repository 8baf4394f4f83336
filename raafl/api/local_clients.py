"""Start the clients of `raafl.Federation.fit(local=)`: each is a process of this machine that runs the user's script again."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final

from raafl.core.coordinator import Coordinator
from raafl.core.hooks import RunHooks
from raafl.core.types import Event, Joined
from raafl.errors import BadInput, one_line
from raafl.runtime.supervisor import exit_in_words, local_ranks

_MARK: Final = "RAAFL_LOCAL_CLIENT"
_SHOWN_LINES: Final = 20  # number of last lines shown of a client that ended before it joined
_END_S: Final = 1.0
_log = logging.getLogger(__name__)
_started: list[int] = []
"""Number of clients that each `fit(local=)` of this process has started."""


@contextmanager
def local_clients(num_clients: int | None) -> Iterator[RunHooks]:
    """Start the clients of a run on this machine, each as a copy of this script, for the duration of a ``with`` block.

    Yields an observer that ends the run if a client's process ends before the client has joined. In a client's process
    the script ends with the block.

    `num_clients`: number of clients to start; None = start nothing, since torchrun has started them.

    Raises:
        BadInput: there is no script to run again, torchrun has started this process, or the context is used a second
            time in a script.
    """
    if num_clients is None:
        yield RunHooks()
    elif os.environ.get(_MARK) == "1":
        yield RunHooks()
        sys.exit(0)
    else:
        command = _script(num_clients)
        _started.append(num_clients)
        environment = {_MARK: "1", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        pipe = subprocess.PIPE
        with local_ranks(command, num_clients + 1, environment=environment, stdout=pipe, stderr=pipe) as processes:
            yield _Starting(processes)


class _Starting(RunHooks):
    """Observer of a run with local client processes: it ends the run if one of them ends before it has joined.

    It passes on what the processes write to standard error, and keeps their last lines for the error message.
    """

    def __init__(self, processes: Sequence[subprocess.Popen[bytes]]) -> None:
        """Begin to read the output of the processes, which are those of clients 1, 2, ..."""
        self._processes, self._joined = processes, set[int]()
        self._outputs = [(_Output(process.stdout), _Output(process.stderr, is_shown=True)) for process in processes]

    def on_event(self, event: Event, coordinator: Coordinator, now: float) -> None:
        """Record that a client has joined."""
        if isinstance(event, Joined):
            self._joined.add(event.client.id)

    def stop_asked(self) -> str | None:
        """Return why the run must end: a client's process has ended before the client joined; None otherwise."""
        for client, process in enumerate(self._processes, start=1):
            if client not in self._joined and (code := process.poll()) is not None:
                return self._end(client, code)
        return None

    def _end(self, client: int, code: int) -> str:
        """Log the last output of a client's process that has ended too early; return the reason for which the run ends."""
        printed, errors = (output.last_lines() for output in self._outputs[client - 1])
        for _, other in self._outputs:
            other.is_shown = False  # the end of this run makes the other clients fail, too, which says nothing new
        lines = [*printed, *errors]
        _log.warning(
            f"client {client} {exit_in_words(code)} before it joined. The end of its output:\n"
            + ("\n".join(f"  {line}" for line in lines) or "  (nothing)")
        )
        why = f": {one_line(lines[-1])}" if lines else ""
        return f"failed: client {client} {exit_in_words(code)} before it joined{why}"


class _Output:
    """Thread that reads the output of one process and keeps its last lines.

    `is_shown`: whether the output is also written to this process's standard error.
    """

    def __init__(self, stream: IO[bytes] | None, *, is_shown: bool = False) -> None:
        """Start the thread, which reads ``stream`` until its end."""
        assert stream is not None
        self._stream, self.is_shown = stream, is_shown
        self._lines = deque[str](maxlen=_SHOWN_LINES)
        self._thread = threading.Thread(target=self._read, name="client-output", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with self._stream:
            for line in self._stream:
                self._lines.append(line.decode(errors="replace").rstrip())
                if self.is_shown:
                    os.write(2, line)

    def last_lines(self) -> list[str]:
        """Return the last lines, without empty ones, of a process that has ended."""
        self._thread.join(_END_S)  # a child of that process may keep the pipe open, so wait a second at most
        return [line for line in self._lines if line.strip()]


def _script(num_clients: int) -> list[str]:
    """Return the command line that started this script, with which clients are started; raise `BadInput` if that cannot work."""
    if num_clients < 1:
        raise BadInput(f"'local' is {num_clients}: give the number of clients to start, 1 or more")
    if _started:
        raise BadInput(
            f"'local' is {num_clients}, but this script has already called `fit(local=)`. Each client runs the whole script, "
            "so it would repeat the first call: call `fit(local=)` once in a script, or use torchrun or `simulate`"
        )
    if "RANK" in os.environ:
        raise BadInput(
            "'local' starts processes of its own, but torchrun has started this one: leave out "
            "'local', or start the script without torchrun"
        )
    main = sys.modules.get("__main__")
    path = getattr(main, "__file__", None)
    if path is None or not Path(path).is_file():
        raise BadInput(
            "'local' starts the clients from your script's file, but this process has no such file (is it a notebook?): "
            "use `simulate`, or put the code into a script"
        )
    spec = getattr(main, "__spec__", None)
    script = [path] if spec is None else ["-m", spec.name.removesuffix(".__main__")]
    return [sys.executable, *script, *sys.argv[1:]]
