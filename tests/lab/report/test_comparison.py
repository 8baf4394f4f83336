"""Which runs are one experiment, and what is made of several."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from raafl.lab.report import overview
from raafl.lab.report.groups import AXES, band, curve, curves, flat, group_runs, lines_of, names_of, x_values
from raafl.lab.report.page import Table, briefly, rounded, split_evenly, thin_rows, thinned, transpose_wide
from raafl.lab.report.submodels import regions, specs, staleness
from raafl.runfolder.reading import read
from tests.lab.report.folders import CONFIG, EVENTS, METRICS, SUMMARY, TASKS, write


@pytest.fixture
def make(tmp_path):
    """A function that writes and reads a run."""

    def run(name, *, seed=0, **fields):
        config = {**CONFIG, "seed": seed, "output": f"runs/{name}", **fields.pop("config", {})}
        return read(write(tmp_path / name, config=config, **fields))

    return run


def test_runs_that_differ_by_their_seed_and_folder_are_one_group(make):
    groups = group_runs([make("a"), make("b", seed=1, config={"name": "other", "workers": 2})])
    assert [(group.label, len(group.runs)) for group in groups] == [("fed_raa", 2)]
    assert list(names_of(groups).values()) == ["fed_raa, seed 0", "fed_raa, seed 1"]


def test_groups_are_called_by_what_tells_them_apart(make):
    other = {"class_path": "raafl.fed_raa", "init_args": {"alpha": 0.9}}
    real = [{**EVENTS[0], "runtime": "distributed"}, *EVENTS[1:]]
    groups = group_runs(
        [
            make("a"),
            make("b", config={"algorithm": other}),
            make("c", events=real),
            make(
                "d", config={"algorithm": {"class_path": "raafl.fed_avg"}}, summary={**SUMMARY, "algorithm": "fed_avg"}
            ),
        ]
    )
    assert [group.label for group in groups] == [
        "fed_raa, virtual clock, alpha 0.5",
        "fed_raa, virtual clock, alpha 0.9",
        "fed_raa, wall clock, alpha 0.5",
        "fed_avg",
    ]
    assert groups[0].differs["algorithm.init_args.alpha"] == "0.5"
    assert "clients" not in groups[0].differs


def test_groups_that_differ_within_a_list_are_called_by_a_run(make):
    devices = [{"name": "x", "flops_per_s": 1.0}, {"name": "y", "flops_per_s": 2.0}]
    changed = [devices[0], {**devices[1], "flops_per_s": 3.0}]
    groups = group_runs([make("a", config={"devices": devices}), make("b", config={"devices": changed})])
    assert [group.label for group in groups] == ["fed_raa, devices of a", "fed_raa, devices of b"]


def test_runs_without_a_config_stay_apart(make, tmp_path):
    groups = group_runs([read(write(tmp_path / name, config=None)) for name in "ab"])
    assert [group.label for group in groups] == ["fed_raa (a)", "fed_raa (b)"]


def test_runs_whose_config_has_numbers_and_texts_as_keys_are_grouped(make):
    runs = [make("a"), make("b", seed=1), make("c")]
    for run, keys in zip(runs, ("1: a, b: c", "b: c, 1: a", "1: b, b: c"), strict=True):
        (run.path / "config.yaml").write_text(f"seed: 0\nmodel: {{{keys}}}\n")
    groups = group_runs([read(run.path) for run in runs])
    assert [[run.name for run in group.runs] for group in groups] == [["a", "b"], ["c"]]


def test_a_killed_run_that_had_diverged_has_no_final_metric(make):
    rows = [{**row, "client_loss": cell} for row, cell in zip(METRICS, ("", 2.5, ""), strict=True)]
    run = make("a", metrics=[*rows[:-1], {**rows[-1], "accuracy": "nan"}], summary=None)
    accuracy, loss = overview.final_metrics(run, ["accuracy", "client_loss"])
    assert np.isnan(accuracy) and loss == 2.5  # clients were not asked at the end
    assert overview.final_metrics(make("b", summary=None), ["accuracy"]) == [0.9]


def test_runs_of_the_same_seed_are_told_apart_by_their_folders(make):
    assert list(names_of(group_runs([make("a"), make("b")])).values()) == ["fed_raa, seed 0 (a)", "fed_raa, seed 0 (b)"]


def test_runs_of_one_config_that_did_not_go_as_far_are_told_apart(make):
    cut = {**SUMMARY, "finished": "interrupted"}
    goals = {"max_updates": 9, "max_time_s": None, "targets": [{"metric": "accuracy", "value": 0.9, "at_most": False}]}
    resumed = [*EVENTS, {"time_s": 8.0, "event": "resumed", "goals": goals}]
    limits = {"max_updates": 9, "max_time": None, "target": "accuracy=0.9"}
    groups = group_runs(
        [
            make("a"),
            make("b", seed=1),
            make("c", summary=cut),
            make("d", summary=None),
            make("e", events=resumed),
            make("f", config=limits),
        ]
    )
    assert [[run.name for run in group.runs] for group in groups] == [["a", "b"], ["c"], ["d"], ["e", "f"]]
    assert [group.differs["ended"] for group in groups] == ["–", "interrupted", "not ended", "–"]
    assert "interrupted" in groups[1].label and "not ended" in groups[2].label and "max_updates 9" in groups[3].label


def test_what_the_shortest_run_of_a_group_hides_is_said(make):
    short = make("b", seed=1, summary={**SUMMARY, "time_s": 4.0}, metrics=METRICS[:2])
    said = "Of fed_raa the shortest, b, has 40% of the longest's seconds: the rest is in the tables."
    assert said in curves(group_runs([make("a"), short])).note
    assert "the shortest, " not in curves(group_runs([make("c"), make("d", seed=1)])).note


def test_a_wide_table_is_turned_and_a_long_one_is_not():
    wide = Table(["run", *map(str, range(12))], [["a", *range(12)], ["b", *range(12, 24)]], "said")
    turned = transpose_wide(wide)
    assert (turned.columns, turned.rows[0], turned.rows[-1], turned.caption) == (
        ["run", "a", "b"],
        ["0", 0, 12],
        ["11", 11, 23],
        "said",
    )
    long = Table(["run", *map(str, range(12))], [["a", *range(12)]] * 11)
    assert transpose_wide(long) is long
    narrow = Table(["run", "x"], [["a", 1]])
    assert transpose_wide(narrow) is narrow


def test_nested_fields_have_dotted_names():
    assert flat({"a": {"b": 1, "c": [1, 2]}, "d": [{"e": None}], "f": {}}) == {
        "a.b": "1",
        "a.c": "[1, 2]",
        "d.0.e": "null",
        "f": "{}",
    }


# ---- curves ----


def test_where_an_evaluation_stands_on_each_axis(make):
    run = make("a")
    expected = {
        "time": [0, 5, 9],
        "wall time": [0, 0.5, 0.9],
        "updates": [0, 2, 3],
        "versions": [0, 2, 3],
        "bytes": [0, 0.003, 0.0055],
    }
    for against in AXES:
        assert x_values(run, against).tolist() == pytest.approx(expected[against]), against
    x, y = curve(run, "accuracy", "time")
    assert (x.tolist(), y.tolist()) == ([0, 5, 9], [0.1, 0.5, 0.9])
    assert [len(part) for part in curve(run, "nothing", "time")] == [0, 0]


def test_a_band_is_mean_least_and_most_where_all_runs_are_known():
    first = (np.array([0.0, 2.0, 4.0]), np.array([0.0, 2.0, 4.0]))
    second = (np.array([1.0, 3.0]), np.array([5.0, 7.0]))
    x, mean, least, most = band([first, second, (np.empty(0), np.empty(0))], 10)
    assert x.tolist() == [1, 2, 3]
    assert mean.tolist() == [3, 4, 5]  # 1 and 5; 2 and 6; 3 and 7
    assert least.tolist() == [1, 2, 3]
    assert most.tolist() == [5, 6, 7]


def test_figures_have_curves_and_are_no_metrics_and_times_to_targets_are_neither(make):
    more = {"peak_bytes": 3e6, "measured_bytes": 4e7, "time_to/accuracy=0.5": 5.0}
    groups = group_runs([make("a", metrics=[{**row, **more} for row in METRICS])])
    names = ["accuracy", "bytes_up", "bytes_down", "peak_bytes", "measured_bytes"]
    assert curves(groups).choices["Metric"] == names
    assert curves(groups, first="peak_bytes").choices["Metric"] == ["peak_bytes", *names[:3], "measured_bytes"]
    assert curves(groups).tables[0].columns == ["updates", "version", "time_s", "wall_s", *names]
    assert overview.model_metrics(groups) == ["accuracy"]
    assert overview.run_totals(groups[0].runs[0])["peak MB"] == 3.0
    summary = {**SUMMARY, "peak_memory": {"predicted_bytes": 5_000_000, "measured_bytes": None}}
    assert overview.run_totals(make("b", summary=summary))["peak MB"] == 5.0


def test_runs_of_one_group_are_drawn_as_a_band_and_others_as_a_line(make):
    other = {"algorithm": {"class_path": "raafl.fed_avg"}}
    higher = [{**row, "accuracy": row["accuracy"] + 0.1} for row in METRICS]
    groups = group_runs([make("a"), make("b", seed=1, metrics=higher), make("c", config=other)])
    low, high, mean, alone = curves(groups).views["accuracy", "time"].data
    assert low["x"] == [0, 5, 9, 10]  # the runs end after 10 s
    assert low["y"] == [0.1, 0.5, 0.9, 0.9]
    assert high["y"] == [0.2, 0.6, 1.0, 1.0]
    assert high["fill"] == "tonexty"
    assert mean["y"] == pytest.approx([0.15, 0.55, 0.95, 0.95])
    assert (alone["x"], alone["y"]) == ([0, 5, 9], [0.1, 0.5, 0.9])


def test_the_last_value_of_a_run_that_has_ended_holds_to_its_end(make):
    """One run merges nothing after 5 s, and its model stays the one of then; what will become of another is not known."""
    (group,) = group_runs([make("a"), make("b", seed=1, metrics=METRICS[:2])])
    assert [x.tolist() for x, _ in lines_of(group, "accuracy", "time")] == [[0, 5, 9, 10], [0, 5, 10]]
    x, mean, _, _ = band(lines_of(group, "accuracy", "time"), 10)
    assert (x.tolist(), mean.tolist()) == ([0, 5, 9, 10], pytest.approx([0.1, 0.5, 0.7, 0.7]))
    assert [x.tolist() for x, _ in lines_of(group, "accuracy", "versions")] == [[0, 2, 3], [0, 2]]
    group = replace(group, runs=[make("c", summary=None), make("d", seed=1, metrics=METRICS[:2], summary=None)])
    assert [x.tolist() for x, _ in lines_of(group, "accuracy", "time")] == [[0, 5, 9], [0, 5]]


def test_spread_over_seeds(make):
    second = {**SUMMARY, "final": {"accuracy": 0.7}, "time_to": {"accuracy=0.5": None}}
    table = overview.groups_table(group_runs([make("a"), make("b", seed=1, summary=second)]))
    row = dict(zip(table.columns, table.rows[0], strict=True))
    assert row["accuracy"] == "0.8 (0.7 to 0.9)"
    assert row["seconds to accuracy=0.5"] == "5 (5 to 5), 1 of 2 runs"


def test_a_final_metric_that_is_no_number_is_not_replaced_by_an_earlier_one(make):
    diverged, going_on = {**SUMMARY, "final": {"accuracy": None}}, {**SUMMARY, "final": {}}
    runs = [make(name, summary=summary) for name, summary in (("a", diverged), ("b", going_on), ("c", None))]
    found = [overview.final_metrics(run, ["accuracy"]) for run in runs]
    assert np.isnan(found[0][0]) and found[1:] == [[0.9], [0.9]]


# ---- submodels ----


def test_staleness_is_that_of_merged_updates(make):
    chart = staleness(group_runs([make("a")]))
    (trace,) = chart.views[()].data
    assert trace["x"] == ["0", "1"]
    assert trace["y"] == pytest.approx([1 / 3, 2 / 3], abs=1e-4)
    assert chart.tables[0].rows[0][1:4] == [3, 0.667, 1.0]


def test_a_region_has_its_merges_staleness_and_longest_pause(make):
    chart = regions(group_runs([make("a")]))
    heights = {key[0]: view.data[0]["y"] for key, view in chart.views.items()}
    # region 1 is in versions 1 and 3, region 2 in version 2 of 3
    assert heights == {"merged updates": [2, 1], "mean staleness": [0.5, 1.0], "longest pause": [1, 1]}


def test_submodels_are_counted_with_what_became_of_them(make):
    chart = specs(group_runs([make("a")]))
    assert [row[:6] for row in chart.tables[0].rows] == [["a[4:8]", 3, 1, 1, 0, 1], ["a[0:4]", 2, 2, 0, 0, 0]]
    assert chart.tables[0].rows[1][6] == 4.5  # tasks of 4 and 5 seconds


def test_figures_of_an_unfinished_run_come_from_the_other_files(make):
    whole, torn = overview.run_totals(make("a")), overview.run_totals(make("b", summary=None))
    assert torn["ended"] == "not ended"
    assert whole["ended"] == "max_updates reached"
    same = (
        "merged updates",
        "versions",
        "unused",
        "refused",
        "lost",
        "MB up",
        "MB down",
        "mean staleness",
        "most staleness",
    )
    assert {name: torn[name] for name in same} == {name: whole[name] for name in same}
    assert (whole["merged updates"], whole["lost"], torn["seconds"]) == (3, 1, 9.0)


# ---- making less of much ----


def test_thinning_keeps_the_ends():
    assert thinned(5, 10).tolist() == [0, 1, 2, 3, 4]
    assert thinned(101, 3).tolist() == [0, 50, 100]
    assert thin_rows([[i] for i in range(9)], 3) == ([[0], [4], [8]], "3 of 9 rows, evenly picked.")
    assert thin_rows([[1]], 3) == ([[1]], "")


def test_bands_hold_everything_once():
    assert split_evenly(range(5), 2) == [[0, 1, 2], [3, 4]]
    assert split_evenly([], 4) == []
    assert split_evenly([7], 4) == [[7]]


def test_numbers_are_shortened():
    assert rounded([1.23456789, float("nan"), float("inf")]) == [1.2346, None, None]
    assert [briefly(value) for value in (0.5, 12, 2.5e9, 3e19)] == ["0.5 ", "12 ", "2.5 G", "3e+04 P"]


def test_tasks_of_this_test_are_what_it_says():
    assert [task["outcome"] for task in TASKS].count("merged") == SUMMARY["updates_merged"] == 3
