"""What memory a client says it has, and that one that is too small is told before it joins."""

from __future__ import annotations

import dataclasses
import inspect
import math

import pytest
import torch

from raafl.algorithms import ALGORITHMS
from raafl.devices.gpus import Place
from raafl.devices.measure import MemoryRoom
from raafl.errors import BadInput
from raafl.local.train import FabricOptions
from raafl.runtime.client import setup
from raafl.runtime.client.setup import ClientSetup
from raafl.runtime.setup import client_infos, client_parts, load_data
from raafl.submodel import FULL
from tests.helpers.methods import each_method
from tests.helpers.small_runs import experiment, unequal

ROOM = MemoryRoom(1e9, "control group")
USABLE = math.floor(0.9e9 - 64 * 2**20)


def asked(tmp_path, monkeypatch, algorithm="fed_avg", room=ROOM, **fields):
    """What client 3 of a run says."""
    made = experiment(tmp_path / "run", algorithm, **fields)
    made.check()
    data = load_data(made)
    submodels, _ = client_parts(made, data, made.fabric)
    monkeypatch.setattr(setup, "memory_room", lambda device, num_sharing: room)
    info, notes = setup.with_memory(made, client_infos(made, data)[2], submodels, data, torch.device("cpu"), Place())
    return info.profile.memory_bytes, notes


def test_a_client_that_declares_none_measures_it_and_says_so(tmp_path, monkeypatch):
    found, (note,) = asked(tmp_path, monkeypatch)
    assert found == USABLE
    assert note.startswith("memory for a task: 833 MB of 1 GB left (control group); ")


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"memory": "none"}, math.inf),
        ({"memory": "5e8"}, 5e8),
        ({"memory": 5e8}, 5e8),
        ({"devices": unequal(memory_bytes=7e8)}, 7e8),
        ({"devices": unequal(memory_bytes=7e8), "memory": 5e8}, 7e8),
        ({"room": MemoryRoom(math.inf, "available memory")}, math.inf),
    ],
)
def test_what_is_declared_is_not_measured(tmp_path, monkeypatch, fields, found):
    assert asked(tmp_path, monkeypatch, **fields) == (found, [])


GIB = 2**30
HERE = [  # what the environment says, and the GPU and the memory that a client then has of two GPUs of 8 GiB
    ({"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "3"}, 1, 0.9 * 8 * GIB - GIB / 2),  # fit --local 2: neither is shared
    ({"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}, 0, 0.9 * 4 * GIB - GIB / 2),  # fit --local 3: one is
    ({"RANK": "1", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, 1, 0.9 * 8 * GIB - GIB / 2),  # one client on both
]


@pytest.mark.parametrize(("environment", "gpu", "found"), HERE)
def test_an_emulated_gpu_is_taken_and_measured_by_one_map(
    tmp_path, monkeypatch, emulated_cuda, environment, gpu, found
):
    for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (8 * GIB, 8 * GIB))
    made = experiment(tmp_path / "run", fabric=FabricOptions(accelerator="cuda"), devices=None)
    site = ClientSetup.build(made, "", 3, own_data=False)
    assert site.trainer.fabric.device == torch.device("cuda", gpu)
    assert site.info.profile.memory_bytes == math.floor(found)


@pytest.mark.parametrize(
    ("times", "device", "what"),
    [
        (math.inf, "cpu", "keep_freed"),
        (1.51, "cpu", "keep_freed"),
        (1.49, "cpu", "free_at_once"),
        (0.5, "cpu", "free_at_once"),
        (0.5, "cuda", "keep_freed"),
    ],
)
def test_what_is_freed_is_kept_where_the_whole_model_and_half_of_it_has_room(
    tmp_path, monkeypatch, times, device, what
):
    made = experiment(tmp_path / "run", "fed_avg")
    data = load_data(made)
    submodels, _ = client_parts(made, data, made.fabric)
    done = []
    for name in ("keep_freed", "free_at_once"):
        monkeypatch.setattr(setup.malloc, name, lambda name=name: done.append(name))
    info = client_infos(made, data)[0]
    room = times * submodels.cost(FULL, made.train.batch_size or data.batch_size).peak_bytes
    info = dataclasses.replace(info, profile=dataclasses.replace(info.profile, memory_bytes=room))
    setup.settle_heap(made, info, submodels, data, torch.device(device))
    assert done == [what]


def test_simulated_clients_never_measure(tmp_path):
    assert {p.memory_bytes for p in experiment(tmp_path / "run").profiles()} == {math.inf}
    assert {p.memory_bytes for p in experiment(tmp_path / "run", memory=3e8, devices=None).profiles()} == {3e8}


def test_a_client_that_measured_too_little_is_told_where_the_number_comes_from(tmp_path, monkeypatch):
    with pytest.raises(
        BadInput, match=r"^client 3: memory_bytes is 1, .*\nmemory for a task: 1 B of 1 MB left \(control group\)"
    ):
        asked(tmp_path, monkeypatch, room=MemoryRoom(1e6, "control group"))


@pytest.mark.parametrize("value", ["measured", "-1", "0", "nan"])
def test_a_wrong_value_is_one_line(tmp_path, value):
    with pytest.raises(BadInput, match=rf"^memory is '{value}': give measure, none, or a number of bytes above 0$"):
        experiment(tmp_path / "run", memory=value).check()


@pytest.mark.parametrize("name", each_method(parts=["select"]))
def test_a_client_too_small_for_anything_is_told_before_it_joins(tmp_path, monkeypatch, name):
    """The smallest part of the model needs kilobytes. 10 bytes are too few for any; a gigabyte is enough for all."""
    make = ALGORITHMS[name]
    needs = [p for p in inspect.signature(make).parameters.values() if p.default is p.empty]
    if needs:
        pytest.skip(f"{name} has to be given {needs[0]}")
    asked(tmp_path, monkeypatch, name)
    with pytest.raises(BadInput, match=r"^client 3: memory_bytes is 10, "):
        asked(
            tmp_path, monkeypatch, name, devices=[*unequal()[:2], dataclasses.replace(unequal()[2], memory_bytes=10.0)]
        )
