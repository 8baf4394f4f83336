"""What RAM-Fed's server remembers, in files: the same bits as in memory, hardly any memory, and no file left."""

from __future__ import annotations

import copy
import errno
import os
import random
import shutil
import sys
from collections import namedtuple

import psutil
import pytest
import torch
from torch import nn

from raafl.algorithms import ram_fed
from raafl.core import saving
from raafl.core.state import GlobalState
from raafl.core.types import Update
from raafl.errors import BadInput, RunFailed
from raafl.local.malloc import give_back
from raafl.parts.merge.remembered import Remembered
from raafl.parts.select.coverage import of_regions
from raafl.runtime.replay import replay
from raafl.submodel import FULL, FlatTensors, Layout, Submodels
from raafl.submodel.tensor_files import is_in_files, is_in_ram, zeros_in
from tests.algorithms.test_ram_fed import Net
from tests.helpers.coordinators import coordinator_for, cut_in_the_middle, line_state, values_of
from tests.helpers.crash import crashed, simulated
from tests.helpers.merges import merge_all, take

CONFIG = "configs/ram-fed.yaml"

LAYOUT = Layout.pack([("a", (3, 2), torch.float32), ("none", (0,), torch.float16), ("b", (5,), torch.float64)])


def state_of(module):
    submodels = Submodels(module)
    return GlobalState(submodels, submodels.state(module).clone())


def test_too_many_mapped_files_are_told_like_a_full_disk_and_leave_none(tmp_path, monkeypatch):
    def from_file(*_, **__):
        raise RuntimeError("unable to mmap 24 bytes from file: Cannot allocate memory (12)")

    monkeypatch.setattr(torch, "from_file", from_file)
    with pytest.raises(RunFailed, match=r"Cannot allocate memory \(unable to mmap 24 bytes"):
        zeros_in(str(tmp_path), LAYOUT)
    assert not list(tmp_path.iterdir())


# ---- the same bits ----


def test_the_bits_are_those_of_memory_with_regions_that_nobody_trains_and_memories_that_grow_old(tmp_path):
    torch.manual_seed(0)
    draw, module = random.Random(0), Net()
    merges = [Remembered(max_age=3), Remembered(max_age=3, folder=str(tmp_path))]
    states = [state_of(copy.deepcopy(module)) for _ in merges]
    submodels = states[0].submodels
    uncovered = 0
    for _ in range(14):
        clients = draw.sample([1, 2, 3], draw.choice([1, 2]))
        regions = {client: sorted(draw.sample(range(3), draw.choice([1, 1, 2]))) for client in clients}
        uncovered += len(set().union(*regions.values())) < 3
        for client in clients:
            spec = of_regions(submodels.axes, regions[client], 3)
            tensors = FlatTensors.empty(submodels.layout(spec, "trained"))
            for buffer in tensors.buffers.values():
                buffer.normal_()
            for merge, state in zip(merges, states, strict=True):
                take(merge, state, Update(0, client, 0, tensors.clone(), 1), spec, 0)
        for merge, state in zip(merges, states, strict=True):
            merge_all(merge, state)
            state.version += 1
        assert states[0].values.fingerprint() == states[1].values.fingerprint()
    assert uncovered >= 3 and is_in_files(states[1].clients.values["latest update"][1])
    assert merges[0].report(states[0]) == merges[1].report(states[1])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("cut", [3, 6])
def test_they_survive_a_restart(tmp_path, cut):
    def fresh(**more):
        algorithm = ram_fed(mask=[1, 2], regions=2, max_age=2, **more)
        return coordinator_for(algorithm, line_state(hidden=4), min_clients=4)

    def value(step):
        return float(step % 5) - 1.0

    in_ram, _ = cut_in_the_middle(fresh, cut, value)
    whole, again = cut_in_the_middle(lambda: fresh(memory="disk", memory_folder=str(tmp_path)), cut, value)
    assert torch.equal(values_of(in_ram.state), values_of(whole.state))
    assert torch.equal(values_of(whole.state), values_of(again.state))
    assert all(map(is_in_files, again.state.clients.values["latest update"].values()))


def test_a_run_ends_alike_in_memory_in_files_resumed_and_replayed(tmp_path, monkeypatch):
    folder = tmp_path / "files"
    folder.mkdir()
    options = [
        *("--config", CONFIG, "--max_updates=40", "--eval_every=40", "--checkpoint_every=1", "--algorithm.max_age=2"),
        *("--algorithm.trained=1", "--algorithm.every=2"),
    ]
    disk = [*options, "--algorithm.memory=disk", f"--algorithm.memory_folder={folder}"]
    ram = simulated(*options, f"--output={tmp_path / 'ram'}")
    crashed(monkeypatch, 25, *disk, f"--output={tmp_path / 'disk'}")
    resumed = simulated(*disk, f"--resume={tmp_path / 'disk'}")
    assert resumed["model_digest"] == ram["model_digest"] and resumed["memory"] == ram["memory"]
    assert replay(tmp_path / "disk")["equal"] is True
    assert list(folder.iterdir()) == []


