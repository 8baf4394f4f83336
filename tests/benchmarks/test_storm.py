"""The arithmetic of the storm's benchmark; the storm itself is no test."""

from __future__ import annotations

import pytest

from benchmarks.storm import arrivals, compared


def test_the_figure_is_the_ratio_of_medians():
    listener, server = [10.0, 30.0, 12.0], [9.0, 6.0, 20.0]
    rows = [{"attacked": "a listener", "updates_per_s": rate} for rate in listener]
    rows += [{"attacked": "the server", "updates_per_s": rate} for rate in server]
    assert compared(rows)["updates_per_s"] == pytest.approx(9.0 / 12.0)


def test_whole_lines_of_the_honest_client_count(tmp_path):
    lines = ['{"event": "arrived", "client": 1}', '{"event": "arrived", "client": 2}', '{"event": "lost", "client": 1}']
    text = "\n".join(lines) + '\n{"event": "arrived", "cli'
    (tmp_path / "events.jsonl").write_text(text)
    assert arrivals(tmp_path, 0) == (1, len("\n".join(lines)) + 1)
