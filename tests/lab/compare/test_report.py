"""Files of a comparison's result."""

from __future__ import annotations

import json

import pytest

from raafl.lab.compare import report
from raafl.lab.report.groups import of_experiment

RESULT = {"name": "mine", "rows": [], "metric": "accuracy", "reference": "A"}


def test_the_numbers_are_saved_before_anything_is_drawn(tmp_path, monkeypatch):
    def broken(*_):
        raise OSError("no fonts")

    monkeypatch.setattr(report, "groups_of", broken)
    with pytest.raises(OSError, match="no fonts"):
        report.write(RESULT, tmp_path)
    assert json.loads((tmp_path / "result.json").read_text()) == RESULT
    assert sorted(path.name for path in tmp_path.iterdir()) == ["result.json", "table.csv", "table.tex"]


def test_rows_in_two_modes_of_batches_have_a_warning():
    fast, plain = {"batch_clients": "fast"}, {}
    rows = [{"row": "A", "runs": [fast, fast]}, {"row": "B", "runs": [plain]}]
    assert report.warnings({"rows": rows, "eval_every": 10}) == [
        "Rows were not trained in one mode: A with batch_clients fast, whose last bits differ, the others not."
    ]
    assert report.warnings({"rows": rows[:1], "eval_every": 10}) == []


def test_a_fast_run_is_another_experiment_than_one_of_another_mode():
    assert of_experiment({"seed": 1, "clients": 4, "batch_clients": "auto"}) == {"clients": 4}
    assert of_experiment({"clients": 4, "batch_clients": "fast"}) == {"clients": 4, "batch_clients": "fast"}
