from __future__ import annotations

import math

import pytest
import torch

from raafl.core.state import GlobalState
from raafl.core.types import Update
from raafl.errors import BadInput
from raafl.parts.merge.deltas import Deltas
from raafl.parts.merge.label_split import LabelSplit
from raafl.parts.merge.mean import Mean, Staleness, trained_pieces
from raafl.parts.merge.server_optimizer import ServerOptimizer
from raafl.submodel import FULL, FlatTensors, Spec, Submodels
from tests.helpers.coordinators import filled, line_state, values_of

TOP, BOTTOM = Spec.select({"hidden": range(0, 2)}), Spec.select({"hidden": range(2, 4)})


MIDDLE = Spec.select({"hidden": range(1, 3)})


def give(merge, state, updates):
    """Let the merge receive (value, spec, weight, staleness) one after the other, then apply."""
    for place, (value, spec, weight, staleness) in enumerate(updates):
        update = Update(place, 1, 0, filled(state, value, spec), weight)
        merge.receive(state, update, spec, staleness)
        if place + 1 < len(updates):
            merge.detach(state)
            for buffer in update.tensors.buffers.values():
                buffer.fill_(math.nan)  # the tensors are only lent
    merge.apply(state)
    return state


def one(state):
    (value,) = values_of(state).unique().tolist()
    return value


def test_mixing_one_update():
    # (1 - 0.25) * 2 + 0.25 * 6
    assert one(give(Mean(alpha=0.25), line_state(value=2.0), [(6.0, FULL, 9, 0)])) == 3.0


def test_staleness_scales_alpha():
    merge = Mean(alpha=0.5, staleness=Staleness("polynomial", a=1.0))
    # s(3) = 1/4, alpha_t = 1/8: 7/8 * 0 + 1/8 * 8
    assert one(give(merge, line_state(), [(8.0, FULL, 1, 3)])) == 1.0


def test_alpha_one_takes_the_update_bit_for_bit():
    assert one(give(Mean(alpha=1.0), line_state(value=0.3), [(0.1, FULL, 1, 5)])) == torch.tensor(0.1).item()


def test_fed_avg_weighs_by_samples():
    # (1 * 2 + 3 * 6) / 4
    assert one(give(Mean(), line_state(value=77.0), [(2.0, FULL, 1, 0), (6.0, FULL, 3, 0)])) == 5.0
    assert one(give(Mean(by_samples=False), line_state(), [(2.0, FULL, 1, 0), (6.0, FULL, 3, 0)])) == 4.0


def test_a_mean_of_several_with_alpha_mixes_their_mean():
    # mean of 2 and 6 is 4; 0.5 * 10 + 0.5 * 4
    assert (
        one(give(Mean(alpha=0.5, by_samples=False), line_state(value=10.0), [(2.0, FULL, 1, 0), (6.0, FULL, 1, 0)]))
        == 7.0
    )


def test_only_what_is_covered_changes_and_shared_parameters_take_the_mean():
    state = line_state(value=1.0)
    give(Mean(by_samples=False), state, [(3.0, TOP, 1, 0), (5.0, BOTTOM, 1, 0)])
    assert state.values["fc1.weight"].tolist() == [[3.0, 3.0], [3.0, 3.0], [5.0, 5.0], [5.0, 5.0]]
    assert state.values["fc2.weight"].tolist() == [[3.0, 3.0, 5.0, 5.0]]
    assert state.values["fc2.bias"].tolist() == [4.0]


def test_coverage_counts_overlaps_and_leaves_the_rest():
    state = line_state(value=1.0)
    middle = Spec.select({"hidden": range(1, 3)})
    give(Mean(), state, [(3.0, TOP, 1, 0), (6.0, middle, 2, 0)])
    # unit 0: 3; unit 1: (3 + 2*6)/3; unit 2: 6; unit 3: untouched
    assert state.values["fc1.weight"][:, 0].tolist() == [3.0, 5.0, 6.0, 1.0]
    assert state.values["fc2.bias"].tolist() == [5.0]


def test_mixing_a_fragment_leaves_the_others_bit_for_bit():
    state = line_state()
    torch.manual_seed(0)
    for buffer in state.values.buffers.values():
        buffer.normal_()
    before = state.values.clone()
    give(Mean(alpha=0.6), state, [(1.0, TOP, 1, 0)])
    assert torch.equal(state.values["fc1.weight"][2:], before["fc1.weight"][2:])
    expected = before["fc1.weight"][:2] * 0.4 + 0.6
    torch.testing.assert_close(state.values["fc1.weight"][:2], expected)


@pytest.mark.parametrize("alpha", [1.0, 0.6])
def test_pieces_that_are_covered_whole_get_the_bits_of_those_that_are_not(alpha, monkeypatch):
    """A piece of one element is covered or not; one of many is computed with a mask, since unit 3 is not covered."""
    found = []
    for size in (1, 1 << 16):
        monkeypatch.setattr("raafl.submodel.flat.CHUNK", size)
        state = line_state()
        torch.manual_seed(0)
        for buffer in state.values.buffers.values():
            buffer.normal_().mul_(torch.randint(0, 2, buffer.shape) - 0.5)  # some are -0.0
        give(Mean(alpha=alpha, staleness=Staleness("polynomial")), state, [(0.3, TOP, 3, 0), (-0.7, MIDDLE, 4, 2)])
        found.append(state.values.fingerprint())
    assert found[0] == found[1]


