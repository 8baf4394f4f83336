"""W&B's and MLflow's own files, read back: what a run has put there, and that a resumed run goes on under the same name."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]

WANDB = """
import json, os, sys
from pathlib import Path
from raafl.commands.cli import main
from raafl.config import loggers as logger_specs
from raafl import loggers
logger_specs._ANSWER_S, loggers.CALL_S, loggers.FINISH_S = 1.0, 200.0, 200.0
sweep = sys.argv[2:]
for name, key, options in (("keyless", "", ["--checkpoint_every=5", "--keep_checkpoints=9"]), ("keyed", "a" * 40, sweep)):
    os.environ["WANDB_API_KEY"] = key
    options = [*options, "--max_updates=20", f"--output={sys.argv[1]}/{name}", "--progress=plain", "--json"]
    sweeping = ["--config=configs/quickstart.yaml", "--logger=wandb"] if name == "keyless" else []
    assert main(["simulate", *sweeping, *options]) == 0
os.environ["WANDB_API_KEY"] = ""
folder = Path(sys.argv[1], "keyless")
for late in ("version-000015.ckpt", "version-000020.ckpt"):
    (folder / "checkpoints" / late).unlink()
assert main(["simulate", f"--resume={folder}", "--progress=plain", "--json"]) == 0
"""


def records(path):
    """The records of an offline run, from wandb's own file: blocks of 32 KiB with pieces of (checksum, length, kind)."""
    from wandb.proto import wandb_internal_pb2

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


class Offline:
    """What an offline run of W&B's holds."""

    def __init__(self, folder: Path) -> None:
        (path,) = folder.glob("run-*.wandb")
        self.folder, self.id = folder, path.stem.removeprefix("run-")
        self.rows, self.config, self.summary, self.metrics, self.artifacts = [], {}, {}, {}, {}
        for record in records(path):
            if record.history.item:
                self.rows.append({key(item): json.loads(item.value_json) for item in record.history.item})
            for item in (*record.config.update, *record.run.config.update):
                self.config[key(item)] = json.loads(item.value_json)
            self.summary |= {key(item): json.loads(item.value_json) for item in record.summary.update}
            if record.metric.glob_name or record.metric.name:
                self.metrics[record.metric.glob_name or record.metric.name] = record.metric.step_metric
            if record.artifact.name:
                self.artifacts[record.artifact.type, record.artifact.name] = record.artifact

    def evaluations(self) -> list[dict]:
        return [row for row in self.rows if "version" in row]

    def table(self, name: str) -> dict:
        (path,) = self.folder.glob(f"files/media/table/{name}_*.table.json")
        return json.loads(path.read_text())


def key(item):
    return item.key or "/".join(item.nested_key)


def sweep_command() -> list[str]:
    """What W&B's agent would run for one choice of the sweep's parameters, made by W&B's own code."""
    from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args

    sweep = yaml.safe_load((ROOT / "launch" / "sweep.yaml").read_text())
    chosen = {"algorithm.init_args.alpha": 0.5, "algorithm.init_args.fragments": 2, "train.num_epochs": 1}
    chosen["model.init_args.lr"] = 0.03
    assert set(chosen) == set(sweep["parameters"])
    args = create_sweep_command_args({"args": {name: {"value": value} for name, value in chosen.items()}})
    filled = {"${env}": ["/usr/bin/env"], "${interpreter}": ["python"], "${args}": args["args"]}
    words = [word for item in create_sweep_command(sweep["command"]) for word in filled.get(item, [item])]
    assert words[:5] == ["/usr/bin/env", "python", "-m", "raafl", "simulate"]
    return words[5:]


