"""`raafl audit RUN`: a run as it was recorded, and one in which somebody changed a bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from raafl.commands.cli import main
from raafl.runfolder.books import check_books
from raafl.runfolder.journal import RunFolder
from raafl.runtime.run import simulate
from tests.helpers import cached_models
from tests.helpers.crash import crashed, simulated
from tests.helpers.small_runs import experiment


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A signed run of a config by name; the user's key lies in a folder of this test."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with cached_models.reuse_findings():
        options = ["--config", "quickstart", "--max_updates", "6", "--checkpoint_every", "2", "--progress", "quiet"]
        assert main(["simulate", *options, "--output", str(tmp_path / "run")]) == 0
    return tmp_path / "run"


def test_an_audit_checks_the_books_and_replays_and_finds_a_flipped_bit(folder, capsys):
    with cached_models.reuse_findings():
        assert main(["audit", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["books"], found["findings"], found["notes"]) == ("signed", [], [])
    assert found["rows"] == found["signed_rows"] == len((folder / "events.jsonl").read_text().splitlines())
    assert found["replay"]["equal"] is True
    assert main(["audit", str(folder), "--books_only", "--key", found["key"]]) == 0
    assert "books: signed" in capsys.readouterr().out
    data = bytearray((folder / "checkpoints" / "version-000002.ckpt").read_bytes())
    data[len(data) // 2] ^= 1
    (folder / "checkpoints" / "version-000002.ckpt").write_bytes(data)
    assert main(["watch", str(folder), "--once", "--json"]) == 0  # which does not read checkpoints
    assert json.loads(capsys.readouterr().out)["books"] is None
    assert main(["audit", str(folder), "--books_only"]) == 1
    assert "FOUND: checkpoints/version-000002.ckpt was altered" in capsys.readouterr().out


def test_watch_and_report_say_unsigned_or_altered(folder, tmp_path, capsys):
    page = tmp_path / "page.html"
    journal, seals = (folder / "events.jsonl").read_text(), (folder / "seals.jsonl").read_text()
    for name, text, line in [
        ("seals.jsonl", "", "books: altered: seals.jsonl: the run has ended, and nothing of it is sealed"),
        (
            "events.jsonl",
            journal.replace('"client":1', '"client":2', 1),
            "books: altered: events.jsonl: row 2 was altered",
        ),
    ]:
        (folder / "events.jsonl").write_text(journal)
        (folder / "seals.jsonl").write_text(seals)
        (folder / name).write_text(text)
        assert main(["watch", str(folder), "--once", "--progress", "plain"]) == 0
        assert line in " ".join(capsys.readouterr().out.split())
        assert main(["report", str(folder), "--output", str(page)]) == 0
        assert line in page.read_text()


@pytest.mark.parametrize("name", ["config.yaml", "events.jsonl"])
def test_a_file_without_which_no_replay_is_possible_is_found_missing(folder, capsys, name):
    (folder / name).unlink()
    assert main(["audit", str(folder)]) == 1
    printed = capsys.readouterr().out
    assert f"FOUND: {name} was removed" in printed and f"it has no {name}" in printed
    site = folder.parent / "site"
    site.mkdir()
    (site / "site.json").write_text('{"client": 1, "key": "k", "conditions": {}}')
    (site / "receipts.jsonl").touch()
    assert main(["audit", str(folder), "--site", str(site)]) == 1
    assert f"FOUND: {name} was removed" in capsys.readouterr().out


def test_a_row_added_to_a_table_is_found_after_the_end_and_named_as_unsealed_before(folder, capsys):
    row = (folder / "metrics.csv").read_text().splitlines()[-1]
    with (folder / "metrics.csv").open("a") as file:
        file.write(row + "\n")
    assert main(["audit", str(folder), "--books_only"]) == 1
    assert "FOUND: metrics.csv: 1 row too many, added after the end of the run" in capsys.readouterr().out
    seals = (folder / "seals.jsonl").read_text().splitlines(keepends=True)
    (folder / "seals.jsonl").write_text("".join(seals[:-1]))
    (folder / "summary.json").unlink()  # now it is as a run that was killed
    said = "metrics.csv: unsealed: 1 row after the last seal, in which an alteration is not found"
    assert main(["audit", str(folder), "--books_only"]) == 0
    printed = capsys.readouterr().out
    assert f"note: {said}" in printed and "books: signed" in printed
    assert main(["report", str(folder), "--output", str(folder.parent / "page.html")]) == 0
    assert said in (folder.parent / "page.html").read_text()


def test_a_wrong_folder_and_a_wrong_key_are_bad_input(tmp_path, capsys):
    assert main(["audit", str(tmp_path)]) == 2
    assert "is not a run folder: it has no events.jsonl" in capsys.readouterr().err
    assert main(["audit", str(tmp_path), "--share"]) == 2


def test_equal_simulations_have_equal_heads(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with cached_models.reuse_findings():
        _, first = simulate(experiment(tmp_path / "a", "fed_async", checkpoint_every=3))
        _, second = simulate(experiment(tmp_path / "b", "fed_async", checkpoint_every=4))
    one, two = check_books(first), check_books(second)
    assert (one.state, one.head) == (two.state, two.head) == ("signed", one.head)


def test_a_run_that_is_killed_as_it_is_resumed_after_its_end_is_not_taken_for_altered(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    ended = "tests/runfolder/of_0_1_0/simulated"  # by an interruption, so that its end is sealed
    folder = Path(shutil.copytree(ended, tmp_path / "run"))
    event = RunFolder.event

    def killed(self, row):
        event(self, row)
        raise SystemExit

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(RunFolder, "event", killed)
        simulated("--resume", str(folder))
    books = check_books(folder)
    assert [line for line in books.findings if "is signed by" not in line] == []  # another user's key
    assert any(line.startswith("events.jsonl: unsealed: 1 row") for line in books.unsealed)


OPTIONS = ("--config=configs/quickstart.yaml", "--max_updates=12", "--eval_every=2", "--checkpoint_every=3")


@pytest.mark.parametrize("cut", [5, 9])
def test_a_run_that_crashed_and_was_resumed_has_sound_books_unless_somebody_altered_them_between(
    tmp_path, monkeypatch, cut
):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    folder = tmp_path / "run"
    crashed(monkeypatch, cut, *OPTIONS, f"--output={folder}")
    with (folder / "events.jsonl").open("a") as file:
        file.write('{"time_s":1.0,"event":"arr')  # the row that was being written
    books = check_books(folder)
    assert books.findings == [] and 0 < books.num_signed < books.num_rows
    altered = tmp_path / "altered"
    shutil.copytree(folder, altered)
    (altered / "clients.csv").write_bytes((folder / "clients.csv").read_bytes().replace(b",merged,", b",unused,", 1))
    simulated("--resume", str(folder))
    books = check_books(folder)
    assert (books.findings, books.num_signed, books.final) == ([], books.num_rows, True)
    simulated("--resume", str(altered))
    (finding,) = check_books(altered).findings
    assert finding.startswith("before seal ") and "clients.csv: a line of its first" in finding
