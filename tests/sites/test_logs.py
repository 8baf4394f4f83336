"""Of a client's log lines those leave that the site's policy names, cleaned, the last ones of many, and nothing that it refuses."""

from __future__ import annotations

import logging

import pytest

from raafl.algorithms import fed_avg
from raafl.errors import BadInput
from raafl.log import warn_once
from raafl.runtime.client.worker import Gate
from raafl.runtime.protocol import MAX_LOG_LINES, MAX_LOG_TEXT, LogLine
from raafl.sites.gate import LogBuffer
from raafl.sites.policy import SiteLogs
from tests.helpers.site_gates import site_gate

MINE = logging.getLogger("test_logs.training")


@pytest.fixture
def heard():
    """A buffer of what the site names, and nothing of which is printed elsewhere."""
    buffer = LogBuffer(SiteLogs("warning", ["test_logs"]))
    with buffer.listening():
        yield buffer
    assert buffer not in logging.getLogger("test_logs").handlers


def test_lines_of_the_named_loggers_leave_once_cleaned_and_cut(heard):
    MINE.info("too low a level")
    logging.getLogger("elsewhere").error("another logger")
    MINE.warning("one\ntwo\x1b[31m %d", 3)
    MINE.critical("x" * 1000)
    first, second = heard.take()
    assert first == LogLine("warning", r"one\ntwo\x1b[31m 3")
    assert second.level == "error" and len(second.text) == MAX_LOG_TEXT
    assert heard.take() == ()


def test_what_the_policy_refuses_and_why_is_for_the_site_alone(heard):
    MINE.warning("the site's policy refuses a task", extra={"private": True})
    warn_once(MINE, "the site's metric 'cases' is inf", private=True)
    assert heard.take() == ()


def test_of_many_lines_the_last_leave_and_how_many_did_not(heard):
    for number in range(MAX_LOG_LINES + 9):
        MINE.warning("line %d", number)
    lines = heard.take()
    assert len(lines) == MAX_LOG_LINES
    assert lines[0] == LogLine("warning", "10 earlier lines are left out")
    assert [lines[1].text, lines[-1].text] == ["line 10", f"line {MAX_LOG_LINES + 8}"]


def test_a_line_is_still_printed_where_no_other_handler_does(heard, monkeypatch):
    """As `logging` does by its last resort, which one more handler would silence."""
    printed = []
    monkeypatch.setattr(logging.lastResort, "emit", lambda record: printed.append(record.getMessage()))
    logger = logging.getLogger("test_logs")
    monkeypatch.setattr(logger, "propagate", False)  # pytest's own handlers
    MINE.warning("seen")
    other = logging.NullHandler()
    logger.addHandler(other)
    MINE.warning("not seen")
    logger.removeHandler(other)
    assert printed == ["seen"]


def test_nothing_leaves_without_a_policy_that_says_so():
    gate = site_gate(fed_avg())
    with Gate().logs_kept(), gate.logs_kept():
        logging.getLogger("raafl").error("x")
        assert gate.log_lines() == ()
    gate = site_gate(fed_avg(), logs=SiteLogs("info"))
    with gate.logs_kept():
        logging.getLogger("raafl.any").error("x")
        assert gate.log_lines() == (LogLine("error", "x"),)


def test_a_name_that_is_none_of_a_logger_is_bad_input():
    with pytest.raises(BadInput, match=r"policy.logs.loggers is \[\]: name loggers"):
        SiteLogs(loggers=[])
