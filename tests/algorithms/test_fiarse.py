"""FIARSE: masks, gradients and a round by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from raafl.algorithms import fed_avg, fiarse
from raafl.algorithms.fiarse import (
    ChangedMean,
    ImportanceAware,
    Important,
    ShareOfElements,
    maskable,
    threshold,
)
from raafl.compression.plan import CompressionPlan
from raafl.core.algorithm import Local
from raafl.core.options import Compress
from raafl.core.types import Update
from raafl.errors import BadInput
from raafl.parts.merge.deltas import Deltas
from raafl.parts.merge.mean import Staleness
from raafl.parts.select.rate_select import RateSelect
from raafl.parts.trigger import AllReported, Buffered
from raafl.rules import Rules
from raafl.submodel import FULL
from tests.helpers.coordinators import assigned, coordinator_for, filled, join, line_state
from tests.helpers.single_task import Slope, task_of
from tests.helpers.small_runs import experiment, finish


def test_every_argument_reaches_its_part():
    algorithm = fiarse(rates=[1.0, 0.5], server_lr=0.5)
    assert algorithm.select == ShareOfElements([1.0, 0.5])
    assert algorithm.local == ImportanceAware() and algorithm.merge == ChangedMean(0.5)
    assert algorithm.trigger == AllReported() and fiarse(buffer_size=3).trigger == Buffered(3)
    units = fiarse("units", 0.5)
    assert units.select == RateSelect("magnitude", 0.5, "parameters")
    assert units.local == Local() and units.merge == Deltas(1.0, Staleness())
    for wrong, message in (({"mask": "rows"}, "mask is 'rows'"), ({"rates": 0.0}, "a rate in rates is 0")):
        with pytest.raises(BadInput, match=message):
            fiarse(**wrong)


def test_the_largest_elements_of_all_layers_together_are_kept():
    module = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.Linear(2, 1, bias=False))
    with torch.no_grad():
        module[0].weight.copy_(torch.tensor([[1.0, -8.0], [2.0, 3.0]]))
        module[0].bias.copy_(torch.tensor([0.5, -6.0]))
        module[2].weight.copy_(torch.tensor([[4.0, 5.0]]))
    parameters = maskable(module)
    assert list(parameters) == ["0.weight", "0.bias", "2.weight"]  # the norm is not masked
    values = list(parameters.values())
    assert [threshold(values, rate) for rate in (0.5, 0.25, 0.01, 1.0)] == [4.0, 6.0, 8.0, 0.0]


def test_a_masked_weight_and_its_gradient_by_hand():
    """tau 2: kept are -4 and 2; dw/dw_eff is 1 + 2*2*4/36 and 1 + 2*2*2/16."""
    weight = torch.tensor([-4.0, 1.0, 2.0], requires_grad=True)
    masked = Important.apply(weight, 2.0)
    assert masked.tolist() == [-4.0, 0.0, 2.0]
    masked.backward(torch.tensor([1.0, 1.0, 3.0]))
    assert weight.grad.tolist() == [pytest.approx(1 + 16 / 36), 0.0, pytest.approx(3 * 1.5)]


def test_a_step_of_a_task_by_hand():
    """One weight 2 = tau: the gradient (2 - 4) is multiplied by 1 + 2*2*2/16 = 1.5, SGD's rate is 1/2."""
    sent, _ = task_of(fiarse(rates=0.5), Slope(), {"line.weight": [[2.0]]}, steps=1)
    assert sent["line.weight"].tolist() == [[pytest.approx(0.5 * 2.0 * 1.5)]]


def test_the_client_is_told_its_share_of_the_whole_model():
    coordinator = coordinator_for(fiarse(rates=[1.0, 0.25]), min_clients=2)
    tasks = assigned(join(coordinator, [1, 2]))
    assert [(tasks[n].spec, dict(tasks[n].extra)) for n in (1, 2)] == [(FULL, {"rate": 1.0}), (FULL, {"rate": 0.25})]


def test_an_element_moves_by_the_mean_of_those_that_changed_it():
    merge, state = ChangedMean(0.5), line_state(hidden=2)
    for first, second in ((4.0, 2.0), (2.0, 0.0)):
        tensors = filled(state, 0.0)
        tensors["fc2.weight"].copy_(torch.tensor([[first, second]]))
        merge.receive(state, Update(0, 1, 0, tensors, 1), FULL, 0)
    merge.apply(state)
    assert state.values["fc2.weight"].tolist() == [[0.5 * 3.0, 0.5 * 2.0]]
    assert state.values["fc2.bias"].item() == 0.0
    merge.apply(state)  # nothing is left of them
    assert state.values["fc2.weight"].tolist() == [[1.5, 1.0]]


def test_at_size_one_it_is_near_fed_avg(tmp_path):
    """Up to rounding, and to elements whose change is exactly 0: inputs that are 0 in all of a client's images."""
    runs = [
        finish(experiment(tmp_path / str(i), one, max_updates=4))
        for i, one in enumerate((fiarse(rates=1.0), fed_avg(by_samples=False)))
    ]
    losses = [run.summary["final"]["loss"] for run in runs]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


@pytest.mark.parametrize("up", ["int8", "top_k"])
def test_compressors_that_send_changed_elements_as_0_are_refused(up):
    """Two clients that change an element by a tenth of int8's step would move it by 0.19 of the step on average, not 0.1."""
    submodels, wanted = line_state().submodels, Compress(up=up)
    with pytest.raises(BadInput, match=f"compress.up is {up}, which sends changed elements as 0"):
        CompressionPlan.of(submodels, wanted, "delta", ImportanceAware())
    assert CompressionPlan.of(submodels, wanted, "delta", fiarse("units").local) is not None
    assert CompressionPlan.of(submodels, Compress(up="bf16"), "delta", ImportanceAware()) is not None
    submodels.rules = Rules(5)  # an older run folder replays
    assert CompressionPlan.of(submodels, wanted, "delta", ImportanceAware()) is not None
