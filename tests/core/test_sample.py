from __future__ import annotations

import random
from collections import Counter

import pytest

from raafl.core.sample import IdlePool, Sample
from raafl.errors import BadInput


def pool(num):
    idle = IdlePool()
    for client in range(1, num + 1):
        idle.add(client)
    return idle


def test_everyone_is_drawn_in_order_of_id():
    idle = pool(3)
    idle.discard(1)
    idle.add(1)
    assert Sample().draw(idle, 0, random.Random(0), rolling=False) == [1, 2, 3]
    assert len(idle) == 0


def test_a_cohort_counts_those_still_at_work():
    assert len(Sample(cohort=5).draw(pool(10), 2, random.Random(0), rolling=False)) == 3
    assert Sample(cohort=5).draw(pool(10), 5, random.Random(0), rolling=False) == []


def test_rolling_draws_only_what_may_start():
    assert len(Sample(concurrency=3).draw(pool(10), 2, random.Random(0), rolling=True)) == 1
    assert len(Sample(concurrency=3).draw(pool(10), 0, random.Random(0), rolling=False)) == 10


def test_as_many_may_be_at_work_as_every_limit_allows():
    parts = (Sample(), Sample(cohort=5), Sample(concurrency=3), Sample(5, 3), Sample(50))
    assert [part.most_at_work(10) for part in parts] == [10, 5, 3, 3, 10]


def test_draws_are_uniform():
    rng, counts = random.Random(0), Counter()
    for _ in range(4000):
        counts.update(Sample(cohort=2).draw(pool(4), 0, rng, rolling=False))
    assert all(abs(n - 2000) < 150 for n in counts.values())  # sd about 32


def test_the_pool_keeps_its_books():
    idle, reference, rng = IdlePool(), set(), random.Random(1)
    for _ in range(2000):
        client = rng.randrange(50)
        if rng.random() < 0.5:
            idle.add(client)
            reference.add(client)
        elif rng.random() < 0.5:
            idle.discard(client)
            reference.discard(client)
        else:
            drawn = idle.draw(3, rng)
            assert len(set(drawn)) == min(3, len(reference)) and set(drawn) <= reference
            reference -= set(drawn)
        assert set(idle) == reference and len(idle) == len(reference)
        assert all((c in idle) == (c in reference) for c in range(50))


def test_a_count_below_one_is_refused():
    with pytest.raises(BadInput, match="cohort is 0"):
        Sample(cohort=0)
    with pytest.raises(BadInput, match="concurrency is -1"):
        Sample(concurrency=-1)