def test_several_merges_in_a_row_start_afresh():
    state, merge = line_state(), Mean()
    give(merge, state, [(2.0, FULL, 1, 0), (4.0, FULL, 1, 0)])
    give(merge, state, [(1.0, TOP, 1, 0), (3.0, BOTTOM, 1, 0)])
    give(merge, state, [(10.0, FULL, 1, 0), (20.0, FULL, 1, 0)])
    assert one(state) == 15.0
    assert one(give(Mean(), state, [(7.0, FULL, 1, 0)])) == 7.0


def test_a_mean_of_the_same_fragment_changes_that_fragment_only():
    state = give(Mean(alpha=0.5), line_state(value=8.0), [(2.0, TOP, 1, 0), (6.0, TOP, 1, 0)])
    assert state.values["fc1.weight"][:, 0].tolist() == [6.0, 6.0, 8.0, 8.0]


def test_fed_buff_scales_each_delta_by_its_own_staleness():
    merge = Deltas(server_lr=0.5)
    # s(0) = 1, s(3) = 1/2: 0.5 * (4 * 1 + 8 * 1/2) / 2
    assert one(give(merge, line_state(value=1.0), [(4.0, FULL, 1, 0), (8.0, FULL, 5, 3)])) == 3.0


def test_fed_buff_with_one_is_an_immediate_delta_step():
    state, expected = line_state(value=1.0), 1.0
    for delta in (0.5, -2.0, 0.25):
        give(Deltas(staleness=Staleness()), state, [(delta, FULL, 1, 7)])
        expected += delta
        assert one(state) == expected


def test_fed_buff_divides_by_coverage_on_submodels():
    state = give(Deltas(staleness=Staleness()), line_state(), [(2.0, TOP, 1, 0), (4.0, FULL, 1, 0)])
    assert state.values["fc1.weight"][:, 0].tolist() == [3.0, 3.0, 4.0, 4.0]
    assert state.values["fc2.bias"].tolist() == [3.0]


def reference_server(kind, deltas, lr, beta1, beta2, tau):
    """Reddi et al. 2021, Algorithm 2, on one number."""
    theta, m, v = 0.0, 0.0, tau**2
    for delta in deltas:
        m = beta1 * m + (1 - beta1) * delta
        if kind == "adagrad":
            v = v + delta**2
        elif kind == "yogi":
            v = v - (1 - beta2) * delta**2 * ((v > delta**2) - (v < delta**2))
        else:
            v = beta2 * v + (1 - beta2) * delta**2
        theta += lr * m / (math.sqrt(v) + tau)
    return theta


@pytest.mark.parametrize("kind", ["adam", "yogi", "adagrad"])
def test_fed_opt_follows_algorithm_2(kind):
    state, merge = line_state(), ServerOptimizer(kind, server_lr=0.1, beta1=0.9, beta2=0.99, tau=0.01)
    rounds = [(1.0, 3.0), (-2.0, 1.0), (0.5, 0.5)]
    for a, b in rounds:
        give(merge, state, [(a, FULL, 1, 0), (b, FULL, 3, 0)])
    means = [(a + 3 * b) / 4 for a, b in rounds]
    assert one(state) == pytest.approx(reference_server(kind, means, 0.1, 0.9, 0.99, 0.01), rel=1e-5)


def test_fed_opt_of_a_buffer_scales_each_delta_by_its_own_staleness():
    merge = ServerOptimizer("adam", server_lr=0.1, tau=0.01, staleness=Staleness("polynomial"), by_samples=False)
    state = give(merge, line_state(), [(4.0, FULL, 1, 0), (8.0, FULL, 5, 3)])
    mean = (4.0 * 1 + 8.0 / 2) / 2  # s(0) = 1, s(3) = 1/2, whatever the samples
    assert one(state) == pytest.approx(reference_server("adam", [mean], 0.1, 0.9, 0.99, 0.01), rel=1e-5)


def test_fed_opt_leaves_uncovered_elements_and_their_moments():
    state, merge = line_state(), ServerOptimizer("adam", server_lr=0.1, tau=0.01)
    give(merge, state, [(1.0, TOP, 1, 0)])
    assert state.values["fc1.weight"][2:].eq(0).all() and state.values["fc1.weight"][:2].gt(0).all()
    give(merge, state, [(1.0, BOTTOM, 1, 0)])
    once = reference_server("adam", [1.0], 0.1, 0.9, 0.99, 0.01)
    assert state.values["fc1.weight"].flatten().tolist() == pytest.approx([once] * 8, rel=1e-5)
    twice = reference_server("adam", [1.0, 1.0], 0.1, 0.9, 0.99, 0.01)
    assert state.values["fc2.bias"].item() == pytest.approx(twice, rel=1e-5)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Mean(alpha=0.0), "alpha is 0.0"),
        (lambda: Mean(alpha=1.5), "alpha is 1.5"),
        (lambda: Deltas(server_lr=0.0), "server_lr is 0.0"),
        (lambda: ServerOptimizer("adan"), "did you mean 'adam'"),
        (lambda: ServerOptimizer(beta1=1.0), "beta1 is 1.0"),
    ],
)
def test_values_out_of_range_are_named(make, says):
    with pytest.raises(BadInput, match=says):
        make()


