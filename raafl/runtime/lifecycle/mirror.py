"""Copy a run folder to an object store while the run continues; errors of the store do not delay the run."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from raafl.core.hooks import RunHooks
from raafl.errors import one_line
from raafl.object_store import ObjectStore
from raafl.runfolder.schema import CHECKPOINTS, GROWING, SEALS
from raafl.runtime.lifecycle.signals import Interrupt

if TYPE_CHECKING:
    from raafl.runtime.run import Run

_LOGGERS, _RUN_IDS = Path("loggers"), "runs.json"
_FIRST_WAIT_S, _LONGEST_WAIT_S = 1.0, 60.0
_SAID_S = 5.0  # seconds of waiting for the store after which a line says so
_log = logging.getLogger(__name__)


def check_store(output: str) -> None:
    """Write a small file to the object store of a new run and remove it.

    Raises:
        BadInput: the store refuses one of the two, so that it could not hold a copy of the run.
    """
    with ObjectStore.answering(output, "output") as store:
        name = f".{uuid4().hex}"  # listings omit names that begin with a dot
        store.write(b"raafl", name)
        store.remove(name)


class Mirror:
    """Copies changed files of a run folder to an object store, on a thread of its own.

    A run can be resumed from the copy at any time: a checkpoint is copied after the journal that belongs to it, and
    only then an older checkpoint is deleted. `request` may be called from any thread, the other methods from one.

    `url`: URL of the folder in the store.
    `num_failed`: number of failed attempts.
    """

    def __init__(
        self,
        folder: Path,
        store: ObjectStore,
        warn: Callable[[str], None] = _log.warning,
        *,
        first_wait_s: float = _FIRST_WAIT_S,
    ) -> None:
        """Start the copying thread, which waits for the first call of `request`."""
        self.url, self.num_failed = store.url, 0
        self._folder, self._warn = folder, warn
        self._first_wait_s = first_wait_s
        # by file name: size and modification time at the last copy; used by the copying thread alone
        self._copied: dict[str, tuple[int, int]] = {}
        self._changed = threading.Condition()
        self._asked = self._done = self._failed_in_a_row = 0
        self._moved_at, self._error, self._is_closed = time.monotonic(), "", False
        self._thread = threading.Thread(target=self._work, args=(store,), name="mirror", daemon=True)
        self._thread.start()

    def request(self) -> None:
        """Request a copy of the run folder in its present state; callable from any thread."""
        with self._changed:
            self._asked += 1
            self._changed.notify_all()

    def finish(
        self, note: Callable[[str], None] = _log.info, *, failing_s: float = 60.0, silent_s: float = 600.0
    ) -> bool:
        """Copy the run folder in its present state, wait until that is done, and return whether the store has all files.

        A first Ctrl-C during the wait ends it; ``note`` says so where it takes long.
        """
        since = time.monotonic()
        with Interrupt() as interrupt, self._changed:
            asked_before, said = interrupt.asked, False
            self._asked += 1
            wanted, self._moved_at = self._asked, since
            self._changed.notify_all()
            while self._done < wanted:
                self._changed.wait(0.2)
                now = time.monotonic()
                if not said and now - since > _SAID_S:
                    note(f"waiting until {self.url} has all files; Ctrl-C ends the wait")
                    said = True
                interrupted = interrupt.asked and not asked_before
                gave_up = interrupted or (self._failed_in_a_row and now - since > failing_s)
                if self._done < wanted and (gave_up or now - self._moved_at > silent_s):
                    why = self._error or (
                        "Ctrl-C ended the wait" if interrupted else f"it has not answered for {silent_s:g} s"
                    )
                    self._warn(f"{self.url} lacks files of {self._folder} ({why}): copy the folder there by hand")
                    return False
        return True

    def close(self) -> None:
        """End the copying thread; if it is waiting for the store, it ends later. The method can be called again."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(timeout=1.0)

    def report(self, whole: bool) -> dict[str, Any]:
        """Return an entry for the run's summary: URL of the copy, number of failed attempts and the last error."""
        return {"url": self.url, "whole": whole, "failed": self.num_failed, "error": self._error or None}

    def _work(self, store: ObjectStore) -> None:
        wait_s = self._first_wait_s
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._asked > self._done or self._is_closed)
                if self._is_closed:
                    return
                asked = self._asked
            try:
                self._copy(store)
            except Exception as error:  # each store's library raises errors of its own
                self._failed(error)
                with self._changed:
                    self._changed.wait_for(lambda: self._is_closed, timeout=wait_s)
                wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
                continue
            wait_s = self._first_wait_s
            with self._changed:
                self._done, self._failed_in_a_row = asked, 0
                self._changed.notify_all()

    def _failed(self, error: Exception) -> None:
        with self._changed:
            self.num_failed += 1
            self._failed_in_a_row += 1
            self._error = one_line(f"{type(error).__name__}: {error}")
        if self.num_failed == 1:
            self._warn(f"{self.url} cannot be written ({self._error}); the run goes on, and raafl tries again")

    def _copy(self, store: ObjectStore) -> None:
        """Copy changed files, the journal before checkpoints and seals, so that it always covers what they refer to."""
        names = [name for name in self._names() if name not in (*GROWING, SEALS)]
        seals = (self._folder / SEALS).read_bytes() if (self._folder / SEALS).is_file() else b""
        checkpoints = [name for name in names if name.startswith(f"{CHECKPOINTS}/")]
        for name in (*GROWING, *(name for name in names if name not in checkpoints), *checkpoints):
            self._put(store, name)
        store.write(seals, SEALS)
        for name in store.names():
            if name.startswith(f"{CHECKPOINTS}/") and name not in checkpoints:
                store.remove(name)
                self._copied.pop(name, None)
        self._moved()

    def _names(self) -> Iterator[str]:
        """Yield the files of the run folder, without what is half written, in hidden files and folders."""
        for folder, inside, files in os.walk(self._folder):  # passes over a folder that is renamed meanwhile
            place = Path(folder).relative_to(self._folder)
            inside[:] = [name for name in inside if not name.startswith(".")]
            if place == _LOGGERS:  # they upload their files; by the ids a resumed run goes on in the same run there
                inside[:], files = [], [name for name in files if name == _RUN_IDS]
            yield from ((place / name).as_posix() for name in files if not name.startswith("."))

    def _put(self, store: ObjectStore, name: str) -> None:
        path = self._folder / name
        try:
            state = path.stat()
            if self._copied.get(name) == (now := (state.st_size, state.st_mtime_ns)):
                return
            store.put(path, name, self._moved)
        except FileNotFoundError:
            if path.exists():  # it is the store that lacks something
                raise
            return  # a checkpoint that was deleted in the meantime
        self._copied[name] = now
        self._moved()

    def _moved(self) -> None:
        self._moved_at = time.monotonic()


