from __future__ import annotations

import csv
import errno
import json
import os
import re
import shutil
import signal
import time
import tracemalloc
from collections import Counter
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
import torch

from raafl.config.parse import parse
from raafl.errors import BadInput
from raafl.local.train import LocalTrainer
from raafl.parts.protect.privacy import PrivacyMemory
from raafl.runfolder.append_file import AppendFile, write_table
from raafl.runfolder.books import check_books
from raafl.runfolder.checkpoints import newest
from raafl.runfolder.journal import FolderLock
from raafl.runtime.lifecycle.resume import SavedRun, after_restart, cut_back, leave_note, load, mend
from raafl.runtime.replay import replay
from raafl.runtime.run import Run
from raafl.runtime.setup import build
from raafl.watch.state import follow
from tests.helpers import forkserver
from tests.helpers.crash import crashed, simulated, stopped
from tests.helpers.forked_command import command, wait_for
from tests.helpers.small_runs import experiment

pytestmark = pytest.mark.timeout(400)

ROOT = Path(__file__).parents[3]
CONFIG = str(ROOT / "configs" / "quickstart.yaml")
DEVICES = (
    '[{"name": "steady", "flops_per_s": 1e8}, {"name": "flaky", "flops_per_s": 5e7,'
    ' "availability": [[0.0, 0.3]], "period_s": 0.5}]'
)


SMALL = ("--model.hidden=[24]", "--train.num_epochs=null", "--train.num_steps=3", "--eval_every=10")


def dawdle() -> None:
    """From now on let each task take its time, so that a run does not end before it is killed."""
    run = LocalTrainer.run

    def slow(*args):
        time.sleep(0.015)
        return run(*args)

    LocalTrainer.run = slow


def rows(path: Path) -> list[list[str]]:
    with path.open(newline="") as file:
        return list(csv.reader(file))


def metric_rows(folder: Path) -> list[list[str]]:
    """Rows without the wall-clock column."""
    return [row[:2] + row[3:] for row in rows(folder / "metrics.csv")]


@pytest.mark.long("tests/commands/test_cli.py::test_a_target_ends_the_run_and_its_time_is_noted")
@pytest.mark.parametrize("cut", [13, 30])
def test_a_run_that_crashed_knows_which_targets_it_had_met(tmp_path, monkeypatch, cut):
    targets = '["accuracy=0.15", "accuracy=0.5", "accuracy=2"]'
    options = ["--config", CONFIG, f"--target={targets}", "--max_updates=40", "--eval_every=1", "--checkpoint_every=1"]
    whole = simulated(*options, f"--output={tmp_path / 'whole'}")
    assert [at_s is None for at_s in whole["time_to"].values()] == [False, False, True]
    folder = tmp_path / "cut"
    crashed(monkeypatch, cut, *options, f"--output={folder}")
    resumed = simulated("--resume", str(folder))
    assert metric_rows(folder) == metric_rows(tmp_path / "whole")
    header, *table = rows(folder / "metrics.csv")
    for target, at_s in whole["time_to"].items():
        cells = [row[header.index(f"time_to/{target}")] for row in table]
        written = set() if at_s is None else {str(float(f"{at_s:.12g}"))}
        assert resumed["time_to"][target] == at_s and set(cells) == {"", *written}


