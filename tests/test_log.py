from __future__ import annotations

import io
import logging
import sys

import pytest

from raafl.commands.cli import main
from raafl.log import Console, console, is_printed, warn_once
from raafl.watch.progress import Progress

RAAFL = logging.getLogger("raafl")
LOG = logging.getLogger("raafl.somewhere")


class Kept(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append((record.levelname, record.getMessage()))


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def bare():
    """The logger as it is where raafl has just been imported; the session's console comes back."""
    before, level = RAAFL.handlers[:], RAAFL.level
    RAAFL.handlers[:] = []
    RAAFL.setLevel(logging.NOTSET)
    yield
    RAAFL.handlers[:] = before
    RAAFL.setLevel(level)


def test_the_console_prints_each_line_with_its_prefix_and_goes_with_its_block(bare, capsys):
    with console(), console():  # the inner one finds a handler
        assert [type(handler) for handler in RAAFL.handlers] == [Console]
        LOG.info("one\ntwo")
        LOG.error("three", extra={"prefix": "raafl, rank 1: "})
        LOG.debug("not this")
        LOG.info("four", extra={"show": lambda: print("four, its own way")})
    assert not RAAFL.handlers and RAAFL.level == logging.NOTSET
    out, err = capsys.readouterr()
    assert err == "raafl: one\nraafl: two\nraafl, rank 1: three\n" and out == "four, its own way\n"


def test_a_closed_standard_error_is_no_error(bare, monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    with console():
        LOG.warning("text")


def test_a_handler_of_ones_own_gets_what_a_run_says_and_nothing_is_printed(bare, capsys, tmp_path):
    kept = Kept()
    RAAFL.addHandler(kept)
    RAAFL.setLevel(logging.INFO)
    run = ["simulate", "--config", "quickstart", "--max_updates", "3", "--clients", "2", "--model.hidden", "[8]"]
    assert main([*run, "--output", str(tmp_path / "run"), "--json"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("{") and err == ""
    assert "quickstart: fed_raa on 2 clients" in kept.lines[0][1]
    assert main(["simulate", "--config", "quickstart", "--clients", "0"]) == 2
    assert kept.lines[-1][0] == "ERROR" and kept.lines[-1][1].startswith("clients is 0")


def test_a_level_silences_progress_but_not_errors(bare, capsys, tmp_path):
    RAAFL.setLevel(logging.ERROR)
    with console():
        progress = Progress("plain", sys.stdout)
        progress.start("title")
        progress.warn("the disk is full")
        LOG.error("broken")
    assert capsys.readouterr() == ("", "raafl: broken\n")


def test_a_table_is_drawn_only_where_the_console_prints(bare, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    assert not is_printed() and Progress("auto", Terminal()).mode == "plain"
    with console():
        assert is_printed() and Progress("auto", Terminal()).mode == "live"


def test_a_warning_for_once(caplog):
    for text in ("a", "a", "b"):
        warn_once(LOG, f"{text} of test_log")
    assert [record.message for record in caplog.records] == ["a of test_log", "b of test_log"]
