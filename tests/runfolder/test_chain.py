"""The hash chain of a journal: a row that is changed, removed, inserted or moved is named; crashes leave a chain that holds."""

from __future__ import annotations

import hashlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raafl.runfolder.append_file import START, AppendFile, link
from raafl.runfolder.books import check_lines, read_head, unlink
from raafl.runfolder.events import JournalReader
from raafl.runfolder.journal import RunFolder
from raafl.runtime.lifecycle.resume import reopened

EVENTS = [{"time_s": float(number), "event": "timer", "id": number} for number in range(1, 7)]


def lines(folder):
    return (folder / "events.jsonl").read_bytes().splitlines(keepends=True)


@pytest.fixture
def run(tmp_path):
    with RunFolder(tmp_path / "run", "") as folder:
        for event in EVENTS:
            folder.event(event)
    return tmp_path / "run"


def test_each_row_has_the_digest_of_the_digest_before_and_of_itself(run):
    before = "0" * 64
    for line, event in zip(lines(run), EVENTS, strict=True):
        plain = json.dumps(event, separators=(",", ":")) + "\n"
        before = hashlib.sha256((before + plain).encode()).hexdigest()
        assert json.loads(line) == {**event, "chain": before}
    assert read_head(run / "events.jsonl") == (before, 6)
    assert list(JournalReader(run).written()) == EVENTS


@given(st.dictionaries(st.text(), st.text() | st.integers(), min_size=1))
def test_what_is_linked_comes_back(event):
    row = (json.dumps(event, separators=(",", ":")) + "\n").encode()
    line, head = link(START, row)
    assert unlink(line) == (row, head) and json.loads(line)["chain"] == head
    assert check_lines([line]).num_broken == 0


def test_every_flipped_bit_of_a_row_is_named(run):
    written = lines(run)
    for place in range(len(written[2]) - 1):  # its line end makes one row of two, see below
        for bit in (1, 64):
            flipped = bytearray(written[2])
            flipped[place] ^= bit
            if b"\n" not in flipped[:-1]:
                found = check_lines([*written[:2], bytes(flipped), *written[3:]])
                assert 3 in found.broken and set(found.broken) <= {3, 4}


@pytest.mark.parametrize(
    ("changed", "broken"),
    [
        (lambda rows: rows[:2] + rows[3:], [3]),  # the third is gone: the fourth does not follow the second
        (lambda rows: [*rows[:3], rows[1], *rows[3:]], [4, 5]),
        (lambda rows: [rows[1], rows[0], *rows[2:]], [1, 2, 3]),
        (lambda rows: rows[1:], [1]),
        (lambda rows: [*rows[:2], rows[2][:-1] + rows[3], *rows[4:]], [3]),
        (lambda rows: [*rows[:2], b'{"event":"timer"}\n', *rows[3:]], [3, 4]),  # without a chain
        (lambda rows: rows[:4], []),  # the end alone may be cut off unseen: that is what seals are for
    ],
)
def test_rows_that_are_removed_added_or_moved_are_named(run, changed, broken):
    assert check_lines(changed(lines(run))).broken == broken


def test_after_a_crash_the_torn_line_is_cut_off_and_the_chain_goes_on(run):
    with (run / "events.jsonl").open("ab") as file:
        file.write(lines(run)[0][:20])
    with reopened(run) as folder:
        folder.event({"time_s": 9.0, "event": "stop", "reason": "x"})
        assert folder.head == check_lines(lines(run)).head
    found = check_lines(lines(run))
    assert (found.num_rows, found.broken, found.num_unlinked) == (7, [], 0)


def test_a_journal_of_an_earlier_version_goes_on_with_a_chain_from_all_of_it(run):
    old = "".join(json.dumps(event) + "\n" for event in EVENTS)
    (run / "events.jsonl").write_text(old)
    assert not check_lines(lines(run)).has_chain
    with reopened(run) as folder:
        folder.event({"time_s": 9.0, "event": "timer", "id": 9})
        folder.event({"time_s": 9.5, "event": "timer", "id": 10})
    found = check_lines(lines(run))
    assert (found.num_unlinked, found.broken, found.has_chain) == (6, [], True)
    assert check_lines([lines(run)[0].replace(b"1", b"2"), *lines(run)[1:]]).broken == [7]


def test_rows_that_had_to_wait_are_linked_in_the_order_in_which_they_are_written(tmp_path, monkeypatch):
    write, fails = AppendFile._write, [False]

    def failing(self, data):
        if fails[0]:
            raise OSError(28, "No space left on device")
        write(self, data)

    monkeypatch.setattr(AppendFile, "_write", failing)
    with RunFolder(tmp_path / "run", "", warn=lambda text: None) as folder:
        folder.event(EVENTS[0])
        fails[0] = True
        folder.event(EVENTS[1])
        folder.event(EVENTS[2])
        fails[0] = False
        folder.flush()
        folder.gap(2)
        folder.event(EVENTS[3])
    found = check_lines(lines(tmp_path / "run"))
    assert (found.num_rows, found.broken) == (5, [])
    assert [row["event"] for row in JournalReader(tmp_path / "run").written()] == ["timer"] * 3 + ["gap", "timer"]
