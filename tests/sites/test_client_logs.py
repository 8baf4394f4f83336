"""Clients' log lines go to a file and to `logging`, so many a minute of each client, and no failure of theirs is the run's."""

from __future__ import annotations

import json
import logging

import pytest

from raafl.runtime.protocol import LogLine
from raafl.sites import server as client_logs
from raafl.sites.server import ClientLogs
from raafl.transport.tcp.listener import TokenBucket


def rows(folder):
    return [json.loads(line) for line in (folder / "client-logs.jsonl").read_text().splitlines()]


def lines(num, text="line"):
    return [LogLine("warning", f"{text} {number}") for number in range(num)]


def test_a_line_is_a_row_and_a_record_of_its_level(tmp_path, caplog):
    caplog.set_level(logging.INFO, "raafl")
    logs = ClientLogs(tmp_path, pytest.fail)
    logs.add(3, [])
    assert not list(tmp_path.iterdir())  # the file is made with the first line
    logs.add(3, [LogLine("error", "bad"), LogLine("info", "good")])
    logs.close()
    assert [(row["client"], row["level"], row["text"]) for row in rows(tmp_path)] == [
        (3, "error", "bad"),
        (3, "info", "good"),
    ]
    assert all(row["time"].endswith("+00:00") for row in rows(tmp_path))
    found = [(record.levelname, record.message, record.client) for record in caplog.records]
    assert found == [("ERROR", "client 3 logs: bad", 3), ("INFO", "client 3 logs: good", 3)]
    again = ClientLogs(tmp_path, pytest.fail)  # of a resumed run
    again.add(1, lines(1))
    again.close()
    again.add(1, lines(1))  # a session that ends late
    assert len(rows(tmp_path)) == 3


def test_a_client_that_logs_without_end_is_cut_short_and_others_are_not(tmp_path, caplog):
    now = [0.0]
    logs = ClientLogs(tmp_path, pytest.fail)
    logs._bucket = TokenBucket(5, 1.0, lambda: now[0])
    for _ in range(3):
        logs.add(1, lines(50, "flood"))
    logs.add(2, lines(5))
    now[0] = 1.0
    logs.add(1, lines(9, "later"))
    logs.close()
    of = [row["client"] for row in rows(tmp_path)]
    assert of == [1] * 5 + [2] * 5 + [1] and len(caplog.records) == 11
    assert rows(tmp_path)[-1]["dropped_before"] == 145


def test_a_full_file_or_none_that_can_be_made_is_said_once(tmp_path, monkeypatch):
    monkeypatch.setattr(client_logs, "MAX_FILE_BYTES", 200)
    warned = []
    for folder in (tmp_path, tmp_path / "no" / "folder"):
        logs = ClientLogs(folder, warned.append)
        for _ in range(5):
            logs.add(1, lines(2))
        logs.close()
    assert len(rows(tmp_path)) < 5
    assert ["has reached" in warned[0], "cannot be written: No such file" in warned[1], len(warned)] == [True, True, 2]
