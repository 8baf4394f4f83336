from __future__ import annotations

import pytest
import torch

from raafl.algorithms import oap
from raafl.core.algorithm import Local
from raafl.errors import BadInput
from raafl.parts.merge.mean import Mean
from raafl.parts.select.rate_select import RateSelect
from raafl.parts.trigger import AllReported
from tests.helpers.coordinators import answer, assigned, coordinator_for, join, line_state


def test_every_argument_reaches_its_part():
    algorithm = oap(rates=0.5, by_samples=True)
    assert algorithm.select == RateSelect("magnitude", 0.5, "width", rounds="server")
    assert algorithm.local == Local()
    assert algorithm.trigger == AllReported()
    assert algorithm.merge == Mean(by_samples=True)
    assert oap().select.rates == [1.0, 0.75, 0.5, 0.25]
    with pytest.raises(BadInput, match=r"rates is 0.5, but submodel says"):
        oap(rates=0.5, submodel=RateSelect())


def test_two_rounds_by_hand():
    """Client 1 has all four units, client 2 the two of the largest norm, which are others after the first round."""
    state = line_state()
    state.values["fc2.weight"].copy_(torch.tensor([[1.0, 3.0, 2.0, -4.0]]))
    coordinator = coordinator_for(oap(rates=[1.0, 0.5]), state, min_clients=2)
    tasks = assigned(join(coordinator, [1, 2]))
    assert (str(tasks[1].spec), list(tasks[2].spec.indices("hidden"))) == ("full", [1, 3])
    answer(coordinator, tasks[1], 2.0)
    tasks = assigned(answer(coordinator, tasks[2], 0.0))
    # |N_i| is 2 for units 1 and 3: (2 + 0) / 2; it is 1 for units 0 and 2
    assert state.values["fc2.weight"].tolist() == [[2.0, 1.0, 2.0, 1.0]]
    assert list(tasks[2].spec.indices("hidden")) == [0, 2]
    answer(coordinator, tasks[1], 4.0)
    answer(coordinator, tasks[2], 6.0)
    assert state.values["fc2.weight"].tolist() == [[5.0, 4.0, 5.0, 4.0]]


def test_what_all_have_pruned_stays():
    state = line_state()
    state.values["fc2.weight"].copy_(torch.tensor([[1.0, 3.0, 2.0, -4.0]]))
    coordinator = coordinator_for(oap(rates=0.5), state, min_clients=2)
    tasks = assigned(join(coordinator, [1, 2]))
    answer(coordinator, tasks[1], 7.0)
    answer(coordinator, tasks[2], 9.0)
    assert state.values["fc2.weight"].tolist() == [[1.0, 8.0, 2.0, 8.0]]
