"""Rows of a result: failed seeds, the worst client, metrics that are not finite."""

from __future__ import annotations

import csv
from dataclasses import replace

import pytest

from raafl.compare.comparison import Comparison
from raafl.compare.results import _clients, gains, measure, summarize
from raafl.compare.runs import Outcome, Run
from raafl.runfolder.schema import CLIENTS, METRICS, TESTED

LOSS = Comparison("c", "quickstart", {"A": ()}, (0, 1, 2), metric="loss", maximize=False, targets=(0.5,))


def test_a_seed_that_failed_counts_as_one_that_never_got_there():
    done = {"seed": 0, "metrics": {}, "final": 0.4, "time_to": {"0.5": 3.0}}
    row = summarize("A", [done, {"seed": 1, "error": "killed"}, {"seed": 2, "error": "killed"}], LOSS)
    assert (row["failed"], row["time_to"]["0.5"]) == (2, {"median_s": None, "reached": 1, "seeds": 3})


@pytest.mark.parametrize(("maximize", "worst"), [(False, 0.9), (True, 0.2)])
def test_the_worst_client_is_worst_in_the_metrics_own_direction(tmp_path, maximize, worst):
    rows = [(1, 10, 5.0, 0.5), (1, 10, 0.2, 0.7), (2, 30, 0.9, "")]
    names = ["client", "num_samples", TESTED + "loss", TESTED + "f1"]
    with (tmp_path / CLIENTS).open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerows([names, *rows])
    found = _clients(tmp_path, replace(LOSS, maximize=maximize))
    assert found["worst_client"] == worst
    assert found["clients"] == {"loss": pytest.approx((10 * 0.2 + 30 * 0.9) / 40)}  # f1 is not there for all


def test_clients_gain_by_their_share_of_the_merges():
    """Client 1 is in 2 of 4 merges, then 3 of 5; client 2 in 4 of 4, then 4 of 5."""
    runs = {
        "A": [{"seed": 0, "versions": 4, "merged": {"1": 2, "2": 4}}],
        "B": [{"seed": 0, "versions": 5, "merged": {"1": 3, "2": 4}}],
        "C": [{"seed": 0, "error": "killed"}],
    }
    found = gains(runs, "A")
    assert found["A"] is None and found["B"]["mean"] == 0.5 and found["C"] is None


def test_a_metric_that_is_not_finite_at_the_end_is_a_failure(tmp_path):
    folder = tmp_path / "runs" / "a"
    folder.mkdir(parents=True)
    (folder / METRICS).write_text("version,time_s,loss\n1,1.0,0.7\n2,2.0,nan\n")
    run = Run("A", "quickstart", (), 0, "d", (None, None), "f")
    found = measure(Outcome(run, folder, {"finished": "max_updates"}, "c"), LOSS, tmp_path)
    assert found["error"] == "loss is nan at the end"
