"""Start clients on this machine for `Federation.fit(..., local=N)`, by running the user's script again for each."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from raafl.errors import BadInput
from raafl.runtime.local.ranks import local_ranks

_MARK: Final = "RAAFL_LOCAL_CLIENT"
_started: list[int] = []
"""How many clients this process has started, for each time."""


@contextmanager
def local_clients(num_clients: int | None) -> Iterator[None]:
    """Start the clients of a run on this machine, each as a copy of this script, for the duration of a ``with`` block.

    In a client's process the script ends with the block.

    Args:
        num_clients: number of clients to start; None = start nothing, since torchrun has started them.

    Raises:
        BadInput: there is no script to run again, torchrun has started this process, or the context is used a second
            time in a script.
    """
    if num_clients is None:
        yield
    elif os.environ.get(_MARK) == "1":
        yield
        sys.exit(0)
    else:
        command = _script(num_clients)
        _started.append(num_clients)
        environment = {_MARK: "1", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        with local_ranks(command, num_clients + 1, environment=environment, stdout=subprocess.DEVNULL):
            yield


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
