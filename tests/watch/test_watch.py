"""The view of a run from its rows: figures by hand, files that grow, are torn, come late or are written anew."""

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
from rich.console import Console

from raafl.commands.cli import main
from raafl.commands.run import simulate
from raafl.commands.watch import watch
from raafl.errors import BadInput
from raafl.runfolder.journal import RunFolder
from raafl.runfolder.schema import CLIENT_COLUMNS
from raafl.submodel.spec import Spec
from raafl.watch.feed import Watched
from raafl.watch.pace import Aim, Eta, Goals, Mark, Marks, Trainings, ends_in_s, etas, speed
from raafl.watch.show import briefly, plain, sentence, table
from raafl.watch.snapshot import ClientProgress, ProgressState
from raafl.watch.state import RunState, spec_in_words
from tests.federation import experiment

ROOT = Path(__file__).parents[2]


class Clock:
    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


# ---- rates and when it ends, by hand ----


def test_trainings_are_counted_over_the_last_ten_seconds():
    trainings = Trainings()
    assert trainings.per_s(5.0) is None
    for _ in range(50):
        trainings.arrived(1.0)  # all that a folder had at the first look
    assert trainings.per_s(2.0) is None
    for tenth in range(15, 45):
        trainings.arrived(tenth / 10)
    assert trainings.per_s(4.5) == 30 / 3.5
    for tenth in range(45, 205):
        trainings.arrived(tenth / 10)
    assert trainings.per_s(20.5) == pytest.approx(10, rel=0.05)


def test_rates_are_those_since_twenty_merges_ago():
    marks = Marks()
    assert marks.rates(Mark()) == (0.0, 0.0)
    for version in range(1, 11):  # one update of 100 bytes each 2 s
        marks.merged(Mark(2.0 * version, version, 100 * version), again=False)
    assert marks.rates(Mark(25.0, 10, 1000)) == (10 / 25, 1000 / 25)  # fewer than twenty: since the run began
    for version in range(11, 41):  # then two updates, of 300 bytes, each second
        marks.merged(Mark(20.0 + version - 10, 2 * version - 10, 1000 + 300 * (version - 10)), again=False)
    # 21 marks are kept, of versions 20 to 40; version 20 was at 30 s with 30 updates and 4,000 bytes
    assert marks.rates(Mark(50.0, 70, 10_000)) == ((70 - 30) / 20, (10_000 - 4_000) / 20)
    assert marks.rates(Mark(70.0, 70, 10_000)) == (1.0, 150.0)  # nothing for 20 s more: the rate falls


def test_several_updates_of_one_merge_are_one_mark():
    marks = Marks()
    for updates, at_s in ((1, 5.0), (2, 3.0), (3, 4.0)):
        marks.merged(Mark(at_s, updates, 10 * updates), again=updates > 1)
    assert list(marks.found) == [Mark(), Mark(5.0, 3, 30)]


def test_when_it_ends_is_when_the_first_limit_or_all_targets_are_met():
    accuracy, loss = Aim("accuracy", 0.9), Aim("loss", 0.5, at_most=True)
    goals = Goals(100, 60.0, (accuracy, loss))
    # accuracy rises by 0.1 in 10 s, from 0.5 at 0 s; loss falls by 0.25 in 10 s, from 2.0
    rows = [{"time_s": t, "accuracy": 0.5 + t / 100, "loss": 2.0 - t / 40} for t in (0.0, 10.0, 20.0)]
    found = etas(goals, 25.0, 40, 4.0, rows)
    # (100 - 40) / 4; 60 - 25; 0.9 at 40 s; 0.5 at 60 s
    assert [eta.goal for eta in found] == ["max_updates", "max_time", "accuracy=0.9", "loss=0.5"]
    assert [eta.in_s for eta in found] == pytest.approx([15.0, 35.0, 15.0, 35.0])
    assert ends_in_s(goals, found) == pytest.approx(15.0)
    assert ends_in_s(Goals(targets=(accuracy, loss)), found[2:]) == pytest.approx(35.0)
    (reached, _) = etas(Goals(targets=(accuracy, loss)), 25.0, 40, 4.0, rows, {accuracy})
    assert reached == Eta("accuracy=0.9", 0.0)


