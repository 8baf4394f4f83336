"""Rows of a result: failed seeds, the worst client, metrics that are not finite."""

from __future__ import annotations

import csv
from dataclasses import replace

import pytest

from raafl.compare.comparison import Comparison
from raafl.compare.results import _worst_client, measure, summarize
from raafl.compare.runs import Outcome, Run
from raafl.runfolder.schema import CLIENTS, METRICS, TESTED

LOSS = Comparison("c", "quickstart", {"A": ()}, (0, 1, 2), metric="loss", maximize=False, targets=(0.5,))


def test_a_seed_that_failed_counts_as_one_that_never_got_there():
    done = {"seed": 0, "metrics": {}, "final": 0.4, "time_to": {"0.5": 3.0}}
    row = summarize("A", [done, {"seed": 1, "error": "killed"}, {"seed": 2, "error": "killed"}], LOSS)
    assert (row["failed"], row["time_to"]["0.5"]) == (2, {"median_s": None, "reached": 1, "seeds": 3})


@pytest.mark.parametrize(("maximize", "worst"), [(False, 0.9), (True, 0.2)])
def test_the_worst_client_is_worst_in_the_metrics_own_direction(tmp_path, maximize, worst):
    with (tmp_path / CLIENTS).open("w", newline="") as file:
        writer = csv.DictWriter(file, ["client", TESTED + "loss"])
        writer.writeheader()
        writer.writerows(
            [
                {"client": 1, TESTED + "loss": 5.0},
                {"client": 1, TESTED + "loss": 0.2},
                {"client": 2, TESTED + "loss": 0.9},
            ]
        )
    assert _worst_client(tmp_path, replace(LOSS, maximize=maximize)) == worst


def test_a_metric_that_is_not_finite_at_the_end_is_a_failure(tmp_path):
    folder = tmp_path / "runs" / "a"
    folder.mkdir(parents=True)
    (folder / METRICS).write_text("version,time_s,loss\n1,1.0,0.7\n2,2.0,nan\n")
    run = Run("A", "quickstart", (), 0, "d", (None, None))
    found = measure(Outcome(run, folder, {"finished": "max_updates"}, "c"), LOSS, tmp_path)
    assert found["error"] == "loss is nan at the end"
