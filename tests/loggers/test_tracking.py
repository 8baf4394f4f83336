"""What loggers are told beside metrics: by hand, and in TensorBoard's own files; W&B's and MLflow's are in test_loggers_real."""

from __future__ import annotations

import csv
import json
from statistics import mean, median

import pytest
from lightning.pytorch.loggers import Logger

from raafl.core.types import Assignment, Settled
from raafl.loggers import (
    Measurements,
    RecentUpdates,
    RunIds,
    Tables,
    clients_table,
    close,
    finish,
    histogram,
    log,
    markdown,
    regions_table,
    timeline_table,
)
from raafl.runfolder.reading import read
from raafl.runtime.run import simulate
from raafl.submodel import FULL, Spec
from tests.helpers.small_runs import experiment

HALF, OTHER = Spec.select({"fc1": range(12)}), Spec.select({"fc1": range(12, 24)})
SHARES = {frozenset({HALF}): 0.4, frozenset({HALF, OTHER}): 0.75, frozenset({FULL}): None}


def settled(outcome, version, staleness, spec=HALF):
    assignment = Assignment(1, 1, 0, 0, version - staleness, spec, 0, None, None, 0, 0.0)
    return Settled(assignment, 1, outcome, version, staleness)


def test_staleness_and_coverage_are_those_since_the_last_evaluation():
    since = RecentUpdates(lambda specs: SHARES[frozenset(specs)])
    for one in (
        ("merged", 1, 0),
        ("merged", 1, 3, OTHER),
        ("lost:gone", 1, 9),
        ("refused:late", 1, 8),
        ("merged", 2, 1),
    ):
        since.settled(settled(*one))
    assert since.take() == ([0, 3, 1], [0.75, 0.4])
    assert since.take() == ([], [])
    since.settled(settled("merged", 3, 2, FULL))  # too large a model to lay its submodels over each other
    assert since.take() == ([2], [])
    assert RecentUpdates().take() == ([], [])


def test_the_scalars_of_an_evaluation():
    measured = Measurements(
        4, {"accuracy": 0.5}, {"time_s": 2.0, "bytes_up": 3, "bytes_down": 4}, [0, 3, 3], [0.5, 1.0]
    )
    recent = {"recent_staleness": 2.0, "recent_staleness_max": 3, "recent_coverage": 0.75}
    assert measured.scalars() == {"accuracy": 0.5, "time_s": 2.0, "bytes_up": 3, "bytes_down": 4, **recent}
    assert Measurements(0, {"accuracy": 0.5}, {}).scalars() == {"accuracy": 0.5}


@pytest.mark.parametrize(
    ("kind", "name"), [("MLFlowLogger", "time_to/accuracy_0.5"), ("CSVLogger", "time_to/accuracy=0.5")]
)
def test_the_name_of_a_target_is_one_that_its_logger_takes(kind, name):
    logged = []
    cls = type(kind, (), {"save": lambda self: None, "log_metrics": lambda self, row, step: logged.append((row, step))})
    log(cls(), Measurements(3, {"accuracy": 0.5}, {"time_to/accuracy=0.5": 2.0}))
    assert logged == [({"accuracy": 0.5, name: 2.0}, 3)]


def test_bins_are_whole_numbers_or_twentieths():
    counts, edges = histogram([0, 3, 3], whole=True)
    assert (counts.tolist(), edges.tolist()) == ([1, 0, 0, 2], [0, 1, 2, 3, 4])
    counts, edges = histogram([0.0, 0.51, 1.0], whole=False)
    assert counts.sum() == 3 and (counts[0], counts[10], counts[19]) == (1, 1, 1) and len(edges) == 21
    assert len(histogram([5000], whole=True)[0]) == 20


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return simulate(experiment(tmp_path_factory.mktemp("runs") / "run", "fed_raa", max_updates=20))


def test_the_tables_are_what_the_rows_say(finished):
    summary, folder = finished
    with (folder / "clients.csv").open(newline="") as file:
        tasks = list(csv.DictReader(file))
    run = read(folder)
    columns, rows = clients_table(run)
    for row in rows:
        cells = dict(zip(columns, row, strict=True))
        mine = [task for task in tasks if task["client"] == str(cells["client"])]
        merged = [int(task["staleness"]) for task in mine if task["outcome"] == "merged"]
        lasted_s = [float(task["arrived_s"]) - float(task["assigned_s"]) for task in mine if task["arrived_s"]]
        assert cells["device"] == f"device-{cells['client']}"
        assert (cells["tasks"], cells["merged"]) == (len(mine), len(merged))
        assert cells["unused"] == sum(task["outcome"] == "unused" for task in mine)
        assert (cells["staleness_mean"], cells["staleness_max"]) == (pytest.approx(mean(merged)), max(merged))
        assert cells["median_task_s"] == pytest.approx(median(lasted_s))
        at_work_s = sum(float(task["arrived_s"] or summary["time_s"]) - float(task["assigned_s"]) for task in mine)
        assert cells["at_work_share"] == pytest.approx(at_work_s / summary["time_s"])
        assert cells["bytes_up"] == sum(int(task["bytes_up"] or 0) for task in mine)
    assert mean(row[columns.index("at_work_share")] for row in rows) == pytest.approx(summary["utilisation"])
    assert sum(row[columns.index("samples")] for row in rows) == sum(
        client.num_samples for client in run.clients.values()
    )
    columns, rows = timeline_table(run)
    assert [row[: len(columns)][0] for row in rows] == [int(task["client"]) for task in tasks]
    assert [row[columns.index("spec")] for row in rows] == [task["spec"] for task in tasks]
    ends = [row[columns.index("ends_s")] for row in rows]
    assert ends == [float(task["arrived_s"]) if task["arrived_s"] else None for task in tasks]
    columns, rows = regions_table(run)
    assert {str(region): num for region, num in rows} == summary["coverage"]["regions"]


