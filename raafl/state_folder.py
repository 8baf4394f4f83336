"""Locate this user's state folder, where raafl keeps notes that outlive a run; write files that only the user can read."""

from __future__ import annotations

import os
from pathlib import Path


def state_folder() -> Path:
    """Return the folder for files that outlive a run, `$XDG_STATE_HOME/raafl` or its default at home; it need not exist.

    Raises:
        RuntimeError: the user has no home folder.
    """
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "raafl"


def write_private(path: Path, data: bytes) -> None:
    """Write a new file with mode 600, whatever the umask is.

    Raises:
        FileExistsError: the file exists already.
        OSError: the file cannot be written.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(descriptor, 0o600)
        file.write(data)
