from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raafl.atomic_file import atomic_file
from raafl.errors import BadInput
from raafl.runfolder.append_file import to_json
from raafl.runfolder.events import JournalReader
from raafl.runfolder.journal import RunFolder, default_run_folder
from raafl.runfolder.schema import CLIENT_COLUMNS
from raafl.runtime.lifecycle.resume import reopened


@pytest.fixture
def folder(tmp_path):
    with RunFolder(tmp_path / "run", "seed: 1\n") as run:
        yield run


def rows(path):
    with path.open(newline="") as file:
        return list(csv.reader(file))


def test_a_new_folder_holds_the_config_and_the_headers(folder):
    assert (folder.path / "config.yaml").read_text() == "seed: 1\n"
    assert (folder.path / "events.jsonl").read_text() == ""
    assert rows(folder.path / "clients.csv") == [list(CLIENT_COLUMNS)]


def test_an_empty_folder_is_taken_and_a_full_one_refused(tmp_path):
    (tmp_path / "run").mkdir()
    RunFolder(tmp_path / "run", "").close()
    with pytest.raises(BadInput, match=r"run' exists and is not an empty folder; name a new one, or remove it first"):
        RunFolder(tmp_path / "run", "")
    with pytest.raises(BadInput, match="not an empty folder"):
        RunFolder(tmp_path / "run" / "config.yaml", "")


def test_a_folder_that_is_being_written_is_refused_until_it_is_closed(folder):
    with pytest.raises(BadInput, match=r"output is '.*run', where another process is writing its run"):
        RunFolder(folder.path, "")
    folder.close()
    with pytest.raises(BadInput, match="not an empty folder"):
        RunFolder(folder.path, "")


def test_events_are_readable_at_once_and_in_order(folder):
    events = [{"type": "joined", "client": 1}, {"type": "arrived", "tags": ["a\nb", "é"], "loss": None}]
    for event in events:
        folder.event(event)
    assert list(JournalReader(folder.path).written()) == events
    assert list(JournalReader(folder.path / "events.jsonl").written()) == events


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=6,
)


@given(st.dictionaries(st.text(), PLAIN))
def test_an_event_is_one_line_and_comes_back_as_it_was(event):
    line = to_json(event)
    assert "\n" not in line
    assert json.loads(line) == event


@dataclass(frozen=True)
class Point:
    x: float
    at: tuple[int, ...]


class WithJson:
    def to_json(self):
        return {"axes": {"hidden": [0, 5]}}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (float("nan"), None),
        ([float("inf"), 1.5, {"a": -float("inf")}], [None, 1.5, {"a": None}]),
        (torch.tensor(2.5), 2.5),
        (torch.tensor(float("nan")), None),
        (torch.tensor([1, 2]), [1, 2]),
        (np.float32(0.5), 0.5),
        (np.int64(7), 7),
        (Point(float("nan"), (1, 2)), {"x": None, "at": [1, 2]}),
        (WithJson(), {"axes": {"hidden": [0, 5]}}),
    ],
)
def test_what_json_has_no_word_for(value, expected):
    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    assert json.loads(to_json({"v": value, "kept": 1}), parse_constant=refuse) == {"v": expected, "kept": 1}


def test_a_value_that_cannot_be_written_is_named():
    with pytest.raises(TypeError, match=r"set \{1\} cannot be written as JSON"):
        to_json({"v": {1}})


def test_metrics_fix_their_columns_and_widen(folder):
    folder.metrics({"version": 1, "time_s": 0.5, "wall_s": 0.25, "loss": torch.tensor(2.0)})
    folder.metrics({"version": 2, "time_s": 1.5, "wall_s": 0.75})
    folder.metrics({"version": 3, "time_s": 2.5, "wall_s": 1.0, "loss": 1.0, "accuracy": 0.5, "note": 'a "b",\nc'})
    folder.metrics({"version": 4, "time_s": 3.5, "wall_s": 1.5, "f1": float("nan")})
    assert rows(folder.path / "metrics.csv") == [
        ["version", "time_s", "wall_s", "loss", "accuracy", "note", "f1"],
        ["1", "0.5", "0.25", "2.0", "", "", ""],
        ["2", "1.5", "0.75", "", "", "", ""],
        ["3", "2.5", "1.0", "1.0", "0.5", 'a "b",\nc', ""],
        ["4", "3.5", "1.5", "", "", "", "nan"],
    ]
    assert [path.name for path in folder.path.iterdir() if path.name.startswith(".")] == []


def test_metrics_columns_start_with_version_and_times_whatever_the_row_order(folder):
    folder.metrics({"accuracy": 0.5, "wall_s": 0.25, "version": 1, "time_s": 0.5})
    assert rows(folder.path / "metrics.csv") == [
        ["version", "time_s", "wall_s", "accuracy"],
        ["1", "0.5", "0.25", "0.5"],
    ]


