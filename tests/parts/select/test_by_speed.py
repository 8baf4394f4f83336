"""Steps by speed, by hand: H = 40 for the fastest, clients of speeds 8, 4, 2 and 1."""

from __future__ import annotations

import random

import pytest

from raafl.algorithms.diloco import BySpeed, SpeedMemory
from raafl.core.algorithm import SelectContext, Training
from raafl.core.types import Assignment, ClientInfo, Work
from raafl.devices.profiles import Profile
from raafl.errors import BadInput
from raafl.parts import RateSelect
from raafl.parts.select.submodels import Full
from tests.helpers.coordinators import line_state

SPEEDS = (8e6, 4e6, 2e6, 1e6)


def fleet_of(select, steps=40, speeds=SPEEDS):
    clients = {i: ClientInfo(i, 64, Profile(flops_per_s=speed)) for i, speed in enumerate(speeds, start=1)}
    fleet = SelectContext(line_state(16), clients, random.Random(0), Training(num_epochs=None, num_steps=steps), 8)
    for client in clients.values():
        select.on_join(client, fleet)
    return clients, fleet


def steps_of(select, clients, fleet):
    return [select(client, fleet).num_steps for client in clients.values()]


def answered(select, client, fleet, factor):
    """Let the client report a task of 40 steps that took ``factor`` times the predicted time."""
    work = Work(num_steps=40)
    assignment = Assignment(1, client.id, 0, 0, 0, work.spec, 0, None, 40, 0, 0.0)
    select.on_update(client, assignment, factor * fleet.cost_s(client, work), fleet)


def test_steps_are_in_proportion_to_speed_and_at_least_the_least():
    select = BySpeed(Full())
    assert steps_of(select, *fleet_of(select)) == [40, 20, 10, 5]
    select = BySpeed(Full(), least=8)
    assert steps_of(select, *fleet_of(select)) == [40, 20, 10, 8]


def test_never_more_than_the_runs_own_steps():
    select = BySpeed(Full(), least=5)
    assert steps_of(select, *fleet_of(select, steps=3)) == [3, 3, 3, 3]


def test_a_narrower_submodel_makes_more_steps():
    select = BySpeed(RateSelect(rates=[1.0, 1.0, 1.0, 0.25], rate_of="width"))
    clients, fleet = fleet_of(select)
    *_, third, slowest = steps_of(select, clients, fleet)
    assert third == 10 and slowest > 10  # a quarter of the units of half the speed


def test_measured_times_count():
    select = BySpeed(Full())
    clients, fleet = fleet_of(select)
    answered(select, clients[1], fleet, 1.0)
    answered(select, clients[2], fleet, 2.0)  # half as fast as its profile says
    answered(select, clients[3], fleet, 1.0)
    answered(select, clients[4], fleet, 1.0)
    assert steps_of(select, clients, fleet) == [40, 10, 10, 5]
    select.on_join(clients[2], fleet)  # perhaps on another device: as the newest ratio says
    assert select(clients[2], fleet).num_steps == 20


def test_clients_without_a_measured_time_take_the_newest_ratio():
    """Where every device is a thousandth of what its profile says, one report must not make the others seem slow."""
    select = BySpeed(Full())
    clients, fleet = fleet_of(select)
    answered(select, clients[1], fleet, 1000.0)
    for client in clients.values():
        select(client, fleet)
    assert steps_of(select, clients, fleet) == [40, 20, 10, 5]


def test_the_fastest_that_is_there_makes_all_steps():
    select = BySpeed(Full())
    clients, fleet = fleet_of(select)
    assert steps_of(select, clients, fleet)[1] == 20
    select.on_loss(clients[1], fleet)
    assert select(clients[2], fleet).num_steps == 40
    select.on_join(clients[1], fleet)
    assert select(clients[2], fleet).num_steps == 20


def test_what_it_knows_is_plain_data_for_a_checkpoint():
    select = BySpeed(Full())
    clients, fleet = fleet_of(select)
    answered(select, clients[4], fleet, 3.0)
    plain = fleet.state.memory.to_plain()
    before = steps_of(select, clients, fleet)
    fleet.state.memory.load(plain)
    fleet.cache.clear()
    assert steps_of(select, clients, fleet) == before
    assert fleet.state.memory.of(SpeedMemory).ratio == {4: pytest.approx(3.0)}


def test_local_work_must_be_given_in_steps():
    clients = {1: ClientInfo(1, 64, Profile())}
    fleet = SelectContext(line_state(), clients, random.Random(0), Training(num_epochs=1), 8)
    assert "train.num_steps" in BySpeed(Full()).check(fleet)[0]
    with pytest.raises(BadInput, match="least_steps"):
        BySpeed(Full(), least=0)