@pytest.mark.parametrize(
    ("values", "in_s"),
    [
        ([0.5, 0.6], None),  # two points say too little
        ([0.6, 0.6, 0.6], None),
        ([0.7, 0.6, 0.5], None),  # away from it
        ([0.4, 0.6, 0.5], pytest.approx(65.0)),  # the line 0.45 + 0.005 t reaches 0.9 at 90 s
        ([0.0, 0.8, 0.85, 0.89], 0.0),  # mean 0.635 at 15 s, slope 13.6/500: 0.9 at 24.7 s, which has passed
    ],
)
def test_a_target_is_met_where_the_line_through_the_evaluations_meets_it(values, in_s):
    rows = [{"time_s": 10.0 * i, "accuracy": value} for i, value in enumerate(values)]
    (found,) = etas(Goals(targets=(Aim("accuracy", 0.9),)), 25.0, 0, 0.0, rows)
    assert found.in_s == in_s


def test_without_progress_nothing_is_promised():
    assert etas(Goals(10), 5.0, 0, 0.0, []) == (Eta("max_updates", None),)
    assert ends_in_s(Goals(10), [Eta("max_updates", None)]) is None
    assert etas(Goals(10), 5.0, 12, 0.0, []) == (Eta("max_updates", 0.0),)  # a round that was begun is merged whole
    assert etas(Goals(), 5.0, 0, 0.0, []) == ()


def test_a_simulation_has_a_speed():
    assert (
        speed([{"wall_s": 1.0, "time_s": 0.0}, {"wall_s": 3.0, "time_s": 50.0}, {"wall_s": 5.0, "time_s": 200.0}]) == 50
    )
    assert speed([{"wall_s": 1.0, "time_s": 0.0}]) is None
    assert speed([{"wall_s": 1.0, "time_s": 0.0}, {"wall_s": 1.0, "time_s": 5.0}]) is None


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.421, "0.42 s"),
        (9.94, "9.9 s"),
        (12.3, "12.3 s"),
        (120, "2.0 min"),
        (5400, "1.5 h"),
        (1e5, "1.2 d"),
    ],
)
def test_durations_are_brief(seconds, text):
    assert briefly(seconds) == text


# ---- the state ----


def goals(**fields):
    return Goals(**fields).to_json()


def run_row(runtime="distributed", **fields):
    return {"time_s": 0.0, "event": "run", "runtime": runtime, "title": "a run", "goals": goals(**fields)}


def joined(client, time_s=0.0, incarnation=0, name="default"):
    return {
        "time_s": time_s,
        "event": "joined",
        "client": client,
        "incarnation": incarnation,
        "profile": {"name": name},
    }


def assigned(number, client, time_s, version=0, **more):
    row = {"time_s": time_s, "event": "assigned", "id": number, "client": client, "incarnation": 0, "version": version}
    return {**row, "spec": {}, "assigned_s": time_s, "pace_s": 0.0, **more}


def arrived(number, client, time_s, incarnation=0):
    return {"time_s": time_s, "event": "arrived", "assignment": number, "client": client, "incarnation": incarnation}


def ended(number, client, since_s, until_s, version, outcome="merged", **more):
    row = {"client": client, "assignment": number, "outcome": outcome, "assigned_s": since_s, "arrived_s": until_s}
    return {
        **row,
        "merged_version": version,
        "staleness": 0,
        "bytes_down": 1000,
        "bytes_up": 500,
        "spec": "full",
        **more,
    }


