"""Comparisons with real runs: equal trials, nothing run twice, cut off and gone on with, verified by replay."""

from __future__ import annotations

import fcntl
import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from multiprocessing import spawn

import pytest
import yaml

import raafl
from raafl.commands.compare import compare
from raafl.config.argv import with_paths
from raafl.config.check import with_class_path
from raafl.config.parse import parse
from raafl.errors import BadInput, RunFailed
from raafl.lab.compare import processes, runs
from raafl.lab.compare.report import _searched
from raafl.lab.compare.search import Trial
from raafl.runfolder.outcome import REASONS
from raafl.runtime.run import simulate

pytestmark = pytest.mark.timeout(240)

SMALL = {
    "config": "quickstart",
    "options": "--max_updates 12 --clients 3 --model.hidden [16]",
    "rows": {"Fed-RAA": None, "FedAsync": "--algorithm fed_async"},
    "seeds": [0],
    "targets": [0.01, 2.0],
    "search": {"grid": {"--model.lr": [0.05, 0.1]}, "seeds": [10], "halving": {"rungs": 2}},
}


def simulated(command, folder):
    """Run the command that a result names, in this process; return its summary."""
    argv = with_paths([*shlex.split(command)[2:], "--output", str(folder), "--progress", "quiet"])
    parsed = parse("simulate", argv)
    return simulate(parsed.experiment, parsed.config_yaml)[0]


def written(folder, **changes):
    folder.mkdir(exist_ok=True)
    path = folder / "small.yaml"
    path.write_text(yaml.safe_dump({**SMALL, **changes}, sort_keys=False))
    return str(path)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A comparison that has ended: its file, its folder, its result."""
    folder = tmp_path_factory.mktemp("compare")
    file = written(folder)
    compare([file, "--output", str(folder / "out"), "--jobs", "2", "--no_page"])
    return file, folder / "out", json.loads((folder / "out" / "result.json").read_text())


def test_rows_have_equal_trials_and_the_best_of_them(finished):
    _, _, result = finished
    for row in result["rows"]:
        trials = row["searched"]["trials"]
        assert [trial["settings"] for trial in trials] == [["--model.lr", "0.05"], ["--model.lr", "0.1"]]
        scores = {tuple(trial["settings"]): trial["scores"]["10"] for trial in trials}
        cut = [trial for trial in trials if trial.get("cut_after") == 0.5]
        assert len(cut) == 1 and tuple(row["searched"]["settings"]) in scores
        assert cut[0]["settings"] != row["searched"]["settings"]
        run = row["runs"][0]
        assert "--model.lr " + row["searched"]["settings"][1] in run["command"] and "validation" not in run["command"]
        assert row["time_to"]["0.01"]["reached"] == 1 and row["time_to"]["2"] == {
            "median_s": None,
            "reached": 0,
            "seeds": 1,
        }


def test_the_printed_command_gives_the_same_digits(finished, tmp_path):
    run = finished[2]["rows"][0]["runs"][0]
    assert simulated(run["command"], tmp_path / "again")["model_digest"] == run["model_digest"]


def test_ranks_that_share_a_run_change_no_digit(finished, tmp_path, monkeypatch):
    """Rank 1 is a process with the same arguments, which this one's fork starts; it ends by itself, and has no complaint."""
    _, _, result = finished
    row = result["rows"][0]
    lr = row["searched"]["settings"][1]
    file = written(tmp_path, search=None, rows={row["row"]: f"--model.lr {lr}"})
    popen, told = subprocess.Popen, tmp_path / "ranks"

    def start_rank(command, **options):
        told.write_text(f"{options['env']['RANK']} of {options['env']['WORLD_SIZE']}: {command[3]}")
        return popen(command, **options)

    monkeypatch.setattr(subprocess, "Popen", start_rank)
    out = tmp_path / "out"
    found = json.loads(compare([file, "--output", str(out), "--ranks", "2", "--no_page", "--json"]))
    assert told.read_text() == "1 of 2: simulate"
    assert found["rows"][0]["runs"][0]["model_digest"] == row["runs"][0]["model_digest"]
    assert [path.read_text() for path in (out / "runs").glob("*.ranks.log")] == [""]


