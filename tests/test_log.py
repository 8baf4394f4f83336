from __future__ import annotations

import io
import json
import logging
import os
import sys
from datetime import datetime, timedelta

import pytest

from raafl.commands.cli import JsonConsole, main
from raafl.log import Console, console, warn_once
from raafl.watch.progress import Progress, is_printed

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


def test_a_log_of_json_has_a_line_for_each_record_whatever_is_in_it(bare, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("RANK", "3")
    with console(JsonConsole()):
        LOG.warning("one\ntwo\x1b[31m \u2028 %s", "é", extra={"client": 7, "show": lambda: print("not so")})
        try:
            raise ValueError("wrong")
        except ValueError:
            LOG.exception("it failed")
        assert not is_printed()  # no table over it
    out, err = capsys.readouterr()
    first, second = map(json.loads, err.splitlines())
    assert out == "" and err.isascii() and err.count("\n") == 2
    assert first["message"] == "one\ntwo\x1b[31m \u2028 é" and (first["client"], first["rank"]) == ("7", "3")
    assert (first["level"], first["logger"]) == ("warning", "raafl.somewhere")
    assert datetime.fromisoformat(first["time"]).utcoffset() == timedelta(0)
    assert second["exception"].endswith("ValueError: wrong")


def test_the_option_log_is_of_every_command_and_of_what_it_starts(bare, capsys, monkeypatch):
    seen = []

    def command(argv):
        seen.append((argv, os.environ.get("RAAFL_LOG")))
        LOG.info("x")
        return 0

    monkeypatch.setattr("raafl.commands.cli._main", command)
    for argv in (["watch", "--log", "json", "RUN"], ["--log=text", "watch", "RUN"], ["watch", "RUN"]):
        assert main(argv) == 0
    assert seen == [(["watch", "RUN"], "json"), (["watch", "RUN"], "text"), (["watch", "RUN"], None)]
    monkeypatch.setenv("RAAFL_LOG", "json")
    assert main([]) == 0 and os.environ["RAAFL_LOG"] == "json"
    assert main(["--log", "xml"]) == 2
    assert [line[:7] for line in capsys.readouterr().err.splitlines()] == [
        '{"time"',
        "raafl: ",
        "raafl: ",
        '{"time"',
        "raafl: ",
    ]
