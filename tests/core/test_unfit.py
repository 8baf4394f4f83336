"""Clients that no work suits are let go; the others go on as if they had not come."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raafl.algorithms import fed_avg, fed_raa
from raafl.core.algorithm import Select
from raafl.core.sample import Sample
from raafl.core.types import Arrived, Assign, ClientInfo, Dismiss, Finish, Joined, Settled, Work
from raafl.devices.profiles import Profile
from raafl.errors import BadInput
from raafl.runtime.setup import build
from tests.helpers.coordinators import coordinator_for, update_for
from tests.helpers.small_runs import experiment


class Picky(Select):
    """Has no work for clients with little memory."""

    def __call__(self, client, fleet):
        if client.profile.memory_bytes < 100:
            raise BadInput(f"client {client.id}: memory_bytes is too small")
        return Work()


SMALL = Profile(memory_bytes=10.0)


def test_a_small_client_does_not_end_a_run_of_others(tmp_path):
    made = experiment(tmp_path / "run", fed_raa())
    coordinator = build(made, pace=False, min_clients=1).coordinator
    (first,) = coordinator.handle(Joined(ClientInfo(3, 100, SMALL)), 0.0)
    assert (type(first), first.client, first.incarnation) == (Dismiss, 3, 0)
    assert first.reason.startswith("client 3: memory_bytes is 10, too small for any fragment")
    assert 3 not in coordinator.roster.clients
    actions = coordinator.handle(Joined(ClientInfo(1, 100)), 1.0)
    assert [type(action) for action in actions] == [Assign]


@pytest.mark.parametrize("concurrency", [None, 1])
@pytest.mark.parametrize("cohort", [None, 1, 2])
def test_a_round_goes_on_without_them(concurrency, cohort):
    algorithm = replace(fed_avg(), sample=Sample(cohort, concurrency), select=Picky())
    coordinator = coordinator_for(algorithm, min_clients=6, max_updates=8)
    out, actions, dismissed, merged = [], [], [], 0
    for number in range(1, 7):
        actions += coordinator.handle(Joined(ClientInfo(number, 1, SMALL if number % 2 else Profile())), 0.0)
    for _ in range(100):
        out += [action.assignment for action in actions if isinstance(action, Assign)]
        dismissed += [action.client for action in actions if isinstance(action, Dismiss)]
        merged += sum(isinstance(action, Settled) and action.outcome == "merged" for action in actions)
        if any(isinstance(action, Finish) for action in actions):
            break
        assert out, "nobody is at work, and nothing will happen any more"
        actions = coordinator.handle(Arrived(update_for(coordinator.state, out.pop(0), 1.0)), 1.0)
    assert merged >= 8 and set(dismissed) <= {1, 3, 5} and len(dismissed) == len(set(dismissed))
