"""What a merge keeps between updates: storage used again must not let an old merge show through."""

from __future__ import annotations

import math

import pytest
import torch

from raafl.core.types import Update
from raafl.parts.merge.deltas import Deltas
from raafl.parts.merge.mean import Mean, Staleness
from raafl.parts.merge.server_optimizer import ServerOptimizer
from raafl.submodel import FULL, Spec
from raafl.submodel import flat as flat_tensors
from tests.helpers.coordinators import filled, line_state
from tests.helpers.merges import merge_all, take

SPECS = [FULL, *(Spec.select({"hidden": kept}) for kept in (range(0, 2), range(2, 4), range(1, 3)))]


def random_updates(state, rng, specs):
    """Updates as (tensors, spec, weight, staleness), every element random."""
    found = []
    for spec in specs:
        tensors = filled(state, 0.0, spec)
        for buffer in tensors.buffers.values():
            buffer.copy_(torch.randn(len(buffer), generator=rng))
        weight, staleness = (int(torch.randint(1, high, (), generator=rng)) for high in (9, 4))
        found.append((tensors, spec, weight, staleness - 1))
    return found


def give(merge, state, updates):
    for place, (tensors, spec, weight, staleness) in enumerate(updates):
        take(merge, state, Update(place, 1, 0, tensors.clone(), weight), spec, staleness)
        if place + 1 < len(updates):
            merge.detach(state)
    merge_all(merge, state)


def elements(state, tensors, spec):
    """The update's elements at their places in the whole model, NaN where it has none: name -> nested tensor."""
    full = {name: torch.full_like(value, math.nan) for name, value in state.values.items()}
    kept = list(spec.indices("hidden") or range(4))
    for name, value in tensors.items():
        if name == "fc1.weight":
            full[name][kept] = value
        elif name == "fc2.weight":
            full[name][:, kept] = value
        else:
            full[name].copy_(value)
    return full


def slow_reference(rule, before, state, updates):
    """Apply `rule(old, [(value, weight, staleness), ...])` to each number by itself; what nobody covers stays."""
    placed = [(elements(state, tensors, spec), w, s) for tensors, spec, w, s in updates]
    expected = {}
    for name, old in before.items():
        new = old.clone()
        for place in range(old.numel()):
            on = [(u[name].flatten()[place].item(), w, s) for u, w, s in placed]
            on = [entry for entry in on if not math.isnan(entry[0])]
            if on:
                new.view(-1)[place] = rule(old.flatten()[place].item(), on)
        expected[name] = new
    return expected


def mean_rule(merge):
    def rule(old, on):
        total = sum(w for _, w, _ in on)
        return old + sum(w * merge.alpha * merge.staleness(s) * (x - old) for x, w, s in on) / total

    return rule


def deltas_rule(merge):
    return lambda old, on: old + merge.server_lr * sum(merge.staleness(s) * x for x, _, s in on) / len(on)


CASES = [
    (Mean(), mean_rule),
    (Mean(alpha=0.3), mean_rule),
    (Mean(alpha=0.7, staleness=Staleness("polynomial", a=1.0)), mean_rule),
    (Deltas(server_lr=0.5), deltas_rule),
]


@pytest.mark.parametrize(("merge", "make_rule"), CASES, ids=lambda case: str(case) if hasattr(case, "sends") else "")
@pytest.mark.parametrize("chunk", [1, 3, 1 << 16])
def test_merges_of_changing_submodels_follow_the_slow_reference(merge, make_rule, chunk, monkeypatch):
    monkeypatch.setattr(flat_tensors, "CHUNK", chunk)
    rng, state = torch.Generator().manual_seed(7), line_state(value=1.0)
    # whole, then fragments, then the same fragment, then whole again: whatever the last merge left must not matter
    for picks in ((0, 0), (1, 2, 3), (2, 2), (0, 1), (3, 3, 3), (0, 0, 0), (1,), (2, 1)):
        updates = random_updates(state, rng, [SPECS[i] for i in picks])
        before = {name: value.clone() for name, value in state.values.items()}
        give(merge, state, updates)
        for name, value in slow_reference(make_rule(merge), before, state, updates).items():
            torch.testing.assert_close(state.values[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("chunk", [1, 3, 1 << 16])
def test_a_server_step_does_not_depend_on_the_chunk(chunk, monkeypatch):
    def run():
        rng, state, merge = torch.Generator().manual_seed(3), line_state(), ServerOptimizer("yogi", tau=0.1)
        for picks in ((0, 0), (1, 2), (3,), (0, 1)):
            give(merge, state, random_updates(state, rng, [SPECS[i] for i in picks]))
        return state.values.model_digest()

    whole = run()
    monkeypatch.setattr(flat_tensors, "CHUNK", chunk)
    assert run() == whole


@pytest.mark.parametrize("merge", [Mean(alpha=0.5), Deltas(), ServerOptimizer()], ids=str)
def test_updates_are_only_read(merge):
    state = line_state()
    updates = random_updates(state, torch.Generator().manual_seed(1), [FULL, SPECS[1], FULL])
    for place, (tensors, spec, weight, _) in enumerate(updates):
        before = tensors.fingerprint()
        take(merge, state, Update(place, 1, 0, tensors, weight), spec, 3)
        assert tensors.fingerprint() == before
    merge_all(merge, state)
    assert [t.fingerprint() for t, *_ in updates][-1] == before
