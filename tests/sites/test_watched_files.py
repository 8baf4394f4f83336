"""Files that are read again: when a change counts, and what a file that cannot be read does."""

from __future__ import annotations

import pytest

from raafl.sites import server as watched_files
from raafl.sites.server import WatchedFiles


@pytest.fixture
def path(tmp_path):
    (tmp_path / "file").write_text("one")
    return tmp_path / "file"


def test_a_change_counts_once_the_file_is_at_rest(path):
    watched = WatchedFiles("text", (path,), path.read_text)
    assert (watched.value, watched.reread()) == ("one", False)
    for text in ("", "tw", "two"):
        path.write_text(text)
        assert not watched.reread() and watched.value == "one"
    assert watched.reread() and watched.value == "two"
    assert not watched.reread()


def test_what_is_written_during_the_reading_does_not_count(path):
    """Emptied after the look that found it at rest: the text that is read is half of it."""
    saved = iter(["", "two"])

    def read():
        if path.read_text() == "new" and (text := next(saved, None)) is not None:
            path.write_text(text)
        return path.read_text()

    watched = WatchedFiles("text", (path,), read)
    path.write_text("new")
    assert not watched.reread() and not watched.reread() and watched.value == "one"
    path.write_text("two")
    assert not watched.reread() and watched.reread() and watched.value == "two"


@pytest.mark.parametrize("error", [OSError("no descriptors"), ValueError("half"), RecursionError("deep")])
def test_what_cannot_be_read_stays_without_effect_is_said_once_and_tried_again(path, monkeypatch, caplog, error):
    problems = []

    def read():
        for problem in problems:
            raise problem
        return path.read_text()

    watched = WatchedFiles("text", (path,), read)
    path.write_text("two")
    problems.append(error)
    assert [watched.reread() for _ in range(4)] == [False] * 4 and watched.value == "one"
    monkeypatch.setattr(watched_files, "_RETRY_S", 0.0)
    path.write_text("three")
    assert [watched.reread() for _ in range(4)] == [False] * 4 and watched.value == "one"
    assert caplog.messages == [f"the earlier text stays in force: {error}"]
    problems.clear()
    assert watched.reread() and watched.value == "three"


def test_a_change_is_read_at_once_after_one_that_could_not_be(path):
    watched = WatchedFiles("number", (path,), lambda: len(path.read_bytes()) // (path.read_text() != "0"))
    path.write_text("0")
    assert not watched.reread() and not watched.reread()
    path.write_text("four")
    assert not watched.reread() and watched.reread() and watched.value == 4


def test_a_file_that_may_be_read_again_counts_though_its_text_is_as_old(path):
    watched = WatchedFiles("mode", (path,), lambda: path.stat().st_mode & 0o777)
    path.chmod(0o400)
    assert not watched.reread() and watched.reread() and watched.value == 0o400