@pytest.mark.long
@pytest.mark.slow("wandb starts its own service, five times")
@pytest.mark.timeout(600)
def test_wandb_offline_has_it_all_and_goes_on_with_a_resumed_run(tmp_path):
    """Without a key, and with one but a server that takes connections and never says a word."""
    if importlib.util.find_spec("wandb") is None:
        pytest.skip("wandb is not installed")
    (tmp_path / "netrc").touch()
    with socket.create_server(("127.0.0.1", 0)) as hole:
        url = f"http://127.0.0.1:{hole.getsockname()[1]}"
        env = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
        env |= {"WANDB_BASE_URL": url, "NETRC": str(tmp_path / "netrc"), "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
        argv = [sys.executable, "-c", WANDB, str(tmp_path), *sweep_command()]
        done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr
    keyless, keyed, resumed = map(json.loads, done.stdout.splitlines())
    assert "anonymous" not in done.stderr, "W&B warns of an argument that Lightning passes"
    assert done.stderr.count("there is no API key, so it logs offline") == 2
    assert keyless["warnings"] == [] and len(keyed["warnings"]) == 1
    assert keyed["warnings"][0].startswith(f"logger WandbLogger: {url} does not answer, so it logs offline")
    first, later = map(Offline, sorted((tmp_path / "keyless" / "loggers" / "wandb").glob("offline-run-*")))
    check_rows(first, keyless, [0, 4, 8, 12, 16, 20], [4, 4, 4, 4, 4])
    check_tables(first, tmp_path / "keyless", keyless)
    check_model(first, keyless)
    assert later.id == first.id and resumed["model_digest"] == keyless["model_digest"]
    check_rows(later, resumed, [12, 16, 20], [2, 4, 4])  # from the checkpoint of version 10
    check_tables(later, tmp_path / "keyless", resumed)
    (swept,) = map(Offline, (tmp_path / "keyed" / "loggers" / "wandb").glob("offline-run-*"))
    assert swept.id != first.id
    check_rows(swept, keyed, [0, 4, 8, 12, 16, 20], [4, 4, 4, 4, 4])
    assert swept.config["train"]["num_epochs"] == 1 and swept.config["model"]["init_args"]["lr"] == 0.03
    assert swept.config["algorithm"]["init_args"]["alpha"] == 0.5


def check_rows(run, summary, versions, merged_since):
    rows = run.evaluations()
    assert summary["loggers"] == {"WandbLogger": {"logged": len(versions), "failed": 0, "error": None}}
    assert [row["trainer/global_step"] for row in rows] == [row["version"] for row in rows] == versions
    last = rows[-1]
    assert last["accuracy"] == last["over_time/accuracy"] == last["over_bytes/accuracy"] == summary["final"]["accuracy"]
    assert last["num_updates"] == 20 and last["bytes"] == summary["bytes_up"] + summary["bytes_down"]
    assert last["time_s"] == pytest.approx(summary["time_s"])
    assert run.metrics["over_time/*"] == "time_s" and run.metrics["over_bytes/*"] == "bytes"
    drawn = [row for row in rows if "histograms/staleness/values" in row]
    # each update makes a version of its own: there are as many of the one as of the other
    assert [sum(row["histograms/staleness/values"]) for row in drawn] == merged_since
    assert [sum(row["histograms/coverage/values"]) for row in drawn] == merged_since
    assert drawn[-1]["recent_staleness"] * merged_since[-1] == sum(
        staleness * num for staleness, num in enumerate(drawn[-1]["histograms/staleness/values"])
    )
    assert run.config["clients"] == 4 and run.config["algorithm"]["class_path"].endswith("fed_raa")


def check_tables(run, folder, summary):
    with (folder / "clients.csv").open(newline="") as file:
        tasks = list(csv.DictReader(file))
    clients, timeline, regions = (run.table(name) for name in ("clients", "timeline", "regions"))
    place = {name: i for i, name in enumerate(clients["columns"])}
    assert {str(row[place["client"]]): row[place["merged"]] for row in clients["data"]} == summary["participation"]
    assert [row[place["device"]] for row in clients["data"]] == ["fast", "middling", "slow", "slowest"]
    assert [[str(row[0]), *row[1:3]] for row in timeline["data"]] == [
        [task["client"], task["spec"], task["outcome"]] for task in tasks
    ]
    assert [row[3] for row in timeline["data"]] == pytest.approx([float(task["assigned_s"]) for task in tasks])
    assert {str(row[0]): row[1] for row in regions["data"]} == summary["coverage"]["regions"]
    assert run.summary["model_digest"] == summary["model_digest"]
    if importlib.util.find_spec("plotly") is not None:
        assert list(run.folder.glob("files/media/plotly/timeline_chart_*.plotly.json"))


def check_model(run, summary):
    artifact = run.artifacts["model", f"model-{run.id}"]
    assert set(artifact.aliases) == {"latest", "final"}
    (file,) = artifact.manifest.contents
    assert summary["model"].endswith(file.path) and file.size > 10_000
    assert json.loads(artifact.metadata)["model_digest"] == summary["model_digest"]


MLFLOW = """
import sys
from raafl.commands.cli import main
from raafl import loggers
loggers.CALL_S = loggers.FINISH_S = 400.0
options = ["--max_updates=20", "--logger=[tensorboard,mlflow]", f"--output={sys.argv[1]}/run", "--progress=quiet", "--json"]
assert main(["simulate", "--config=configs/quickstart.yaml", *options]) == 0
"""


@pytest.mark.slow("mlflow is imported by a process of its own")
@pytest.mark.timeout(600)
def test_mlflow_in_files_has_metrics_tables_and_the_model(tmp_path):
    if importlib.util.find_spec("mlflow") is None:
        pytest.skip("mlflow is not installed: pip install mlflow-skinny")
    env = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW")}
    env |= {"HOME": str(tmp_path), "OMP_NUM_THREADS": "1", "DO_NOT_TRACK": "true"}
    argv = [sys.executable, "-c", MLFLOW, str(tmp_path)]
    done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    whole = {"logged": 6, "failed": 0, "error": None}
    assert summary["loggers"] == {"TensorBoardLogger": whole, "MLFlowLogger": whole}
    (meta,) = (tmp_path / "run" / "loggers" / "mlflow").glob("*/*/meta.yaml")
    assert "Malformed" not in done.stderr
    run = meta.parent
    ids = json.loads((tmp_path / "run" / "loggers" / "runs.json").read_text())
    assert ids == {"TensorBoardLogger": {"version": 0}, "MLFlowLogger": {"run_id": run.name}}
    accuracy = [line.split() for line in (run / "metrics" / "accuracy").read_text().splitlines()]
    assert [int(step) for _, _, step, *_ in accuracy] == [0, 4, 8, 12, 16, 20]
    assert float(accuracy[-1][1]) == pytest.approx(summary["final"]["accuracy"])
    assert (run / "params" / "clients").read_text() == "4"
    tables = [path.name for path in (run / "artifacts").glob("*.csv")]
    assert sorted(tables) == ["clients.csv", "regions.csv", "timeline.csv"]
    (model,) = (run / "artifacts" / "model").iterdir()
    assert summary["model"].endswith(model.name)
