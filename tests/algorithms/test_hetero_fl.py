from __future__ import annotations

from typing import Any

import pytest

from raafl.algorithms import hetero_fl
from raafl.core.algorithm import Local
from raafl.data import Dirichlet
from raafl.errors import BadInput
from raafl.parts.merge.label_split import LabelSplit
from raafl.parts.merge.mean import Mean
from raafl.parts.select.rate_select import RateSelect
from raafl.parts.trigger import AllReported
from tests.helpers.coordinators import answer, assigned, coordinator_for, join
from tests.helpers.small_runs import experiment, finish


def test_every_argument_reaches_its_part():
    algorithm = hetero_fl(rates=[0.5, 1.0], rescale=False, masked=False, by_samples=True)
    assert algorithm.select == RateSelect("leading", [0.5, 1.0], "width")
    assert algorithm.local == Local()
    assert algorithm.trigger == AllReported()
    assert algorithm.merge == Mean(by_samples=True)
    default = hetero_fl()
    assert default.merge == LabelSplit(Mean(by_samples=False))
    assert default.select == RateSelect("leading", [1.0, 0.5, 0.25, 0.125, 0.0625], "width")
    assert default.local == Local(rescale=True, masked=True)
    with pytest.raises(BadInput, match=r"rates is 0.5, but submodel says what each client trains: leave out"):
        hetero_fl(rates=0.5, submodel=RateSelect())


def test_two_rounds_by_hand():
    """Four hidden units; client 1 trains all, client 2 the first two: their mean where both are, else client 1's."""
    coordinator = coordinator_for(hetero_fl(rates=[1.0, 0.5]), min_clients=2)
    tasks = assigned(join(coordinator, [1, 2]))
    assert (str(tasks[1].spec), str(tasks[2].spec)) == ("full", "hidden[0:2]")
    answer(coordinator, tasks[1], 1.0, num_samples=30)
    tasks = assigned(answer(coordinator, tasks[2], 3.0, num_samples=10))  # samples do not count
    values = coordinator.state.values
    assert values["fc1.weight"].tolist() == [[2.0, 2.0], [2.0, 2.0], [1.0, 1.0], [1.0, 1.0]]
    assert values["fc2.weight"].tolist() == [[2.0, 2.0, 1.0, 1.0]]
    assert values["fc2.bias"].tolist() == [2.0]
    answer(coordinator, tasks[1], 5.0)
    answer(coordinator, tasks[2], 0.0)
    assert values["fc2.weight"].tolist() == [[2.5, 2.5, 5.0, 5.0]]


def test_what_no_client_has_stays():
    coordinator = coordinator_for(hetero_fl(rates=0.5), min_clients=2)
    tasks = assigned(join(coordinator, [1, 2]))
    answer(coordinator, tasks[1], 1.0)
    answer(coordinator, tasks[2], 2.0)
    assert coordinator.state.values["fc2.weight"].tolist() == [[1.5, 1.5, 0.0, 0.0]]


def test_masking_makes_a_difference_where_classes_are_missing(tmp_path):
    more = {"partition": Dirichlet(alpha=0.1), "max_updates": 4}
    digests = {
        finish(experiment(tmp_path / str(masked), hetero_fl(masked=masked), **more)).digest for masked in (True, False)
    }
    assert len(digests) == 2


def test_drawn_rates_are_drawn_anew_in_each_round_and_equally_often():
    coordinator = coordinator_for(hetero_fl(rates=[1.0, 0.5], drawn=True), min_clients=2)
    tasks = assigned(join(coordinator, [1, 2]))
    specs: dict[int, list[str]] = {1: [], 2: []}
    for _ in range(100):
        for client, task in tasks.items():
            specs[client].append(str(task.spec))
        answer(coordinator, tasks[1], 1.0)
        tasks = assigned(answer(coordinator, tasks[2], 3.0))
    for drawn in specs.values():
        assert set(drawn) == {"full", "hidden[0:2]"}
        assert 30 <= drawn.count("full") <= 70  # 50 expected, four standard deviations of 5
    assert specs[1] != specs[2]


def test_one_drawn_rate_is_that_rate(tmp_path):
    digests = {
        finish(experiment(tmp_path / str(drawn), hetero_fl(rates=[0.5], drawn=drawn), max_updates=4)).digest
        for drawn in (True, False)
    }
    assert len(digests) == 1


def test_drawn_rates_need_a_list():
    others: list[dict[str, Any]] = [{"rates": 0.5}, {"rates": {"phone": 0.5}}, {"submodel": RateSelect()}]
    for other in others:
        with pytest.raises(BadInput, match=r"drawn is true, so each client's rate is drawn from a list: give rates as"):
            hetero_fl(**other, drawn=True)
    for wrong in [list[float](), [0.5, 1.5]]:
        with pytest.raises(BadInput, match=r"rates is empty|a rate in rates is 1.5"):
            hetero_fl(rates=wrong, drawn=True)
