"""Rows of a result: failed seeds, the worst client, metrics that are not finite."""

from __future__ import annotations

import csv
import json
import math
from dataclasses import replace

import pytest

from raafl.lab.compare.comparison import Comparison
from raafl.lab.compare.results import (
    _clients,
    _last_before,
    energy_kj,
    gains,
    measure,
    summarize,
    versions_of_clients,
    with_holm,
)
from raafl.lab.compare.runs import Outcome, Run, _sentence
from raafl.runfolder.append_file import to_json
from raafl.runfolder.events import read_summary
from raafl.runfolder.schema import CLIENTS, CONFIG, JOURNAL, METRICS, SUMMARY, TESTED

LOSS = Comparison("c", "quickstart", {"A": ()}, (0, 1, 2), metric="loss", maximize=False, targets=(0.5,))


def test_a_seed_that_failed_counts_as_one_that_never_got_there():
    done = {"seed": 0, "metrics": {}, "final": 0.4, "time_to": {"0.5": 3.0}}
    row = summarize("A", [done, {"seed": 1, "error": "killed"}, {"seed": 2, "error": "killed"}], LOSS)
    assert (row["failed"], row["time_to"]["0.5"]) == (2, {"median_s": None, "reached": 1, "seeds": 3})


@pytest.mark.parametrize(("maximize", "worst"), [(False, 0.9), (True, 0.2)])
def test_the_worst_client_is_worst_in_the_metrics_own_direction(tmp_path, maximize, worst):
    rows = [
        (1, 8, "merged", 5.0, 0.5, 2),
        (1, 8, "merged", 0.2, 0.7, 2),
        (1, 8, "unused", 0.1, 0.7, 2),  # as in the run's own mean, only merged updates count, and all samples
        (2, 20, "merged", 0.9, "", 10),
        (2, 20, "refused:outlier", 9.0, "", 10),
    ]
    names = ["client", "num_samples", "outcome", TESTED + "loss", TESTED + "f1", TESTED + "num_samples"]
    with (tmp_path / CLIENTS).open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerows([names, *rows])
    found = _clients(tmp_path, replace(LOSS, maximize=maximize))
    assert found["worst_client"] == worst
    assert found["clients_mean"] == pytest.approx((10 * 0.2 + 30 * 0.9) / 40)
    assert set(found["clients"]) == {"loss", "num_samples"}  # f1 is not there for all


def test_clients_gain_by_their_share_of_the_merges():
    """Client 1 is in 2 of 4 merges, then 3 of 5; client 2 in 4 of 4, then 4 of 5."""
    runs = {
        "A": [{"seed": 0, "versions": 4, "merged": {"1": 2, "2": 4}}],
        "B": [{"seed": 0, "versions": 5, "merged": {"1": 3, "2": 4}}],
        "C": [{"seed": 0, "error": "killed"}],
    }
    found = gains(runs, "A")
    assert found["A"] is None and found["B"]["mean"] == 0.5 and found["C"] is None


def test_two_updates_of_a_client_in_one_merge_are_one_share_of_the_merges(tmp_path):
    """A buffer takes two updates of client 1 in each of its 2 merges; in rounds it is in 3 of 3, and so gains nothing."""
    rows = "".join(f"{client},merged,{version}\n" for version in (1, 2) for client in (1, 1, 2) if version + client < 4)
    (tmp_path / CLIENTS).write_text(f"client,outcome,merged_version\n{rows}1,unused,2\n2,lost:left,2\n")
    took_part = versions_of_clients(tmp_path)
    assert took_part == {"1": 2, "2": 1}
    runs = {
        "buffer": [{"seed": 0, "versions": 2, "merged": {"1": 4, "2": 1, "3": 0}, "took_part": took_part}],
        "rounds": [{"seed": 0, "versions": 3, "merged": {"1": 3, "2": 3, "3": 3}}],
    }
    assert gains(runs, "buffer")["rounds"]["mean"] == pytest.approx(2 / 3)  # clients 2 and 3
    assert gains(runs, "rounds")["buffer"]["mean"] == 0.0  # 4 updates in 2 merges are no share of 2


def test_a_metric_that_is_not_finite_at_the_end_is_a_failure(tmp_path):
    folder = tmp_path / "runs" / "a"
    folder.mkdir(parents=True)
    (folder / METRICS).write_text("version,time_s,loss\n1,1.0,0.7\n2,2.0,nan\n")
    run = Run("A", "quickstart", (), 0, "d", (None, None), "f")
    found = measure(Outcome(run, folder, {"finished": "max_updates"}, "c"), LOSS, tmp_path)
    assert found["error"] == "loss is nan at the end"
    (folder / METRICS).write_text("version,time_s,loss\n1,1.0,0.7\n2,2.0,nan\n3,3.0,0.5\n")
    smooth = replace(LOSS, smooth=2)
    found = measure(Outcome(run, folder, {"finished": "max_updates"}, "c"), smooth, tmp_path)
    assert found["error"] == "loss is not finite in one of the last 2 evaluations, of which `smooth` takes the mean"


