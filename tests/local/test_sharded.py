"""What a sharded client refuses, and what memory it has; that it trains as one process does is in tests/launch/test_spanning.py."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from raafl.algorithms import diloco, fed_avg, fed_prox, scaffold
from raafl.core.algorithm import Local
from raafl.core.options import FabricOptions
from raafl.errors import BadInput
from raafl.local.client_group import problem, room_bytes
from raafl.submodel import Submodels

PLAIN = Submodels(nn.Linear(4, 2))


@pytest.mark.parametrize("algorithm", [diloco(), fed_avg()], ids=lambda one: one.name)
def test_plain_steps_can_be_sharded(algorithm):
    assert problem(algorithm.local, FabricOptions(), PLAIN) is None


@pytest.mark.parametrize(
    "algorithm", [diloco(inner_state="kept"), fed_prox(prox=0.1), scaffold()], ids=lambda one: one.name
)
def test_methods_that_read_whole_parameters_are_refused(algorithm):
    assert "works with whole parameters" in problem(algorithm.local, FabricOptions(), PLAIN)


def test_a_scale_of_gradients_and_complex_parameters_are_refused():
    assert "16-mixed" in problem(Local(), FabricOptions(precision="16-mixed"), PLAIN)
    waves = nn.Linear(4, 2, dtype=torch.complex64)
    assert "'weight' is complex" in problem(Local(), FabricOptions(), Submodels(waves))


def test_memory_is_what_the_processes_have_beside_values_received_and_sent():
    """Four processes of 10 GB and a model of 2 GB: 6 GB of each are left for a quarter of what a task needs."""
    assert room_bytes(10e9, 4, 2 * 10**9) == 24e9
    with pytest.raises(BadInput, match=r"memory is 4 GB: with fabric.shard the first process needs more than 4 GB"):
        room_bytes(4e9, 4, 2 * 10**9)
