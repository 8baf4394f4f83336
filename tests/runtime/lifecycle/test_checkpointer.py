"""Checkpoints by time, and those that cannot be written: the run goes on, the last good one stays."""

from __future__ import annotations

import csv
import errno
import hashlib
import json
import os
import shutil
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from raafl.algorithm import Mean, MergeMemory
from raafl.errors import BadInput
from raafl.runfolder import append_file, checkpoint_reader
from raafl.runfolder import checkpoints as checkpoint
from raafl.runfolder.schema import EVENTS
from raafl.runfolder.seals import read_seals
from raafl.runtime.lifecycle.checkpointer import Checkpointer, SavedForm, cause, check_space
from raafl.runtime.run import simulate
from tests.helpers.small_runs import experiment


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def saver(tmp_path):
    """A saver whose checkpoints are made here, with a clock that is set by hand."""
    import torch

    made = Checkpointer(
        tmp_path, SavedForm(torch.nn.Linear(1, 1)), 2, "simulated", record=None, every_s=10.0, clock=Clock()
    )
    yield made
    made.close()


def test_a_checkpoint_is_due_when_the_last_is_old_enough_and_written(saver):
    clock = saver._clock
    assert not saver.checkpoint_due()
    clock.now = 9.9
    assert not saver.checkpoint_due()
    clock.now = 10.0
    assert saver.checkpoint_due()
    from concurrent.futures import Future

    saver._last = Future()  # one is being written
    assert not saver.checkpoint_due()
    saver._last.set_result(None)
    assert saver.checkpoint_due()
    saver._every_s = None
    assert not saver.checkpoint_due()


@pytest.mark.parametrize(("checkpoint_s", "least", "most"), [(1e-9, 2, 3), (3600.0, 1, 1), (None, 1, 1)])
def test_checkpoints_by_time_change_nothing_else_and_are_bounded(tmp_path, checkpoint_s, least, most):
    plain, _ = simulate(experiment(tmp_path / "plain", "fed_async", checkpoint_s=None))
    summary, folder = simulate(experiment(tmp_path / "run", "fed_async", checkpoint_s=checkpoint_s))
    assert summary["model_digest"] == plain["model_digest"]
    files = list((folder / "checkpoints").glob("*.ckpt"))
    assert least <= len(files) <= most
    assert checkpoint.newest(folder).stem == f"version-{summary['versions']:06d}"


def test_each_checkpoint_is_sealed_once_it_is_written_with_the_rows_before_it(tmp_path, monkeypatch):
    write, rows = checkpoint.write, {}

    def fail_first(folder, content, **options):
        version = content["global_step"]
        rows[version] = (folder / "events.jsonl").read_bytes().count(b"\n")
        if version == 4:
            raise OSError(errno.EROFS, "Read-only file system")
        return write(folder, content, **options)

    monkeypatch.setattr(checkpoint, "write", fail_first)
    _, folder = simulate(experiment(tmp_path / "run", "fed_async", checkpoint_every=4, keep_checkpoints=9))
    found = [seal.data for seal in read_seals(folder / "seals.jsonl")]
    assert [(seal["version"], sorted(seal["files"])) for seal in found[:-1]] == [
        (0, ["config.yaml"]),
        (8, ["checkpoints/version-000008.ckpt"]),
        (12, ["checkpoints/version-000012.ckpt"]),
    ]
    lines = (folder / "events.jsonl").read_text().splitlines()
    for seal in found[1:-1]:
        assert (
            1 < seal["rows"] <= rows[seal["version"]] and json.loads(lines[seal["rows"] - 1])["chain"] == seal["head"]
        )
        (path, digest), *_ = seal["files"].items()
        assert hashlib.sha256((folder / path).read_bytes()).hexdigest() == digest


@dataclass
class Seen(MergeMemory):
    key = "seen"
    clients: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class Remembers(Mean):
    def receive(self, state, update, spec, staleness):
        state.memory.of(Seen).clients.add(update.client)
        super().receive(state, update, spec, staleness)


def test_a_method_whose_state_cannot_be_saved_loses_its_checkpoints_but_not_the_run(tmp_path, monkeypatch):
    (tmp_path / "system").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "system"))
    plain, _ = simulate(experiment(tmp_path / "plain", "fed_async"))
    planned = experiment(tmp_path / "run", "fed_async", checkpoint_every=4)
    mean = planned.algorithm.merge
    merge = Remembers(mean.alpha, mean.staleness, mean.by_samples)
    summary, folder = simulate(replace(planned, algorithm=replace(planned.algorithm, merge=merge)))
    assert summary["versions"] == 12 and summary["model_digest"] == plain["model_digest"]
    assert not list(folder.glob("checkpoints/*")) and Path(summary["model_copy"]).is_file()
    assert "cannot be written: TypeError: a set cannot be saved in a checkpoint: use dicts" in summary["warnings"][0]
    assert [row["version"] for row in csv.DictReader((folder / "metrics.csv").open())][-1] == "12"


