"""What is wrong with a command line: one clear line each, found before anything is written."""

from __future__ import annotations

import errno
import os
import re
import socket
from pathlib import Path

import pytest
import yaml

from raafl.commands.cli import main
from tests.commands.simulated import QUICKSTART
from tests.helpers.forked_command import command

CLIENT_1_K = "client 1: its cheapest fragment, 1, takes 0.08665 s, more than K = 1e-09 s: set K to at least 0.08665"
BAD = {  # one of each way to the line; tests/config has every message
    "algorithm unknown": (["--algorithm", "fed_rra"], "algorithm is 'fed_rra': did you mean 'fed_raa'?"),
    "algorithm without a name": (["--algorithm"], "--algorithm needs a name: ada_vit, "),
    "option unknown": (["--cliens", "5"], "unknown option --cliens: did you mean '--clients'?"),
    "argument of a Trainer": (["--max_epochs", "5"], "unknown option --max_epochs: a run ends by max_updates"),
    "option abbreviated": (["--client", "5"], "unknown option --client: did you mean '--clients'?"),
    "argument of the algorithm": (["--algorithm.alfa", "1"], "unknown field algorithm.alfa: did you mean 'alpha'?"),
    "argument of a logger": (
        ["--logger.class_path", "csv", "--logger.init_args.name=x"],
        "unknown option --logger.init_args.name: give a logger and its arguments as one value, --logger "
        "'{class_path: wandb, init_args: {name: VALUE}}'",
    ),
    "clients zero": (["--clients", "0"], "clients is 0: give 1 or more"),
    "target unknown": (
        ["--target", "acuracy=0.5"],
        "target is 'acuracy=0.5', but validation_step gives no 'acuracy': use one of loss, accuracy",
    ),
    "K impossible": (["--algorithm", "fed_raa", "--algorithm.K", "1e-9"], CLIENT_1_K),
    "select unknown": (
        ["--algorithm.select", "best"],
        "algorithm.select is 'best': give one of gre_raa, random, fewest_updates",
    ),
    "more clients than data": (
        ["--clients", "2000"],
        "more clients than data: 2000 clients need 1 sample(s) each, and there are 1438",
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
    "server device absent": (["--server_device", "cuda:99"], "server_device is 'cuda:99', but torch sees "),
    "output not writable": (
        ["--output", "/proc/version/run"],
        "output is '/proc/version/run', and /proc/version is not writable",
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


def test_bad_input_in_a_process_of_its_own(tmp_path):
    """Exit code 2, nothing on standard output, no traceback; BAD has every kind, in this process."""
    with command(tmp_path, "simulate", "--config", QUICKSTART, "--model.in_features", "100") as started:
        assert (started.end(), started.out) == (2, "")
    assert "is given float32 (2, 64)" in started.err
    assert "Traceback" not in started.err
    assert all(text.startswith("raafl: ") for text in started.err.splitlines())


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (("simulate", "--config", QUICKSTART, "--algorithm", "fed_rra"), "did you mean 'fed_raa'?"),
        (("simulate", "--config", "nowhere.yaml"), "config is 'nowhere.yaml', which does not exist"),
        (
            ("simulate", "--config", "quickstat"),
            "config is 'quickstat', which is neither a file nor a config that comes with raafl: did you",
        ),
        (("replay",), "the following arguments are required: RUN: raafl replay --help lists the options"),
        (("fit", "--config", QUICKSTART), "start the command with `torchrun --nproc-per-node 5 -m raafl fit ...`"),
    ],
)
def test_bad_input_of_a_whole_command(argv, line, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main([str(word) for word in argv]) == 2
    out, err = capsys.readouterr()
    assert out == "" and line in err and all(text.startswith("raafl: ") for text in err.splitlines())


# ---- ranks ----


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({}, "raafl: MASTER_PORT is {port}, which is in use on 127.0.0.1: choose a free port\n"),
        (
            {"MASTER_PORT": "70000"},
            "raafl: MASTER_PORT is '70000': give a whole number up to 65535, or let torchrun set it\n",
        ),
        ({"RANK": "5"}, "raafl, rank 5: RANK is 5, but WORLD_SIZE is 5: set RANK to a number from 0 to 4\n"),
        (
            {"RANK": "1"},
            "raafl, rank 1: another program listens at 127.0.0.1:{port} (MASTER_ADDR, MASTER_PORT): "
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


@pytest.mark.parametrize(
    ("number", "code", "remedy"),
    [
        (errno.EROFS, 2, "name another file or folder"),
        (errno.ENAMETOOLONG, 2, "name another file or folder"),
        (errno.ENOSPC, 1, "free some space, and run the same command again"),
    ],
)
def test_a_file_that_the_disk_does_not_take_is_named_without_a_traceback(number, code, remedy, monkeypatch, capsys):
    def report(argv):
        raise OSError(number, os.strerror(number), argv[0])

    monkeypatch.setattr("raafl.commands.report.report", report)
    assert main(["report", "here"]) == code
    assert capsys.readouterr().err == f"raafl: 'here': {os.strerror(number)}: {remedy}\n"


def test_an_error_of_the_machine_that_is_of_no_file_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr("raafl.commands.report.report", lambda argv: os.close(-1))
    with pytest.raises(OSError, match="Bad file descriptor"):
        main(["report", "here"])
