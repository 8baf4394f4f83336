"""Files that grow, are torn, come late or are written anew; raafl.watch is tested beside it on what it makes of the rows."""

from __future__ import annotations

import json

from raafl.runfolder.events import JournalReader, NewLines, RunTail


class Heard:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.rows, self.tables, self.summary = [], [], None

    def event(self, row, at=None) -> None:
        self.rows.append(row)

    def client(self, row) -> None:
        self.tables.append(row)

    metrics = client

    def ended(self, summary) -> None:
        self.summary = summary


def test_a_tail_gives_whole_lines_and_notices_another_file(tmp_path):
    path = tmp_path / "file"
    tail = NewLines(path)
    assert tail.lines() == []
    path.write_bytes(b"one\ntw")
    assert tail.lines() == ["one"]
    assert tail.lines() == []
    with path.open("ab") as file:
        file.write(b"o\nthree\n\xc3")  # cut within a letter
    assert tail.lines() == ["two", "three"]
    (tmp_path / "new").write_text("one\ntwo\nthree\nfour\n")
    (tmp_path / "new").replace(path)
    assert tail.lines() is None
    shorter = NewLines(path)
    assert len(shorter.lines()) == 4
    path.write_text("one\n")
    assert shorter.lines() is None
    path.unlink()
    assert shorter.lines() is None


def test_a_long_file_is_read_in_pieces_of_whole_lines(tmp_path, monkeypatch):
    monkeypatch.setattr("raafl.runfolder.events._READ_BYTES", 8)
    (tmp_path / "file").write_bytes(b"a\nbc\nlonger than a piece\nd\x0ce\r\nhal")
    tail = NewLines(tmp_path / "file")
    found = list(iter(tail.lines, []))
    assert [line for piece in found for line in piece] == ["a", "bc", "longer than a piece", "d\x0ce\r"]
    assert len(found) > 1 and tail.lines() == []


def test_what_resumed_runs_have_gone_back_behind_is_left_out(tmp_path, monkeypatch):
    """Twice, the second time to before the first; as `JournalReader` has it, in pieces of a few lines."""
    monkeypatch.setattr("raafl.runfolder.events._READ_BYTES", 100)
    kinds = ["run", "joined", "joined", "joined", 3, "assigned", "joined", "joined", 4, "joined", 2, "timer", 9]
    rows = [
        {"event": "resumed", "kept": kind, "at": at} if isinstance(kind, int) else {"event": kind, "at": at}
        for at, kind in enumerate(kinds)
    ]
    for known in (len(rows), 6, 3):  # read at once, and as it grows
        journal = tmp_path / f"{known}" / "events.jsonl"
        journal.parent.mkdir()
        following = RunTail(journal.parent, Heard)
        for part in (rows[:known], rows[known:]):
            with journal.open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in part)
            following.look()
        assert following.state.rows == list(JournalReader(journal))
        assert [row["at"] for row in following.state.rows] == [0, 1, 2, 4, 8, 10, 11, 12]
        assert not following.look() and following.num_damaged == 0


def test_a_table_that_is_written_anew_is_read_anew(tmp_path):
    following = RunTail(tmp_path, Heard)
    assert not following.look() and not following.begun
    (tmp_path / "clients.csv").write_text("client,outcome\n1,merged\n2,lo")
    assert following.look() and following.begun
    assert following.state.tables == [{"client": "1", "outcome": "merged"}]
    (tmp_path / "new").write_text("client,outcome,loss\n1,merged,\n2,lost:gone,\n3\n")
    (tmp_path / "new").replace(tmp_path / "clients.csv")
    assert following.look() and not following.look()
    assert [row["client"] for row in following.state.tables] == ["1", "2"] and following.num_damaged == 1
    (tmp_path / "summary.json").write_text('{"finished": "interrupted"}')
    assert not following.look()  # without a journal
    (tmp_path / "events.jsonl").write_text("")
    assert following.look() and following.state.summary == {"finished": "interrupted"} and not following.look()
