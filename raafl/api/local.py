"""Start clients on this machine for `Federation.fit(..., local=N)`, by running the user's script again for each."""

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
from raafl.runtime.local.ranks import local_ranks
from raafl.runtime.local.supervisor import exit_in_words

_MARK: Final = "RAAFL_LOCAL_CLIENT"
_SHOWN_LINES: Final = 20  # of the output of a client that has ended before it joined
_END_S: Final = 1.0
_log = logging.getLogger(__name__)
_started: list[int] = []
"""How many clients this process has started, for each time."""


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
    """Observer that ends a run if the process of a client ends before the client has joined.

    What the processes write to standard error is passed on, and their last lines are kept for the message.
    """

    def __init__(self, processes: Sequence[subprocess.Popen[bytes]]) -> None:
        """Watch the processes of the clients 1, 2, ..., whose output goes to pipes."""
        self._processes, self._joined = processes, set[int]()
        self._outputs = [(_Output(process.stdout), _Output(process.stderr, is_shown=True)) for process in processes]

    def on_event(self, event: Event, coordinator: Coordinator, now: float) -> None:
        """Note which clients have joined; see `RunHooks.on_event`."""
        if isinstance(event, Joined):
            self._joined.add(event.client.id)

    def stop_asked(self) -> str | None:
        """Return why the run must end, if a client's process has ended before the client joined; see `RunHooks.stop_asked`."""
        for client, process in enumerate(self._processes, start=1):
            if client not in self._joined and (code := process.poll()) is not None:
                return self._end(client, code)
        return None

    def _end(self, client: int, code: int) -> str:
        """Show the end of the output of a client's process that has ended too early, and return the reason for the run's end."""
        printed, errors = (output.last_lines() for output in self._outputs[client - 1])
        for _, other in self._outputs:
            other.is_shown = False  # that the run ends is no news of the others'
        lines = [*printed, *errors]
        _log.warning(
            f"client {client} {exit_in_words(code)} before it joined. The end of its output:\n"
            + ("\n".join(f"  {line}" for line in lines) or "  (nothing)")
        )
        why = f": {one_line(lines[-1])}" if lines else ""
        return f"failed: client {client} {exit_in_words(code)} before it joined{why}"


class _Output:
    """Reader of a process's output, in a thread of its own: it keeps the last lines, and passes all on if they are to be shown.

    `is_shown`: whether the output is written to this process's standard error.
    """

    def __init__(self, stream: IO[bytes] | None, *, is_shown: bool = False) -> None:
        """Read ``stream`` until its end."""
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
        self._thread.join(_END_S)  # a process that it has started may hold the pipe open
        return [line for line in self._lines if line.strip()]


def _script(num_clients: int) -> list[str]:
    """Return the command that started this script."""
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
    name = ["-m", spec.name.removesuffix(".__main__")] if spec is not None else [path]
    return [sys.executable, *name, *sys.argv[1:]]