def test_a_run_that_another_process_writes_is_read_and_neither_resumed_nor_touched(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    options = ("--config", CONFIG, *SMALL, "--max_updates=8", "--checkpoint_every=2")
    crashed(monkeypatch, 5, *options, f"--output={folder}")
    before = contents(folder)
    with FolderLock(folder, "resume"):
        with pytest.raises(BadInput, match=r"resume is '.*run', where another process is writing its run"):
            simulated("--resume", str(folder))
        follow(folder).look()
        assert not check_books(folder).findings
        assert contents(folder) == before
    assert simulated("--resume", str(folder))["updates_merged"] == 8
    FolderLock(folder, "resume").close()  # as it is once the run has ended, in this process, too


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.long
def test_a_run_killed_again_and_again_still_ends_the_same(tmp_path):
    """Real processes, SIGKILL, wherever it hits."""
    small = ("--config", CONFIG, *SMALL, "--max_updates=200")
    whole = simulated(*small, f"--output={tmp_path / 'whole'}")
    cut = tmp_path / "cut"
    start = ("simulate", "--progress=quiet", *small, "--checkpoint_every=5")
    for version, options in [(20, (*start, f"--output={cut}")), (60, ("simulate", "--resume", str(cut)))]:
        with command(tmp_path / f"to-{version}", *options, before=dawdle) as started:
            wait_for_version(cut, version)
            started.send(signal.SIGKILL)
            started.end()
    assert 60 <= newest_version(cut) < 200
    assert simulated("--resume", str(tmp_path / "cut"))["model_digest"] == whole["model_digest"]


def newest_version(folder: Path) -> int:
    return max((int(file.stem.split("-")[1]) for file in folder.glob("checkpoints/version-*.ckpt")), default=0)


TORCHRUN = ("--standalone", "--nproc-per-node=4", "-m", "raafl", "fit", "--progress=quiet")


@pytest.fixture
def torchrun(tmp_path):
    """Start torchrun of four ranks, all forked; also returns a rank's process."""
    notes = tmp_path / "started"
    notes.mkdir()

    @contextmanager
    def start(name, *argv):
        with command(
            tmp_path / name,
            *argv,
            before=forkserver.start,
            entry=forkserver.torchrun,
            **{forkserver.STARTED: str(notes)},
        ) as started:
            yield started, lambda rank: next(one.process for one in forkserver.started(notes) if one.rank == rank)

    return start


def wait_for_version(folder: Path, version: int) -> None:
    wait_for(lambda: newest_version(folder) >= version, f"version {version}")


@pytest.mark.long
def test_rank_0_killed_under_torchrun_goes_on_from_its_checkpoint_and_replays(tmp_path, torchrun):
    folder = tmp_path / "run"
    options = ("--config", CONFIG, "--clients=3", "--max_updates=120", "--checkpoint_every=10", f"--output={folder}")
    with torchrun("first", *TORCHRUN, *options) as (first, rank):
        wait_for_version(folder, 30)
        rank("0").kill()
        assert first.end() != 0 and not (folder / "summary.json").exists()
    with torchrun("second", *TORCHRUN, "--resume", str(folder)) as (second, _):
        assert second.end() == 0, second.err
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["updates_merged"] == 120 == summary["versions"]
    assert summary["updates_lost_by_reason"]["restart"] >= 3  # three clients were at work, at the least
    table = rows(folder / "clients.csv")
    number, outcome = table[0].index("assignment"), table[0].index("outcome")
    ids = [row[number] for row in table[1:]]
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    assert sorted(map(int, ids)) == sorted(row["id"] for row in events if row["event"] == "assigned")
    assert len(ids) == len(set(ids))  # each assignment is accounted for exactly once
    assert sum(row[outcome] == "lost:restart" for row in table) == summary["updates_lost_by_reason"]["restart"]
    assert replay(folder)["equal"] is True


@pytest.mark.long
def test_torchrun_brings_a_run_back_from_its_last_checkpoint_by_itself(tmp_path, torchrun):
    """With --max-restarts: a killed client ends all ranks of the node; the next attempt goes on."""
    folder = tmp_path / "run"
    options = ("--config", CONFIG, "--clients=3", "--max_updates=60", "--checkpoint_every=5", f"--output={folder}")
    with torchrun("first", "--max-restarts=1", *TORCHRUN, *options) as (started, rank):
        wait_for_version(folder, 10)
        rank("2").kill()
        assert started.end() == 0, started.err
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["updates_merged"] == 60 and summary["updates_lost_by_reason"]["restart"] > 0
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    assert [row["event"] for row in events].count("resumed") == 1
    assert replay(folder)["equal"] is True


@pytest.mark.quick_cases(0)
@pytest.mark.parametrize(
    ("first", "then"),
    [
        ("--max_time=60", "--max_time=0.385"),
        ("--max_time=0.341", "--max_time=0.385"),
        ("--max_updates=45", "--max_updates=50"),
        ("--max_updates=60", "--max_updates=50"),
        ("--max_time=0.341 --max_updates=45", "--max_time=null --max_updates=50"),
    ],
)
def test_a_resumed_run_keeps_the_limits_that_it_is_given(tmp_path, monkeypatch, first, then):
    """Fewer or more than it had, it ends as a run that had them from the beginning."""
    base = ["--config", CONFIG, *SMALL, "--algorithm=fed_buff", "--algorithm.buffer_size=7", "--max_updates=null"]
    whole = simulated(*base, *then.split(), f"--output={tmp_path / 'whole'}")
    crashed(monkeypatch, 40, *base, *first.split(), "--checkpoint_every=1", f"--output={tmp_path / 'cut'}")
    assert newest_version(tmp_path / "cut") > 2
    resumed = simulated("--resume", str(tmp_path / "cut"), *then.split())
    same = ("model_digest", "finished", "time_s", "updates_merged", "versions")
    assert {name: resumed[name] for name in same} == {name: whole[name] for name in same}
    assert rows(tmp_path / "cut" / "clients.csv") == rows(tmp_path / "whole" / "clients.csv")
    assert replay(tmp_path / "cut")["equal"] is True
    view = follow(tmp_path / "cut")
    view.look()
    goals = view.state.goals
    assert set(then.split()) & {f"--max_updates={goals.max_updates}", f"--max_time={goals.max_time_s}"}


@pytest.mark.long
def test_a_resumed_run_of_real_ranks_keeps_the_limit_that_it_is_given(tmp_path):
    folder = tmp_path / "run"
    fit = ("fit", "--local=2", "--progress=quiet", "--max_updates=null")
    first = (*fit, "--config", CONFIG, "--max_time=3600", "--checkpoint_every=5", f"--output={folder}")
    with command(tmp_path / "first", *first, before=forkserver.start) as started:
        wait_for_version(folder, 10)
        started.send(signal.SIGINT)
        assert started.end() == 130
    limit = json.loads((folder / "summary.json").read_text())["time_s"] + 2
    second = (*fit, "--resume", str(folder), f"--max_time={limit}")
    with command(tmp_path / "second", *second, before=forkserver.start) as started:
        assert started.end() == 0, started.err
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["finished"] == "max_time" and limit <= summary["time_s"] < limit + 2
    assert replay(folder)["equal"] is True


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("option", "says"),
    [
        (
            "--max_time=0.1",
            r"whose run has merged \d\d updates in \d\.\d s: give a larger max_time to go on, or start a",
        ),
        ("--max_updates=6", r"whose run has merged \d\d updates in \d\.\d s: give a larger max_updates to go on, or"),
        (
            "--privacy.noise_multiplier=9",
            r"privacy.noise_multiplier is 9\.0, but the run began with 0\.5, for which its epsilon is counted: leave it out",
        ),
        ("--privacy.clip_norm=2", r"privacy.clip_norm is 2\.0, but the run began with 1\.0, for which"),
    ],
)
def test_what_a_run_cannot_go_on_with_is_named_before_anything_changes(tmp_path, monkeypatch, option, says):
    folder = tmp_path / "cut"
    private = ("--privacy.clip_norm=1", "--privacy.noise_multiplier=0.5")
    options = ("--config", CONFIG, *SMALL, *private, "--max_updates=60", "--checkpoint_every=1", f"--output={folder}")
    crashed(monkeypatch, 30, *options)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(BadInput, match=says):
        simulated("--resume", str(folder), option)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_settings_that_are_not_as_in_the_folder_are_named_and_refused_if_strict(tmp_path, monkeypatch):
    """The run went on with them without a word, and only a replay told that something had changed."""
    folder, options = tmp_path / "cut", ("--config", CONFIG, *SMALL, "--max_updates=20", "--checkpoint_every=1")
    crashed(monkeypatch, 12, *options, f"--output={folder}")
    before, changed = contents(folder), ("--resume", str(folder), "--seed=5", "--train.num_steps=4")
    with pytest.raises(
        BadInput, match=r"resume: seed, train not as in '.*cut/config.yaml': the run .* since strict is"
    ):
        simulated(*changed, "--strict=true")
    with pytest.raises(
        BadInput, match=r"resume: algorithm, subfederations not as in '.*cut/config.yaml': give the same"
    ):
        simulated("--resume", str(folder), "--subfederations.size=2", "--algorithm=fed_avg")
    assert contents(folder) == before
    shutil.copytree(folder, tmp_path / "copy")
    (warning,) = [text for text in simulated(*changed)["warnings"] if text.startswith("resume: ")]
    assert "seed, train not as in" in warning
    # as started by the same command with --resume auto
    again = simulated(*options, "--max_updates=24", "--resume", str(tmp_path / "copy"), "--strict=true")
    assert again["updates_merged"] >= 24 and replay(tmp_path / "copy")["equal"] is True


