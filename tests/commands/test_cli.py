"""The command line as its users meet it: whole commands in processes forked from this one, one of them started from nothing."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from raafl.commands.cli import main
from raafl.runfolder.outcome import report_command
from tests.commands.simulated import QUICKSTART
from tests.habits.source import ROOT
from tests.helpers import forkserver
from tests.helpers.forked_command import command, wait_for

SUMMARY = {
    "algorithm",
    "runtime",
    "seed",
    "versions",
    "updates_merged",
    "updates_refused",
    "updates_lost",
    "time_s",
    "wall_s",
    "bytes_up",
    "bytes_down",
    "utilisation",
    "participation",
    "staleness",
    "final",
    "time_to",
    "model_digest",
}


@pytest.mark.quick_cases("fed_raa")
@pytest.mark.parametrize("name", ["fed_avg", "fed_raa", "split_fed"])
def test_an_algorithm_runs_on_the_quick_start(name, summary):
    """All the others do in tests/runtime/lifecycle/test_resume.py, whose options are read alike."""
    result = summary("--algorithm", name, updates=10)
    assert result.keys() >= SUMMARY
    assert (result["algorithm"], result["runtime"], result["seed"]) == (name, "simulated", 0)
    assert 10 <= result["updates_merged"] <= 12  # a round of four that is begun is merged whole
    assert sum(result["participation"].values()) == result["updates_merged"]
    assert result["final"]["accuracy"] > 0.2  # ten classes, a few steps


def test_the_run_folder_is_whole(run, tmp_path):
    code, out, _ = run("--output", tmp_path / "here", "--checkpoint_every", "2", "--progress", "plain", updates=6)
    assert code == 0
    folder = tmp_path / "here"
    assert {path.name for path in folder.iterdir()} >= {
        "config.yaml",
        "events.jsonl",
        "metrics.csv",
        "clients.csv",
        "checkpoints",
        "summary.json",
    }
    summary = json.loads((folder / "summary.json").read_text())
    assert out.splitlines()[-2:] == [f"run folder: {folder}", f"next: {report_command(folder)}"]
    assert f"model digest {summary['model_digest'][:16]}" in out
    assert "after 6 updates, 6 versions" in out
    tasks = list(csv.DictReader((folder / "clients.csv").open()))
    assert sum(task["outcome"] == "merged" for task in tasks) == 6
    metrics = list(csv.DictReader((folder / "metrics.csv").open()))
    assert [row["version"] for row in metrics] == ["0", "4", "6"]
    assert list(metrics[0])[:3] == ["version", "time_s", "wall_s"]
    events = [json.loads(line)["event"] for line in (folder / "events.jsonl").read_text().splitlines()]
    assert events.count("joined") == 4
    assert events.count("arrived") == 6


def test_the_next_command_starts_where_raafl_is_not_on_the_path(tmp_path, monkeypatch):
    """As after `make demo`, whose environment the user's shell does not know."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sys.executable", str(tmp_path / ".venv" / "bin" / "python"))
    run = Path("runs/a")
    assert report_command(run) == ".venv/bin/python -m raafl report runs/a"
    monkeypatch.setattr("sys.executable", "/usr/bin/python3")
    assert report_command(run) == "/usr/bin/python3 -m raafl report runs/a"
    (tmp_path / "raafl").touch(mode=0o755)
    assert report_command(run) == "raafl report runs/a"
    assert report_command(Path("my runs/it's")) == """raafl report 'my runs/it'"'"'s'"""


def test_the_kept_config_gives_the_same_run(summary, run, tmp_path):
    first = summary("--output", tmp_path / "first", "--algorithm", "fed_async", "--model.lr", "0.1", "--seed", "3")
    again = summary("--output", tmp_path / "second", config=tmp_path / "first" / "config.yaml", updates=None)
    assert again["model_digest"] == first["model_digest"]
    other = summary("--output", tmp_path / "third", "--seed", "4", config=tmp_path / "first" / "config.yaml")
    assert other["model_digest"] != first["model_digest"]


def test_print_config_prints_one_that_loads(capsys, tmp_path):
    options = ["--algorithm", "fed_avg", "--clients", "3", "--model.hidden", "[8, 4]"]
    texts = []
    for config in (QUICKSTART, tmp_path / "printed.yaml"):
        with pytest.raises(SystemExit) as ended:
            main(["simulate", "--config", str(config), *options, "--print_config"])
        assert ended.value.code in (0, None)
        texts.append(capsys.readouterr().out)
        (tmp_path / "printed.yaml").write_text(texts[0])
    assert texts[0] == texts[1]
    printed = yaml.safe_load(texts[0])
    assert printed["clients"] == 3
    assert printed["model"]["init_args"]["hidden"] == [8, 4]
    given = {"cohort": None, "concurrency": None, "by_samples": True, "submodel": None, "lora": None}
    given |= {"prune_ranks": None, "prune_penalty": 0.0}
    assert printed["algorithm"] == {"class_path": "raafl.fed_avg", "init_args": given}


def test_options_win_over_the_file_wherever_they_stand(summary, tmp_path):
    late = summary("--clients", "2", "--seed", "7", "--algorithm", "fed_avg", updates=4)
    (tmp_path / "more.yaml").write_text("clients: 3\n")
    early = main_json(
        "--clients",
        "2",
        "--seed",
        "7",
        "--algorithm=fed_avg",
        "--max_updates",
        "4",
        "--output",
        str(tmp_path / "early"),
        f"--config={QUICKSTART}",
        "--config",
        str(tmp_path / "more.yaml"),
    )
    assert early["model_digest"] == late["model_digest"]
    assert list(early["participation"]) == ["1", "2"]


def main_json(*argv):
    import contextlib
    import io

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(["simulate", "--json", "--progress", "quiet", *argv]) == 0
    return json.loads(out.getvalue())


