"""Write files that appear whole or not at all, whatever ends the process."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

_unfinished: set[Path] = set()


@contextmanager
def atomic_file(path: Path, is_synced: bool = True) -> Iterator[BinaryIO]:
    """Open a temporary file for writing; rename it to `path` if the block ends without an error, else delete it.

    Raises:
        OSError: the file cannot be written; `path` is unchanged, and no temporary file is left.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    _unfinished.add(temporary)
    try:
        with temporary.open("wb") as file:
            yield file
            if is_synced:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    finally:
        _unfinished.discard(temporary)
    if is_synced:
        _sync_folder(path.parent)


def drop_unfinished() -> None:
    """Delete the temporary files that `atomic_file` is writing; to be called, from any thread, when the process must exit."""
    for temporary in list(_unfinished):
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def remove_leftovers(folder: Path) -> None:
    """Delete the temporary files that a killed process left in `folder`."""
    for temporary in folder.glob(".*.tmp"):
        with suppress(OSError):
            temporary.unlink()


def _sync_folder(folder: Path) -> None:
    """Flush a folder's entries to disk, so that a rename in it survives a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:  # some network file systems cannot do this; the file is there all the same
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(descriptor)


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