def test_a_rank_that_died_is_named(tmp_path, monkeypatch):
    for name in (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "TORCHELASTIC_USE_AGENT_STORE",
    ):
        monkeypatch.setenv(name, "before")  # and again after the test
    popen, ranks = subprocess.Popen, []
    monkeypatch.setattr(
        subprocess, "Popen", lambda *_, **options: ranks.append(popen(["false"], **options)) or ranks[-1]
    )
    with processes.other_ranks(["simulate"], 3, tmp_path / "run.log"):
        assert [process.wait(10) for process in ranks] == [1, 1]
    said = (tmp_path / "run.ranks.log").read_text().splitlines()
    assert said == [f"rank {rank} had ended before the run, with exit code 1" for rank in (1, 2)]


def test_a_run_over_ranks_that_fails_says_why(tmp_path):
    file = written(tmp_path, search=None, rows={"row": "--workers 2"})
    with pytest.raises(RunFailed, match=r"workers is 2, but the run has 2 ranks"):
        compare([file, "--output", str(tmp_path / "out"), "--ranks", "2", "--no_page"])


def test_nothing_is_run_twice(finished, monkeypatch):
    file, out, before = finished
    monkeypatch.setattr(runs, "start", lambda *_: pytest.fail("a run was started again"))
    again = json.loads(compare([file, "--output", str(out), "--no_page", "--json"]))
    assert again["rows"] == before["rows"]


def test_a_run_that_was_extended_by_hand_is_not_taken_for_the_rows(tmp_path, monkeypatch):
    """It has more updates than its rivals; resumed with the goal of its row it has as many."""
    file = written(tmp_path, search=None, options=f"{SMALL['options']} --checkpoint_every 5", rows={"A": None})
    argv = [file, "--output", str(tmp_path / "out"), "--no_page", "--json"]
    run = json.loads(compare(argv))["rows"][0]["runs"][0]
    folder, started = tmp_path / "out" / run["folder"], []
    monkeypatch.setattr(runs, "start", lambda argv, *_: started.append(argv) or 1 / 0)

    def resume(*goal):
        parsed = parse("simulate", ["--resume", str(folder), *goal, "--progress", "quiet"])
        return simulate(parsed.experiment, parsed.config_yaml)[0]["updates_merged"]

    (folder / "summary.json").unlink()  # as if it had been interrupted before its summary
    assert resume() == 12
    assert json.loads(compare(argv))["rows"][0]["runs"][0]["model_digest"] == run["model_digest"]
    assert resume("--max_updates", "20") == 20
    says = f"row 'A', seed 0: its run in {folder} was resumed with max_updates 20, but the row has 12: move that folder"
    with pytest.raises(BadInput, match=f"^{re.escape(says)}"):
        compare(argv)
    (folder / "summary.json").unlink()  # as one that is interrupted on its way to the farther goal
    with pytest.raises(BadInput, match=f"^{re.escape(says)}"):
        compare(argv)
    shutil.rmtree(folder)
    with pytest.raises(ZeroDivisionError):
        compare(argv)
    assert started[0][started[0].index("--output") + 1] == str(folder)


def test_a_run_that_a_method_ended_for_a_reason_of_its_own_has_ended(finished, tmp_path):
    _, out, before = finished
    shutil.copytree(out, tmp_path / "out")
    path = tmp_path / "out" / before["rows"][0]["runs"][0]["folder"] / "summary.json"
    path.write_text(path.read_text().replace('"finished": "max_updates"', '"finished": "converged"'))
    assert json.loads(path.read_text())["finished"] == "converged"
    compare([finished[0], "--output", str(tmp_path / "out"), "--no_page"])
    assert json.loads(path.read_text())["finished"] == "converged"


def test_without_matplotlib_there_is_a_page_and_a_line_about_the_curves(finished, monkeypatch, caplog):
    file, folder, _ = finished
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # neither found nor imported
    caplog.set_level("INFO", logger="raafl")
    compare([file, "--output", str(folder)])
    assert (folder / "index.html").is_file() and not (folder / "curves.svg").exists()
    assert "there will be no curves.svg, which matplotlib draws: pip install '.[report]'" in caplog.text