def test_who_trains_what_since_when_and_when_it_should_be_back():
    clock = Clock(100.0)
    state = RunState(clock=clock)
    for row in (run_row(max_updates=9), joined(1, name="phone"), joined(2), assigned(1, 1, 1.0), assigned(2, 2, 1.0)):
        state.event(row)
    fragment = {"kept": {"fc1": {"range": [0, 40]}}}
    state.event(arrived(1, 1, 4.0))
    state.client(ended(1, 1, 1.0, 4.0, 1, spec="fc1[0:40]"))
    state.event(assigned(3, 1, 4.0, version=1, spec=fragment))
    clock.now = 101.0  # a second after the last row, which was at 4 s
    snapshot = state.snapshot()
    assert (snapshot.time_s, snapshot.version, snapshot.num_updates, snapshot.bytes_down) == (5.0, 1, 1, 1000)
    phone, other = snapshot.clients
    assert phone == ClientProgress(
        1, "fc1[0:40]", 1, "phone", True, version=1, behind=0, since_s=1.0, due_in_s=2.0
    )  # its last took 3 s
    assert other == ClientProgress(2, "full", 0, "", True, version=0, behind=1, since_s=4.0, due_in_s=None)
    assert (snapshot.updates_per_s, snapshot.bytes_per_s) == (1 / 5, 1500 / 5)
    assert snapshot.ends_in_s == 8 * 5
    state.event({"time_s": 6.0, "event": "lost", "client": 1, "reason": "disconnected"})
    state.client(
        {"client": "1", "outcome": "lost:disconnected", "assignment": "3", "assigned_s": "4.0", "arrived_s": ""}
    )
    snapshot = state.snapshot()
    assert snapshot.clients[0] == ClientProgress(1, "", 1, "phone", there=False)
    assert (snapshot.num_there, snapshot.num_working, dict(snapshot.outcomes)) == (1, 1, {"merged": 1, "lost": 1})


def test_an_emulated_pace_and_the_last_task_on_the_same_submodel_say_when():
    state = RunState(clock=Clock())
    for row in (run_row("simulated"), joined(1), assigned(1, 1, 0.0, pace_s=7.0)):
        state.event(row)
    assert state.snapshot().clients[0].due_in_s == 7.0
    for number, (spec, lasted_s) in enumerate((("full", 2.0), ("fc1[0:40]", 1.0)), start=1):
        state.event(arrived(number, 1, lasted_s))
        state.client(ended(number, 1, 0.0, lasted_s, number, spec=spec))
        state.event(assigned(number + 1, 1, 2.0))
    assert state.snapshot().clients[0].due_in_s == 2.0  # the whole model took 2 s, a fragment 1 s
    state.event(assigned(9, 1, 2.0, spec={"kept": {"fc1": {"range": [40, 60]}}}))
    assert state.snapshot().clients[0].due_in_s == 1.0  # never had before: as long as the last


def test_a_client_cannot_steer_the_terminal():
    said = []
    state = RunState(say=said.append, clock=Clock())
    state.event(joined(1, name="\x1b[2J" + "phone" * 20))
    state.event({"time_s": 1.0, "event": "lost", "client": 1, "reason": "gone\x1b[1A\r"})
    assert state.snapshot().clients[0].device == r"\x1b[2J" + "phone" * 3 + "p…"
    assert not any("\x1b" in text or "\r" in text for text in said) and len(said) == 2


def test_an_answer_of_an_earlier_life_ends_no_task():
    state = RunState(clock=Clock())
    for row in (
        run_row(),
        joined(1, incarnation=1),
        assigned(2, 1, 0.0, incarnation=1),
        arrived(2, 1, 1.0, incarnation=0),
    ):
        state.event(row)
    assert state.snapshot().num_working == 1


def test_of_many_clients_those_at_work_are_shown_the_longest_first():
    state = RunState(clock=Clock())
    state.event(run_row("simulated"))
    for client in range(1, 101):
        state.event(joined(client))
    for number, client in enumerate((70, 50, 60), start=1):
        state.event(assigned(number, client, float(number)))
    snapshot = state.snapshot()
    assert [client.client for client in snapshot.clients] == [70, 50, 60, *range(1, 14)]
    assert (snapshot.num_clients, snapshot.num_there, snapshot.num_working) == (100, 100, 3)
    assert len(state.snapshot(None).clients) == 100
    console = Console(file=io.StringIO(), width=100)
    console.print(table(snapshot, "title"))
    assert "84 more, 0 at work" in console.file.getvalue()


