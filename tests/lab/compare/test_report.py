"""Files of a comparison's result."""

from __future__ import annotations

import json
import math
import re

import pytest

from raafl.lab.compare import report
from raafl.lab.compare.search import Trial
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


def test_a_search_shows_each_score_below_its_seed_and_which_trials_were_cut(tmp_path):
    trials = [
        Trial(("--lr", "1"), [], {1000: 0.5, 1001: 0.75}, 1.0),
        Trial(("--lr", "2"), [], {1001: 0.9}, 0.25),  # its run with the first seed failed
        Trial(("--lr", "3"), [], {1000: math.inf, 1001: 0.5}, 1.0),  # missed the target
    ]
    searched = report._searched(trials, trials[0])
    assert "Infinity" not in json.dumps(searched)
    shown = report._search_tables({"rows": [{"row": "A", "searched": searched}]})
    cells = [re.findall(r"<t[hd][^>]*>([^<]*)<", line) for line in re.findall(r"<tr>.*?</tr>", shown)]
    assert cells == [
        ["row", "settings", "budget", "seed 1000", "seed 1001"],
        ["A", "--lr 1", "100%", "0.5", "0.75"],
        ["A", "--lr 2", "25%", "-", "0.9"],
        ["A", "--lr 3", "100%", "-", "0.5"],
    ]
    assert "Scores after a part of the budget are of trials that ended early." in shown
