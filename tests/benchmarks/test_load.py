"""The arithmetic of the load's benchmark; the load itself is no test."""

from __future__ import annotations

import pytest

from benchmarks.load import figures


def test_rates_delays_and_the_servers_cpu_time():
    delays = [number / 1000 for number in range(1, 201)]  # 1 to 200 ms
    row = figures(400, delays, took_s=4.0, cpu_s=0.5)
    assert row["updates_per_s"] == 100 and row["updates_per_cpu_s"] == 800 and row["server_cpu_share"] == 0.125
    assert row["delay_p50_ms"] == pytest.approx(100, abs=1) and row["delay_p99_ms"] == pytest.approx(198.5, abs=1)
