"""A run's folder, followed: files that grow, are torn, come late or are written anew."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from raafl.commands.cli import main
from raafl.commands.watch import watch
from raafl.errors import BadInput
from raafl.runfolder.journal import RunFolder
from raafl.runfolder.schema import CLIENT_COLUMNS
from raafl.runtime.run import simulate
from raafl.units import size
from raafl.watch.progress import evaluation, plain
from raafl.watch.state import ProgressState, follow
from tests.helpers.small_runs import experiment
from tests.watch.rows import Clock, arrived, assigned, ended, joined, run_row

ROOT = Path(__file__).parents[2]


# ---- files ----


@pytest.mark.parametrize("finished", ["interrupted", "failed: every client was lost", "stopped: enough"])
def test_the_summary_of_a_run_that_has_been_resumed_since_does_not_end_the_view(tmp_path, finished):
    with RunFolder(tmp_path / "run", "") as run:
        run.event(run_row("simulated"))
        run.summary({"finished": finished})
        os.utime(tmp_path / "run" / "summary.json", (1000.0, 1000.0))
        run.event({"event": "resumed", "kept": 0, "version": 0, "time_s": 0.0})
        watched = follow(tmp_path / "run")
        watched.look()
        assert watched.state.summary is None
        run.summary({"finished": finished})
    assert watched.look() and watched.state.summary == {"finished": finished}


STEERS = "\x1b]0;title\x07\u202e"


def test_a_folder_that_somebody_else_made_shows_no_text_as_it_stands(tmp_path, capsys):
    with RunFolder(tmp_path / "run", "") as run:
        run.event({**run_row("simulated"), "title": STEERS})
        run.event(joined(1, name=STEERS))
        run.event(assigned(1, 1, 0.0, spec={"kept": {STEERS: {"range": [0, 2]}}}))
        run.metrics({"version": 1, "time_s": 1.0, STEERS: 0.5})
        run.client(ended(1, 1, 0.0, 1.0, 1, outcome=f"refused:{STEERS}", spec=STEERS))
        run.summary({"finished": STEERS * 100, "final": {STEERS: 1.0}})
    for mode in ("plain", "verbose"):
        assert main(["watch", str(tmp_path / "run"), "--once", "--progress", mode]) == 0
        said = capsys.readouterr().out.replace("\n", "")
        assert r"\x1b]0;title\x07\u202e" in said and said.isprintable()


DAMAGED = [
    {"event": "assigned", "id": [1], "client": 1, "time_s": 0.0},
    {**assigned(2, 1, 0.0), "version": "x"},
    {"event": "joined", "client": 1, "profile": {"name": ["x"]}, "time_s": "soon"},
    {"event": "run", "goals": {"max_updates": "x", "max_time_s": [], "targets": []}, "time_s": 0.0, "title": 3},
]


def test_what_is_no_row_of_a_journal_is_left_out_and_a_summary_keeps_what_fits(tmp_path, capsys):
    """No traceback, whatever stands there."""
    with RunFolder(tmp_path / "run", "") as run:
        run.event(run_row("simulated"))
        run.event(joined(1))
        run.event(assigned(1, 1, 0.0, spec={"kept": [1], "blocks": {"b": {"range": [0, 10**9]}}}))
    with (tmp_path / "run" / "events.jsonl").open("a") as file:
        file.write("".join(f"{json.dumps(row)}\n" for row in DAMAGED) + '{"a": ' + "[" * 100_000 + "\n")
    (tmp_path / "run" / "summary.json").write_text(json.dumps({"updates_merged": "x", "batched": 3, "versions": 7}))
    assert main(["watch", str(tmp_path / "run"), "--once", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["version"], found["num_updates"], found["damaged_lines"]) == (7, 0, 5)
    assert main(["watch", str(tmp_path / "run"), "--once"]) == 0
    (tmp_path / "run" / "summary.json").unlink()
    assert main(["watch", str(tmp_path / "run"), "--once"]) == 0
    assert main(["replay", str(tmp_path / "run")]) == 2
    assert "events.jsonl:4: id is [1]; the journal was changed: give an unchanged copy" in capsys.readouterr().err


def test_what_may_never_end_is_not_read(tmp_path):
    with RunFolder(tmp_path / "run", "") as run:
        run.event(run_row("simulated"))
    (tmp_path / "run" / "metrics.csv").unlink()
    (tmp_path / "run" / "metrics.csv").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "run" / "summary.json")
    watched = follow(tmp_path / "run")
    assert watched.look() and watched.begun and watched.state.summary is None


def cells(**row):
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerow([row.get(name, "") for name in CLIENT_COLUMNS])
    return file.getvalue()


def test_a_folder_is_followed_as_it_grows_whatever_its_last_line(tmp_path):
    folder = tmp_path / "later" / "run"
    watched = follow(folder)
    assert not watched.look() and not watched.begun
    with RunFolder(folder, "") as run:
        assert watched.look() and watched.begun
        for row in (run_row("simulated", max_updates=4), joined(1), assigned(1, 1, 0.0)):
            run.event(row)
        run.metrics({"version": 0, "time_s": 0.0, "wall_s": 0.0, "accuracy": 0.1})
        watched.look()
        assert (watched.state.title, watched.state.snapshot().num_working) == ("a run", 1)
        half = json.dumps(arrived(1, 1, 8.0))
        with (folder / "events.jsonl").open("a") as file:
            file.write(half[:20])
        assert not watched.look()
        with (folder / "events.jsonl").open("a") as file:
            file.write(half[20:] + "\nnot json\n[1]\n")
            file.write(
                '{"event": "joined", "client": 1, "profile": {}, "time_s": {}}\n{"event": "lost", "client": {}}\n'
            )
        run.client(ended(1, 1, 0.0, 8.0, 1))
        assert watched.look()
        # the table is written anew
        run.metrics({"version": 1, "time_s": 8.0, "wall_s": 1.0, "accuracy": 0.2, "f1": 0.3})
        watched.look()
        snapshot = watched.state.snapshot()
        assert (snapshot.num_working, snapshot.num_updates, snapshot.ends_in_s) == (0, 1, 24.0)
        assert dict(snapshot.metrics) == {"accuracy": 0.2, "f1": 0.3}
        assert watched.num_damaged == 4
        run.summary({"finished": "max_updates", "updates_merged": 1, "time_s": 9.0, "bytes_up": 7, "bytes_down": 8})
    assert watched.look() and not watched.look()
    snapshot = watched.state.snapshot()
    assert (snapshot.finished, snapshot.time_s, snapshot.bytes_up, snapshot.etas) == ("max_updates", 9.0, 7, ())


def test_the_clock_of_a_real_run_goes_on_between_rows(tmp_path):
    with RunFolder(tmp_path / "run", "") as run:
        for row in (run_row(), joined(1, 3.0), assigned(1, 1, 3.0)):
            run.event(row)
    for name in ("events.jsonl", "metrics.csv", "clients.csv"):
        os.utime(tmp_path / "run" / name, (1000.0, 1000.0))
    clock = Clock(1005.0)
    watched = follow(tmp_path / "run", clock=clock)
    watched.look()
    assert watched.state.snapshot().clients[0].since_s == watched.silent_s == 5.0


def test_watching_writes_nothing_and_agrees_with_the_summary(tmp_path, capsys):
    summary, folder = simulate(experiment(tmp_path / "run", "fed_async", eval_every=4))
    before = {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in tmp_path.rglob("*")}
    (tmp_path / "run").chmod(0o555)
    try:
        assert main(["watch", str(folder), "--once", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert main(["watch", str(folder), "--progress", "plain"]) == 0
    finally:
        (tmp_path / "run").chmod(0o755)
    assert before == {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in tmp_path.rglob("*")}
    assert (found["state"], found["finished"], found["version"]) == ("finished", "max_updates", 12)
    assert {str(c["client"]): c["num_tasks"] for c in found["clients"]} == summary["participation"]
    assert found["metrics"] == {k: v for k, v in summary["final"].items() if not k.startswith("client_")}
    assert (
        found["staleness_mean"] == summary["staleness"]["mean"]
        and found["staleness_max"] == summary["staleness"]["max"]
    )
    assert found["updates_per_s"] == pytest.approx(12 / summary["time_s"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and lines[1].endswith("ended: max_updates") and "eval:" in lines[2]
    assert lines[3] == "books: unsigned"


def test_the_view_of_the_run_itself_is_that_of_its_folder(tmp_path, monkeypatch):
    """At each evaluation, what the run shows is what `raafl watch` reads from the files at that moment."""
    from raafl.watch.progress import Progress

    seen, folder = [], tmp_path / "run"
    show = Progress.update

    def update(progress, snapshot=None, evaluated=False):
        if evaluated:
            watched = follow(folder)
            watched.look()
            seen.append((progress.source(), watched.state.snapshot()))
        show(progress, snapshot, evaluated)

    monkeypatch.setattr(Progress, "update", update)
    simulate(experiment(folder, "fed_async", eval_every=3, target="accuracy=0.99", clients=6, progress="plain"))
    assert len(seen) == 4
    for own, read in seen:
        assert own.num_processes == 1 and read.num_processes is None
        assert replace(own, num_processes=None, trainings_per_s=None) == read
        assert own.updates_per_s and own.etas
        assert own.num_working or own.ends_in_s == 0


def test_a_resumed_run_is_shown_without_what_it_has_gone_back_behind(tmp_path):
    from raafl.runtime.lifecycle.resume import load

    whole, _ = simulate(experiment(tmp_path / "whole", "fed_async", checkpoint_every=5))
    _, folder = simulate(experiment(tmp_path / "cut", "fed_async", checkpoint_every=5, keep_checkpoints=9))
    for late in ("version-000010.ckpt", "version-000012.ckpt"):
        (folder / "checkpoints" / late).unlink()
    (folder / "summary.json").write_text('{"finished": "interrupted"}')
    os.utime(folder / "summary.json", ns=(1, 1))
    assert load(folder, "simulated", experiment(folder)).section["coordinator"]["version"] == 5
    watched = follow(folder)
    watched.look()
    resumed, _ = simulate(experiment(folder, "fed_async", checkpoint_every=5, resume=str(folder)))
    assert resumed["model_digest"] == whole["model_digest"]
    watched = follow(folder)
    watched.look()
    snapshot = watched.state.snapshot(None)
    assert {str(client.client): client.num_tasks for client in snapshot.clients} == whole["participation"]
    assert (snapshot.num_updates, snapshot.finished, snapshot.version) == (12, "max_updates", 12)


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--once"], "RUN is missing: give the folder of a run"),
        (["nowhere", "--once"], "run is 'nowhere', a folder without a run: leave out --once"),
        (["nowhere", "--json"], "--json needs --once"),
        (["nowhere", "--onec"], "unknown option '--onec'"),
        ([__file__], "is a file: give the folder of a run"),
        (["nowhere", "--progress", "quiet"], "invalid choice"),
    ],
)
def test_what_is_wrong_is_one_line(argv, line):
    with pytest.raises(BadInput, match=line):
        watch(argv)


def test_a_folder_that_appears_late_is_waited_for_and_silence_is_said_once(tmp_path):
    folder, file = tmp_path / "run", io.StringIO()
    run, looks = [], []

    def sleep(_):
        looks.append(1)
        if len(looks) == 2:
            run.append(RunFolder(folder, ""))
            run[0].event(run_row())
            run[0].event(joined(1))
        if len(looks) in (4, 5):
            for name in ("events.jsonl", "metrics.csv", "clients.csv"):
                os.utime(folder / name, (1000.0, 1000.0))
        if len(looks) == 7:
            run[0].summary({"finished": "max_time", "time_s": 9.0})
            run[0].close()

    watch([str(folder), "--progress", "verbose"], file, sleep)
    lines = file.getvalue().splitlines()
    assert lines[0] == str(folder)
    assert lines[1] == "waiting: there is no run in the folder yet"
    assert [line.split(" for ")[0] for line in lines[2:]].count("no row was written") == 1
    (end,) = [number for number, line in enumerate(lines) if line.endswith("ended: max_time")]
    assert " ".join(lines[end + 1 :]).startswith(
        "books: altered: seals.jsonl: the run has ended, and nothing of it is sealed"
    )
    assert len(looks) == 7


@pytest.mark.parametrize("large", [True, False])
def test_the_view_of_a_folder_with_many_rows_says_that_it_reads_them(tmp_path, monkeypatch, large):
    folder, file = tmp_path / "run", io.StringIO()
    run = RunFolder(folder, "")
    for row in (run_row(), *map(joined, range(1, 200))):
        run.event(row)
    run.summary({"finished": "max_time", "time_s": 9.0})
    run.close()
    num_bytes = sum((folder / name).stat().st_size for name in ("events.jsonl", "clients.csv"))
    monkeypatch.setattr("raafl.commands.watch.LARGE_BYTES", num_bytes - large)
    watch([str(folder), "--progress", "plain"], file)
    lines = file.getvalue().splitlines()
    assert (lines[1] == f"reading {size(num_bytes)} of rows") == large
    assert file.getvalue().count("reading") == large


def test_watching_needs_neither_torch_nor_lightning(tmp_path):
    _, folder = simulate(experiment(tmp_path / "run"))
    code = (
        "import sys; from raafl.commands.cli import main\n"
        f"assert main(['watch', {str(folder)!r}, '--once', '--json']) == 0\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'lightning', 'numpy')))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=100, capture_output=True).returncode == 0


def test_verbose_says_when_each_task_begins_and_ends(tmp_path):
    file = io.StringIO()
    with redirect_stdout(file):
        simulate(experiment(tmp_path / "run", "fed_avg", progress="verbose", max_updates=4))
    lines = [" ".join(line.split(maxsplit=2)[2:]) for line in file.getvalue().splitlines() if " s  client" in line]
    begun = [line for line in lines if " trains " in line]
    assert begun == [f"client {n} trains full of version 0" for n in range(1, 5)]
    assert sum(": merged after " in line for line in lines) == 4
    times = [float(line.split()[0]) for line in file.getvalue().splitlines() if " s  client" in line]
    assert all(before <= after for before, after in pairwise(times))


def test_shares_of_ranks_are_left_to_reports_and_json():
    state = ProgressState(1, 1, 1.0, metrics={"loss": 0.5, "rank_energy/1": 0.9})
    assert "loss 0.5" in evaluation(state) and "rank_energy" not in evaluation(state)
    assert plain(state)["metrics"] == {"loss": 0.5, "rank_energy/1": 0.9}