def test_targets_that_were_met_stay_met():
    state = RunState(clock=Clock())
    state.metrics(
        {"version": "0", "time_s": "0.0", "wall_s": "0.1", "accuracy": "0.95"}
    )  # before the journal's first row
    state.event(run_row("simulated", targets=(Aim("accuracy", 0.9), Aim("loss", 1.0, at_most=True))))
    for version in range(1, 20):
        state.metrics({"version": version, "time_s": 2.0 * version, "wall_s": 0.1, "accuracy": 0.5, "loss": 2.0})
    assert state.snapshot().etas == (Eta("accuracy=0.9", 0.0), Eta("loss=1", None))
    assert state.snapshot().metrics == {"accuracy": 0.5, "loss": 2.0}


def test_the_table_says_everything():
    state = RunState(clock=Clock())
    for row in (run_row("simulated", max_updates=4, max_time_s=100.0), joined(1, name="phone"), joined(2), joined(3)):
        state.event(row)
    state.event(assigned(1, 1, 0.0))
    state.event(assigned(2, 2, 0.0))
    state.event(arrived(1, 1, 10.0))
    state.client(ended(1, 1, 0.0, 10.0, 1))
    state.metrics({"version": 0, "time_s": 0.0, "wall_s": 0.0, "accuracy": 0.1, "coverage": 1.0})
    beside = {"peak_bytes": 5000, "measured_bytes": 6000, "time_to/accuracy=0.2": 10.0}
    state.metrics({"version": 1, "time_s": 10.0, "wall_s": 2.0, "accuracy": 0.25, **beside})
    state.event({"time_s": 10.0, "event": "lost", "client": 3, "reason": "unavailable"})
    state.client({"client": 3, "outcome": "lost:unavailable", "assignment": 7})
    state.event(assigned(3, 1, 10.0, version=1))
    console = Console(file=io.StringIO(), width=160)
    console.print(table(state.snapshot(), "title"))
    lines = [" ".join(line.split()) for line in console.file.getvalue().splitlines()]
    assert lines == [
        "title",
        "a run",
        "client trains version for back in merged",
        "1 phone full 1 0 s 10.0 s 1",
        "2 full 0 (-1) 10.0 s ? 0",
        "3 gone 0",
        "version 1 1 of 4 updates 10.0 s 0.1 updates/s 0.00015 MB/s 5 times real time staleness 0 (at most 0) 1 lost",
        "accuracy 0.25",
        "max_updates in 30.0 s, here 6 s max_time in 1.5 min, here 18.0 s",
        "ends in 30.0 s, here 6 s",
    ]
    assert sentence(state.snapshot()).endswith("2 of 2 clients at work  ends in 30.0 s, here 6 s")
    assert json.loads(json.dumps(plain(state.snapshot())))["etas"][0] == {"goal": "max_updates", "in_s": 30.0}


@pytest.mark.parametrize(
    "spec",
    [
        Spec(),
        Spec.keep({"fc1": range(40), "conv1": (0, 2, 5)}, trained=["fc2", "fc1"]),
        Spec.keep({f"axis{i}": range(8) for i in range(6)}, blocks={"blocks": (0, 2)}, exits=[]),
        Spec.keep(blocks={"blocks": range(1, 4)}, exits=["exit_2"]),
    ],
)
def test_submodels_are_named_as_elsewhere(spec):
    assert spec_in_words(json.loads(json.dumps(spec.to_json()))) == str(spec)
    assert len(spec_in_words(spec.to_json(), 5)) <= 5


# ---- files ----


@pytest.mark.parametrize("finished", ["interrupted", "failed: every client was lost"])
def test_the_summary_of_a_run_that_has_been_resumed_since_does_not_end_the_view(tmp_path, finished):
    with RunFolder(tmp_path / "run", "") as run:
        run.event(run_row("simulated"))
        run.summary({"finished": finished})
        os.utime(tmp_path / "run" / "summary.json", (1000.0, 1000.0))
        run.event({"event": "resumed", "kept": 0, "version": 0, "time_s": 0.0})
        watched = Watched(tmp_path / "run")
        watched.look()
        assert watched.state.summary is None
        run.summary({"finished": finished})
    assert watched.look() and watched.state.summary == {"finished": finished}


