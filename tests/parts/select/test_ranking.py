from __future__ import annotations

import random

import pytest

from raafl.core.algorithm import SelectContext, Training
from raafl.core.types import ClientInfo
from raafl.devices.profiles import Profile
from raafl.parts.select.submodels import Fragments, Ranking
from tests.helpers.coordinators import line_state


def slow_bound(clients, sizes):
    """The offline assignment of the paper's appendix B, pair by pair; `clients` in order of arrival."""
    ranked = sorted(clients, key=lambda row: -row[1])
    fragments = sorted(range(len(sizes)), key=lambda j: -sizes[j])
    if len(ranked) >= len(fragments):
        share = len(ranked) // len(fragments)
        pairs = [(row, fragments[min(place // share, len(fragments) - 1)]) for place, row in enumerate(ranked)]
    else:
        share = len(fragments) // len(ranked)
        pairs = [(ranked[min(place // share, len(ranked) - 1)], j) for place, j in enumerate(fragments)]
    return max(row[2][j] for row, j in pairs)


@pytest.mark.parametrize("num_fragments", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", range(5))
def test_coming_and_going_leaves_the_bound_of_the_paper(num_fragments, seed):
    rng = random.Random(seed)
    sizes = [rng.choice([1.0, 2.0, 3.0, 4.0]) for _ in range(num_fragments)]

    def newcomer(client):
        capability = rng.choice([1.0, 2.0, 4.0, float("inf")])  # few values, so that many clients are alike
        return client, capability, [size * rng.random() for size in sizes]

    present = [newcomer(i) for i in range(rng.randint(1, 6))]
    ranking = Ranking(sizes, present)
    for client in range(10, 90):
        if len(present) > 1 and rng.random() < 0.45:
            gone = present.pop(rng.randrange(len(present)))
            ranking.remove(gone[0], gone[1])
        else:
            present.append(newcomer(client))
            ranking.add(*present[-1])
        assert len(ranking) == len(present)
        assert ranking.bound() == slow_bound(present, sizes)


def info(client, speed, num_samples, memory=float("inf")):
    return ClientInfo(client, num_samples, Profile(flops_per_s=speed, latency_s=0.01 * client, memory_bytes=memory))


def test_a_select_part_told_of_changes_answers_as_one_that_starts_afresh():
    rng, select, state = random.Random(1), Fragments((0.2, 0.3, 0.5)), line_state(hidden=10)
    clients = {i: info(i, float(i % 3 + 1), i) for i in range(1, 8)}
    fleet = SelectContext(state, clients, random.Random(0), Training(num_epochs=1), 1)
    for step in range(60):
        if rng.random() < 0.5 and len(clients) > 1:
            gone = clients.pop(rng.choice(list(clients)))
            select.on_loss(gone, fleet)
        else:
            new = info(rng.randint(1, 20), rng.choice([0.5, 1.0, 5.0]), rng.randint(1, 9))
            if new.id in clients:
                select.on_loss(clients.pop(new.id), fleet)
            clients[new.id] = new
            select.on_join(new, fleet)
        if step % 2:  # several changes may come between two questions
            fresh = SelectContext(state, dict(clients), random.Random(0), Training(num_epochs=1), 1)
            assert select.bound(fleet) == select.bound(fresh)
            assert [select.allowed(c, fleet) for c in clients.values()] == [
                select.allowed(c, fresh) for c in clients.values()
            ]
