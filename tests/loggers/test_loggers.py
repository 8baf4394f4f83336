"""Loggers that work, raise, hang, dawdle or cannot be made: none of them changes, delays or ends the run."""

from __future__ import annotations

import csv
import json
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from lightning.pytorch.loggers import CSVLogger, Logger
from torch import nn

from raafl import loggers
from raafl.config import loggers as logger_specs
from raafl.config.loggers import specs
from raafl.data import Iid
from raafl.errors import BadInput
from raafl.runfolder.record import RunRecord
from raafl.runtime.run import simulate
from raafl.submodel import Submodels
from tests.helpers.small_runs import experiment

ROOT = Path(__file__).parents[2]


class Noting(Logger):
    """Notes every call, and from which thread."""

    name = version = None

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.threads = [], set()

    def note(self, *call):
        self.calls.append(call)
        self.threads.add(threading.current_thread())

    def log_hyperparams(self, params, *args, **kwargs):
        self.note("hyperparams", dict(params))

    def log_metrics(self, metrics, step=None):
        self.note("metrics", dict(metrics), step)

    def finalize(self, status):
        self.note("finalize", status)


class Raising(Noting):
    def log_metrics(self, metrics, step=None):
        raise ConnectionError("no network\nat all")


class Exiting(Noting):
    def log_metrics(self, metrics, step=None):
        raise SystemExit(3)


RELEASED = threading.Event()


@pytest.fixture
def released():
    """Lets loggers that hang end with the test."""
    RELEASED.clear()
    yield
    RELEASED.set()


class Hanging(Noting):
    def log_metrics(self, metrics, step=None):
        super().log_metrics(metrics, step)
        RELEASED.wait(100)


class Stillborn(Noting):
    def __init__(self, size: int = 1) -> None:
        raise ValueError(f"size {size} is too small")


def run(tmp_path, logger, **fields):
    return simulate(experiment(tmp_path / "run", "fed_async", logger=logger, eval_every=1, **fields), "seed: 7\n")


