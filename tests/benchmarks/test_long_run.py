from __future__ import annotations

import pytest

from benchmarks import long_run
from tests.helpers.forked_command import in_fork


def test_every_way_on_a_short_run(tmp_path):
    """Each in a process of its own, as the command has them; a replay checks its digest, a resume its rows."""
    found = {way: in_fork(long_run.measure, way, tmp_path / "run", 300) for way in long_run.WAYS}
    for way, row in found.items():
        assert row["way"] == way and row["updates"] == 300
        assert row["rows"] > 2 * 300 + long_run.CLIENTS  # assigned and arrived, and each client's joining
        assert row["us_per_row"] == pytest.approx(1e6 * row["cpu_s"] / row["rows"])
        assert row["grown_bytes"] >= 0
