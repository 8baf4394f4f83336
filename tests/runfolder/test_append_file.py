"""Files on a disk that is full, read-only or gone: no error reaches the run, and what is missing is counted."""

from __future__ import annotations

import errno
import gc
import json
import os
import shutil
import subprocess
import sys
from contextlib import contextmanager

import pytest

from raafl.runfolder import append_file as rows_module
from raafl.runfolder.append_file import AppendFile, read_table
from raafl.runfolder.events import JournalReader
from raafl.runfolder.journal import RunFolder
from raafl.runfolder.schema import CLIENT_COLUMNS
from raafl.runtime.lifecycle.resume import reopened

EVENT = {"time_s": 1.5, "event": "timer", "id": 1}


@pytest.fixture
def warned():
    return []


@pytest.fixture
def folder(tmp_path, warned, monkeypatch):
    monkeypatch.setattr(rows_module, "KEPT_ROWS", 3)
    monkeypatch.setattr(rows_module, "RETRY_S", 0.0)
    with RunFolder(tmp_path / "run", "seed: 1\n", warned.append) as run:
        yield run


@contextmanager
def full_disk(monkeypatch, after_bytes=0):
    """Writes fail as on a full disk: the first ``after_bytes`` still fit, so that a row may be cut short."""
    room = [after_bytes]

    class Full:
        def __init__(self, file):
            self._file = file

        def write(self, data):
            if not room[0]:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            num_bytes = self._file.write(data[: room[0]])
            room[0] -= num_bytes
            return num_bytes

        def __getattr__(self, name):
            return getattr(self._file, name)

    original = AppendFile._write

    def write(self, data):
        file, self._file = self._file, Full(self._file)
        try:
            original(self, data)
        finally:
            self._file = file

    with monkeypatch.context() as patch:
        patch.setattr(AppendFile, "_write", write)
        yield


def ids(folder):
    return [(row["event"], row.get("id", row.get("rows"))) for row in JournalReader(folder.path).written()]


def test_rows_are_kept_and_written_when_there_is_space_again(folder, monkeypatch, warned):
    folder.event({**EVENT, "id": 1})
    with full_disk(monkeypatch):
        for number in (2, 3):
            folder.event({**EVENT, "id": number})
        assert folder.unwritten == {"events.jsonl": 2}
    assert ids(folder) == [("timer", 1)]
    folder.event({**EVENT, "id": 4})
    assert ids(folder) == [("timer", n) for n in (1, 2, 3, 4)]
    assert folder.unwritten == {}
    assert len(warned) == 1 and "events.jsonl cannot be written: No space left on device" in warned[0]
    assert warned[0].endswith("are counted as unwritten in the summary")


def test_beyond_the_bound_rows_are_dropped_and_the_journal_says_where(folder, monkeypatch, warned):
    with full_disk(monkeypatch):
        folder.event({"time_s": 1.0, "event": "assigned", "id": 7})
        for number in range(5):
            folder.event({**EVENT, "id": number})
            folder.client({"client": number, "outcome": "merged"})
        assert folder.unwritten == {"events.jsonl": 6, "clients.csv": 5}
    folder.event({**EVENT, "id": 9})  # kept is full, so it is dropped too, and then space is found
    folder.flush()
    assert ids(folder) == [("assigned", 7), ("timer", 0), ("timer", 1), ("gap", 4)]
    assert list(JournalReader(folder.path).written())[-1] == {"time_s": 1.5, "event": "gap", "rows": 4, "last_id": 7}
    folder.event({**EVENT, "id": 10})
    assert ids(folder)[-1] == ("timer", 10)
    assert folder.unwritten == {"events.jsonl": 4, "clients.csv": 2} and folder.num_clients_dropped == 2
    assert [row[0] for row in read_table(folder.path / "clients.csv")][1:] == ["0", "1", "2"]
    assert len(warned) == 2  # once a file


@pytest.mark.parametrize("num_bytes", [1, 10, 25])
def test_a_row_cut_short_leaves_no_part_of_it(folder, monkeypatch, num_bytes):
    folder.event(EVENT)
    whole = (folder.path / "events.jsonl").read_bytes()
    with full_disk(monkeypatch, after_bytes=num_bytes):
        folder.event({**EVENT, "id": 2})
    assert (folder.path / "events.jsonl").read_bytes() == whole
    folder.flush()
    assert ids(folder) == [("timer", 1), ("timer", 2)]


def test_a_table_that_cannot_be_widened_is_widened_later(folder, monkeypatch):
    first = {"version": 0, "time_s": 0.0, "wall_s": 0.0, "loss": 2.0}
    folder.metrics(first)
    with full_disk(monkeypatch), monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left on device")))
        folder.metrics({**first, "version": 1, "accuracy": 0.5})
        folder.metrics({**first, "version": 2})
    assert folder.unwritten == {"metrics.csv": 2}
    folder.flush()
    header, *rows = read_table(folder.path / "metrics.csv")
    assert header == ["version", "time_s", "wall_s", "loss", "accuracy"]
    assert [[row[0], row[-1]] for row in rows] == [["0", ""], ["1", "0.5"], ["2", ""]]
    assert [path.name for path in folder.path.iterdir() if path.name.startswith(".")] == []


