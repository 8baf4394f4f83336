"""Samples that clients evaluate on, and measured times beside predicted ones."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest

from raafl.core import select
from raafl.core.algorithm import OwnTests, SelectContext
from raafl.core.local import Local
from raafl.core.options import Training
from raafl.core.types import Assignment, ClientInfo, Work
from raafl.devices.profiles import Profile
from raafl.rules import Rules
from raafl.submodel.spec import FULL, Spec
from tests.helpers.coordinators import line_state


def client(number, num_samples, own_data=False):
    return ClientInfo(number, num_samples, Profile(), 0, own_data)


def test_own_tests_are_counted_for_the_run_s_data_and_estimated_for_a_client_s_own():
    tests = OwnTests({1: 7}, share=0.2)
    assert tests.of(client(1, 28)) == 7.0 and tests.of(client(2, 28)) == 0.0, "a client that is not named has none"
    # 40 samples train, which are 80 % of 50: 10 are left to test on, and rounding may make one more of them
    assert tests.of(client(3, 40, own_data=True)) == pytest.approx(10.0)
    assert tests.most(client(3, 40, own_data=True)) == 11 and tests.most(client(1, 28)) == 7
    assert OwnTests().of(client(3, 40, own_data=True)) == 0.0


def test_a_ratio_of_times_is_exact_but_for_rounding_about_1():
    predicted = SimpleNamespace(cost_s=lambda _, work: 2.0 * work.num_steps)
    task = Assignment(1, 1, 0, 0, 0, FULL, 0, None, 3, seed=5, assigned_s=0.0)
    ratio = partial(SelectContext.time_ratio, predicted, client(1, 10), task)
    assert ratio(9.0) == 1.5 and ratio(6.0 + 1e-9) == 1.0 and ratio(6.001) == 6.001 / 6.0
    assert ratio(0.0) is None, "no time has passed"
    predicted.cost_s = lambda *_: 0.0
    assert ratio(9.0) is None, "the profile predicts no time"


@pytest.mark.parametrize(
    ("num_samples", "drop_last", "work", "trained", "nominal"),
    [
        (33, False, Work(num_steps=10), 165, 320),
        (63, True, Work(num_epochs=10), 320, 630),
        (64, False, Work(num_steps=10), 320, 320),
    ],
)
def test_a_task_takes_the_time_of_the_samples_that_it_trains(num_samples, drop_last, work, trained, nominal):
    """By the first rules each batch counts as a whole one."""
    slow = ClientInfo(1, num_samples, Profile(flops_per_s=1000.0))
    for rules, counted in ((Rules(2), trained), (Rules(1), nominal)):
        fleet = SelectContext(
            line_state(), {1: slow}, random.Random(0), Training(), 32, drop_last=drop_last, rules=rules
        )
        per_sample = fleet.cost(FULL).flops_per_sample
        assert fleet.cost_s(slow, work) == pytest.approx(counted * per_sample / 1000.0)


def test_a_bounded_number_of_costs_is_stored(monkeypatch):
    monkeypatch.setattr(select, "MAX_CACHED", 3)
    fleet = SelectContext(line_state(hidden=8), {}, random.Random(0), Training(), 1)
    specs = [Spec.select({"hidden": range(width)}) for width in range(1, 9)]
    found = [fleet.cost(spec) for spec in specs]
    assert len(fleet._costs) <= 3
    assert [fleet.cost(spec) for spec in specs] == found
    assert fleet.cost(specs[-1]) is fleet.cost(specs[-1])


def test_the_cost_of_a_task_with_settings_of_its_own_is_not_taken_for_that_of_the_submodel():
    class Larger(Local):
        def cost(self, submodels, spec, batch_size, extra):
            found = super().cost(submodels, spec, batch_size, extra)
            return replace(found, peak_bytes=extra.get("peak", 1))

    fleet = SelectContext(line_state(), {}, random.Random(0), Training(), 1, local=Larger())
    assert [fleet.cost(FULL, extra).peak_bytes for extra in ({"peak": 5}, None, {"peak": 7}, {})] == [5, 1, 7, 1]
