from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from raafl.algorithms import fed_avg, split_fed
from raafl.algorithms.split_fed.exchange import halves
from raafl.core.algorithm import SelectContext, Training
from raafl.core.state import GlobalState
from raafl.core.types import ClientInfo, Work
from raafl.devices.profiles import Profile
from raafl.runfolder.schema import EXCHANGES
from raafl.submodel import FULL, SpecError, Submodels
from tests.algorithms.split_fed.models import Tied, mlp, submodels_of


def fleet_for(submodels: Submodels, algorithm, **profile) -> SelectContext:
    import random

    state = GlobalState(submodels, submodels.state(mlp()))
    clients = {1: ClientInfo(1, 70, Profile(**profile))}
    return SelectContext(state, clients, random.Random(0), Training(num_epochs=3), 32, local=algorithm.local)


LINK = {"latency_s": 0.25, "flops_per_s": 1e6, "down_bytes_per_s": 1e4, "up_bytes_per_s": 2e4}


@pytest.mark.parametrize(
    ("arguments", "path"),
    [
        ({}, "layers.4"),  # two layers at the client; the last place to cut with these, of those that send least
        ({"client_layers": 1}, "layers.2"),
        ({"client_layers": 9}, "layers.4"),
        ({"share": 0.01}, "layers.2"),  # 1560 of 2130 parameters are 73 %, 1960 are 92 %
        ({"share": 0.8}, "layers.2"),
        ({"share": 0.9}, "layers.4"),
        ({"cut": "layers.1"}, "layers.1"),
    ],
)
def test_where_the_settings_cut(arguments, path):
    assert split_fed(**arguments).local.choose_cut(submodels_of(mlp)).path == path


def test_a_cut_that_there_is_not_and_memory_that_is_too_small_are_named_before_the_start():
    submodels = submodels_of(mlp)
    algorithm = split_fed(cut="layers.9")
    (problem,) = algorithm.select.check(fleet_for(submodels, algorithm))
    assert "cut is 'layers.9', where the model cannot be cut: use one of layers.1, layers.2" in problem
    algorithm = split_fed()
    (problem,) = algorithm.select.check(fleet_for(submodels, algorithm, memory_bytes=1000.0))
    assert "client 1: memory_bytes is 1000, the part up to 'layers.4' needs" in problem
    with pytest.raises(SpecError, match=r"the model cannot be cut after 'layers\.5'"):
        halves(submodels, "layers.5")


def test_the_cost_is_that_of_the_clients_layers_and_of_every_samples_activation_and_gradient():
    submodels = submodels_of(mlp)
    local = split_fed(cut="layers.2").local
    fleet = fleet_for(submodels, split_fed(cut="layers.2"))
    work = split_fed().select(fleet.clients[1], fleet)
    terms = {"cut": "layers.2", "batch_size": 32, "num_samples": 70, "per_epoch": 3, "batches": 9, "samples": 210}
    terms["sends"] = "values"
    assert work == Work(num_epochs=3, extra={"split": terms})
    assert work.extra[EXCHANGES[0]][EXCHANGES[1]] == 9  # where reports look for it
    cost = fleet.cost(FULL, work.extra)
    assert cost.params == 1560
    assert cost.down_bytes == 1560 * 4 + 210 * 24 * 4  # its layers' values; 24 gradients for each sample
    assert cost.up_bytes == 1560 * 4 + 210 * (24 * 4 + 8)  # the same; and a label of 8 bytes
    # forward 2 * 64 * 24; backward the same for the weights, nothing for the inputs
    assert cost.flops_per_sample == 2 * (2 * 64 * 24)
    whole = submodels.cost(FULL, 32)
    assert cost.flops_per_sample < whole.flops_per_sample
    assert cost.peak_bytes < whole.peak_bytes + 32 * (2 * 96 + 8)
    assert local.cost(submodels, FULL, 32, {}).up_bytes == 1560 * 4
    assert (cost.num_exchanges, whole.num_exchanges) == (9, 0)


@pytest.mark.parametrize(
    ("training", "drop_last", "per_epoch", "batches", "samples"),
    [
        (Training(num_epochs=2), False, 3, 6, 140),  # 32, 32 and 6 of 70, twice
        (Training(num_epochs=2), True, 2, 4, 128),  # the 6 are left out
        (Training(num_epochs=None, num_steps=4), False, 3, 4, 70 + 32),  # an epoch, and the first batch of the next
        (Training(num_epochs=None, num_steps=3), True, 2, 3, 64 + 32),
        (Training(num_epochs=None, num_steps=2), False, 3, 2, 64),
    ],
)
def test_the_server_expects_the_batches_that_the_client_makes(training, drop_last, per_epoch, batches, samples):
    from raafl.data.federated import ClientData

    algorithm = split_fed()
    fleet = replace(fleet_for(submodels_of(mlp), algorithm), training=training, drop_last=drop_last)
    work = algorithm.select(fleet.clients[1], fleet)
    terms = work.extra["split"]
    assert [terms[name] for name in ("per_epoch", "batches", "samples")] == [per_epoch, batches, samples]
    dataset = torch.utils.data.TensorDataset(torch.zeros(70, 1))
    data = ClientData(dataset, torch.arange(70), 32, drop_last=drop_last)
    sizes = [len(x) for (x,), _ in data.batches(torch.Generator(), None, work.num_epochs, work.num_steps)]
    assert (data.num_batches(), len(sizes), sum(sizes)) == (per_epoch, batches, samples)


def test_every_batch_takes_the_latency_of_the_link_both_ways():
    submodels, algorithm = submodels_of(mlp), split_fed(cut="layers.2")
    fleet = replace(fleet_for(submodels, algorithm, **LINK), training=Training(num_epochs=1))  # 70 samples by 32
    client = fleet.clients[1]
    time = fleet.task_time(client, algorithm.select(client, fleet))
    # down 1560 values and 24 gradients a sample; up the same values, 24 activations and a label of 8 bytes
    assert time.down_s == pytest.approx(0.25 + 3 * 0.25 + (1560 * 4 + 70 * 96) / 1e4)
    assert time.up_s == pytest.approx(0.25 + 3 * 0.25 + (1560 * 4 + 70 * 104) / 2e4)
    assert time.compute_s == pytest.approx(70 * 2 * (2 * 64 * 24) / 1e6)
    whole = fed_avg()
    fleet = replace(fleet, local=whole.local)
    time = fleet.task_time(client, whole.select(client, fleet))
    assert time.down_s == 0.25 + 2130 * 4 / 1e4


def test_the_notes_say_what_leaves_the_clients():
    notes = "\n".join(split_fed().local.notes(submodels_of(mlp)))
    assert "clients train 1,960 of 2,130 parameters" in notes
    assert "PRIVACY: the server sees the output of 'layers.4' for every sample (64 bytes)" in notes
    assert "number 1; this includes the labels" in notes
    assert "the server trains a copy of the upper part: 680 bytes of values" in notes
    (note,) = split_fed().local.notes(submodels_of(Tied))
    assert "the model cannot be cut, so clients train all of it, as in FedAvg" in note