def test_a_target_ends_the_run_and_its_time_is_noted(run, summary):
    result = summary("--target", "accuracy=0.6", updates=200)
    assert result["finished"] == "target"
    assert result["time_to"] == {"accuracy=0.6": result["time_s"]}
    assert result["final"]["accuracy"] >= 0.6
    code, out, _ = run("--target", "accuracy=0.999", "--progress", "plain", updates=5)
    assert run(updates=1) == (0, "", "")  # quiet
    assert code == 0
    assert "time to accuracy=0.999: not reached" in out


def test_time_is_that_of_the_virtual_clock(summary):
    result = summary("--max_time", "0.01m", updates=None, config=QUICKSTART)
    # The quick start's own max_updates is far off: it takes 20 virtual seconds.
    assert result["finished"] == "max_time"
    assert result["time_s"] == 0.6


def test_a_run_that_loses_everyone_has_failed(run, tmp_path):
    # All are there for the first 0.05 s, in which no task can end (client 1's shortest takes 0.087 s).
    devices = [
        {**device, "availability": [[0.0, 0.05]]} for device in yaml.safe_load(Path(QUICKSTART).read_text())["devices"]
    ]
    (tmp_path / "devices.yaml").write_text(yaml.safe_dump(devices))
    code, out, _ = run("--devices", tmp_path / "devices.yaml", "--output", tmp_path / "gone")
    assert code == 1
    assert "finished: failed: all clients have left, and none will come back after 0 updates" in out
    assert "not merged: 4 lost" in out
    summary = json.loads((tmp_path / "gone" / "summary.json").read_text())
    assert (summary["updates_lost"], summary["updates_merged"]) == (4, 0)


CHATTY = """
import sys
from model_zoo import MLP

class Chatty(MLP):
    def training_step(self, batch, batch_idx):
        print("training")
        sys.stdout.write("a step\\n")
        return super().training_step(batch, batch_idx)
"""


@pytest.mark.slow("a process starts from nothing")
def test_json_prints_json_alone_even_with_a_model_that_prints(tmp_path):
    """Also: a module of the folder in which the command is run needs no installing."""
    (tmp_path / "chatty.py").write_text(CHATTY)
    argv = ("--config", QUICKSTART, "--model", "chatty.Chatty", "--model.in_features=64", "--max_updates=2", "--json")
    done = subprocess.run(
        [sys.executable, "-m", "raafl", "simulate", *argv],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert done.stdout.count("\n") == 1
    assert result["updates_merged"] == 2
    assert "training\na step\n" in done.stderr
    assert "quickstart: fed_raa on 4 clients" in done.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("quickstart-")
    assert json.loads((folder / "summary.json").read_text())["model_digest"] == result["model_digest"]


def test_ctrl_c_ends_with_a_summary(tmp_path):
    argv = ("simulate", "--config", QUICKSTART, "--max_updates", "1000000", "--output", str(tmp_path / "run"))
    with command(tmp_path / "c", *argv, TORCHELASTIC_RUN_ID="here") as running:
        metrics = tmp_path / "run" / "metrics.csv"
        wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") > 3, "three evaluations")
        running.send(signal.SIGINT)
        running.send(signal.SIGINT)  # torchrun repeats what its ranks have had already
        assert running.end() == 130
    assert running.err == ""
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["finished"] == "interrupted"
    assert f"finished: interrupted after {summary['updates_merged']} updates" in running.out
    tasks = list(csv.DictReader((tmp_path / "run" / "clients.csv").open()))
    merged = sum(task["outcome"] == "merged" for task in tasks)
    assert merged == summary["updates_merged"] >= 8  # header, versions 0, 4, 8
    assert len(list((tmp_path / "run" / "checkpoints").iterdir())) == 1


def test_a_run_in_a_folder_whose_name_is_no_utf8_ends_well(tmp_path, monkeypatch):
    """Standard output takes no such bytes in most locales, though the file system does."""
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding="utf-8", errors="strict"))
    options = ("--output", str(tmp_path / "bad\udcffname"), "--progress", "plain")
    assert main(["simulate", "--config", str(QUICKSTART), "--max_updates", "2", *options]) == 0
    assert rb"bad\udcffname" in printed.getvalue()


def test_a_reader_that_goes_away_ends_nothing(tmp_path):
    argv = ("simulate", "--config", QUICKSTART, "--max_updates", "20", "--output", str(tmp_path / "run"))
    reading, writing = os.pipe()
    with command(tmp_path / "c", *argv, before=lambda: (os.dup2(writing, 1), os.close(reading))) as running:
        os.close(writing)
        with os.fdopen(reading) as reader:
            assert reader.readline()
        assert (running.end(), running.err) == (0, "")
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["updates_merged"] == 20


# ---- fit ----


@pytest.mark.long("tests/commands/test_bad_options.py::test_ranks_started_by_hand_with_bad_places")
def test_too_few_ranks_under_torchrun(tmp_path):
    """What enough of them do is in tests/distributed/test_torchrun.py."""
    argv = ("--standalone", "--nproc-per-node=3", "-m", "raafl", "fit", "--config", QUICKSTART, "--clients", "4")
    with command(tmp_path, *argv, before=forkserver.start, entry=forkserver.torchrun) as done:
        assert done.end() != 0
    ours = [line for line in done.err.splitlines() if line.startswith("raafl: ")]
    assert ours == [
        "raafl: clients is 4, but the run has 3 ranks (1 server and 2 clients): start 5 ranks, or use --clients 2"
    ]
    assert "raafl, rank" not in done.err  # one rank speaks for all
    assert str(ROOT / "raafl") not in done.err  # torchrun has a traceback of its own, which is not ours
