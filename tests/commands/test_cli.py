"""The command line as its users meet it: real processes where the process matters, `main` itself for the many cases."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from raafl.algorithms import ALGORITHMS
from raafl.commands.cli import main
from tests.habits.source import ROOT

QUICKSTART = str(ROOT / "configs" / "quickstart.yaml")
SUMMARY = {
    "algorithm", "runtime", "seed", "versions", "updates_merged", "updates_refused", "updates_lost", "time_s", "wall_s",
    "bytes_up", "bytes_down", "utilisation", "participation", "staleness", "final", "time_to", "model_digest",
}  # fmt: skip
DEADLINE_S = 100


def command(*argv, torchrun=0):
    """The argv of a raafl process, under torchrun with that many ranks if there are any."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={torchrun}"] if torchrun else []
    return [sys.executable, *launcher, "-m", "raafl", *map(str, argv)]


def process(*argv, cwd=ROOT, torchrun=0, **environment):
    """Run raafl to its end."""
    env = {k: v for k, v in os.environ.items() if k != "COLUMNS"} | {"PYTHONPATH": str(ROOT)} | environment
    return subprocess.run(
        command(*argv, torchrun=torchrun), cwd=cwd, env=env, capture_output=True, text=True, timeout=DEADLINE_S
    )


@pytest.fixture
def run(tmp_path, capsys):
    """A function that runs `simulate` on the quick start with options; returns exit code, standard output and error."""

    def simulate(*options, config=QUICKSTART, updates=3):
        numbered = len(list(tmp_path.glob("run*")))
        output = [] if "--output" in options else ["--output", str(tmp_path / f"run{numbered}")]
        limit = ["--max_updates", str(updates)] if updates else []
        code = main(["simulate", "--config", str(config), "--progress", "quiet", *limit, *output, *map(str, options)])
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return simulate


@pytest.fixture
def summary(run):
    """A function that runs `simulate --json` and returns its summary."""

    def simulate(*options, **keywords):
        code, out, err = run("--json", *options, **keywords)
        assert code == 0, err
        return json.loads(out)

    return simulate


# ---- bad input: one clear line each, found before anything is written ----