def test_every_evaluation_is_logged_with_its_version_in_one_thread(tmp_path):
    logger = Noting()
    summary, folder = run(tmp_path, logger)
    assert summary["loggers"] == {"Noting": {"logged": 13, "failed": 0, "error": None}}
    assert logger.calls[0] == ("hyperparams", {"seed": 7})
    assert logger.calls[-1] == ("finalize", "success")
    logged = [call for call in logger.calls if call[0] == "metrics"]
    assert [step for _, _, step in logged] == list(range(13))
    with (folder / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [metrics["accuracy"] for _, metrics, _ in logged] == [float(row["accuracy"]) for row in rows]
    assert [metrics["time_s"] for _, metrics, _ in logged] == [float(row["time_s"]) for row in rows]
    assert [metrics["num_updates"] for _, metrics, _ in logged] == list(range(13))
    assert logged[-1][1]["bytes_up"] == summary["bytes_up"] and logged[0][1]["bytes_down"] == 0
    assert len(logger.threads) == 1 and threading.main_thread() not in logger.threads
    assert not any(thread.is_alive() for thread in logger.threads)


def test_whatever_is_a_number_in_metrics_csv_is_logged(tmp_path):
    logger = Noting()
    _, folder = run(tmp_path, logger, partition=Iid(test_share=0.2), target=["accuracy=0.21", "accuracy=2"])
    with (folder / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    own = ("loss", "accuracy", "top5_accuracy", "macro_f1")
    clients = tuple(f"client_{name}" for name in own)
    figures = ("utilisation", "participation", "staleness", "coverage", "round_s", "bytes_up", "bytes_down")
    figures += ("peak_bytes",)
    times = ("time_to/accuracy=0.21", "time_to/accuracy=2")
    assert set(rows[0]) == {"version", "time_s", "wall_s", *own, *clients, *figures, *times}
    logged = [call[1:] for call in logger.calls if call[0] == "metrics"]
    for (metrics, step), row in zip(logged, rows, strict=True):
        assert step == int(row["version"]) and metrics["wall_s"] > 0  # that clock has gone on since the row was written
        cells = {name: float(cell) for name, cell in row.items() if cell and name not in ("version", "wall_s")}
        # the file has 12 digits of times
        assert {name: metrics.get(name) for name in cells} == pytest.approx(cells, rel=1e-11)
    first = next(row["time_s"] for row in rows if float(row["accuracy"]) >= 0.21)
    assert [row[times[0]] for row in rows] == [first if float(row["time_s"]) >= float(first) else "" for row in rows]
    assert float(first) > 0 and not any(row[times[1]] for row in rows)
    assert all(rows[-1][name] for name in rows[-1] if name != times[1])


def test_bytes_are_those_of_the_version_though_more_travel_while_it_is_measured():
    record, calls = RunRecord(None), []
    record.moved(down=4, up=3)
    record.due(1, 2.0)
    record.moved(down=100, up=100)
    record.evaluated(1, 2.0, {"accuracy": 0.5})
    observer = loggers.Loggers(SimpleNamespace(record=record))
    observer._workers = [SimpleNamespace(put=lambda call, counted: calls.append(call))]
    observer._since = loggers.RecentUpdates()
    observer.on_evaluate(1, 2.0, {"accuracy": 0.5})
    logger = Noting()
    calls[0](logger)
    ((_, logged, step),) = logger.calls
    assert (step, logged["time_s"], logged["bytes_down"], logged["bytes_up"]) == (1, 2.0, 4, 3)


@pytest.mark.parametrize(
    ("cls", "error"), [(Raising, "ConnectionError: no network at all"), (Exiting, "SystemExit: 3")]
)
def test_one_that_raises_is_reported_once_and_the_others_go_on(tmp_path, capsys, cls, error):
    good = Noting()
    summary, _ = run(tmp_path, [cls(), good])
    assert summary["loggers"][cls.__name__] == {"logged": 0, "failed": 13, "error": error}
    assert summary["loggers"]["Noting"]["logged"] == 13
    (warning,) = summary["warnings"]
    assert warning.startswith(f"logger {cls.__name__}: {error}; the run goes on")
    assert capsys.readouterr().err.count(error) == 1
    assert summary["finished"] == "max_updates"


def test_one_that_hangs_for_ever_costs_no_more_than_its_deadline(tmp_path, monkeypatch, released):
    monkeypatch.setattr(loggers, "CALL_S", 0.5)
    plain, _ = simulate(experiment(tmp_path / "plain", "fed_async", eval_every=1))
    began = time.monotonic()
    summary, _ = run(tmp_path, [Hanging(), Noting()])
    assert time.monotonic() - began < 30
    assert summary["model_digest"] == plain["model_digest"]
    hung = summary["loggers"]["Hanging"]
    assert (hung["logged"], hung["error"]) == (0, "a call has not returned within 0.5 s")
    assert hung["failed"] == 15  # 13 evaluations, the tables and the end
    assert summary["loggers"]["Noting"] == {"logged": 13, "failed": 0, "error": None}
    assert len(summary["warnings"]) == 1


def test_a_slow_one_delays_no_merge_and_is_waited_for_at_the_end(tmp_path, monkeypatch, released):
    logger, written = Hanging(), []
    publish = loggers.Loggers.publish

    def publish_now(self, *args):
        written.append(sum(call[0] == "metrics" for call in logger.calls))
        RELEASED.set()
        return publish(self, *args)

    monkeypatch.setattr(loggers.Loggers, "publish", publish_now)
    monkeypatch.setattr(loggers, "CALL_S", 100.0)
    summary, _ = run(tmp_path, logger)
    assert written[0] <= 1  # all that was merged was merged while it was still busy with the first
    assert summary["loggers"]["Hanging"] == {"logged": 13, "failed": 0, "error": None}


def test_one_that_is_too_slow_is_given_up_and_what_is_left_counted(tmp_path, monkeypatch, caplog, released):
    monkeypatch.setattr(loggers, "FINISH_S", 0.5)
    monkeypatch.setattr(loggers, "SAID_S", 0.2)
    monkeypatch.setattr(loggers, "CALL_S", 100.0)
    caplog.set_level("INFO", logger="raafl.run")
    summary, _ = run(tmp_path, [Noting(), Hanging()])
    # 13 evaluations, the tables and the end
    assert summary["loggers"]["Hanging"] == {"logged": 0, "failed": 15, "error": "it has not ended in time"}
    waits = [message for message in caplog.messages if message.startswith("waiting")]
    assert waits == ["waiting up to 0.5 s for logger Hanging to write what is queued"]


def test_a_full_queue_drops_and_counts(monkeypatch, released):
    monkeypatch.setattr(loggers, "MAX_QUEUED", 4)
    warned = []
    run = SimpleNamespace(
        parts=SimpleNamespace(experiment=SimpleNamespace(logger=Hanging()), submodels=Submodels(nn.Linear(1, 1))),
        folder=Path(),
        record=Counts(),
        progress=SimpleNamespace(warn=warned.append, note=print),
        config_yaml="",
        resumed=True,
    )
    many = loggers.Loggers(run)
    many.opened()
    many.start()
    for version in range(50):
        many.on_evaluate(version, 0.0, {})
    assert 45 <= many._workers[0]._failed <= 48  # of 52 calls four wait, and up to three were taken
    assert warned == [
        "logger Hanging: 4 calls are waiting for it, and further calls are dropped; the run goes on, and the summary counts what "
        "is not logged"
    ]
    RELEASED.set()
    many.close()


class Counts:
    """As much of a record as loggers look at."""

    wall_s = bytes_up = bytes_down = evaluated_version = 0
    outcomes = {"merged": 0}  # noqa: RUF012
    row = {}  # noqa: RUF012


def test_one_that_cannot_be_made_is_reported(tmp_path):
    summary, _ = run(tmp_path, {"class_path": f"{__name__}.Stillborn", "init_args": {"size": 2}})
    assert summary["loggers"] == {"Stillborn": {"logged": 0, "failed": 14, "error": "ValueError: size 2 is too small"}}


def test_libraries_are_imported_one_after_the_other(tmp_path, monkeypatch):
    library = "import time\nbegan = time.monotonic()\ntime.sleep(0.3)\nended = time.monotonic()\n"
    names = {"CSVLogger": "slow_to_import", "TensorBoardLogger": "slow_to_import_too"}
    for module in names.values():
        (tmp_path / f"{module}.py").write_text(library)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(logger_specs, "_LIBRARIES", names)
    makers = [logger_specs.maker(spec, tmp_path, print, print) for spec in specs(["csv", "tensorboard"])]
    threads = [threading.Thread(target=make) for make in makers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first, second = sorted((sys.modules[name] for name in names.values()), key=lambda module: module.began)
    assert first.ended <= second.began


def test_csv_and_tensorboard_write_into_the_run_folder(tmp_path):
    pytest.importorskip("tensorboard")
    summary, folder = run(tmp_path, ["csv", "tensorboard"])
    assert [fared["logged"] for fared in summary["loggers"].values()] == [13, 13]
    (metrics,) = folder.glob("loggers/csv/*/metrics.csv")
    with metrics.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == list(range(13))
    assert float(rows[-1]["accuracy"]) == summary["final"]["accuracy"]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (events,) = folder.glob("loggers/tensorboard/*/events.*")
    found = EventAccumulator(str(events))
    found.Reload()
    assert [point.step for point in found.Scalars("accuracy")] == list(range(13))
    assert found.Scalars("accuracy")[-1].value == pytest.approx(summary["final"]["accuracy"])


# ---- what a config may say ----


def test_names_classes_and_lists_are_understood():
    (one,) = specs("csv")
    assert one.class_path == "lightning.pytorch.loggers.CSVLogger"
    assert specs("CSVLogger") == specs({"class_path": "csv"}) == [one]
    two = specs(["csv", {"class_path": f"{__name__}.Noting"}])
    assert [spec.name for spec in two] == ["CSVLogger", "Noting"]
    made = CSVLogger("somewhere")
    assert specs(made)[0].instance is made
    assert specs(None) == specs([]) == []


@pytest.mark.parametrize(
    ("logger", "line"),
    [
        ("wandbb", "logger is 'wandbb': did you mean 'wandb'?"),
        (7, "logger is 7: give csv, mlflow, tensorboard, wandb, or a class_path with init_args"),
        ({"class": "csv"}, "logger is {'class': 'csv'}: give csv,"),
        ({"class_path": "csv", "initargs": {}}, "unknown field logger.initargs: did you mean 'init_args'?"),
        ({"class_path": "csv", "init_args": 3}, "logger.init_args is 3: give a mapping"),
        ({"class_path": "csv", "init_args": {"nme": 1}}, "unknown field logger.init_args.nme of lightning.pytorch."),
        ("nowhere.Logger", "logger is nowhere.Logger, which cannot be imported"),
        ("lightning.pytorch.Trainer", "logger is lightning.pytorch.Trainer, which is not a Lightning logger"),
    ],
)
def test_what_is_wrong_is_one_line(logger, line):
    with pytest.raises(BadInput) as caught:
        specs([logger])
    assert str(caught.value).startswith(line)


def test_a_missing_package_is_named_before_training(monkeypatch, tmp_path):
    monkeypatch.setitem(logger_specs._PACKAGES, "CSVLogger", ("no_such_package",))
    with pytest.raises(BadInput, match=r"needs the package no_such_package: pip install no_such_package"):
        experiment(tmp_path / "run", logger=["csv"]).check()


@pytest.mark.parametrize("name", ["mlflow", "wandb"])
def test_a_missing_package_of_an_extra_is_installed_by_it(monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(BadInput, match=rf"which needs the package {name}: pip install '.\[{name}\]'"):
        specs(name)


def test_a_config_keeps_what_it_says_and_nothing_is_imported_for_it(tmp_path):
    from raafl.config.parse import parse

    config, before = tmp_path / "with.yaml", set(sys.modules)
    text = (ROOT / "configs" / "quickstart.yaml").read_text()
    config.write_text(text + "logger: [csv, {class_path: wandb, init_args: {project: mine}}]\n")
    parsed = parse("simulate", ["--config", str(config)])
    parsed.experiment.check()
    assert parsed.experiment.logger == ["csv", {"class_path": "wandb", "init_args": {"project": "mine"}}]
    assert not {"wandb", "tensorboard", "mlflow"} & (set(sys.modules) - before)
    (tmp_path / "again.yaml").write_text(parsed.config_yaml)
    assert parse("simulate", ["--config", str(tmp_path / "again.yaml")]).experiment.logger == parsed.experiment.logger
    assert parse("simulate", ["--config", str(config), "--logger=csv"]).experiment.logger == "csv"


def test_mlflow_gets_the_pictures_of_samples_with_the_tables(tmp_path):
    """The logger stands for Lightning's; what it is told is MLflow's own interface of a client."""

    class MLFlowLogger:
        run_id = "run"

        def __init__(self):
            self.experiment, self.told = self, {}

        def log_text(self, run, text, file):
            self.told[file] = text

        def log_artifacts(self, run, folder, where):
            self.told[where] = sorted(path.name for path in Path(folder).iterdir())

    (tmp_path / "samples").mkdir()
    (tmp_path / "samples" / "3.png").write_bytes(b"a picture")
    logger = MLFlowLogger()
    tables = SimpleNamespace(all=lambda: {"samples": (("version", "text"), [[0, "a"]])})
    loggers.finish(logger, tmp_path, {"model": None}, tables)
    assert logger.told.pop("samples.csv").splitlines() == ["version,text", "0,a"]
    assert json.loads(logger.told.pop("summary.json")) == {"model": None} and logger.told == {"samples": ["3.png"]}