@pytest.mark.parametrize("text", ["[]", '{"WandbLogger": 3}', "{"])
def test_names_of_runs_that_cannot_be_read_are_none(tmp_path, text):
    (tmp_path / "runs.json").write_text(text)
    assert RunIds(tmp_path).of("WandbLogger") == {}


def test_a_folder_of_somebody_else_s_gives_loggers_names_and_no_other_argument(tmp_path):
    theirs = {"MLFlowLogger": {"run_id": "a1", "tracking_uri": "https://evil", "version": {"x": 1}}}
    (tmp_path / "runs.json").write_text(json.dumps(theirs))
    assert RunIds(tmp_path).of("MLFlowLogger") == {"run_id": "a1"}


@pytest.mark.parametrize(
    ("version", "taken"), [(3, True), ("version_3", True), ("/home/me", False), ("../x", False), (True, False)]
)
def test_a_folder_of_somebody_else_s_names_no_place_to_write_to(tmp_path, version, taken):
    (tmp_path / "runs.json").write_text(json.dumps({"TensorBoardLogger": {"version": version, "id": "a/b"}}))
    assert RunIds(tmp_path).of("TensorBoardLogger") == ({"version": version} if taken else {})


def test_a_long_timeline_is_its_end(finished, monkeypatch):
    from raafl import loggers

    run = read(finished[1])
    whole = timeline_table(run)[1]
    monkeypatch.setattr(loggers, "MAX_TASKS", 5)
    assert timeline_table(run)[1] == whole[-5:]


def test_the_timeline_is_drawn_where_plotly_is_there(finished):
    pytest.importorskip("plotly")
    figure = Tables(finished[1]).figure()
    bars = {bar.name: bar for bar in figure.data}
    assert len(bars["merged"].y) == 20
    assert all(lasted_s > 0 for lasted_s in bars["merged"].x)


def test_text_tables_are_markdown_and_not_endless():
    assert markdown(["a", "b"], [[1, None], ["x", 0.123456789]]).splitlines() == [
        "| a | b |",
        "| --- | --- |",
        "| 1 |  |",
        "| x | 0.123457 |",
    ]
    assert markdown(["a"], [["one | two\n\\three"]]).splitlines()[-1] == "| one \\| two \\\\three |"
    assert markdown(["a"], [[i] for i in range(300)]).splitlines()[-2:] == ["", "and 100 more"]


def test_any_other_logger_is_told_no_more_than_scalars(finished):
    told = []

    class Plain(Logger):
        name = version = None

        def log_metrics(self, metrics, step=None):
            told.append(metrics)

        log_hyperparams = log_metrics

    summary, folder = finished
    finish(Plain(), folder, summary, Tables(folder / "nowhere"))  # the tables are not even read
    assert told == []


@pytest.mark.parametrize(("status", "code"), [("success", 0), ("interrupted", 0), ("failed", 1)])
def test_a_run_ends_at_wandb_also_by_a_logger_of_ones_own(status, code):
    """Of a subclass W&B's run stayed open until the process ended, without the code of a failed run."""
    ended = []

    class Experiment:
        def finish(self, exit_code):
            ended.append(exit_code)

    class WandbLogger:
        experiment = Experiment()

        def finalize(self, status):
            pass

    class Own(WandbLogger):
        pass

    for logger in (WandbLogger(), Own()):
        close(logger, status)
    assert ended == [code, code]


def test_names_of_runs_are_kept_and_damage_is_survived(tmp_path):
    class TensorBoardLogger:
        version = 3

    ids = RunIds(tmp_path / "loggers")
    assert ids.of("TensorBoardLogger") == {}
    ids.keep("TensorBoardLogger", TensorBoardLogger())
    ids.keep("Other", object())
    assert RunIds(tmp_path / "loggers").of("TensorBoardLogger") == {"version": 3}
    assert json.loads((tmp_path / "loggers" / "runs.json").read_text()) == {"TensorBoardLogger": {"version": 3}}
    (tmp_path / "loggers" / "runs.json").write_text("[1")
    assert RunIds(tmp_path / "loggers").of("TensorBoardLogger") == {}


def test_tensorboard_has_histograms_and_tables_and_goes_on_after_a_resume(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    settings = {"logger": "tensorboard", "eval_every": 2, "checkpoint_every": 6}
    whole, folder = simulate(experiment(tmp_path / "run", "fed_async", keep_checkpoints=9, **settings))
    (folder / "checkpoints" / "version-000012.ckpt").unlink()
    (folder / "summary.json").unlink()
    resumed, _ = simulate(experiment(folder, "fed_async", resume=str(folder), **settings))
    assert resumed["model_digest"] == whole["model_digest"]
    (place,) = (folder / "loggers" / "tensorboard").iterdir()
    assert len(list(place.glob("events.*"))) == 2
    found = EventAccumulator(
        str(place), size_guidance={"scalars": 0, "histograms": 0, "tensors": 0}, purge_orphaned_data=True
    )
    found.Reload()
    # what came after the checkpoint, at version 6, is there once
    assert [point.step for point in found.Scalars("accuracy")] == [0, 2, 4, 6, 8, 10, 12]
    histograms = found.Histograms("histograms/staleness")
    assert [point.step for point in histograms] == [2, 4, 6, 8, 10, 12]
    assert [point.histogram_value.num for point in histograms] == [2] * 6
    assert [point.histogram_value.sum for point in found.Histograms("histograms/coverage")] == [2.0] * 6  # whole models
    text = found.Tensors("clients/text_summary")[-1].tensor_proto.string_val[0].decode()
    assert len(text.splitlines()) == 2 + 4 and text.startswith("| client | device |")