def test_a_folder_deleted_under_the_run_is_made_again_and_the_loss_counted(folder, warned):
    for number in (1, 2):
        folder.event({**EVENT, "id": number})
    folder.client({"client": 1})
    shutil.rmtree(folder.path)
    folder.event({**EVENT, "id": 3})
    folder.client({"client": 2})
    assert ids(folder) == [("gap", 2), ("timer", 3)]
    assert next(read_table(folder.path / "clients.csv")) == list(CLIENT_COLUMNS)
    assert [row[0] for row in read_table(folder.path / "clients.csv")][1:] == ["2"]
    assert (folder.path / "config.yaml").read_text() == "seed: 1\n"
    assert folder.unwritten == {"events.jsonl": 2, "clients.csv": 1}
    assert len(warned) == 2 and all("it was deleted during the run" in line for line in warned)


def test_rows_from_before_a_resume_count_as_lost_too(folder, warned):
    for number in (1, 2):
        folder.event({**EVENT, "id": number})
        folder.client({"client": number})
    folder.close()
    with reopened(folder.path, warned.append) as again:
        again.event({**EVENT, "id": 3})
        for name in ("events.jsonl", "clients.csv"):
            (folder.path / name).unlink()
        again.event({**EVENT, "id": 4})
        again.client({"client": 3})
        assert ids(again) == [("gap", 3), ("timer", 4)]
        assert again.unwritten == {"events.jsonl": 3, "clients.csv": 2}


def test_a_folder_that_cannot_be_made_again_is_waited_for(folder, warned):
    folder.event({**EVENT, "id": 1})
    shutil.rmtree(folder.path)
    folder.path.write_text("in the way")
    for number in (2, 3):
        folder.event({**EVENT, "id": number})
    assert folder.unwritten == {"events.jsonl": 2}
    assert "cannot be made again: File exists" in warned[0]
    folder.path.unlink()
    folder.flush()
    assert ids(folder) == [("gap", 1), ("timer", 2), ("timer", 3)]


def test_finish_says_what_is_missing_even_if_the_summary_is(folder, monkeypatch, warned):
    with full_disk(monkeypatch):
        folder.event(EVENT)
        summary = {"versions": 3}
        folder.finish(summary, 2, warned)
    assert summary["unwritten"] == {"events.jsonl": 1, "checkpoints": 2}
    assert json.loads((folder.path / "summary.json").read_text()) == summary
    (folder.path / "summary.json").unlink()
    (folder.path / "summary.json").mkdir()  # nothing can be renamed onto it
    summary = {"versions": 3}
    folder.finish(summary, 0, warned)
    assert summary["unwritten"] == {"summary.json": 1}
    assert "summary.json cannot be written: Is a directory" in summary["warnings"][-1]


def test_a_folder_for_which_there_is_no_room_leaves_nothing(tmp_path, monkeypatch):
    with full_disk(monkeypatch), pytest.raises(OSError, match="No space left"):
        RunFolder(tmp_path / "run", "")
    assert not (tmp_path / "run").exists()
    gc.collect()  # a file that was left open would be an error here, as pytest is set
    RunFolder(tmp_path / "run", "").close()


def test_a_device_that_is_always_full(tmp_path, warned, monkeypatch):
    monkeypatch.setattr(rows_module, "KEPT_ROWS", 2)
    (tmp_path / "events.jsonl").symlink_to("/dev/full")
    rows = AppendFile(tmp_path / "events.jsonl", bytes, warned.append, new=False)
    for _ in range(5):
        rows.add(b"row\n")
    rows.close()
    assert rows.num_unwritten == 5 and len(warned) == 1
    assert warned[0].endswith(
        "No space left on device; the run goes on, and rows that cannot be written later are lost"
    )


LIMITED = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
from raafl.runfolder import append_file
from raafl.runfolder.journal import RunFolder
append_file.RETRY_S = 0.0
run = RunFolder(sys.argv[1], "", print)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
for number in range(1000):
    run.event({"time_s": 0.0, "event": "timer", "id": number})
missing = run.unwritten["events.jsonl"]
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
run.close()
print(missing)
"""


def test_a_file_that_may_not_grow_and_then_may(tmp_path):
    """The operating system's own limit on the size of a file, which cuts a write short."""
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path / "run")], capture_output=True, text=True, timeout=60, check=True
    )
    warning, missing = done.stdout.splitlines()
    assert "events.jsonl cannot be written: File too large" in warning
    assert 800 < int(missing) < 1000
    assert [row["id"] for row in JournalReader(tmp_path / "run").written()] == list(range(1000))