def test_the_rows_that_a_checkpoint_knows_of_are_on_the_disk_before_it(tmp_path, monkeypatch):
    """A power failure in between leaves the checkpoint before, and never one that is newer than the journal."""
    flush, rename, flushed, checkpoints = os.fdatasync, Path.replace, [], []

    def flushes(descriptor):
        flush(descriptor)
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        flushed.append((path.name, path.read_bytes()))

    def renames(path, target):
        if Path(target).suffix == ".ckpt":
            checkpoints.append((Path(target).name, dict(flushed)))
        return rename(path, target)

    monkeypatch.setattr(os, "fdatasync", flushes)
    monkeypatch.setattr(Path, "replace", renames)
    _, folder = simulate(experiment(tmp_path / "run", "fed_async", checkpoint_every=4, keep_checkpoints=9))
    assert [name for name, _ in checkpoints] == [f"version-{version:06d}.ckpt" for version in (4, 8, 12)]
    for name, on_disk in checkpoints:
        record = checkpoint_reader.load(folder / "checkpoints" / name).raafl["record"]
        kinds = [json.loads(line)["event"] for line in on_disk["events.jsonl"].splitlines()]
        assert sum(kind in EVENTS for kind in kinds) >= record["num_events"]
        assert len(on_disk["clients.csv"].splitlines()) > record["num_rows"]


def test_a_checkpoint_that_cannot_be_written_is_reported_and_the_next_is_tried(tmp_path, monkeypatch, capsys):
    """Two of them meet a full disk within torch.save, which says so in words of its own."""
    sync, calls = os.fsync, []

    def full(descriptor):
        if ".ckpt" in os.readlink(f"/proc/self/fd/{descriptor}"):
            calls.append(descriptor)
            if len(calls) in (2, 3):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(descriptor)

    monkeypatch.setattr(append_file.os, "fsync", full)
    settings = experiment(tmp_path / "run", "fed_async", checkpoint_every=2, keep_checkpoints=9)
    summary, folder = simulate(settings)
    assert [file.stem for file in checkpoint.versions(folder)] == [
        "version-000002",
        "version-000008",
        "version-000010",
        "version-000012",
    ]
    assert summary["unwritten"] == {} and len(summary["warnings"]) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "checkpoint" in line]
    assert "the checkpoint of version 4 in" in line and "No space left on device" in line
    assert len(list((folder / "checkpoints").iterdir())) == 4  # no temporary file


def test_the_last_checkpoint_fails_and_the_one_before_is_good(tmp_path, monkeypatch):
    write = checkpoint.write

    def fail_last(folder, content, **options):
        if content["global_step"] == 12:
            raise OSError(errno.EROFS, "Read-only file system")
        return write(folder, content, **options)

    monkeypatch.setattr(checkpoint, "write", fail_last)
    summary, folder = simulate(experiment(tmp_path / "run", "fed_async", checkpoint_every=5))
    assert summary["unwritten"] == {"checkpoints": 1}
    assert "Read-only file system" in summary["warnings"][0]
    assert checkpoint_reader.load(folder).version == 10


def test_a_run_whose_folder_is_deleted_goes_on_in_one_made_again(tmp_path, monkeypatch):
    on_settled, seen = Checkpointer.on_settled, []

    def delete(self, settled, now):
        seen.append(settled)
        if len(seen) == 6:
            shutil.rmtree(tmp_path / "run")
        on_settled(self, settled, now)

    plain, _ = simulate(experiment(tmp_path / "plain", "fed_async"))
    monkeypatch.setattr(Checkpointer, "on_settled", delete)
    summary, folder = simulate(experiment(tmp_path / "run", "fed_async"))
    assert summary["model_digest"] == plain["model_digest"]
    assert checkpoint_reader.load(folder).version == summary["versions"]
    assert summary["unwritten"]["events.jsonl"] > 6 and summary["unwritten"]["clients.csv"] >= 6
    assert any("deleted during the run" in line for line in summary["warnings"])
    assert (folder / "config.yaml").exists() and (folder / "summary.json").exists()


def test_space_for_all_checkpoints_one_more_and_the_model_is_asked_for_where_the_folder_will_be(tmp_path, monkeypatch):
    free, asked = iter((40, 39)), []
    monkeypatch.setattr(shutil, "disk_usage", lambda path: asked.append(path) or SimpleNamespace(free=next(free)))
    check_space(tmp_path / "new" / "run", 10, keep=2)
    words = r"has 39 B free, but the run will write 40 B or more \(2 \+ 1 checkpoints and the model, 10 B each"
    with pytest.raises(BadInput, match=words):
        check_space(tmp_path / "new" / "run", 10, keep=2)
    assert asked == [tmp_path] * 2


@pytest.mark.parametrize("link", ["__cause__", "__context__"])
def test_the_systems_words_are_found_behind_an_error_of_torch(link):
    outer = RuntimeError("unexpected\n pos 64")
    setattr(outer, link, OSError("no number"))
    assert cause(outer) == "RuntimeError: unexpected pos 64"
    getattr(outer, link).__context__ = OSError(errno.ENOSPC, "No space left on device")
    assert cause(outer) == "No space left on device"