# ---- updates that weigh nothing ----

WEIGHTLESS = {
    "one": [(6.0, FULL, 0, 0)],
    "several of one part": [(6.0, FULL, 0, 0), (9.0, FULL, 0, 1)],
    "of one smaller part": [(6.0, TOP, 0, 0), (9.0, TOP, 0, 1)],
    "of several parts": [(6.0, TOP, 0, 0), (9.0, BOTTOM, 0, 0), (9.0, FULL, 0, 2)],
}
BY_SAMPLES = {
    "mean": Mean,
    "mixed mean": lambda: Mean(alpha=0.5, staleness=Staleness("polynomial")),
    **{kind: lambda kind=kind: ServerOptimizer(kind) for kind in ("adam", "yogi", "adagrad")},
    "label split": lambda: LabelSplit(Mean()),
}


@pytest.mark.parametrize("updates", WEIGHTLESS.values(), ids=WEIGHTLESS)
@pytest.mark.parametrize("make", BY_SAMPLES.values(), ids=BY_SAMPLES)
def test_updates_without_samples_change_nothing_and_the_next_merge_is_as_if_they_had_not_been(make, updates):
    merge, state = make(), give(make(), line_state(value=0.3), updates)
    assert torch.equal(values_of(state), values_of(line_state(value=0.3)))
    after = [(2.0, FULL, 1, 0), (5.0, TOP, 3, 1)]
    assert torch.equal(values_of(give(merge, state, after)), values_of(give(make(), line_state(value=0.3), after)))


@pytest.mark.parametrize("make", BY_SAMPLES.values(), ids=BY_SAMPLES)
def test_beside_others_an_update_without_samples_counts_for_nothing(make):
    sound = [(2.0, FULL, 2, 0), (5.0, FULL, 1, 0)]
    found, expected = (give(make(), line_state(value=0.3), [*more, *sound]) for more in ([(9.0, FULL, 0, 0)], []))
    assert torch.equal(values_of(found), values_of(expected))


# ---- staleness that undoes the work ----


@pytest.mark.parametrize(
    ("merge", "staleness", "said"),
    [
        (Mean(alpha=0.9), 17.7, "17.7 merges late on average and are mixed in with 0.9, so 94% of"),  # 15.93 / 16.93
        (Mean(alpha=0.9), 9.9, None),  # 8.91: 8.91 / 9.91 is a little less than nine tenths
        (Mean(alpha=0.9, staleness=Staleness("polynomial")), 99.0, None),  # 0.09 * 99
        (Mean(alpha=0.9, staleness=Staleness("polynomial")), 120.0, "mixed in with 0.082, so 91% of"),  # 0.9 / 11 * 120
        (Mean(alpha=0.9, staleness=Staleness("polynomial", a=1.0)), 1e6, None),
        (Mean(), 0.0, None),
        (Deltas(), 1e6, None),
    ],
)
def test_what_takes_back_nine_tenths_of_the_work_is_said(merge, staleness, said):
    found = merge.too_stale(staleness)
    assert found is None if said is None else said in found


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_of_its_own_progress_the_model_keeps_as_much_as_the_rule_says(share):
    """By brute force: theta moves by a (theta_old + 1 - theta), with theta_old nine merges old: a / (1 + 9 a) each time."""
    theta = [0.0] * 10
    for _ in range(4000):
        theta.append((1 - share) * theta[-1] + share * (theta[-10] + 1))
    assert (theta[-1] - theta[-1001]) / 1000 == pytest.approx(share / (1 + 9 * share), rel=1e-3)


def test_pieces_are_each_trained_value_once_and_say_whether_it_is_a_parameter():
    half = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)).to(torch.float64)
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3), half)
    module[0].bias.requires_grad_(False)
    submodels = Submodels(module)
    state = GlobalState(submodels, FlatTensors.from_named(module.state_dict(), submodels.layout()))
    seen = state.values.clone().zero_()
    for is_parameter, (theta, mark) in trained_pieces(state, seen):
        theta.fill_(7.0)
        mark.add_(1.0 if is_parameter else 10.0)
    for name, mark in seen.items():
        trained = name != "0.bias" and "num_batches" not in name
        assert set(mark.reshape(-1).tolist()) == {(10.0 if "running" in name else 1.0) if trained else 0.0}, name
        assert bool((state.values[name] == 7.0).all()) == trained, name