CLIENT_1_K = "client 1: its cheapest fragment, 1, takes 0.08665 s, more than K = 1e-09 s: set K to at least 0.08665"
BAD = {
    "algorithm unknown": (["--algorithm", "fed_rra"], "algorithm is 'fed_rra': did you mean 'fed_raa'?"),
    "algorithm without a name": (["--algorithm"], "--algorithm needs a name: ada_vit, "),
    "option unknown": (["--cliens", "5"], "unknown option --cliens: did you mean '--clients'?"),
    "argument of a Trainer": (["--max_epochs", "5"], "unknown option --max_epochs: a run ends by max_updates"),
    "devices not closed": (
        ["--devices", "[{name: a100"],
        "devices, given as '[{name: a100', is not valid YAML: line 1",
    ),
    "devices unknown": (
        ["--devices", "[{name: iphone-99}]"],
        "device 'iphone-99' is no shipped profile, and nothing says",
    ),
    "devices a word": (
        ["--devices", "auto"],
        "devices is auto: it says what the clients can do, by names, fields or a",
    ),
    "option abbreviated": (["--client", "5"], "unknown option --client: did you mean '--clients'?"),
    "option of a group": (
        ["--train.num_epoch", "5"],
        "unknown option --train.num_epoch: did you mean '--train.num_epochs'?",
    ),
    "argument of the algorithm": (["--algorithm.alfa", "1"], "unknown field algorithm.alfa: did you mean 'alpha'?"),
    "argument of the model": (["--model.hiden", "1"], "unknown field model.hiden: did you mean 'hidden'?"),
    "no option": (["5"], "unexpected '5': an option starts with --"),
    "no value": (["--clients"], "--clients needs a value"),
    "clients zero": (["--clients", "0"], "clients is 0: give 1 or more"),
    "clients negative": (["--clients", "-2"], "clients is -2: give 1 or more"),
    "clients a word": (["--clients", "abc"], "clients is 'abc': give a whole number"),
    "clients a fraction": (["--clients", "2.5"], "clients is '2.5': give a whole number"),
    "seed negative": (["--seed", "-1"], "seed is -1: give 0 or more"),
    "updates zero": (["--max_updates", "0"], "max_updates is 0: give 1 or more"),
    "epochs zero": (["--train.num_epochs", "0"], "train.num_epochs is 0: give 1 or more"),
    "batch zero": (["--train.batch_size", "0"], "train.batch_size is 0: give 1 or more"),
    "workers zero": (["--workers", "0"], "workers is 0: give 1 or more"),
    "time malformed": (["--max_time", "2x"], "max_time is 2x: give seconds above 0, or text such as 90s, 5m, 2h"),
    "time zero": (["--max_time", "0"], "max_time is 0.0: give seconds above 0"),
    "target malformed": (
        ["--target", "accuracy"],
        "target is 'accuracy': give METRIC=VALUE, for example accuracy=0.93",
    ),
    "target no number": (["--target", "accuracy=high"], "target is 'accuracy=high': give METRIC=VALUE"),
    "target unknown": (
        ["--target", "acuracy=0.5"],
        "target is 'acuracy=0.5', but validation_step gives no 'acuracy': use one of loss, accuracy",
    ),
    "K impossible": (["--algorithm", "fed_raa", "--algorithm.K", "1e-9"], CLIENT_1_K),
    "K zero": (["--algorithm.K", "0"], "K is 0.0: give a number above 0"),
    "alpha above 1": (["--algorithm.alpha", "2"], "alpha is 2.0: give a number above 0, at most 1"),
    "select unknown": (
        ["--algorithm.select", "best"],
        "algorithm.select is 'best': give one of gre_raa, random, fewest_updates",
    ),
    "cohort too large": (
        ["--algorithm", "fed_avg", "--algorithm.cohort", "9"],
        "cohort is 9, more than there are clients: give at most 4",
    ),
    "more clients than data": (
        ["--clients", "2000"],
        "more clients than data: 2000 clients need 2000 samples (one each) but there are 1438",
    ),
    "devices missing": (
        ["--devices", "nowhere.yaml"],
        "no device file at nowhere.yaml; give the path of a .yaml, .json or .csv file",
    ),
    "partition unknown": (
        ["--partition", "raafl.data.Dirichlett"],
        "partition is raafl.data.Dirichlett, which does not exist: did you mean 'raafl.data.Dirichlet'?",
    ),
    "partition incomplete": (
        ["--partition", "raafl.data.ClassesPerClient"],
        "partition.num_classes is missing: give it in the config, or as --partition.num_classes VALUE",
    ),
    "partition refuses": (["--partition.alpha", "-1"], "Dirichlet: alpha is -1.0: give a finite number above 0"),
    "model unknown": (
        ["--model", "model_zoo.MPL"],
        "model is model_zoo.MPL, which does not exist: did you mean 'model_zoo.MLP'?",
    ),
    "model's module unknown": (
        ["--model", "modelzoo.MLP"],
        "model cannot be imported, there is no module 'modelzoo': did you mean 'model_zoo'?",
    ),
    "model of another kind": (
        ["--model", "raafl.data.Digits"],
        "model is raafl.data.Digits, which makes no LightningModule: give one that does, such as model_zoo.MLP",
    ),
    "learning rate negative": (
        ["--model.lr", "-1"],
        "MLP.configure_optimizers fails: ValueError: Invalid learning rate: -1.0 (model_zoo/classifier.py:",
    ),
    "data do not fit the model": (
        ["--model.in_features", "100"],
        "MLP.training_step fails on a batch of float32 (2, 1, 8, 8), int64 (2,), where layers.1, "
        "Linear(in_features=100, "
        "out_features=200, bias=True), is given float32 (2, 64): RuntimeError: ",
    ),
    "too few classes": (
        ["--model.num_classes", "5"],
        "MLP.validation_step fails on a batch of float32 (32, 1, 8, 8), int64 (32,): IndexError: Target 5 "
        "is out of bounds",
    ),
    "accelerator unknown": (["--fabric.accelerator", "gpus"], "fabric.accelerator is 'gpus': did you mean 'gpu'?"),
    "precision unknown": (
        ["--fabric.precision", "8-bit"],
        "fabric.accelerator is 'cpu', fabric.precision '8-bit': Precision '8-bit' is invalid",
    ),
    "server device unknown": (["--server_device", "gpu"], "server_device is 'gpu': give cpu, or a GPU such as cuda:0"),
    "server device absent": (["--server_device", "cuda:99"], "server_device is 'cuda:99', but torch sees "),
    "progress unknown": (["--progress", "loud"], "progress is 'loud': give auto, live, plain, verbose or quiet"),
    "output not writable": (
        ["--output", "/proc/version/run"],
        "output is '/proc/version/run', but nothing may be written in /proc/version",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_option_is_one_clear_line(case, run, tmp_path):
    options, line = BAD[case]
    code, out, err = run(*options)
    assert (code, out) == (2, "")
    first = err.splitlines()[0]
    assert first.startswith(f"raafl: {line}"), first
    assert len(err.splitlines()) == (4 if case == "K impossible" else 1)  # each of the four clients has its own
    assert "Traceback" not in err
    assert not list(tmp_path.glob("run*")), "a run that cannot start leaves no folder"


def test_a_profile_too_small_for_any_fragment(run, tmp_path):
    devices = yaml.safe_load(Path(QUICKSTART).read_text())["devices"]
    devices[2]["memory_bytes"] = 1000
    (tmp_path / "devices.yaml").write_text(yaml.safe_dump(devices))
    code, out, err = run("--devices", tmp_path / "devices.yaml")
    assert (code, out) == (2, "")
    assert re.fullmatch(
        r"raafl: client 3: memory_bytes is 1000, too small for any fragment \(the smallest needs \S+ to train\): "
        r"raise memory_bytes, use a smaller batch, or more and smaller fragments\n",
        err,
    )


def test_several_problems_are_said_at_once(run):
    code, _, err = run("--clients", "0", "--max_time", "soon", "--target", "x", "--progress", "loud")
    assert code == 2
    assert [line.split()[1] for line in err.splitlines()] == ["clients", "progress", "max_time", "target"]


def test_output_that_is_not_empty_stays_as_it_is(run, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    code, _, err = run("--output", tmp_path / "mine")
    assert code == 2
    assert err.startswith(f"raafl: output is '{tmp_path / 'mine'}', which is not an empty folder: name a new folder")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.txt"]


def test_a_run_that_could_not_start_can_be_started_again_into_the_same_folder(run, tmp_path):
    for options in (["--target", "acuracy=0.5"], ["--fabric.precision", "8-bit"], ["--model.lr", "-1"]):
        assert run("--output", tmp_path / "it", *options)[0] == 2
    assert run("--output", tmp_path / "it")[0] == 0


def test_commands_and_their_misspellings(capsys):
    assert main(["simulat"]) == 2
    assert capsys.readouterr().err == "raafl: unknown command 'simulat': did you mean 'simulate'?\n"
    assert main([]) == 2
    assert "usage: raafl COMMAND" in capsys.readouterr().out
    assert main(["--help"]) == 0
    assert main(["simulate"]) == 2
    assert "simulate needs a config: give --config FILE" in capsys.readouterr().err
    assert main(["algorithms", "--jsn"]) == 2
    assert "unknown option '--jsn'" in capsys.readouterr().err


@pytest.mark.slow("a process starts from nothing")
def test_bad_input_in_a_real_process(tmp_path):
    """Exit code 2, nothing on standard output, no traceback; BAD has every kind, in this process."""
    done = process("simulate", "--config", QUICKSTART, "--model.in_features", "100", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "is given float32 (2, 64)" in done.stderr
    assert "Traceback" not in done.stderr
    assert all(text.startswith("raafl: ") for text in done.stderr.splitlines())


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (("simulate", "--config", QUICKSTART, "--algorithm", "fed_rra"), "did you mean 'fed_raa'?"),
        (("simulate", "--config", "nowhere.yaml"), "config is 'nowhere.yaml', which does not exist"),
        (("fit", "--config", QUICKSTART), "start it with `torchrun --nproc-per-node 5 -m raafl fit ...`"),
    ],
)
def test_bad_input_of_a_whole_command(argv, line, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main([str(word) for word in argv]) == 2
    out, err = capsys.readouterr()
    assert out == "" and line in err and all(text.startswith("raafl: ") for text in err.splitlines())


# ---- runs ----


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_every_algorithm_runs_on_the_quick_start(name, summary):
    result = summary("--algorithm", name, updates=10)
    assert result.keys() >= SUMMARY
    assert (result["algorithm"], result["runtime"], result["seed"]) == (name, "simulated", 0)
    assert 10 <= result["updates_merged"] <= 12  # a round of four that is begun is merged whole
    assert sum(result["participation"].values()) == result["updates_merged"]
    assert result["final"]["accuracy"] > 0.2  # ten classes, a few steps


def test_the_run_folder_is_whole(run, tmp_path):
    code, out, _ = run("--output", tmp_path / "here", "--checkpoint_every", "2", updates=6)
    assert code == 0
    folder = tmp_path / "here"
    assert {path.name for path in folder.iterdir()} >= {
        "config.yaml", "events.jsonl", "metrics.csv", "clients.csv", "checkpoints", "summary.json",
    }  # fmt: skip
    summary = json.loads((folder / "summary.json").read_text())
    assert out.splitlines()[-1] == f"run folder: {folder}"
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
    assert printed["algorithm"] == {
        "class_path": "raafl.fed_avg", "init_args": {"cohort": None, "concurrency": None, "by_samples": True, "submodel": None},
    }  # fmt: skip


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
    code, out, _ = run("--target", "accuracy=0.999", updates=5)
    assert code == 0
    assert "time to accuracy=0.999: not reached" in out


def test_time_is_that_of_the_virtual_clock(summary):
    result = summary("--max_time", "0.05m", updates=None, config=QUICKSTART)
    # The quick start's own max_updates is far off: it takes 20 virtual seconds.
    assert result["finished"] == "max_time"
    assert result["time_s"] == 3.0


def test_a_run_that_loses_everyone_has_failed(run, tmp_path):
    # All are there for the first 0.05 s, in which no task can end (client 1's shortest takes 0.087 s).
    devices = [
        {**device, "availability": [[0.0, 0.05]]} for device in yaml.safe_load(Path(QUICKSTART).read_text())["devices"]
    ]
    (tmp_path / "devices.yaml").write_text(yaml.safe_dump(devices))
    code, out, _ = run("--devices", tmp_path / "devices.yaml", "--output", tmp_path / "gone")
    assert code == 1
    assert "finished: failed: no client is left or will come back after 0 updates" in out
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
    done = process(
        "simulate", "--config", QUICKSTART, "--model", "chatty.Chatty", "--model.in_features", 64, "--max_updates", 2,
        "--json", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert done.stdout.count("\n") == 1
    assert result["updates_merged"] == 2
    assert "training\na step\n" in done.stderr
    assert "quickstart: fed_raa on 4 clients" in done.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("quickstart-")
    assert json.loads((folder / "summary.json").read_text())["model_digest"] == result["model_digest"]


@pytest.mark.slow("a process starts from nothing")
def test_ctrl_c_ends_with_a_summary(tmp_path):
    argv = command("simulate", "--config", QUICKSTART, "--max_updates", "1000000", "--output", tmp_path / "run")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(argv, cwd=ROOT, env=os.environ | {"TORCHELASTIC_RUN_ID": "here"}, **pipes) as running:
        try:
            metrics = tmp_path / "run" / "metrics.csv"
            await_true(lambda: metrics.exists() and metrics.read_text().count("\n") > 3)
            running.send_signal(signal.SIGINT)
            running.send_signal(signal.SIGINT)  # torchrun repeats what its ranks have had already
            out, err = running.communicate(timeout=DEADLINE_S)
        finally:
            running.kill()
    assert running.returncode == 130
    assert err == ""
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["finished"] == "interrupted"
    assert f"finished: interrupted after {summary['updates_merged']} updates" in out
    tasks = list(csv.DictReader((tmp_path / "run" / "clients.csv").open()))
    assert (
        sum(task["outcome"] == "merged" for task in tasks) == summary["updates_merged"] >= 8
    )  # header, versions 0, 4, 8
    assert len(list((tmp_path / "run" / "checkpoints").iterdir())) == 1


@pytest.mark.slow("a process starts from nothing")
def test_a_reader_that_goes_away_ends_nothing(tmp_path):
    argv = command("simulate", "--config", QUICKSTART, "--max_updates", "50", "--output", tmp_path / "run")
    with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        try:
            running.stdout.readline()
            running.stdout.close()
            err = running.stderr.read()
            code = running.wait(timeout=DEADLINE_S)
        finally:
            running.kill()
    assert (code, err) == (0, "")
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["updates_merged"] == 50


# ---- fit ----


@pytest.mark.slow("torchrun and three ranks start from nothing")
@pytest.mark.timeout(240)
def test_too_few_ranks_under_torchrun():
    """What enough of them do is in tests/distributed/test_torchrun.py."""
    done = process("fit", "--config", QUICKSTART, "--clients", "4", torchrun=3)
    assert done.returncode != 0
    ours = [line for line in done.stderr.splitlines() if line.startswith("raafl: ")]
    assert ours == [
        "raafl: clients is 4, but torchrun started 3 ranks (1 aggregator and 2 clients): start 5 ranks, "
        "or use --clients 2"
    ]
    assert "raafl, rank" not in done.stderr  # one rank speaks for all
    assert str(ROOT / "raafl") not in done.stderr  # torchrun has a traceback of its own, which is not ours


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({}, "raafl: MASTER_PORT is {port}, which is in use on 127.0.0.1: choose a free port\n"),
        (
            {"MASTER_PORT": "70000"},
            "raafl: MASTER_PORT is '70000': give a whole number up to 65535, or let torchrun set it\n",
        ),
        ({"RANK": "5"}, "raafl, rank 5: RANK is 5, but WORLD_SIZE is 5: ranks are 0 to 4\n"),
        (
            {"RANK": "1"},
            "raafl, rank 1: what listens at 127.0.0.1:{port} (MASTER_ADDR, MASTER_PORT) is no store of torch's: "
            "choose a free port\n",
        ),
    ],
)
def test_ranks_started_by_hand_with_bad_places(change, line, monkeypatch, capfd, tmp_path):
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        ready = {"RANK": "0", "WORLD_SIZE": "5", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name, value in (ready | change).items():
            monkeypatch.setenv(name, value)
        assert main(["fit", "--config", QUICKSTART, "--waits.join_s", "1"]) == 2
    assert capfd.readouterr() == ("", line.format(port=port))


def await_true(condition):
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


# ---- algorithms, help ----


def test_algorithms_json(capsys):
    assert main(["algorithms", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == sorted(ALGORITHMS)
    assert all(list(row) == ["name", "paper", "sample", "select", "local", "trigger", "merge"] for row in rows)


@pytest.mark.parametrize("columns", [60, 80, 120, 160])
def test_the_table_of_algorithms_fits_and_says_everything(columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["algorithms"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= columns
    for name, factory in ALGORITHMS.items():
        row = next(line for line in text.splitlines() if line.startswith(name))
        assert factory().paper.split()[0] in row
    words = set(re.findall(r"[\w./+-]+", " ".join(" ".join(f().describe().values()) for f in ALGORITHMS.values())))
    assert words <= set(re.findall(r"[\w./+-]+", text))


@pytest.mark.parametrize("name", ["simulate", "fit"])
def test_help_names_every_field_in_plain_words(name, capsys, monkeypatch):
    from dataclasses import fields

    from raafl.config.experiment import Experiment

    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: raafl {name} --config FILE [--FIELD VALUE ...] [--json]\n")
    for field in fields(Experiment):
        line = re.search(rf"^  --{field.name}(\.\w+)? ", text, re.M)
        assert line is not None, field.name
    for jargon in ("<class", "Callable", "Union", "| null", "Namespace", "jsonargparse", "init_args"):
        assert jargon not in text
    assert all(f"`raafl.{algorithm}`" not in text for algorithm in ALGORITHMS)


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_an_algorithm_named_says_all_it_takes(name, capsys, monkeypatch):
    import inspect

    monkeypatch.setenv("COLUMNS", "80")
    assert main(["algorithms", name]) == 0
    text = capsys.readouterr().out
    assert text.startswith(name)
    assert max(map(len, text.splitlines())) <= 80
    for argument, parameter in inspect.signature(ALGORITHMS[name]).parameters.items():
        (entry,) = re.findall(rf"^    {argument} .*?(?=^    \w|\Z)", text, re.M | re.S)
        if isinstance(parameter.default, float | str):
            assert f"(default: {parameter.default})" in " ".join(entry.split())
    assert main(["algorithms", "fed_rra"]) == 2
    assert "did you mean 'fed_raa'?" in capsys.readouterr().err


def test_help_of_a_model_lists_its_arguments(capsys):
    with pytest.raises(SystemExit):
        main(["simulate", "--model.help", "model_zoo.MLP"])
    assert "--model.hidden" in capsys.readouterr().out
    assert main(["simulate", "--algorithm.help", "fed_raa"]) == 2
    assert "`raafl algorithms NAME` says what an algorithm takes" in capsys.readouterr().err
