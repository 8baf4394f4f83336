from __future__ import annotations

import pytest

from benchmarks import task_costs


def test_a_row_says_what_is_predicted_over_what_is_counted():
    whole, quarter = task_costs.rows(["cnn"], ["fed_avg"])
    assert (whole["case"], quarter["case"]) == ("cnn", "cnn, 1/4")
    for row in (whole, quarter):
        assert (row["flops"], row["bytes"]) == pytest.approx((1.0, 1.0), abs=0.05)
        assert row["both"] == f"{row['flops']:.3f}, {row['bytes']:.3f}"