def test_a_folder_of_an_earlier_version_gets_the_column_of_what_was_logged(folder):
    folder.client({"client": 1, "task": 0, "outcome": "merged"})
    folder.close()
    with reopened(folder.path) as again:
        again.client({"client": 2, "task": 0, "outcome": "merged", "logged": {"train/acc": 0.5, "worst": float("nan")}})
    header, first, second = rows(folder.path / "clients.csv")
    assert header == [*CLIENT_COLUMNS, "logged"]
    assert (first[0], first[-1]) == ("1", "") and json.loads(second[-1]) == {"train/acc": 0.5, "worst": None}


def test_a_client_row_is_written_by_column_and_a_strange_column_refused(folder):
    folder.client({"outcome": "merged", "client": 3, "spec": {"hidden": [0, 5]}, "loss": 0.125})
    with pytest.raises(ValueError, match=r"clients\.csv has no column losss, when; it has client, task"):
        folder.client({"client": 3, "when": 1, "losss": 2})
    header, row = rows(folder.path / "clients.csv")
    expected = dict.fromkeys(header, "") | {
        "client": "3",
        "spec": '{"hidden":[0,5]}',
        "loss": "0.125",
        "outcome": "merged",
    }
    assert dict(zip(header, row, strict=True)) == expected


def test_times_and_shares_are_written_without_the_noise_of_floats_and_metrics_as_they_are(folder):
    """0.1 + 0.2 is 0.30000000000000004; whoever watches the run is told what stands in the file."""
    told = []
    folder.reader = SimpleNamespace(metrics=told.append, client=told.append)
    noisy = 0.1 + 0.2
    folder.metrics(
        {"version": 1, "time_s": noisy, "wall_s": 4.2132000089623034e-05, "loss": noisy, "utilisation": 1 - 2**-53}
    )
    folder.client({"client": 1, "outcome": "merged", "assigned_s": 20 / 3, "loss": noisy})
    folder.close()
    with (folder.path / "metrics.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert row == {
        "version": "1",
        "time_s": "0.3",
        "wall_s": "4.21320000896e-05",
        "loss": "0.30000000000000004",
        "utilisation": "1.0",
    }
    with (folder.path / "clients.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert (row["assigned_s"], row["loss"]) == ("6.66666666667", "0.30000000000000004")
    assert told[0]["time_s"] == 0.3 and told[1]["assigned_s"] == 6.66666666667


def test_the_summary_is_replaced_whole(folder):
    folder.summary({"final": {"accuracy": float("nan")}})
    folder.summary({"final": {"accuracy": 0.75}, "staleness": {"mean": np.float64(1.5)}})
    assert json.loads((folder.path / "summary.json").read_text()) == {
        "final": {"accuracy": 0.75},
        "staleness": {"mean": 1.5},
    }


def test_a_failed_atomic_write_leaves_the_old_content_and_no_litter(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(RuntimeError), atomic_file(path) as file:
        file.write(b"half")
        raise RuntimeError
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_default_folders_do_not_collide(tmp_path):
    first = default_run_folder("quick", tmp_path)
    assert first.parent == tmp_path
    assert time.strptime(first.name, "quick-%Y%m%d-%H%M%S")
    assert not first.exists()
    taken = set()
    for _ in range(3):
        path = default_run_folder("quick", tmp_path)
        path.mkdir()
        taken.add(path)
    assert len(taken) == 3


def test_close_may_be_called_twice(tmp_path):
    run = RunFolder(tmp_path / "run", "")
    run.close()
    run.close()
    with pytest.raises(ValueError, match="the file is closed"):
        run.event({})


def test_a_killed_run_leaves_every_line_that_was_appended(tmp_path):
    code = (
        "import sys; from raafl.runfolder.journal import RunFolder\n"
        f"run = RunFolder({str(tmp_path / 'run')!r}, '')\n"
        "for i in range(10**9):\n"
        "    run.event({'i': i, 'filler': 'x' * 200}); run.client({'client': i})\n"
        "    if i == 500: print('ready', flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "ready\n"
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.communicate(timeout=90)
    events = [event["i"] for event in JournalReader(tmp_path / "run").written()]
    assert events == list(range(len(events)))
    assert len(events) > 500
    assert len(rows(tmp_path / "run" / "clients.csv")) in (len(events), len(events) + 1)


def test_a_row_costs_microseconds(folder):
    """Microseconds of this process's own time, and loosely bounded, because other processes share the cores."""
    event = {"type": "arrived", "at": 12.345678, "client": 3, "assignment": 12345, "incarnation": 1, "loss": 0.125}
    client = dict.fromkeys(CLIENT_COLUMNS, 0.123456789) | {"spec": {"hidden": [0, 5]}, "outcome": "merged"}
    best = {"event": float("inf"), "client": float("inf")}
    for _ in range(20):
        for name, write, row in (("event", folder.event, event), ("client", folder.client, client)):
            start = time.process_time()
            for _ in range(200):
                write(row)
            best[name] = min(best[name], (time.process_time() - start) / 200)
    assert best["event"] < 40e-6
    assert best["client"] < 80e-6
