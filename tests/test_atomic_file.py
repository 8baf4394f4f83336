"""Files that appear whole or not at all."""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
from contextlib import nullcontext

import pytest

from raafl.atomic_file import atomic_file, remove_leftovers


def test_what_a_killed_process_left_is_removed(tmp_path):
    code = (
        "import os, signal; from pathlib import Path; from raafl.atomic_file import atomic_file\n"
        f"with atomic_file(Path({str(tmp_path / 'file')!r})) as file:\n"
        "    file.write(b'half'); file.flush(); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 1
    remove_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_atomic_write_that_fails_and_cannot_clean_up_raises_the_first_error(tmp_path, monkeypatch):
    def refuse(self, missing_ok=False):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(type(tmp_path), "unlink", refuse)
    with pytest.raises(RuntimeError, match="first"), atomic_file(tmp_path / "file"):
        raise RuntimeError("first")


@pytest.mark.parametrize("is_synced", [True, False])
def test_a_file_is_the_earlier_one_until_the_block_has_ended(tmp_path, is_synced):
    path = tmp_path / "file"
    path.write_bytes(b"earlier")
    with atomic_file(path, is_synced) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"earlier"
    assert path.read_bytes() == b"new" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("number", "is_said"), [(errno.EINVAL, False), (errno.ENOTSUP, False), (errno.EIO, True)])
def test_a_file_system_that_cannot_sync_folders_has_the_file_all_the_same(tmp_path, monkeypatch, number, is_said):
    sync = os.fsync

    def refuses_folders(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", refuses_folders)
    with (
        pytest.raises(OSError, match="Input/output") if is_said else nullcontext(),
        atomic_file(tmp_path / "a") as file,
    ):
        file.write(b"whole")
    assert (tmp_path / "a").read_bytes() == b"whole"
