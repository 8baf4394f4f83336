"""Which GPU each process takes, by topologies that are made up, and what of its memory a client may believe to be its own."""

from __future__ import annotations

import pytest
import torch

from raafl.devices.gpus import Place
from raafl.devices.measure import memory_room
from raafl.local.train import FabricOptions
from tests.habits.source import ROOT


def rows():
    """The table of docs/gpu.md: ranks on the machine, GPUs, server_device, the GPU of each local rank."""
    lines = [line for line in (ROOT / "docs" / "gpu.md").read_text().splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: row[1:] for row in cells if len(row) == 5 and row[1].isdecimal()}


@pytest.mark.parametrize("processes", rows())
def test_each_rank_has_its_gpu(processes):
    num_ranks, num_gpus, server_device, text = rows()[processes]
    gpus = [None if gpu == "-" else int(gpu) for gpu in text.split()]
    places = [
        Place(rank, int(num_ranks), int(num_gpus), None if server_device == "none" else server_device)
        for rank in range(int(num_ranks))
    ]
    assert [place.gpu for place in places] == gpus
    for gpu in {gpu for gpu in gpus if gpu is not None}:
        assert places[0].num_sharing(gpu) == gpus.count(gpu)


def test_the_table_is_read_and_a_server_without_an_index_has_the_first():
    assert len(rows()) == 12
    assert [Place(rank, 3, 4, "cuda").gpu for rank in range(3)] == [0, 1, 2]


def test_a_gpu_that_is_chosen_is_everyones_but_the_servers():
    place = Place(1, 5, 4, "cuda:0", chosen=3)
    assert [place.gpu_of(rank) for rank in range(5)] == [0, 3, 3, 3, 3]
    assert (place.num_sharing(3), place.num_sharing(0), place.num_sharing(None)) == (4, 1, 5)


SEEN = [  # what the environment has of RANK, LOCAL_RANK and LOCAL_WORLD_SIZE; the GPU of 4, and how many share it
    ({"RANK": "3", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "9"}, 2, 2),  # torchrun; ranks 3 and 7
    ({"RANK": "11", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "8"}, 3, 2),  # its second node
    ({"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}, 2, 1),  # fit --local
    ({"LOCAL_RANK": "3"}, 3, 1),  # set by hand
    ({}, 0, 1),  # a client alone
]


@pytest.fixture
def four_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(("environment", "gpu", "num_sharing"), SEEN)
def test_the_environment_says_where_a_process_stands(monkeypatch, four_gpus, environment, gpu, num_sharing):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    place = Place.here("cpu")
    assert (place.gpu, place.num_sharing(place.gpu)) == (gpu, num_sharing)
    assert Place.here("cpu", chosen=1).gpu == 1


@pytest.mark.parametrize(("accelerator", "device"), [("cuda", 2), ("gpu", 2), ("auto", 2), ("cpu", None)])
def test_who_trains_on_gpus_takes_that_of_its_place_unless_one_is_named(accelerator, device):
    place = Place(2, 4, 4)
    assert FabricOptions(accelerator).on(place.gpu).device == device
    assert FabricOptions(accelerator, device=0).on(place.gpu).device == 0
    assert FabricOptions(accelerator).on(Place().gpu).device is None


def test_a_client_has_its_share_of_a_gpu_less_its_context_and_workspace(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (80 * 10**9, 81 * 10**9))
    assert memory_room("cuda:1").num_bytes == 80e9
    room = memory_room(torch.device("cuda", 1), 2)
    assert (room.num_bytes, room.limit) == (40e9, "free on cuda:1")
    assert room.for_task_bytes == 36e9 - 512 * 2**20