def test_mending_the_tables_of_a_long_run_holds_no_rows_in_memory(tmp_path):
    """6,000 tasks, of which the checkpoint knows 4,500; as lists and dictionaries they take 12 MB."""
    num, kept = 6_000, 4_500
    journal = [{"event": "joined", "client": 7, "incarnation": 2, "time_s": 0.0}]
    for number in range(1, num + 1):
        journal += [{"event": "assigned", "id": number, "time_s": 1.0}, {"event": "arrived", "time_s": 2.0}]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in journal))
    write_table(tmp_path / "metrics.csv", [["version", "loss"], ["0", "3.5"], ["100", "2.5"], ["5000", "1.5"]])
    header = ["client", "outcome", "merged_version", "assignment"]
    table = ([str(number % 9), "merged", str(number), str(number)] for number in range(1, num + 1))
    write_table(tmp_path / "clients.csv", chain([header], table))
    record = {"num_rows": kept, "num_events": kept + 1, "evaluated_version": 100}
    section = {"runtime": "simulated", "coordinator": {"version": kept, "last_id": kept}, "record": record}
    tracemalloc.start()
    try:
        mended = mend(saved := SavedRun(tmp_path, {}, section))
        cut_back(saved, mended.lost)
        assert tracemalloc.get_traced_memory()[1] < 3 * 2**20
    finally:
        tracemalloc.stop()
    assert (mended.last_id, mended.lost, mended.num_missing, mended.joins) == (num, [], 0, {7: 3})
    assert mended.merged == [(number % 9, number) for number in range(kept + 1, num + 1)]
    assert rows(tmp_path / "clients.csv")[-1][3] == str(kept) and len(rows(tmp_path / "clients.csv")) == 1 + kept
    assert [row[0] for row in rows(tmp_path / "metrics.csv")] == ["version", "0", "100"]


