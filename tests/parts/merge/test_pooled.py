"""Running statistics in every merge: exact variances, no overshoot, and nothing else touched."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from raafl.algorithms import ALGORITHMS, fed_avg
from raafl.algorithms.fed_compass import CompassMemory, Group, GroupDeltas, Pace
from raafl.core.algorithm import Local, Training
from raafl.core.state import GlobalState
from raafl.core.types import Update
from raafl.local.train import LocalTrainer
from raafl.parts.merge.deltas import Deltas
from raafl.parts.merge.mean import Mean, Staleness
from raafl.parts.merge.pooled import Pooled
from raafl.parts.merge.server_optimizer import ServerOptimizer
from raafl.parts.protect.assembly import pooled
from raafl.parts.protect.robust import CoordinateWise, NormFilter
from raafl.rules import CURRENT, Rules
from raafl.submodel import FULL, Spec, Submodels
from tests.helpers.coordinators import line_state
from tests.helpers.merges import merge_all, take
from tests.local.bench import Bench, Net, assignment

MEAN, VAR = "norm.running_mean", "norm.running_var"
FRONT = Spec.select({"fc1": range(0, 2)})


class Normed(Net):
    """Six inputs, three normed hidden units, three classes."""

    def __init__(self):
        super().__init__()
        self.fc1, self.norm, self.fc2 = nn.Linear(6, 3), nn.BatchNorm1d(3), nn.Linear(3, 3)

    def forward(self, x):
        return self.fc2(torch.relu(self.norm(self.fc1(x))))


def state_of(mean=0.0, variance=1.0):
    torch.manual_seed(0)
    module = Normed()
    submodels = Submodels(module)
    state = GlobalState(submodels, submodels.state(module))
    state.values[MEAN].fill_(mean)
    state.values[VAR].fill_(variance)
    return state


def around(state, inner):
    return Pooled(inner, state.submodels.pooling())


def give(state, merge, updates, apply=True):
    """Each update as its client sends it: (mean, variance, spec, samples, staleness); parameters as they are, or no delta."""
    merge = around(state, merge)
    for place, (mean, variance, spec, samples, staleness) in enumerate(updates):
        tensors = state.submodels.plan(spec).gather(state.values)
        if merge.sends == "delta":
            for buffer in tensors.buffers.values():
                buffer.zero_()
        tensors[MEAN].fill_(mean)
        tensors[VAR].fill_(variance + mean**2)
        take(merge, state, Update(place + 1, place + 1, 0, tensors, samples), spec, staleness)
        if place + 1 < len(updates):
            merge.detach(state)
    if apply:
        merge_all(merge, state)
    return state


def statistics(state):
    return state.values[MEAN].tolist(), state.values[VAR].tolist()


# ---- by hand ----


@pytest.mark.parametrize("inner", [Mean(), ServerOptimizer(server_lr=0.3)], ids=str)
def test_the_variance_of_the_union(inner):
    """Means 0 and 4, variances 1 and 3, one and three samples: mean 3, variance 1/4 (1 + 9) + 3/4 (3 + 1)."""
    state = give(state_of(mean=2.0, variance=9.0), inner, [(0.0, 1.0, FULL, 1, 0), (4.0, 3.0, FULL, 3, 0)])
    assert statistics(state) == ([3.0] * 3, [5.5] * 3)


@pytest.mark.parametrize("inner", [Mean(), ServerOptimizer()], ids=str)
def test_real_samples_of_two_clients(inner):
    generator = torch.Generator().manual_seed(1)
    few, many = (torch.randn(n, generator=generator) * scale + shift for n, scale, shift in ((8, 1, -2), (24, 3, 5)))
    updates = [(x.mean().item(), x.var(correction=0).item(), FULL, len(x), 0) for x in (few, many)]
    found, together = give(state_of(), inner, updates), torch.cat([few, many])
    assert found.values[MEAN].tolist() == pytest.approx([together.mean().item()] * 3, rel=1e-5)
    assert found.values[VAR].tolist() == pytest.approx([together.var(correction=0).item()] * 3, rel=1e-5)


def test_a_mix_with_one_stale_update():
    # a = 1/2 * 1/2: mean 3/4 * 0 + 1/4 * 4 = 1, variance 3/4 (1 + 1) + 1/4 (3 + 9) = 4.5
    inner = Mean(alpha=0.5, staleness=Staleness("polynomial", a=0.5))
    assert statistics(give(state_of(), inner, [(4.0, 3.0, FULL, 7, 3)])) == ([1.0] * 3, [4.5] * 3)


@pytest.mark.parametrize("server_lr", [1.0, 0.1, 5.0])
def test_a_buffer_mixes_and_server_rates_do_not_act_on_statistics(server_lr):
    # s(0) = 1, s(3) = 1/2 over K = 2: shares 1/2, 1/4, and 1/4 stay: mean 1/2 * 2 + 1/4 * 4 = 2,
    # variance 1/2 (2 + 0) + 1/4 (4 + 4) + 1/4 (1 + 4) = 4.25
    state = give(state_of(), Deltas(server_lr), [(2.0, 2.0, FULL, 1, 0), (4.0, 4.0, FULL, 1, 3)])
    assert statistics(state) == ([2.0] * 3, [4.25] * 3)


def test_updates_against_one_old_version_do_not_add_up():
    """Deltas of a mean that moved from 0 to 10 would take it to 30, and the variance to 1 - 600."""
    state = state_of()
    for staleness in range(3):
        give(state, Deltas(staleness=Staleness()), [(10.0, 1.0, FULL, 1, staleness)])
    assert statistics(state) == ([10.0] * 3, [1.0] * 3)


@pytest.mark.parametrize(("revision", "twice"), [(5, True), (CURRENT, False)])
def test_groups_that_wait_together_and_are_merged_one_after_the_other_do_not_add_up(revision, twice):
    """Clients 1 and 2 report before either group is merged; with the first the mean moves from 0 to 10, and should stay there."""
    state = state_of()
    state.submodels.rules, state.num_clients, state.now_s = Rules(revision), 2, 5.0
    memory = state.memory.of(CompassMemory)
    memory.groups = {number: Group([number], [], [], 5.0, 5.0) for number in (1, 2)}
    memory.group, memory.num_groups = {1: 1, 2: 2}, 3
    memory.speed, memory.steps, memory.planned_s = {1: 1.0, 2: 1.0}, {1: 5, 2: 5}, {1: 0.0, 2: 0.0}
    merge = GroupDeltas(staleness=Staleness(), pace=Pace(1, 4))
    give(state, merge, [(10.0, 1.0, FULL, 1, 0), (10.0, 1.0, FULL, 1, 0)], apply=False)
    for item in list(state.waiting):
        state.waiting[:] = [item]
        merge_all(around(state, merge), state)
    assert statistics(state) == (([20.0] * 3, [0.0] * 3) if twice else ([10.0] * 3, [1.0] * 3))


@pytest.mark.parametrize("inner", [Mean(by_samples=False), Deltas(staleness=Staleness()), ServerOptimizer()], ids=str)
def test_channels_that_only_one_covers_and_that_nobody_does(inner):
    both = [(0.0, 1.0, FULL, 1, 0), (4.0, 3.0, FRONT, 1, 0)]
    # the first two channels: mean 2, variance 1/2 (1 + 4) + 1/2 (3 + 4); the last: that of the first client
    assert statistics(give(state_of(5.0, 9.0), inner, both)) == ([2.0, 2.0, 0.0], [6.0, 6.0, 1.0])
    state = state_of()
    for name in (MEAN, VAR):
        state.values[name].copy_(torch.tensor([0.1, 0.2, 0.7]))
    give(state, inner, [(4.0, 3.0, FRONT, 1, 0), (0.0, 1.0, FRONT, 1, 0)])
    assert state.values[MEAN][2].item() == state.values[VAR][2].item() == torch.tensor(0.7).item()
    assert state.values[VAR][:2].tolist() == pytest.approx([6.0, 6.0])


def test_nothing_is_changed_before_the_merge():
    state = state_of(0.3, 0.7)
    before = state.values.fingerprint()
    give(state, Deltas(), [(4.0, 3.0, FULL, 1, 0), (2.0, 3.0, FRONT, 1, 0)], apply=False)
    assert state.values.fingerprint() == before


# ---- with a guard ----


@pytest.mark.parametrize("inner", [Mean(), Deltas()], ids=str)
def test_a_clipped_update_takes_its_statistics_half_the_way(inner):
    state = state_of()
    tensors = state.submodels.plan(FULL).gather(state.values)
    if inner.sends == "delta":
        for buffer in tensors.buffers.values():
            buffer.zero_()
    tensors["fc2.bias"].add_(2.0)  # a norm of 2 sqrt(3)
    tensors[MEAN].fill_(4.0)
    tensors[VAR].fill_(3.0 + 16.0)
    merge = around(state, NormFilter(inner, 3**0.5, None, 1))
    take(merge, state, Update(1, 1, 0, tensors, 1), FULL, 0)
    merge_all(merge, state)
    # mean 2, variance 1/2 (1 + 4) + 1/2 (3 + 4)
    assert state.values[MEAN].tolist() == pytest.approx([2.0] * 3, rel=1e-5)
    assert state.values[VAR].tolist() == pytest.approx([6.0] * 3, rel=1e-5)


@pytest.mark.parametrize("inner", [Mean(), Deltas(), ServerOptimizer()], ids=str)
def test_a_median_is_of_means_and_of_second_moments(inner):
    updates = [(1.0, 1.0, FULL, 1, 0), (1e6, 1.0, FULL, 1, 0), (3.0, 2.0, FULL, 1, 0)]
    mean, variance = statistics(give(state_of(), CoordinateWise(inner, "median", 0.1), updates))
    assert mean == [3.0] * 3 and variance == [2.0] * 3


# ---- what clients send ----


@pytest.mark.parametrize("sends", ["values", "delta"])
def test_clients_send_second_moments_and_never_their_differences(sends):
    bench, plain = Bench.of(Normed, sends=sends), Bench.of(Normed, sends=sends)
    bench.trainer = LocalTrainer(bench.submodels, Local(), sends, Training(), pools=True)
    bench.values[MEAN].fill_(0.25)
    plain.values.copy_(bench.values)
    _, sent = bench.run(assignment(steps=4))
    _, raw = plain.run(assignment(steps=4))
    if sends == "delta":  # of statistics, they are the values all the same
        for name in (MEAN, VAR):
            raw[name].add_(bench.values[name])
    torch.testing.assert_close(sent[MEAN], raw[MEAN])
    torch.testing.assert_close(sent[VAR], raw[VAR] + raw[MEAN].square())
    for name, tensor in sent.items():
        assert name in (MEAN, VAR) or torch.equal(tensor, raw[name])


# ---- where it is not needed ----


@pytest.mark.parametrize("name", ALGORITHMS)
def test_models_without_running_statistics_keep_their_merge(name):
    algorithm = ALGORITHMS[name]()
    assert pooled(algorithm, line_state().submodels) is algorithm
    assert pooled(algorithm, Submodels(Normed(), batch_norm="static")) is algorithm
    found = pooled(algorithm, Submodels(Normed())).merge
    assert found.inner is algorithm.merge and found.sends == algorithm.merge.sends


def test_parameters_are_merged_to_the_same_bits():
    for inner in (Mean(alpha=0.3), Deltas(0.7), ServerOptimizer()):
        plain, wrapped = state_of(), state_of()
        for state, merge in ((plain, inner), (wrapped, around(wrapped, inner))):
            for place, spec in enumerate((FULL, FRONT, FULL)):
                tensors = state.submodels.plan(spec).gather(state.values)
                for buffer in tensors.buffers.values():
                    buffer.mul_(1.0 + 0.1 * place)
                take(merge, state, Update(place + 1, 1, 0, tensors, place + 1), spec, place)
                merge.detach(state)
            merge_all(merge, state)
        for name, tensor in plain.values.items():
            assert name in (MEAN, VAR) or torch.equal(tensor, wrapped.values[name])


def test_the_answer_in_words():
    words = str(pooled(fed_avg(), Submodels(Normed())).merge)
    assert words == "coverage mean, weighted by samples, running variances pooled"
