from __future__ import annotations

import pytest

from raafl.algorithms import fed_rolex
from raafl.core.algorithm import Local
from raafl.errors import BadInput
from raafl.parts.merge.label_split import LabelSplit
from raafl.parts.merge.mean import Mean
from raafl.parts.select.rate_select import RateSelect
from raafl.parts.trigger import AllReported
from tests.helpers.coordinators import answer, assigned, coordinator_for, join


def test_every_argument_reaches_its_part():
    algorithm = fed_rolex(rates=0.5, rescale=False, masked=False, by_samples=True)
    assert algorithm.select == RateSelect("rolling", 0.5, "width", rounds="server")
    assert algorithm.local == Local()
    assert algorithm.trigger == AllReported()
    assert algorithm.merge == Mean(by_samples=True)
    assert fed_rolex().select.rates == [1.0, 0.5, 0.25, 0.125, 0.0625]
    assert fed_rolex().local == Local(rescale=True, masked=True)
    assert fed_rolex().merge == LabelSplit(Mean(by_samples=False))
    with pytest.raises(BadInput, match=r"rates is 0.5, but submodel says"):
        fed_rolex(rates=0.5, submodel=RateSelect())


def test_five_rounds_by_hand():
    """Of four units client 1 trains two and client 2 one, from unit 0, 1, 2, 3 and again 0 on; in round 3 across the end."""
    coordinator = coordinator_for(fed_rolex(rates=[0.5, 0.25]), min_clients=2)
    tasks = assigned(join(coordinator, [1, 2]))
    # client 1's answer, client 2's; the units each has; fc2.weight afterwards
    rounds = [
        (2.0, 4.0, [0, 1], [0], [3.0, 2.0, 0.0, 0.0]),
        (6.0, 8.0, [1, 2], [1], [3.0, 7.0, 6.0, 0.0]),
        (1.0, 5.0, [2, 3], [2], [3.0, 7.0, 3.0, 1.0]),
        (4.0, 6.0, [0, 3], [3], [4.0, 7.0, 3.0, 5.0]),
        (9.0, 9.0, [0, 1], [0], [9.0, 9.0, 3.0, 5.0]),
    ]
    for first, second, units_1, units_2, after in rounds:
        assert list(tasks[1].spec.indices("hidden")) == units_1
        assert list(tasks[2].spec.indices("hidden")) == units_2
        answer(coordinator, tasks[1], first)
        tasks = assigned(answer(coordinator, tasks[2], second))
        values = coordinator.state.values
        assert values["fc2.weight"].tolist() == [after]
        assert values["fc1.weight"].tolist() == [[value, value] for value in after]
        assert values["fc2.bias"].tolist() == [(first + second) / 2]