# ---- the memory it takes ----


def test_the_server_keeps_hardly_any_of_it_in_memory(tmp_path):
    module = nn.Linear(1000, 2000, bias=False)  # 8 MB
    state, merge = state_of(module), Remembered(folder=str(tmp_path))
    update = FlatTensors.zeros(state.submodels.layout(FULL, "trained"))

    def merge_one(client):
        for buffer in update.buffers.values():
            buffer.fill_(float(client))
        take(merge, state, Update(0, client, 0, update, 1), FULL, 0)
        merge_all(merge, state)
        state.version += 1

    def anonymous():  # a file's pages, too, count as the process's while it has them mapped
        give_back(0)  # of what an earlier test had the allocator keep, nothing is in use
        memory = psutil.Process().memory_info()
        return memory.rss - memory.shared

    merge_one(1)
    before = anonymous()
    for client in range(2, 13):
        merge_one(client)
    # what a checkpoint is written from: the sums, and twelve copies in files, too
    saved = saving.to_plain([state.memory.to_plain(), state.clients.values])
    grown = anonymous() - before
    assert grown < 44e6, "of 176 MB that are remembered, and saved"
    merge_one(1)  # not into what is saved
    latest = dict(saved[1]["__pairs__"])["latest update"]
    for client, flat in latest["__pairs__"]:
        (buffer,) = flat["buffers"]
        assert type(buffer) is torch.Tensor and buffer.eq(float(client)).all()


# ---- the files ----


def test_tensors_in_files_are_tensors(tmp_path):
    flat = zeros_in(str(tmp_path), LAYOUT)
    assert all(buffer.eq(0).all() for buffer in flat.buffers.values())
    flat["a"].fill_(2.0)
    twice = flat.clone()
    flat["a"].mul_(3.0)
    assert flat["a"].tolist() == [[6.0, 6.0]] * 3 and twice["a"].tolist() == [[2.0, 2.0]] * 3
    assert type(flat["a"]) is torch.Tensor and type(flat.buffers[torch.float32] + 1) is torch.Tensor
    assert is_in_files(flat) and not is_in_files(FlatTensors.zeros(LAYOUT))
    assert list(tmp_path.iterdir()) == []


def no_room(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_without_room_a_copy_is_made_in_memory_and_no_client_is_added(tmp_path, monkeypatch):
    flat = zeros_in(str(tmp_path), LAYOUT)
    flat["b"].fill_(1.0)
    monkeypatch.setattr(os, "posix_fallocate", no_room)
    assert flat.clone()["b"].tolist() == [1.0] * 5
    with pytest.raises(
        RunFailed, match=r"no room to store the latest update of one more client \(64 bytes\): No space left"
    ):
        zeros_in(str(tmp_path), LAYOUT)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_in_ram_is_known(tmp_path):
    assert is_in_ram("/dev/shm") or not os.path.isdir("/dev/shm")
    assert not is_in_ram("/proc")


# ---- what the user is told ----

Usage = namedtuple("Usage", "total used free")


def test_where_it_lies_and_what_it_takes_is_said_at_the_start(tmp_path, monkeypatch):
    state = line_state(hidden=2)  # 7 floats
    size = r"each client's latest update is remembered: 10 clients x 28 bytes = 280 bytes"
    (note,) = Remembered().notes(state, 10)
    assert note == f"{size} in the server's memory (cpu); and in each checkpoint"
    merge = Remembered(folder=str(tmp_path))
    assert merge.notes(state, 10)[0].startswith(f"{size} in files in {tmp_path}") and merge.check(state) == []
    monkeypatch.setattr(sys.modules[Remembered.__module__], "is_in_ram", lambda folder: True)
    assert "which is in RAM itself" in merge.notes(state, 10)[0]
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(1000, 441, 559))
    with pytest.raises(BadInput, match=r"559 bytes free, but 560 are needed: 10 clients x 28 bytes, and as much again"):
        merge.notes(state, 10)


def test_a_folder_that_is_none_is_found_before_the_start(tmp_path):
    (tmp_path / "file").touch()
    for folder, said in (("nowhere", "No such file"), ("file", "Not a directory")):
        (problem,) = Remembered(folder=str(tmp_path / folder)).check(line_state())
        assert problem.startswith(f"memory_folder is '{tmp_path / folder}', in which no file can be created: {said}")
