"""The journal read back: torn and damaged lines, what a resumed run has gone back behind, and rows that are missing."""

from __future__ import annotations

import json
import os
import tracemalloc

import pytest

from raafl.core.types import Arrived, Joined, Lost, Received, Sending, Stop, Timer
from raafl.errors import BadInput
from raafl.runfolder.events import JournalReader, read_run, read_summary
from raafl.runfolder.schema import EVENTS


def test_a_torn_last_line_is_left_out_and_a_damaged_one_is_named(tmp_path):
    journal = tmp_path / "events.jsonl"
    journal.write_text('{"a":1}\n{"a":2}\n{"a":')
    assert list(JournalReader(tmp_path).written()) == [{"a": 1}, {"a": 2}]
    journal.write_text('{"a":1}\n{"a":\n{"a":3}\n')
    with pytest.raises(ValueError, match=r"events\.jsonl:2 is not JSON"):
        list(JournalReader(tmp_path).written())
    journal.write_text("[1]\n")
    with pytest.raises(ValueError, match=r"events\.jsonl:1 is not a JSON object, but a list"):
        list(JournalReader(tmp_path).written())


def events(*kinds):
    """Rows by kind, each with its place as its time; a number is of a run that goes on, which keeps so many events."""
    rows = [{"event": "resumed", "kept": kind} if isinstance(kind, int) else {"event": kind} for kind in kinds]
    return [{**row, "place": place, "time_s": float(place)} for place, row in enumerate(rows)]


def test_a_journal_that_grows_is_the_same_in_each_pass_of_a_reader(tmp_path):
    """A replay reads it twice, and trains in the second pass what it has found in the first."""
    journal = tmp_path / "events.jsonl"
    journal.write_text('{"event":"joined"}\n{"event":"arrived"}\n')
    rows = JournalReader(tmp_path)
    before = list(rows)
    with journal.open("a") as file:
        file.write('{"event":"arrived"}\n')
    assert len(before) == 2 and list(rows) == before and len(list(JournalReader(tmp_path))) == 3


@pytest.mark.parametrize(
    ("kinds", "places"),
    [
        ((), []),
        (("run", "joined", "assigned", "arrived"), [0, 1, 2, 3]),
        # the second event stays, and what it made the coordinator assign; the third is undone with all behind it
        (("run", "joined", "joined", "assigned", "arrived", "assigned", 2, "arrived"), [0, 1, 2, 3, 6, 7]),
        (("run", "joined", 0, "joined"), [0, 2, 3]),
        (("run", "joined", 1, "timer", 2, "stop"), [0, 1, 2, 3, 4, 5]),  # nothing came after the checkpoint
        (("joined", "timer", 1, "timer", "timer", 2, "stop"), [0, 2, 3, 5, 6]),
        # to before where it went back to the first time, which still counts: merges that it has undone stay charged
        (("joined", "timer", "timer", 2, "timer", 1, "stop"), [0, 3, 5, 6]),
        (("joined", 7, "stop"), [0, 1, 2]),  # events are missing
    ],
)
def test_rows_that_a_resumed_run_has_gone_back_behind_do_not_count(tmp_path, kinds, places):
    rows = JournalReader(folder(tmp_path, *events(*kinds)))
    assert [row["place"] for row in rows] == [row["place"] for row in rows] == places  # twice
    assert rows.num_events == sum(row["event"] in EVENTS for row in rows)


def test_the_events_are_those_that_the_coordinator_is_told_of():
    assert set(EVENTS) == {kind.__name__.lower() for kind in (Joined, Arrived, Sending, Lost, Timer, Stop, Received)}


def folder(tmp_path, *rows, summary=None):
    (tmp_path / "config.yaml").write_text("seed: 1\n")
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if summary is not None:
        (tmp_path / "summary.json").write_text(summary)
    return tmp_path