def test_merges_that_a_crash_has_undone_count_until_a_checkpoint_has_counted_them(tmp_path):
    """Two crashes after one checkpoint, of 10 events and two tasks, then another after a checkpoint of 14 events."""

    def mended(tasks, num_rows, num_events):
        with (tmp_path / "clients.csv").open("a", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(tasks)
        record = {"num_rows": num_rows, "num_events": num_events, "evaluated_version": 0}
        section = {"runtime": "distributed", "coordinator": {"version": 2, "last_id": 2}, "record": record}
        found = mend(saved := SavedRun(tmp_path, {}, section))
        cut_back(saved, found.lost)
        row = {"event": "resumed", "kept": num_events, "undone": found.merged}
        with (tmp_path / "events.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        return found.before, found.merged

    (tmp_path / "events.jsonl").write_text(json.dumps({"event": "run"}) + "\n")
    write_table(tmp_path / "metrics.csv", [["version"], ["0"]])
    write_table(tmp_path / "clients.csv", [["client", "outcome", "merged_version"], [1, "merged", 1], [2, "merged", 2]])
    assert mended([(1, "merged", 3), (2, "lost:other", 3), (1, "merged", 4)], 2, 10) == ([], [(1, 3), (1, 4)])
    assert mended([(2, "merged", 3)], 2, 10) == ([[(1, 3), (1, 4)]], [(2, 3)])
    assert mended([(3, "merged", 3), (3, "merged", 4)], 3, 14) == ([], [(3, 4)])
    assert mended([], 2, 10) == ([[(1, 3), (1, 4)], [(2, 3)], [(3, 4)]], [(3, 3)])  # the checkpoint of 14 is damaged


TORN = {"clients.csv": b"3,7,1", "metrics.csv": b"1", "events.jsonl": b'{"time_s":0.1,"eve', "seals.jsonl": b'{"at":1'}
TORN["samples.csv"] = b"6,cla\n\0\0,,,,,\n6"


def test_a_run_that_was_stopped_and_whose_files_end_in_torn_rows_ends_as_if_it_had_not_been(tmp_path):
    """The stop measures the model out of turn; a power failure, or a kill on a full disk, leaves the beginnings of rows."""
    options = ("--config", CONFIG, *SMALL, "--algorithm=fed_async", "--max_updates=17", "--eval_every=3")
    options += ("--samples.predictions=1", "--samples.every=2")
    simulated(*options, f"--output={tmp_path / 'whole'}")
    cut = tmp_path / "cut"
    stopped(8, *options, f"--output={cut}")
    assert [row[0] for row in rows(cut / "metrics.csv")] == ["version", "0", "3", "6", "8"]
    for name, row in TORN.items():
        with (cut / name).open("ab") as file:
            file.write(row)
    simulated("--resume", str(cut))
    assert metric_rows(cut) == metric_rows(tmp_path / "whole")
    for name in ("clients.csv", "samples.csv"):
        assert rows(cut / name) == rows(tmp_path / "whole" / name)
    assert replay(cut)["equal"] is True


@pytest.mark.parametrize("fails", ["_write", "open"])
def test_a_resume_without_room_for_its_seal_leaves_the_run_as_it_was(tmp_path, monkeypatch, fails):
    """Else the journal has a row that no seal covers, which an audit reports as added after the end of the run."""
    stopped(6, "--config", CONFIG, *SMALL, "--algorithm=fed_async", "--max_updates=9", f"--output={tmp_path / 'run'}")
    before, write = contents(tmp_path / "run"), AppendFile._write

    def full(file: AppendFile, data: bytes) -> None:
        if file.path.name == "seals.jsonl":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(file, data)

    def closed(*_: object, **__: object) -> None:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    with monkeypatch.context() as patch:
        patch.setattr(
            *(("raafl.runfolder.seals.SealFile", closed) if fails == "open" else (AppendFile, "_write", full))
        )
        with pytest.raises(BadInput, match=r"where writing fails \(seals.jsonl takes no row\): make it writable"):
            simulated("--resume", str(tmp_path / "run"))
    assert contents(tmp_path / "run") == before
    simulated("--resume", str(tmp_path / "run"))
    assert check_books(tmp_path / "run").findings == []
    assert replay(tmp_path / "run")["equal"] is True


def test_merges_undone_by_a_crash_are_still_known_after_a_resume_that_failed(tmp_path):
    """Rows of clients.csv alone tell them, so that these stay until the run goes on."""
    write_table(tmp_path / "metrics.csv", [["version"], ["0"], ["1"], ["2"], ["3"]])
    write_table(tmp_path / "clients.csv", [["client", "outcome", "merged_version"], [1, "merged", 1], [2, "merged", 2]])
    (tmp_path / "events.jsonl").write_text(json.dumps({"event": "run"}) + "\n")
    record = {"num_rows": 1, "num_events": 10, "evaluated_version": 1}
    section = {"runtime": "distributed", "coordinator": {"version": 3, "last_id": 2}, "record": record}
    saved = SavedRun(tmp_path, {}, section)
    assert [mend(saved).merged for _ in range(2)] == [[(2, 2)], [(2, 2)]]
    cut_back(saved, [])
    assert mend(saved).merged == []
    # version 3, at the checkpoint, is measured again: its metrics were not there yet
    assert [row[0] for row in rows(tmp_path / "metrics.csv")] == ["version", "0", "1", "2"]


PRIVATE = ("--algorithm=fed_buff", "--algorithm.buffer_size=3", "--max_updates=60", "--checkpoint_every=2")
PRIVATE += ("--privacy.clip_norm=1", "--privacy.noise_multiplier=0.5")


def spent(folder: Path) -> list[Counter[int]]:
    """By client: the updates in all merges of clients.csv, and the sum of the squares of their numbers in each merge."""
    merges = Counter((row["client"], row["merged_version"]) for row in dict_rows(folder) if row["outcome"] == "merged")
    updates, squares = Counter[int](), Counter[int]()
    for (client, _), num in merges.items():
        updates[int(client)] += num
        squares[int(client)] += num**2
    return [updates, squares]


def dict_rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "clients.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def restarted(parts, folder: Path, num_writes: int) -> list[Counter[int]] | None:
    """Resume a run as on the wall clock, in a forked process that is killed before it writes for the ``num_writes``-th time.

    Each row that is added, and each file that is put in the place of another, is a write. Returns what clients have spent
    of their privacy once the run is resumed; None = the process was killed before.
    """
    left = iter(range(num_writes))

    def mortal(write):
        def wrapped(*args):
            next(left, None) is None and os._exit(9)
            return write(*args)

        return wrapped

    told, tell = os.pipe()
    if (child := os.fork()) == 0:
        try:
            AppendFile._write, Path.replace = mortal(AppendFile._write), mortal(Path.replace)
            saved = load(folder, "simulated", parts.experiment)
            run = Run(parts, "", "distributed", replace(saved, section={**saved.section, "runtime": "distributed"}))
            with closing(run):
                memory = parts.coordinator.state.memory.of(PrivacyMemory)
                os.write(tell, json.dumps([[*memory.updates.items()], [*memory.squares.items()]]).encode())
            os._exit(0)
        finally:
            os._exit(1)
    os.close(tell)
    with os.fdopen(told) as file:
        text = file.read()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == (0 if text else 9)
    return [Counter(dict(book)) for book in json.loads(text)] if text else None


@pytest.mark.parametrize("how", ["crashed", "stopped"])
def test_a_kill_at_any_write_of_a_resume_neither_loses_a_merge_nor_counts_it_twice(tmp_path, monkeypatch, how):
    """And leaves books in order, also those that the end of a run has sealed."""
    folder = tmp_path / "run"
    options = ("--config", CONFIG, *SMALL, *PRIVATE, f"--output={folder}")
    crashed(monkeypatch, 17, *options) if how == "crashed" else stopped(5, *options)
    parsed = parse("simulate", ["--progress=quiet", "--resume", str(folder)])
    parts, expected = build(parsed.experiment, pace=False), spent(folder)
    assert (
        how == "stopped"
        or len(dict_rows(folder)) > load(folder, "simulated", parts.experiment).section["record"]["num_rows"]
    )
    num_kills = 0
    while restarted(parts, killed := Path(shutil.copytree(folder, tmp_path / str(num_kills))), num_kills) is None:
        assert not check_books(killed).findings
        assert (
            restarted(parts, killed, num_kills) is None and not check_books(killed).findings
        )  # at the same write again
        assert restarted(parts, killed, 99) == expected and not check_books(killed).findings
        num_kills += 1
    assert num_kills >= 4  # a seal, a row of the journal, and two tables
    assert restarted(parts, killed, 99) == expected  # and again, before the run has gone on


def test_merges_that_a_checkpoint_has_counted_are_not_counted_again_when_numbers_of_events_come_again(tmp_path):
    """Resumed from event 3, and from event 1 since that checkpoint was lost; then from one of event 2, written after that."""
    journal = [{"event": "run"}, *[{"event": "timer"}] * 4, {"event": "resumed", "kept": 3, "undone": [[1, 4]]}]
    journal += [{"event": "timer"}, {"event": "resumed", "kept": 1, "undone": [[2, 2]]}]
    counted = [*journal, *[{"event": "timer"}] * 2]
    write_table(tmp_path / "clients.csv", [["client", "outcome", "merged_version"]])

    def before(rows, num_events):
        (tmp_path / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        record = {"num_rows": 0, "num_events": num_events, "evaluated_version": 0}
        section = {"runtime": "distributed", "coordinator": {"version": 1, "last_id": 0}, "record": record}
        return mend(SavedRun(tmp_path, {}, section)).before

    assert before(journal, 1) == [[(1, 4)], [(2, 2)]]
    assert before(counted, 1) == [[(1, 4)], [(2, 2)]]
    assert before(counted, 2) == []
    # where rows are missing, their place is unknown: better twice than never
    assert before([{"event": "gap", "rows": 1, "last_id": 0}, *counted], 2) == [[(1, 4)]]


def test_a_restart_by_torchrun_never_takes_up_an_earlier_run(tmp_path, monkeypatch):
    """The first attempt dies before it has a folder; the note in runs/.torchrun is of yesterday's run of the same id."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "2")
    yesterday = tmp_path / "yesterday"
    (yesterday / "checkpoints").mkdir(parents=True)
    (yesterday / "checkpoints" / "version-000003.ckpt").touch()
    leave_note(yesterday)
    made = experiment(tmp_path / "today")
    for attempt in (0, 1):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))
        begun = after_restart(made)
        assert begun.resume is None and begun.output in (None, made.output)
    leave_note(yesterday)
    assert after_restart(made).resume == str(yesterday)


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """The folder of a simulated run that was cut off."""
    folder = tmp_path_factory.mktemp("interrupted") / "run"
    with pytest.MonkeyPatch.context() as patch:
        options = ["--config", CONFIG, *SMALL, "--algorithm=fed_buff", "--max_updates=40", "--checkpoint_every=1"]
        crashed(patch, 20, *options, f"--output={folder}")
    return folder


@pytest.mark.parametrize(
    ("where", "value", "says"),
    [
        (("coordinator", "waiting"), None, "KeyError: 'waiting'"),
        (("coordinator",), None, "KeyError: 'coordinator'"),
        (("clock",), 5, "TypeError"),
        (("clock", "now"), float("nan"), "now is nan"),
        (("clock", "now"), "late", "now is not a number"),
        (("clock", "heap", 0, 0), -1.0, "timers is -1.0"),
        (("clock", "heap", 0, 3), "x", "Error"),
        (("record", "num_rows"), -5, "num_rows is -5"),
        (("record", "bytes"), [-1, 0], "bytes is -1"),
        (("record", "due"), [[4, 5]], "TypeError"),
        (("coordinator", "joins"), [[1, -3]], "joins is -3"),
        (("coordinator", "unanswered_s"), [[1, ["long"]]], "unanswered_s is not a number"),
        (("coordinator", "rng"), [3, [1], None], "Error"),
        (("coordinator", "memory"), {"__pairs__": 3}, "TypeError"),
    ],
)
def test_a_checkpoint_that_somebody_altered_is_refused_in_a_line(tmp_path, interrupted, where, value, says):
    folder = Path(shutil.copytree(interrupted, tmp_path / "run"))
    file = newest(folder)
    content = torch.load(file, weights_only=True)
    place = content["raafl"]["state"]
    for name in where[:-1]:
        place = place[name]
    if value is None:
        del place[where[-1]]
    else:
        place[where[-1]] = value
    torch.save(content, file)
    before = contents(folder)
    with pytest.raises(
        BadInput, match=rf"^resume: the last checkpoint .* was altered \(.*{re.escape(says)}.*: use an"
    ) as refused:
        simulated("--resume", str(folder))
    assert "\n" not in str(refused.value)
    # tables are cut back last, so that a resume that fails loses nothing
    assert where[:2] == ("clock", "heap") or contents(folder) == before


def test_a_link_below_the_top_of_a_folder_may_only_stay_in_it(tmp_path, interrupted):
    """As W&B's `latest-run` does; a foreign folder might send a logger's files elsewhere."""
    folder = Path(shutil.copytree(interrupted, tmp_path / "run"))
    (folder / "loggers" / "wandb" / "run-1").mkdir(parents=True)
    (folder / "loggers" / "wandb" / "latest-run").symlink_to("run-1")
    (folder / "loggers" / "wandb" / "run-1" / "logs").mkdir()
    (folder / "loggers" / "wandb" / "run-1" / "logs" / "debug-core.log").symlink_to("/var/log/wandb.log")
    load(folder, "simulated", experiment(folder))
    (tmp_path / "elsewhere").mkdir()
    (folder / "loggers" / "csv").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BadInput, match=r"'.*loggers/csv' is a symbolic link"):
        load(folder, "simulated", experiment(folder))


def test_nothing_is_written_through_a_link_that_somebody_left_in_a_folder(tmp_path):
    """A torn last line would be cut off there, and rows added."""
    mine = tmp_path / "mine.txt"
    mine.write_text("not to be touched")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "events.jsonl").symlink_to(mine)
    with pytest.raises(BadInput, match=r"'.*events.jsonl' is a symbolic link"):
        load(tmp_path / "run", "simulated", experiment(tmp_path))
    assert mine.read_text() == "not to be touched"
