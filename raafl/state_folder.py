"""Locate the user's state folder, in which raafl keeps small files between runs; write files that only the user can read."""

from __future__ import annotations

import os
from pathlib import Path


def state_folder() -> Path:
    """Return the folder for files that raafl keeps between runs: `$XDG_STATE_HOME/raafl`, or its default in the home folder.

    The folder may not exist yet.

    Raises:
        RuntimeError: the user has no home folder.
    """
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "raafl"


def write_private(path: Path, data: bytes) -> None:
    """Write a new file that only this user can read (mode 600).

    Raises:
        FileExistsError: the file exists already.
        OSError: the file cannot be written.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(descriptor, 0o600)
        file.write(data)
