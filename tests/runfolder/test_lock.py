from __future__ import annotations

import fcntl
import gc
import multiprocessing as mp
import os
import signal
from contextlib import contextmanager

import pytest

from raafl.errors import BadInput
from raafl.runfolder.journal import FolderLock
from tests.helpers.refusals import cannot_lock

REFUSED = r"resume is '.*run', where another process is writing its run: wait until it ends, or end it first"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


@contextmanager
def forked(work):
    """Fork a child that works and then sleeps; yield its process once it has worked."""
    context = mp.get_context("fork")
    has_worked = context.Event()

    def child():
        lock = work()  # noqa: F841
        has_worked.set()
        signal.pause()

    process = context.Process(target=child)
    process.start()
    try:
        assert has_worked.wait(20)
        yield process
    finally:
        process.kill()
        process.join()


def test_a_folder_has_one_lock_at_a_time_which_leaves_nothing_there(folder):
    with FolderLock(folder, "resume") as lock:
        with pytest.raises(BadInput, match=REFUSED):
            FolderLock(folder, "resume")
        folder = folder.rename(folder.with_name("another-run"))
        with pytest.raises(BadInput, match="another-run"):
            FolderLock(folder, "output")
    lock.close()
    FolderLock(folder, "resume").close()
    assert list(folder.iterdir()) == []


def test_a_process_that_is_killed_leaves_its_lock(folder):
    with forked(lambda: FolderLock(folder, "resume")) as writer:
        with pytest.raises(BadInput, match=REFUSED):
            FolderLock(folder, "resume")
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()
        FolderLock(folder, "resume").close()


def test_a_forked_child_does_not_hold_the_lock_on(folder):
    with FolderLock(folder, "resume") as lock, forked(lock.close):  # which has nothing to close there
        with pytest.raises(BadInput, match=REFUSED):
            FolderLock(folder, "resume")
        lock.close()
        FolderLock(folder, "resume").close()


def test_where_nothing_can_be_locked_the_run_goes_on_with_a_warning(folder, monkeypatch, caplog):
    monkeypatch.setattr(fcntl, "flock", cannot_lock)
    with FolderLock(folder, "resume"), FolderLock(folder, "resume"):
        pass
    (said, _) = caplog.messages
    assert said == f"{folder} cannot be locked (No locks available): make sure that no other process writes there"


def test_a_run_that_is_dropped_leaves_its_lock(folder):
    FolderLock(folder, "resume")
    gc.collect()
    FolderLock(folder, "resume").close()


def test_a_forked_child_can_take_a_lock_of_its_own_beside_the_inherited_one(folder):
    """The child's copy of the parent's lock closes nothing of the child's, though a descriptor's number is used again."""
    other = folder.parent / "other"
    other.mkdir()
    parents = FolderLock(folder, "resume")

    def work():
        lock = FolderLock(other, "resume")
        parents.close()
        return lock

    with forked(work), pytest.raises(BadInput):
        FolderLock(other, "resume")
    parents.close()