def cells(**row):
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerow([row.get(name, "") for name in CLIENT_COLUMNS])
    return file.getvalue()


def test_a_folder_is_followed_as_it_grows_whatever_its_last_line(tmp_path):
    folder = tmp_path / "later" / "run"
    watched = Watched(folder)
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
        run.metrics(
            {"version": 1, "time_s": 8.0, "wall_s": 1.0, "accuracy": 0.2, "f1": 0.3}
        )  # the table is written anew
        watched.look()
        snapshot = watched.state.snapshot()
        assert (snapshot.num_working, snapshot.num_updates, snapshot.ends_in_s) == (0, 1, 24.0)
        assert dict(snapshot.metrics) == {"accuracy": 0.2, "f1": 0.3}
        assert watched.num_damaged == 2
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
    watched = Watched(tmp_path / "run", clock=clock)
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
    assert len(lines) == 2 and lines[1].endswith("ended: max_updates")


def test_the_view_of_the_run_itself_is_that_of_its_folder(tmp_path, monkeypatch):
    """At each evaluation, what the run shows is what `raafl watch` reads from the files at that moment."""
    from raafl.watch.progress import Progress

    seen, folder = [], tmp_path / "run"
    show = Progress.update

    def update(progress, snapshot=None, evaluated=False):
        if evaluated:
            watched = Watched(folder)
            watched.look()
            seen.append((progress.source(), watched.state.snapshot()))
        show(progress, snapshot, evaluated)

    monkeypatch.setattr(Progress, "update", update)
    simulate(experiment(folder, "fed_async", eval_every=3, target="accuracy=0.99", clients=6))
    assert len(seen) == 4
    for own, read in seen:
        assert own.num_processes == 1 and read.num_processes is None
        assert replace(own, num_processes=None, trainings_per_s=None) == read
        assert own.updates_per_s and own.etas
        assert own.num_working or own.ends_in_s == 0


def test_a_resumed_run_is_shown_without_what_it_has_gone_back_behind(tmp_path):
    from raafl.runtime.resume import load

    whole, _ = simulate(experiment(tmp_path / "whole", "fed_async", checkpoint_every=5))
    _, folder = simulate(experiment(tmp_path / "cut", "fed_async", checkpoint_every=5, keep_checkpoints=9))
    for late in ("version-000010.ckpt", "version-000012.ckpt"):
        (folder / "checkpoints" / late).unlink()
    (folder / "summary.json").write_text('{"finished": "interrupted"}')
    os.utime(folder / "summary.json", ns=(1, 1))
    assert load(folder, "simulated").section["coordinator"]["version"] == 5
    watched = Watched(folder)
    watched.look()
    resumed, _ = simulate(experiment(folder, "fed_async", checkpoint_every=5, resume=str(folder)))
    assert resumed["model_digest"] == whole["model_digest"]
    watched = Watched(folder)
    watched.look()
    snapshot = watched.state.snapshot(None)
    assert {str(client.client): client.num_tasks for client in snapshot.clients} == whole["participation"]
    assert (snapshot.num_updates, snapshot.finished, snapshot.version) == (12, "max_updates", 12)


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--once"], "RUN is missing: give the folder of a run"),
        (["nowhere", "--once"], "'nowhere' is not a run folder: there is no run in it yet"),
        (["nowhere", "--json"], "--json goes with --once"),
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
    assert lines[1] == "waiting: there is no run in it yet"
    assert [line.split(" for ")[0] for line in lines[2:]].count("nothing has been written") == 1
    assert lines[-1].endswith("ended: max_time")
    assert len(looks) == 7


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
    assert "loss 0.5" in sentence(state) and "rank_energy" not in sentence(state)
    assert plain(state)["metrics"] == {"loss": 0.5, "rank_energy/1": 0.9}