class StoreCopy(RunHooks):
    """Observer that keeps a copy of the run folder in the object store that ``output`` names."""

    def __init__(self, run: Run) -> None:
        self._run, self._output = run, str(run.parts.experiment.output)
        self._mirror: Mirror | None = None  # None until the run folder exists
        self._is_whole = False

    def begin(self, run: Run, saved: object = None) -> None:
        """Try the store of a new run."""
        if saved is None:
            check_store(self._output)

    def opened(self) -> None:
        """Begin to copy the folder."""
        self._mirror = Mirror(self._run.folder, ObjectStore(self._output), self._run.progress.warn)

    def start(self) -> None:
        """Copy the first files."""
        self.saved()

    def saved(self) -> None:
        """Copy the checkpoint, and what belongs to it."""
        if self._mirror is not None:
            self._mirror.request()

    def publish(self, summary: dict[str, Any]) -> None:
        """Copy all that is there, and add what came of it to the summary."""
        if self._mirror is not None:
            self._is_whole = self._mirror.finish(self._run.progress.note)
            summary["mirror"] = self._mirror.report(self._is_whole)

    def written(self) -> None:
        """Copy the summary, unless the store has failed before."""
        if self._mirror is not None and self._is_whole:
            self._mirror.finish()

    def close(self) -> None:
        """End the copying thread."""
        if self._mirror is not None:
            self._mirror.close()
