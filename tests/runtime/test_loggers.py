"""Loggers that work, raise, hang, dawdle or cannot be made: none of them changes, delays or ends the run."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from lightning.pytorch.loggers import CSVLogger, Logger

from raafl.errors import BadInput
from raafl.run import simulate
from raafl.runtime import logger_specs, loggers
from raafl.runtime.logger_specs import specs
from tests.federation import experiment

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


class Slow(Noting):
    def log_metrics(self, metrics, step=None):
        time.sleep(0.3)
        super().log_metrics(metrics, step)


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
    assert hung["failed"] == 14  # 13 evaluations and the end
    assert summary["loggers"]["Noting"] == {"logged": 13, "failed": 0, "error": None}
    assert len(summary["warnings"]) == 1


def test_a_slow_one_delays_no_merge_and_is_waited_for_at_the_end(tmp_path):
    logger = Slow()
    summary, _ = run(tmp_path, logger)
    assert summary["loggers"]["Slow"]["logged"] == 13
    assert summary["wall_s"] < 13 * 0.3  # all that was merged was merged while it was still busy


def test_one_that_is_too_slow_is_given_up_and_what_is_left_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(loggers, "FINISH_S", 0.5)
    summary, _ = run(tmp_path, Slow())
    fared = summary["loggers"]["Slow"]
    assert fared["logged"] + fared["failed"] in (13, 14, 15) and fared["failed"] > 0
    assert fared["error"] == "it has not ended in time"


def test_a_full_queue_drops_and_counts(released):
    warned = []
    many = loggers.Loggers(Hanging(), Path(), record=Counts(), warn=warned.append, note=print, call_s=9.0, max_queued=4)
    many.start({})
    for version in range(50):
        many.on_evaluate(version, 0.0, {})
    assert 45 <= many._workers[0]._failed <= 47  # of 51 calls four wait, and one or two were taken
    assert warned == [
        "logger Hanging: 4 calls wait for it, and what comes is dropped; the run goes on, and the summary counts what "
        "is not logged"
    ]
    RELEASED.set()
    many.close()


class Counts:
    """As much of a record as loggers look at."""

    wall_s = bytes_up = bytes_down = 0
    outcomes = {"merged": 0}  # noqa: RUF012
    row = {}  # noqa: RUF012


def test_one_that_cannot_be_made_is_reported(tmp_path):
    summary, _ = run(tmp_path, {"class_path": f"{__name__}.Stillborn", "init_args": {"size": 2}})
    assert summary["loggers"] == {
        "Stillborn": {"logged": 0, "failed": 14, "error": "ValueError: size 2 is too small"}
    }  # fmt: skip


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


TWICE = """
import json, os, sys
from raafl.cli import main
from raafl.runtime import logger_specs, loggers
logger_specs._ANSWER_S, loggers.CALL_S, loggers.FINISH_S = 1.0, 100.0, 100.0
for name, key in (("keyless", ""), ("keyed", "a" * 40)):
    os.environ["WANDB_API_KEY"] = key
    options = ["--max_updates=20", "--logger=wandb", f"--output={sys.argv[1]}/{name}", "--progress=plain", "--json"]
    assert main(["simulate", "--config", "configs/quickstart.yaml", *options]) == 0
"""


def wandb_records(folder):
    """The records of an offline run, from wandb's own file: blocks of 32 KiB with pieces of (checksum, length, kind)."""
    from wandb.proto import wandb_internal_pb2

    (path,) = folder.glob("loggers/wandb/offline-run-*/run-*.wandb")
    data, at, whole = path.read_bytes(), 7, b""
    assert data.startswith(b":W&B")
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # too little of the block is left for another piece
            at += 32768 - at % 32768
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            whole = b""
            yield record


def wandb_rows(folder):
    """The rows that were logged, and the names of the config's fields."""

    def key(item):
        return item.key or "/".join(item.nested_key)

    rows, config = [], set()
    for record in wandb_records(folder):
        if record.history.item:
            rows.append({key(item): json.loads(item.value_json) for item in record.history.item})
        config |= {key(item) for item in (*record.config.update, *record.run.config.update)}
    return rows, config


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_wandb_without_a_key_or_a_network_logs_offline_and_says_so(tmp_path):
    """Real files of wandb's; its server takes connections and never says a word."""
    if importlib.util.find_spec("wandb") is None:
        pytest.skip("wandb is not installed")
    (tmp_path / "netrc").touch()
    with socket.create_server(("127.0.0.1", 0)) as hole:
        url = f"http://127.0.0.1:{hole.getsockname()[1]}"
        env = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
        env |= {"WANDB_BASE_URL": url, "NETRC": str(tmp_path / "netrc"), "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-c", TWICE, str(tmp_path)], cwd=ROOT, env=env, capture_output=True, text=True, timeout=200
        )
    assert done.returncode == 0, done.stderr
    keyless, keyed = map(json.loads, done.stdout.splitlines())
    assert done.stderr.count("there is no API key, so it logs offline") == 1
    assert keyless["warnings"] == [] and len(keyed["warnings"]) == 1
    assert keyed["warnings"][0].startswith(f"logger WandbLogger: {url} does not answer, so it logs offline")
    for name, summary in (("keyless", keyless), ("keyed", keyed)):
        assert summary["loggers"] == {"WandbLogger": {"logged": 6, "failed": 0, "error": None}}, done.stderr
        rows, config = wandb_rows(tmp_path / name)
        assert [row["trainer/global_step"] for row in rows] == [0, 4, 8, 12, 16, 20]
        assert rows[-1]["accuracy"] == summary["final"]["accuracy"]
        assert rows[-1]["num_updates"] == 20 and rows[-1]["bytes_up"] == summary["bytes_up"]
        assert "clients" in config


# ---- what a config may say ----


def test_names_classes_and_lists_are_understood():
    (one,) = specs("csv")
    assert one.class_path == "lightning.pytorch.loggers.CSVLogger"
    assert specs("CSVLogger") == specs({"class_path": "csv"}) == [one]
    two = specs(["csv", {"class_path": f"{__name__}.Noting"}])
    assert [spec.name for spec in two] == ["CSVLogger", "Noting"]
    made = CSVLogger("somewhere")
    assert specs(made)[0].made is made
    assert specs(None) == specs([]) == []


@pytest.mark.parametrize(
    ("logger", "line"),
    [
        ("wandbb", "logger is 'wandbb': did you mean 'wandb'?"),
        (7, "logger is 7: give csv, mlflow, tensorboard, wandb, or a class_path with init_args"),
        ({"class": "csv"}, "logger is {'class': 'csv'}: give csv,"),
        ({"class_path": "csv", "initargs": {}}, "unknown field logger.initargs: did you mean 'init_args'?"),
        ({"class_path": "csv", "init_args": 3}, "logger.init_args is 3: give a table"),
        ({"class_path": "csv", "init_args": {"nme": 1}}, "unknown field logger.init_args.nme of lightning.pytorch."),
        ("nowhere.Logger", "logger is nowhere.Logger, which cannot be imported"),
        ("lightning.pytorch.Trainer", "logger is lightning.pytorch.Trainer, which is no Lightning logger"),
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


def test_a_config_keeps_what_it_says_and_nothing_is_imported_for_it(tmp_path):
    from raafl.config import parse

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
