"""`make gpu`, as far as it goes without a GPU: every step is begun by `.ci/run`; here, what is done with what they find."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from benchmarks import gpu, gpu_rows, gpu_steps
from benchmarks.common import gpu_busy


def fine(where):
    """What works."""
    return [{"value": 1, "met": not where.dry}]


def bad(where):
    """What does not."""
    raise KeyboardInterrupt("in the step")


def short(where):
    """What is too slow."""
    return [{"value": 0.1, "met": False}]


@pytest.fixture
def steps(monkeypatch):
    made = {step.__name__: gpu_steps.Step(step, 10.0) for step in (bad, fine, short)}
    monkeypatch.setattr(gpu, "STEPS", made | {"both": gpu_steps.Step(fine, 10.0, num_gpus=2)})
    return gpu.STEPS


def rows(where):
    """Rows, of which one fails and one ends its process."""
    return {
        "first": lambda: {"value": 1, "pid": os.getpid()},
        "wrong": lambda: {"value": 1 // 0},
        "dead": lambda: os._exit(7) if os.environ.get("ROWS_DIE") else {"value": 2},
        "broken": lambda: exec("raise RuntimeError('CUDA error: an illegal access')"),
        "last": lambda: {"value": 3, "pid": os.getpid()},
    }


def told(tmp_path):
    return {row["step"]: row["outcome"] for row in json.loads((tmp_path / "report.json").read_text())["rows"]}


def test_a_step_that_fails_ends_no_other_and_is_in_the_report(tmp_path, steps, capsys):
    assert gpu.accept(tmp_path, list(steps), 0) == 1
    outcomes = {"bad": "failed: KeyboardInterrupt: in the step", "fine": "ok", "short": "ok", "both": "ok"}
    assert told(tmp_path) == outcomes  # a dry run meets no goal
    assert "in the step" in json.loads((tmp_path / "report.json").read_text())["rows"][0]["traceback"]
    assert gpu.accept(tmp_path, ["fine", "short"], 0) == 0
    assert "with two nodes" in capsys.readouterr().out


def test_on_gpus_a_goal_that_is_missed_counts_and_what_needs_more_gpus_waits(tmp_path, steps, monkeypatch):
    monkeypatch.setattr(gpu, "_head", lambda num_gpus: {})
    monkeypatch.setattr(gpu, "begin", lambda name, device, limit_s, rows: gpu.within(name, device))
    assert gpu.accept(tmp_path, ["fine", "short", "both"], 1) == 1
    assert told(tmp_path) == {"fine": "ok", "short": "missed", "both": "needs 2 GPUs"}
    assert gpu.accept(tmp_path, ["fine", "both"], 2) == 0
    assert gpu.accept(tmp_path, ["fine"], 2, total_s=1.0) == 0 and told(tmp_path) == {"fine": "no time was left"}


def test_what_a_report_has_is_not_run_again(tmp_path, steps, monkeypatch):
    began = []
    monkeypatch.setattr(gpu, "_head", lambda num_gpus: {})
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(gpu, "begin", lambda name, *_: began.append(name) or gpu.within(name, "cuda:0"))
    assert gpu.main(["--out", str(tmp_path), "--skip", "both"]) == 1 and sorted(began) == ["bad", "fine", "short"]
    assert gpu.main(["--out", str(tmp_path), "--resume"]) == 1  # what failed, and what was skipped
    assert began[3:] == ["bad"]
    outcomes = {
        "bad": "failed: KeyboardInterrupt: in the step",
        "fine": "ok",
        "short": "missed",
        "both": "needs 2 GPUs",
    }
    assert told(tmp_path) == outcomes
    (tmp_path / "more").mkdir()
    assert gpu.main(["--out", str(tmp_path / "more"), "--only", "fine", "--resume", str(tmp_path / "report.json")]) == 0
    assert began[4:] == []
    assert gpu.known_of(tmp_path / "none.json") == {}


def test_a_row_that_fails_is_a_row_with_its_error_and_only_such_rows_are_run_again(tmp_path, monkeypatch):
    """The processes of a step are forks here; each error of the GPU, and each death, needs another one for the rows after it."""

    def attempt(name, device, limit_s, written):
        reader, writer = os.pipe()
        if not (child := os.fork()):
            os.write(writer, json.dumps(gpu.within(name, device, written)).encode())
            os._exit(0)
        os.close(writer)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        with os.fdopen(reader) as words:
            return {"outcome": f"died with {code}", "rows": []} if code else json.load(words)

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # a process that dies leaves its temporary folder
    monkeypatch.setattr(gpu, "STEPS", {"rows": gpu_steps.Step(rows, 60.0)})
    monkeypatch.setattr(gpu, "_head", lambda num_gpus: {})
    monkeypatch.setattr(gpu, "_attempt", attempt)
    monkeypatch.setenv("ROWS_DIE", "1")
    assert gpu.accept(tmp_path, ["rows"], 1) == 1
    (step,) = json.loads((tmp_path / "report.json").read_text())["rows"]
    assert step["outcome"] == "failed in 3 of 5 rows: wrong, dead, broken"
    first, wrong, dead, broken, last = step["rows"]
    assert wrong["error"].startswith("ZeroDivisionError") and dead["error"] == "the process died with 7"
    assert broken["error"] == "RuntimeError: CUDA error: an illegal access"
    assert (first["value"], last["value"]) == (1, 3) and first["pid"] != last["pid"]
    monkeypatch.delenv("ROWS_DIE")
    assert gpu.accept(tmp_path, ["rows"], 1, gpu.known_of(tmp_path / "report.json")) == 1
    (step,) = json.loads((tmp_path / "report.json").read_text())["rows"]
    assert step["outcome"] == "failed in 2 of 5 rows: wrong, broken"
    assert [row.get("pid") for row in step["rows"]] == [first["pid"], None, None, None, last["pid"]]
    assert step["rows"][2]["value"] == 2


def test_a_step_without_enough_time_keeps_the_rows_that_it_has(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "STEPS", {"rows": gpu_steps.Step(rows, 60.0)})
    monkeypatch.setattr(gpu, "_head", lambda num_gpus: {})

    def attempt(name, device, limit_s, written):
        gpu._write_row(written, {"row": "first", "value": 1})
        gpu._write_row(written, {"begun": "wrong"})
        return {"outcome": "not done within 60 s", "rows": []}

    monkeypatch.setattr(gpu, "_attempt", attempt)
    assert gpu.accept(tmp_path, ["rows"], 1) == 1
    (step,) = gpu.known_of(tmp_path / "report.json").values()
    assert (step["outcome"], step["rows"]) == ("not done within 60 s", [{"row": "first", "value": 1}])
    assert gpu.accept(tmp_path, ["rows"], 1, {"rows": step}, total_s=1.0) == 0
    assert gpu.known_of(tmp_path / "report.json")["rows"]["rows"] == step["rows"]


def test_a_window_counts_tasks_after_the_first_ones_until_it_is_long_enough(monkeypatch):
    now = iter([0.0, 1.0, 3.0, 6.0, 11.0, 11.5, 12.5])
    monkeypatch.setattr(gpu_rows.time, "monotonic", lambda: next(now))
    watch = gpu_rows.Window(2, 10.0, 1.0)
    settled = SimpleNamespace(update=SimpleNamespace(num_steps=5))
    for _ in range(6):
        watch.on_settled(settled, 0.0)
        assert watch.stop_asked() is None
    watch.on_settled(settled, 0.0)  # the profile of two tasks has taken a second and more
    assert watch.stop_asked() == "measured"
    assert (watch.num_tasks, watch.begun_s, watch.ended_s) == (3, 1.0, 11.0)
    assert (watch.tasks_per_s, watch.steps_per_s, watch.kernels_s) == (0.3, 1.5, 0.0)


def test_a_step_whose_processes_print_has_a_record_all_the_same(capfd):
    assert gpu.main(["--step", "sharing", "--device", "cpu"]) == 0
    assert json.loads(capfd.readouterr().out)["outcome"] == "ok"


def test_a_step_that_dies_and_a_process_by_its_last_words(monkeypatch):
    monkeypatch.setattr(gpu.sys, "executable", "/bin/echo")  # prints its arguments, which are no JSON
    assert gpu.begin("fine", "cpu", 20.0)["outcome"] == "died with 0"
    command = ["sh", "-c", "echo; sleep 60; :", "sh", "--client", "1"]
    sleeping = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    try:
        sleeping.stdout.read(1)  # a process that has only just begun has no command line yet
        assert gpu_steps.child(os.getpid(), b"\0--client\x001\0") == sleeping.pid
    finally:
        os.killpg(sleeping.pid, signal.SIGKILL)
        sleeping.communicate()


def test_what_a_step_leaves_that_is_ended_is_deleted(tmp_path, monkeypatch):
    (tmp_path / "system").mkdir()
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nmkdir "$TMPDIR/left"; ls -d "$TMPDIR/left" > {tmp_path}/told; sleep 60\n')
    script.chmod(0o755)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "system"))
    monkeypatch.setattr(gpu.sys, "executable", str(script))
    assert gpu.begin("fine", "cpu", 1.0)["outcome"] == "not done within 1 s"
    assert (tmp_path / "told").read_text().startswith(f"{tmp_path}/system/raafl-gpu-")
    assert not list((tmp_path / "system").iterdir())


def test_a_step_has_a_process_of_its_own_and_a_limit():
    assert gpu.begin("sharing", "cpu", 60.0)["outcome"] == "ok"
    assert gpu.begin("sharing", "cpu", 0.001)["outcome"] == "not done within 0 s"


def test_what_is_missing_is_said_in_one_line(tmp_path, steps, monkeypatch, capsys):
    monkeypatch.setattr(
        gpu, "WHEELS", {"torch": "torch", "no_such_wheel": "no-such-wheel>=2", "nor_this": "nor-this[x]"}
    )
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert gpu.main(["--out", str(tmp_path), "--only", "fine"]) == 0
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith(
        "[raafl] missing: 'no-such-wheel>=2' 'nor-this[x]'; bring them in a folder, with `pip download "
    )
    assert first.endswith(" -m pip install --no-index --find-links wheels 'no-such-wheel>=2' 'nor-this[x]'`")
    assert second == "[raafl] no GPU here: each step is only begun, on the CPU"


def test_how_busy_a_gpu_is_is_read_from_what_nvidia_smi_says(tmp_path):
    there = tmp_path / "there"
    with gpu_busy("sh", "-c", "echo 50; echo N/A; echo 70; touch $0; exec sleep 60", str(there)) as seen:
        while not there.exists():
            time.sleep(0.01)
    assert [percent for _, percent in seen] == [50.0, 70.0] and seen[0][0] <= seen[1][0]
    with gpu_busy("no-such-command") as seen:
        pass
    assert seen == []


def test_rows_of_small_clients_run_on_an_emulated_gpu_in_each_way(emulated_cuda, tmp_path):
    work = replace(gpu_rows.MLP_MNIST, samples=20, batch_size=10, num_steps=2, clients=2, cohort=2)
    found = {way: gpu_rows.measured(work, way, "cuda:0", tmp_path / way, dry=True) for way in gpu_rows.WAYS}
    assert [found[way]["captured"] for way in ("eager", "captured")] == [None, 1]
    assert found["fast"]["mean_cohort"] == 2 and all(row["steps_per_s"] > 0 for row in found.values())
    assert "no kernels' seconds" in found["eager"]["problem"]  # there is no profiler of such a GPU