def test_other_code_runs_anew_unless_any_code_will_do(finished, monkeypatch):
    file, out, before = finished
    monkeypatch.setattr(runs, "code_digest", lambda: "0" * 64)
    started = []
    monkeypatch.setattr(runs, "start", lambda argv, *_: started.append(argv) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        compare([file, "--output", str(out), "--no_page"])
    assert started
    again = json.loads(compare([file, "--output", str(out), "--no_page", "--json", "--any_code"]))
    assert again["rows"] == before["rows"]


def test_a_flipped_digest_is_found(finished):
    file, out, result = finished
    assert "2 runs replayed, each equal" in compare([file, "--output", str(out), "--verify", "1"])
    digest = result["rows"][1]["runs"][0]["model_digest"]
    text = (out / "result.json").read_text()
    (out / "result.json").write_text(text.replace(digest, ("0" if digest[0] != "0" else "1") + digest[1:]))
    try:
        with pytest.raises(RunFailed, match="1 of 2 replayed runs gave another result"):
            compare([file, "--output", str(out), "--verify", "1"])
    finally:
        (out / "result.json").write_text(text)


def test_nothing_is_verified_where_no_run_has_ended(tmp_path):
    rows = [{"row": "Fed-RAA", "runs": [{"seed": 0, "error": "killed"}]}]
    (tmp_path / "result.json").write_text(json.dumps({"name": "small", "rows": rows}))
    with pytest.raises(BadInput, match=r"verify is 0\.2, but no run of 'small' has ended: run the comparison first"):
        compare([written(tmp_path), "--output", str(tmp_path), "--verify"])


def test_a_run_that_fails_is_named_and_the_others_are_kept(tmp_path, capfd):
    file = written(
        tmp_path,
        search=None,
        rows={"good": None, "bad": "--partition raafl.data.ClassesPerClient --partition.num_classes 99"},
    )
    with pytest.raises(RunFailed, match="1 of 2 runs failed; the first: "):
        compare([file, "--output", str(tmp_path / "out"), "--no_page"])
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert [row["failed"] for row in result["rows"]] == [0, 1]
    assert "bad, seed 0: failed" in capfd.readouterr().err


def test_trials_that_go_on_are_run_to_their_whole_budget(finished):
    """Half of 12 updates for each of the two trials of a row, all 12 for the better one: no score is of another part."""
    _, out, result = finished
    updates = []
    for row in result["rows"]:
        folders = [path.parent for path in (out / "runs").glob(f"{row['row'].lower()}-search-seed-10-*/summary.json")]
        updates.append(sorted(json.loads((path / "summary.json").read_text())["updates_merged"] for path in folders))
        commands = {json.loads(path.with_suffix(".json").read_text())["command"] for path in folders}
        assert len(commands) == len(folders)
        whole = next(trial for trial in row["searched"]["trials"] if "cut_after" not in trial)
        assert whole["settings"] == row["searched"]["settings"]
    assert updates == [[6, 6, 12], [6, 6, 12]]


def test_the_result_names_the_trial_that_was_run_where_two_are_level():
    level = [Trial(("--x", value), [], {}, 1.0) for value in ("1", "2")]
    assert _searched(level, level[1])["settings"] == ["--x", "2"]


def test_a_wrong_option_of_any_row_is_named_before_anything_runs(tmp_path):
    file = written(tmp_path, rows={"good": None, "worse": "--clientz 3"})
    with pytest.raises(BadInput, match=r"row 'worse.*': .*clientz"):
        compare([file, "--output", str(tmp_path / "out"), "--no_page"])
    assert not list((tmp_path / "out").glob("runs/*"))


def test_a_class_of_the_notebook_itself_is_refused_with_the_way_to_a_file(tmp_path, monkeypatch):
    from model_zoo import MLP

    here = type("Net", (MLP,), {"__module__": "__main__"})
    monkeypatch.setattr(sys.modules["__main__"], "Net", here, raising=False)
    config = tmp_path / "mine.yaml"
    config.write_text(
        "model: {class_path: __main__.Net, init_args: {in_features: 64, hidden: [8]}}\n"
        "data: {class_path: raafl.data.Digits}\nmax_updates: 2\n"
    )
    fields = {"config": str(config), "rows": {"A": "--algorithm fed_avg", "B": "--algorithm fed_buff"}, "seeds": [0]}
    with pytest.raises(BadInput, match=r"^row 'A': __main__\.Net is a class of this .* %%writefile .* my_model\.Net$"):
        raafl.compare(fields, output=tmp_path / "out")


def test_a_script_that_compares_is_not_run_again_by_each_run(tmp_path, monkeypatch):
    """It needs no `if __name__ == "__main__"`: what multiprocessing tells a new process names no main module."""
    told = {}

    class Process:
        def start(self):
            told.update(spawn.get_preparation_data("run"))

    script = sys.modules["__main__"]
    monkeypatch.setattr(script, "__spec__", None)
    monkeypatch.setattr(script, "__file__", str(tmp_path / "script.py"), raising=False)
    assert "init_main_from_path" in spawn.get_preparation_data("run")
    monkeypatch.setattr(processes, "_new_process", lambda *_: Process())
    processes.start([], tmp_path / "log")
    assert told and not {"init_main_from_path", "init_main_from_name"} & told.keys()
    assert sys.modules["__main__"] is script


def test_a_metric_that_runs_do_not_measure_ends_the_first_of_them(tmp_path):
    options = "--max_updates 100000 --clients 3 --model.hidden [16]"
    file = written(tmp_path, search=None, options=options, metric="acuracy")
    with pytest.raises(BadInput, match=r"metric is 'acuracy', which .* row 'Fed-RAA' do not measure: .*'accuracy'"):
        compare([file, "--output", str(tmp_path / "out"), "--no_page"])
    # at most one was begun; interrupted before it watches for that, it leaves no summary
    ends = [json.loads(path.read_text())["finished"] for path in (tmp_path / "out" / "runs").glob("*/summary.json")]
    assert len(ends) <= 1 and not set(ends) & set(REASONS)


def test_a_metric_that_finished_runs_do_not_measure_is_named(finished):
    _, out, _ = finished
    file = written(out.parent.with_name("other"), metric="acuracy")
    with pytest.raises(BadInput, match="metric is 'acuracy'"):
        compare([file, "--output", str(out), "--no_page"])


@pytest.mark.long("test_nothing_is_run_twice")
def test_a_run_that_was_cut_off_before_its_summary_is_resumed(tmp_path, capfd):
    """Its last checkpoint says that it has finished, so that it trains nothing more."""
    file, argv = (
        written(tmp_path, search=None, rows={"A": None}),
        ["--output", str(tmp_path / "out"), "--no_page", "--json"],
    )
    before = json.loads(compare([file, *argv]))["rows"][0]["runs"][0]
    (tmp_path / "out" / before["folder"] / "summary.json").unlink()
    after = json.loads(compare([file, *argv]))["rows"][0]["runs"][0]
    assert after["model_digest"] == before["model_digest"]
    folder = tmp_path / "out" / after["folder"]
    assert after["folder"] == before["folder"]
    assert (folder / "events.jsonl").read_text().count('"resumed"') == 1


@pytest.mark.long("test_nothing_is_run_twice")
def test_runs_end_with_the_process_that_started_them(tmp_path):
    """However it ended, so that the same command cannot meet its own earlier run in the folder."""
    options = "--max_updates 4000 --checkpoint_every 10 --model.hidden [16] --clients 3"
    file, out = written(tmp_path, search=None, options=options, rows={"only": None}), tmp_path / "out"
    process = subprocess.Popen([sys.executable, "-m", "raafl", "compare", file, "--output", str(out), "--no_page"])
    try:
        wait_for(lambda: list(out.glob("runs/*/checkpoints/*.ckpt")), process)
        with pytest.raises(BadInput, match="another process is running only-seed-0"):
            compare([file, "--output", str(out), "--no_page"])
    finally:
        process.kill()
        process.wait()
    folder = next(path for path in (out / "runs").iterdir() if path.is_dir())
    wait_for(lambda: (folder / "summary.json").is_file())
    assert json.loads((folder / "summary.json").read_text())["updates_merged"] < 4000


def wait_for(condition, process=None):
    deadline = time.monotonic() + 100
    while not condition():
        assert time.monotonic() < deadline
        assert process is None or process.poll() is None
        time.sleep(0.02)


SERVER_OF_FORKS = """
import signal, sys
from multiprocessing import forkserver
from pathlib import Path
from raafl.lab.compare import processes
processes.PRELOADED = ()
process = processes.start(["--version"], Path(sys.argv[1]))
status = Path(f"/proc/{forkserver._forkserver._forkserver_pid}/status").read_text()
blocked = int(next(line.split()[1] for line in status.splitlines() if line.startswith("SigBlk")), 16)
print(sorted(number for number in processes._FROM_OUTSIDE if blocked >> number - 1 & 1))
process.join()
"""


def test_a_signal_to_the_whole_group_does_not_end_the_server_of_forks(tmp_path):
    found = subprocess.run(
        [sys.executable, "-c", SERVER_OF_FORKS, str(tmp_path / "log")], check=True, capture_output=True, text=True
    )
    assert found.stdout == f"{sorted((signal.SIGHUP, signal.SIGINT, signal.SIGTERM))}\n"


def test_a_trial_that_something_ended_decides_nothing(tmp_path, monkeypatch):
    began = runs.Runner._start
    killed = []

    def start(self, run):
        process = began(self, run)
        if not killed:
            killed.append(run)
            process.kill()
        return process

    monkeypatch.setattr(runs.Runner, "_start", start)
    search = {"grid": {"--model.lr": [0.05, 0.1]}, "seeds": [10]}
    file = written(tmp_path, rows={"A": None}, search=search)
    with pytest.raises(RunFailed, match=r"a trial of A \(search\), seed 10, was interrupted .*same command again"):
        compare([file, "--output", str(tmp_path / "out"), "--no_page"])
    assert not (tmp_path / "out" / "result.json").exists()


def test_a_run_of_another_process_is_not_removed_before_its_first_checkpoint(tmp_path):
    out = tmp_path / "out"
    run = runs.resolve("quickstart", "only", ("--max_updates", "12"), [0])[0]
    folder = run.folder(out / "runs", runs.code_digest())
    folder.mkdir(parents=True)
    (folder / "events.jsonl").write_text("{}")
    with folder.with_suffix(".log").open("ab") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        with pytest.raises(BadInput, match="another process is running only-seed-0"):
            runs.Runner(out / "runs", 1, any_code=False, tell=print).run_all([run])
    assert (folder / "events.jsonl").is_file()


def test_equal_trials_are_refused(tmp_path):
    file = written(tmp_path, search={"grid": {"--model.lr": [0.1, "1e-1"]}, "seeds": [10]})
    with pytest.raises(
        BadInput, match=r"search of row 'Fed-RAA' tries the same settings twice, --model.lr 0.1 and --model.lr 1e-1"
    ):
        compare([file, "--output", str(tmp_path / "out")])


@pytest.mark.parametrize("search", [None, SMALL["search"]], ids=["plain", "searched"])
def test_rows_that_are_the_same_runs_are_refused(tmp_path, search):
    # the second row keeps the cohort of the options' algorithm, which the first row gives itself
    rows = {"A": "--algorithm fed_avg --algorithm.cohort 2", "B": "--algorithm fed_avg"}
    file = written(tmp_path, rows=rows, search=search, options="--algorithm raafl.fed_prox --algorithm.cohort 2")
    with pytest.raises(
        BadInput, match=r"rows has 'A' and 'B', which are the same runs: give one of them another option"
    ):
        compare([file, "--output", str(tmp_path / "out"), "--no_page"])


@pytest.mark.parametrize(
    ("rows", "search"),
    [
        ({"A": None, "B": "--checkpoint_every 3"}, None),
        ({"A": "--max_updates 4", "B": "--max_updates 8"}, SMALL["search"] | {"options": "--max_updates 2"}),
    ],
    ids=["of other speed", "of other length"],
)
def test_rows_that_differ_in_one_option_are_not(tmp_path, monkeypatch, rows, search):
    started = []
    monkeypatch.setattr(runs, "start", lambda argv, *_: started.append(argv) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        compare([written(tmp_path, rows=rows, search=search), "--output", str(tmp_path / "out"), "--no_page"])
    assert started


def test_contents_of_named_files_are_part_of_a_runs_digest(tmp_path, monkeypatch):
    devices, module = tmp_path / "devices.yaml", tmp_path / "own_of_compare.py"
    recorded = tmp_path / "recorded.csv"
    recorded.write_text("time_s,speed\n0,1\n")
    devices.write_text(f"- {{name: a, flops_per_s: 1.0e9, count: 3, recorded: {recorded}}}\n")
    module.write_text("import model_zoo\n\nclass Own(model_zoo.MLP):\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    options = (
        "--clients",
        "3",
        "--devices",
        str(devices),
        "--model",
        "own_of_compare.Own",
        "--model.in_features",
        "64",
    )
    options += ("--model.hidden", "[16]", "--model.num_classes", "10")

    def digest():
        return runs.resolve("quickstart", "A", options, [0])[0].digest

    before = digest()
    assert digest() == before
    recorded.write_text("time_s,speed\n0,0.5\n")
    slower = digest()
    devices.write_text(devices.read_text() + "\n")
    other = digest()
    module.write_text(module.read_text() + "\n")
    assert len({before, slower, other, digest()}) == 4


def test_the_file_of_a_class_within_a_class_is_part_of_a_runs_digest(tmp_path, monkeypatch):
    module = tmp_path / "nested_of_compare.py"
    module.write_text("import model_zoo\n\nclass Outer:\n    class Net(model_zoo.MLP):\n        pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert runs._named_files({"model": {"class_path": "nested_of_compare.Outer.Net"}}) == [module]
    options = ("--model", "nested_of_compare.Outer.Net", "--model.in_features", "64", "--model.num_classes", "10")
    (run,) = runs.resolve("quickstart", "A", (*options, "--model.hidden", "[16]"), [0])
    module.write_text(module.read_text() + "\n")
    assert runs.resolve("quickstart", "A", (*options, "--model.hidden", "[16]"), [0])[0].digest != run.digest


def test_the_file_of_a_trainers_function_is_part_of_a_runs_digest(tmp_path, monkeypatch):
    module = tmp_path / "trainer_of_compare.py"
    module.write_text("def make_trainer(): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    config = with_class_path({"trainer": "trainer_of_compare.make_trainer", "algorithm": "fed_avg"})
    assert runs._named_files(config) == [module]


@pytest.mark.long("test_nothing_is_run_twice")
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_ctrl_c_loses_nothing(tmp_path, num_ranks):
    options = "--max_updates 400 --checkpoint_every 10 --model.hidden [16] --clients 3"
    file, out = written(tmp_path, search=None, options=options, rows={"only": None}), tmp_path / "out"
    argv = [file, "--output", str(out), "--no_page", "--ranks", str(num_ranks)]
    process = subprocess.Popen([sys.executable, "-m", "raafl", "compare", *argv], stderr=subprocess.PIPE, text=True)
    wait_for(lambda: list(out.glob("runs/*/checkpoints/*.ckpt")), process)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=100)
    assert process.returncode == 130 and "waiting for the runs under way" in told
    folder = next(path for path in (out / "runs").iterdir() if path.is_dir())
    cut_at = json.loads((folder / "summary.json").read_text())["updates_merged"]
    assert 0 < cut_at < 400
    run = json.loads(compare([*argv, "--json"]))["rows"][0]["runs"][0]
    whole = simulated(run["command"], tmp_path / "whole")
    assert (run["model_digest"], run["updates"]) == (whole["model_digest"], 400)


def test_a_long_run_is_named_after_ever_longer_silences(tmp_path, monkeypatch):
    told = []
    runner = runs.Runner(tmp_path / "runs", 1, any_code=False, tell=told.append)
    run = runs.resolve("quickstart", "Fed-RAA", ("--max_updates", "12"), [3])[0]
    clock = [runner._told_s]
    monkeypatch.setattr(runs.time, "monotonic", lambda: clock[0])
    begun_s = {run: clock[0]}
    for _ in range(1000):
        clock[0] += 1
        runner._tell_sometimes(2, begun_s)
    assert told == [
        f"Fed-RAA, seed 3: for {spent}  (2 runs left in this step)"
        for spent in ("31.0 s", "1.5 min", "3.5 min", "7.6 min", "15.6 min")
    ]