def test_a_run_is_read_without_what_does_not_count(tmp_path):
    rows = events("run", "joined", "timer", 1, "stop")
    found, summary = read_run(folder(tmp_path, *rows))
    assert (list(found), summary) == ([rows[0], rows[1], rows[3], rows[4]], None)
    assert read_run(folder(tmp_path, *rows, summary='{"seed": 3}'))[1] == {"seed": 3}


def test_a_summary_from_before_the_run_was_resumed_is_none(tmp_path):
    """Interrupted, resumed, and killed: the summary has the model of the interruption, which no replay ends with."""
    rows, stopped = events("joined", "stop", 1, "timer"), '{"finished": "interrupted"}'

    def found(rows, summary, journal_s):
        folder(tmp_path, *rows, summary=summary)
        os.utime(tmp_path / "summary.json", (100, 100))
        os.utime(tmp_path / "events.jsonl", (journal_s, journal_s))
        return read_run(tmp_path)[1]

    assert found(rows, stopped, 101) is None
    assert found(rows, stopped, 100) == {"finished": "interrupted"}  # stopped a second time
    assert found(rows[:2], stopped, 101) == {"finished": "interrupted"}  # never resumed: somebody has touched the file
    assert found(rows, '{"finished": "max_updates"}', 101) == {"finished": "max_updates"}


@pytest.mark.parametrize(
    ("seal", "is_current"),
    [
        ({"rows": 4, "final": True}, True),  # stopped a second time
        ({"rows": 2, "final": True}, False),  # resumed, and killed before its first seal
        ({"rows": 4, "final": False}, False),  # resumed, and killed after it
    ],
)
@pytest.mark.parametrize("journal_s", [99, 101])
def test_a_copy_of_a_folder_may_have_any_times(tmp_path, seal, is_current, journal_s):
    folder(tmp_path, *events("joined", "stop", 1, "timer"), summary='{"finished": "interrupted"}')
    (tmp_path / "seals.jsonl").write_text(json.dumps(seal) + "\n")
    os.utime(tmp_path / "summary.json", (100, 100))
    os.utime(tmp_path / "events.jsonl", (journal_s, journal_s))
    assert (read_run(tmp_path)[1] is not None) == is_current


@pytest.mark.parametrize("text", ["", "[1]", '{"seed":', "\xff"])
def test_a_damaged_summary_is_none(tmp_path, text):
    assert read_summary(tmp_path) is None
    assert read_summary(folder(tmp_path, summary=text)) is None


def test_rows_that_are_missing_are_named_unless_nobody_needs_them(tmp_path):
    gap = [*events("joined", "timer"), {"event": "gap", "rows": 5}, *events("stop")]
    with pytest.raises(BadInput, match=r"5 rows are missing after event 2, .* use --until 2"):
        read_run(folder(tmp_path, *gap))
    assert list(read_run(tmp_path, until=2)[0]) == gap
    with pytest.raises(BadInput, match="5 rows are missing"):
        read_run(tmp_path, until=3)
    lost = '{"unwritten": {"events.jsonl": 4}}'
    with pytest.raises(BadInput, match=r"its last 4 rows are missing, .* use --until 2"):
        read_run(folder(tmp_path, *gap[:2], summary=lost))
    assert list(read_run(tmp_path, until=1)[0]) == gap[:2]


def test_a_long_journal_is_not_held_in_memory(tmp_path):
    place = folder(tmp_path, *({"event": "timer", "id": number, "time_s": 1.5} for number in range(20_000)))
    tracemalloc.start()
    try:
        found, _ = read_run(place)
        assert sum(1 for _ in found) == 20_000
        assert tracemalloc.get_traced_memory()[1] < 2**20, "as dictionaries they are 5 MB"
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", ["config.yaml", "events.jsonl"])
def test_a_folder_without_a_journal_or_a_config_is_no_run(tmp_path, name):
    (folder(tmp_path) / name).unlink()
    with pytest.raises(BadInput, match=f"is not a run folder: it has no {name}"):
        read_run(tmp_path)