def test_a_client_that_trains_while_it_sends_draws_its_power_once(tmp_path):
    """Client 1 works from 0 to 5 s and from 6 to 8 s, client 2 from 0 to 2 s: 7 s and 2 s at 60 W."""
    tasks = ["1,0.0,3.0,merged", "2,0.0,2.0,merged", "1,2.0,3.0,merged", "1,6.0,2.0,unused", "1,7.0,,lost:left"]
    (tmp_path / CLIENTS).write_text("\n".join(["client,assigned_s,train_s,outcome", *tasks]) + "\n")
    config = {"devices": [{"name": "jetson-agx-orin"}], "clients": 2}
    assert energy_kj(tmp_path, config) == pytest.approx(60 * (7 + 2) / 1e3)


def test_another_metric_that_is_not_finite_is_left_out(tmp_path):
    """A perplexity, exp(loss), is infinite soon; a summary, like all JSON, has null for it."""
    summary = {
        "finished": "max_updates",
        "final": {"loss": 800.0, "perplexity": math.inf},
        "model_digest": "d",
        "participation": {"1": 1},
        "participation_rate": {"mean": 1.0},
        **dict.fromkeys(("time_s", "wall_s", "bytes_up", "bytes_down", "updates_merged", "versions", "utilisation"), 1),
    }
    (tmp_path / SUMMARY).write_text(to_json(summary))
    (tmp_path / METRICS).write_text(
        "version,time_s,bytes_up,bytes_down,loss,perplexity\n0,0.0,0,0,nan,nan\n1,1.0,1,1,800.0,inf\n"
    )
    (tmp_path / CLIENTS).write_text(f"client,num_samples,outcome,{TESTED}loss\n")
    (tmp_path / CONFIG).write_text("clients: 1\n")
    (tmp_path / JOURNAL).write_text("")
    run = Run("A", "quickstart", (), 0, "d", (None, None), "f")
    outcome = Outcome(run, tmp_path, read_summary(tmp_path), "c")
    assert _sentence(outcome) == "loss 800  perplexity not finite  in 1 s"
    found = measure(outcome, LOSS, tmp_path)
    assert (found["metrics"], found["final"]) == ({"loss": 800.0}, 800.0)
    assert json.loads(json.dumps(found, allow_nan=False))["curve"] == [[0.0, None], [1.0, 800.0]]


def test_a_metric_that_is_not_finite_for_a_client_has_no_mean_and_no_worst_client(tmp_path):
    (tmp_path / CLIENTS).write_text(
        f"client,num_samples,outcome,{TESTED}loss,{TESTED}f1\n1,10,merged,nan,0.5\n2,10,merged,0.7,0.7\n3,10,merged,0.2,0.9\n"
    )
    found = _clients(tmp_path, LOSS)
    assert found == {"clients": {"f1": pytest.approx(0.7)}, "clients_mean": None, "worst_client": None}


def test_targets_that_differ_after_six_digits_are_two():
    comparison = replace(LOSS, targets=(0.1234567, 0.1234568, 0.5, 5.0, 1e-07))
    names = ["0.1234567", "0.1234568", "0.5", "5", "1e-07"]
    assert (
        list(summarize("A", [], comparison)["time_to"]) == list(summarize("A", [], comparison)["megabytes_to"]) == names
    )


def test_a_difference_is_shown_where_holms_correction_leaves_it():
    """With t(0.975, 2) = 4.3027, p of mean m and half h is 1 - t / sqrt(2 + t^2) at t = 4.3027 m / h.

    At h = m / 2 and at h = m / 1.1 that is 0.0131 and 0.0418: of two tests 0.0262 and 0.0418, and of three with one more
    at m / 1.5, p 0.0231, the smallest is 0.0397 and the others 0.0463 and 0.0463 again, since they do not fall.
    """

    def gap(ratio):
        return {"mean": -1.0, "half": 1 / ratio, "num": 3, "excludes_0": True}

    def p(ratio):
        t = 4.302653 * ratio
        return 1 - t / (2 + t * t) ** 0.5

    one_seed = {"mean": 1.0, "half": None, "num": 1, "excludes_0": False}
    found = with_holm({"A": None, "B": gap(2), "C": gap(1.1), "D": gap(1.5), "E": one_seed})
    assert found["A"] is None
    assert [found[label]["p"] for label in "BCD"] == pytest.approx([p(2), p(1.1), p(1.5)], rel=1e-5)
    assert [found[label]["p_holm"] for label in "BCD"] == pytest.approx([3 * p(2), 2 * p(1.5), 2 * p(1.5)], rel=1e-5)
    assert [found[label]["tests"] for label in "BCDE"] == [3, 3, 3, 3]
    assert [found[label]["shown"] for label in "BCDE"] == [True, True, True, False]
    equal = with_holm({"B": {"mean": 0.1, "half": 0.0, "num": 2, "excludes_0": True}, "C": gap(2)})
    assert (equal["B"]["p_holm"], equal["B"]["shown"], equal["C"]["tests"]) == (None, False, 1)
    many = with_holm({str(i): gap(1.1) for i in range(2)})  # twice 0.0418 is above 0.05
    assert [one["shown"] for one in many.values()] == [False, False]


def test_bytes_to_a_target_are_those_of_the_last_evaluation_until_then():
    """On a common grid a target is reached at 2.0 s by what was evaluated at 1.7 s."""
    sent = [(0.0, 0.0), (1.7, 5.0), (2.4, 9.0)]
    assert [_last_before(sent, time_s) for time_s in (2.0, 1.7, 5.0, None)] == [5.0, 5.0, 9.0, None]
