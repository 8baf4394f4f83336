"""Lock a run folder, so that two processes never write one run.

The folder itself is locked (flock), so the lock leaves no file, and stays with a folder that is renamed. The kernel releases it
when the process ends, however it ends. Readers do not ask for it.
"""

from __future__ import annotations

import fcntl
import logging
import os
from pathlib import Path
from typing import Final, Self
from weakref import WeakSet

from raafl.errors import BadInput

_log = logging.getLogger(__name__)
_held: Final[WeakSet[FolderLock]] = WeakSet()
"""Locks of this process."""


class FolderLock:
    """Lock on a run folder, for the process that writes the run; a context manager.

    Where the file system cannot lock, it logs a warning and does nothing else. On a network file system (NFS) Linux locks
    folders on each machine by itself, without asking the server.
    """

    def __init__(self, folder: Path, field: str) -> None:
        """Take the lock; do not wait for it.

        Raises:
            BadInput: another process, or another run of this process, has the lock.
        """
        self._descriptor: int | None = None
        try:
            self._descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            _held.add(self)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise BadInput(
                f"{field} is '{folder}', where another process is writing its run: wait until it ends, or end it first"
            ) from None
        except OSError as error:
            self.close()
            _log.warning(
                f"{folder} cannot be locked ({error.strerror or error}): make sure that no other process writes there"
            )

    def close(self) -> None:
        """Release the lock; a second call does nothing."""
        _held.discard(self)
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def __del__(self) -> None:  # the run failed before somebody could close it
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _leave_to_parent() -> None:
    """Close a forked child's copies of its parent's locks, which would outlive a parent that is killed."""
    for lock in list(_held):
        lock.close()


os.register_at_fork(after_in_child=_leave_to_parent)
