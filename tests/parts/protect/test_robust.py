from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from raafl.algorithms import fed_async, fed_avg, fed_buff, fed_mezo, fed_opt, fed_pm, fed_raa
from raafl.core.options import Guard
from raafl.core.state import GlobalState
from raafl.core.types import Update
from raafl.errors import BadInput
from raafl.parts.merge.deltas import Deltas
from raafl.parts.merge.mean import Mean, Staleness
from raafl.parts.merge.nesterov import DelayedNesterov, Nesterov
from raafl.parts.merge.server_optimizer import ServerOptimizer
from raafl.parts.protect.robust import (
    WINDOW,
    CoordinateWise,
    GuardMemory,
    NormFilter,
    comparators,
    guarded,
    locate,
    norm_of,
)
from raafl.rules import CURRENT, Rules
from raafl.submodel import FULL, FlatTensors, Spec, Submodels
from raafl.submodel import flat as flat_tensors
from tests.helpers.coordinators import (
    answer,
    assigned,
    coordinator_for,
    cut_in_the_middle,
    filled,
    join,
    line_state,
    values_of,
)
from tests.helpers.merges import merge_all, take

TOP, MIDDLE, BOTTOM = (Spec.select({"hidden": kept}) for kept in (range(0, 2), range(1, 3), range(2, 4)))
INF = math.inf


def give(merge, state, updates):
    """Each update: (value everywhere, spec, samples, staleness)."""
    for place, (value, spec, samples, staleness) in enumerate(updates):
        tensors = value if isinstance(value, FlatTensors) else filled(state, value, spec)
        update = Update(place + 1, place + 1, 0, tensors, samples, 1)
        assert merge.reject_reason(state, update, spec, staleness) is None
        take(merge, state, update, spec, staleness)
        if place + 1 < len(updates):
            merge.detach(state)
    merge_all(merge, state)
    return state


def one(state):
    (value,) = values_of(state).unique().tolist()
    return value


def screened(inner, clip_norm=None, outlier=None, warm_up=2):
    return NormFilter(inner, clip_norm, outlier, warm_up)


def located(inner, combine="median", trim=0.1):
    return CoordinateWise(inner, combine, trim)


# ---- clipping ----


def test_a_whole_update_is_clipped_to_half():
    # 13 parameters, each 2 away: a norm of 2 sqrt(13), to be sqrt(13)
    state = give(screened(Mean(), clip_norm=math.sqrt(13)), line_state(value=1.0), [(3.0, FULL, 1, 0)])
    assert values_of(state).tolist() == pytest.approx([2.0] * 13, rel=1e-6)
    assert state.memory.of(GuardMemory).clipped == 1


def test_a_submodel_is_clipped_by_its_own_norm_and_the_rest_stays():
    # units 0 and 1: 4 + 2 weights and the bias, each 2 away
    state = give(screened(Mean(), clip_norm=math.sqrt(7)), line_state(value=1.0), [(3.0, TOP, 1, 0)])
    assert state.values["fc1.weight"][:2].flatten().tolist() == pytest.approx([2.0] * 4, rel=1e-6)
    assert state.values["fc1.weight"][2:].eq(1).all() and state.values["fc2.weight"][0, 2:].eq(1).all()


def test_three_clients_that_overlap_partly():
    # differences 7 (clipped to 1), -1 and 1 (within the norm); unit by unit the mean of those that cover it
    state = line_state(value=10.0)
    updates = [(17.0, TOP, 1, 0), (9.0, MIDDLE, 1, 0), (11.0, BOTTOM, 1, 0)]
    give(screened(Mean(by_samples=False), clip_norm=math.sqrt(7)), state, updates)
    assert state.values["fc2.weight"][0].tolist() == pytest.approx([11.0, 10.0, 10.0, 11.0], rel=1e-6)
    assert state.values["fc2.bias"].item() == pytest.approx(10 + 1 / 3, rel=1e-6)


@pytest.mark.parametrize("factor", [0.3, 5.0])
def test_in_a_round_values_and_deltas_are_clipped_alike(factor):
    """The global values stand still until the merge, so both differences are the same."""
    state, other = line_state(), line_state()
    rng = torch.Generator().manual_seed(3)
    for buffer in state.values.buffers.values():
        buffer.normal_(generator=rng)
    other.values.copy_(state.values)
    updates, deltas = [], []
    for spec in (FULL, TOP, MIDDLE):
        delta = filled(state, 0.0, spec)
        for buffer in delta.buffers.values():
            buffer.normal_(generator=rng)
        values = state.submodels.plan(spec).gather(state.values)
        for dtype, buffer in values.buffers.items():
            buffer.add_(delta.buffers[dtype])
        updates.append((values, spec, 1, 0))
        deltas.append((delta, spec, 1, 0))
    give(screened(Mean(by_samples=False), clip_norm=factor), state, updates)
    give(screened(Deltas(staleness=Staleness()), clip_norm=factor), other, deltas)
    torch.testing.assert_close(values_of(state), values_of(other), rtol=1e-5, atol=1e-6)


class WithNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.norm = nn.Linear(2, 3), nn.BatchNorm1d(3)

    def forward(self, x):
        return self.norm(self.fc(x))

    def training_step(self, batch, index):
        return self(batch[0]).square().mean()


def test_running_statistics_do_not_count_in_the_norm():
    module = WithNorm()
    submodels = Submodels(module, (torch.randn(4, 2),))
    tensors = FlatTensors.zeros(submodels.layout(part="trained"))
    tensors["norm.running_var"].fill_(1e6)
    tensors["fc.weight"].fill_(2.0)
    assert norm_of(tensors, submodels) == pytest.approx(2 * math.sqrt(6))


def test_a_huge_finite_update_has_a_finite_norm():
    state = line_state()
    assert norm_of(filled(state, 1e38), state.submodels) == pytest.approx(1e38 * math.sqrt(13))


def test_what_is_within_bounds_is_passed_on_as_it_is():
    for inner in (Mean(alpha=0.3), Deltas(), ServerOptimizer()):
        updates = [(0.1, FULL, 3, 1), (0.7, TOP, 5, 0), (-0.2, BOTTOM, 1, 2)]
        plain, bounded = give(inner, line_state(), updates), give(screened(inner, INF, INF), line_state(), updates)
        assert plain.values.model_digest() == bounded.values.model_digest()


# ---- outliers ----


def test_an_outlier_is_refused_counted_and_settled():
    coordinator = coordinator_for(guarded(fed_async(alpha=1.0), Guard(outlier=3.0, warm_up=3)))
    tasks = assigned(join(coordinator, [1, 2]))
    value = 0.0
    for _ in range(3):
        value += 1.0  # each update is 1 away from what is there: a norm of sqrt(13)
        tasks |= assigned(answer(coordinator, tasks[1], value))
    before = coordinator.state.values.model_digest()
    actions = answer(coordinator, tasks[2], value + 3.1)
    assert coordinator.admission.refused == {"outlier": 1} and coordinator.state.values.model_digest() == before
    assert [a.outcome for a in actions if hasattr(a, "outcome")] == ["refused:outlier"]
    tasks |= assigned(actions)  # it may try again
    answer(coordinator, tasks[2], value + 2.9)
    assert coordinator.admission.refused == {"outlier": 1} and coordinator.merged == 4
    assert coordinator.algorithm.merge.report(coordinator.state)["guard"]["outlier"] == 3.0


def test_small_submodels_are_judged_among_their_like():
    state, merge = line_state(), screened(Deltas(), outlier=2.0)
    give(merge, state, [(0.1, TOP, 1, 0), (0.1, BOTTOM, 1, 0), (10.0, FULL, 1, 0), (10.0, FULL, 1, 0)])

    def judged(value, spec):
        return merge.reject_reason(state, Update(9, 1, 0, filled(state, value, spec), 1), spec, 0)

    assert judged(0.5, TOP) == "outlier" and judged(0.15, MIDDLE) is None
    assert judged(15.0, FULL) is None and judged(25.0, FULL) == "outlier"


def test_the_window_is_bounded_and_the_median_follows():
    state, merge = line_state(), screened(Deltas(), outlier=2.0)
    for value in [1.0] * 60 + [1.8] * WINDOW:
        give(merge, state, [(value, FULL, 1, 0)])
    (norms,) = state.memory.of(GuardMemory).norms.values()
    assert norms == pytest.approx([1.8 * math.sqrt(13)] * WINDOW)


def test_no_move_at_all_makes_nobody_an_outlier():
    state, merge = line_state(), screened(Deltas(), outlier=2.0)
    give(merge, state, [(0.0, FULL, 1, 0)] * 3)
    assert merge.reject_reason(state, Update(9, 1, 0, filled(state, 1.0), 1), FULL, 0) is None


# ---- trimmed means and medians ----


def test_median_and_trimmed_mean_over_coverage_by_hand():
    updates = [(1.0, TOP, 9, 0), (2.0, MIDDLE, 1, 0), (60.0, FULL, 1, 0), (4.0, FULL, 1, 0)]
    # unit 0: 1, 60, 4; unit 1: 1, 2, 60, 4; unit 2: 2, 60, 4; unit 3: 60, 4; the bias: 1, 2, 60, 4
    state = give(located(Mean()), line_state(value=7.0), updates)
    assert state.values["fc2.weight"][0].tolist() == [4.0, 3.0, 4.0, 32.0]
    assert state.values["fc1.weight"][:, 1].tolist() == [4.0, 3.0, 4.0, 32.0]
    assert state.values["fc2.bias"].item() == 3.0
    # floor(0.3 * k): one at each end of 4, none of 3 and 2
    state = give(located(Mean(), "trimmed_mean", 0.3), line_state(value=7.0), updates)
    assert state.values["fc2.weight"][0].tolist() == pytest.approx([65 / 3, 3.0, 22.0, 32.0], rel=1e-6)


@pytest.mark.parametrize("inner", [Mean(), Mean(alpha=0.5), Deltas(), ServerOptimizer()], ids=str)
def test_what_nobody_covers_is_left_alone(inner):
    state = line_state(value=0.3)
    give(located(inner), state, [(1.0, TOP, 1, 0), (5.0, TOP, 1, 2), (2.0, MIDDLE, 1, 1)])
    assert state.values["fc1.weight"][3].eq(0.3).all() and state.values["fc2.weight"][0, 3].item() == pytest.approx(0.3)
    assert state.values["fc1.weight"][:3].ne(0.3).all()


@pytest.mark.parametrize("spec", [FULL, TOP])
@pytest.mark.parametrize("inner", [Mean(), Mean(alpha=0.3), Deltas(), ServerOptimizer()], ids=str)
def test_a_median_of_one_is_that_one(inner, spec):
    update = [(0.7, spec, 5, 2)]
    plain, robust = give(inner, line_state(), update), give(located(inner), line_state(), update)
    assert plain.values.model_digest() == robust.values.model_digest()


def test_the_inner_merge_does_the_rest():
    # the median 4 of 1, 4, 100 in the place of each; alpha 0.5 from 2: 3
    assert one(give(located(Mean(alpha=0.5)), line_state(value=2.0), [(v, FULL, 1, 0) for v in (1.0, 4.0, 100.0)])) == 3
    # FedBuff: s(0) = 1, s(3) = 1/2, so 3/4 of the median of 2 and 6
    assert one(give(located(Deltas()), line_state(), [(2.0, FULL, 1, 0), (6.0, FULL, 1, 3)])) == 3.0


def slow(columns, combine, trim):
    """One coordinate at a time: sort, cut, average. NaN where there is nothing."""
    result = []
    for row in np.array(columns, dtype=np.float64).T:
        there = sorted(x for x in row if not math.isnan(x))
        if combine == "median":
            result.append(float(np.median(there)) if there else math.nan)
            continue
        cut = math.floor(round(trim * len(there), 6))
        there = there[cut : len(there) - cut]
        result.append(sum(there) / len(there) if there else math.nan)
    return result


@st.composite
def rounds(draw):
    specs = draw(st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=5, unique=True), min_size=1, max_size=7))
    seed = draw(st.integers(0, 2**16))
    return [Spec.select({"hidden": kept}) for kept in specs], seed


STATE = line_state(hidden=5)


@given(rounds(), st.sampled_from(["median", "trimmed_mean"]), st.sampled_from([0.0, 0.1, 0.2, 0.25, 1 / 3, 0.49]))
def test_any_coverage_gives_what_the_slow_reference_gives(case, combine, trim):
    specs, seed = case
    rng = torch.Generator().manual_seed(seed)
    state = GlobalState(STATE.submodels, STATE.values.clone())
    stored, columns = [], []
    for spec in map(state.submodels.normal, specs):
        tensors = filled(state, 0.0, spec)
        for buffer in tensors.buffers.values():
            buffer.copy_(torch.randint(-3, 4, buffer.shape, generator=rng))  # ties, too
        stored.append((spec, tensors))
        whole = FlatTensors.from_named({name: torch.full_like(v, math.nan) for name, v in state.values.items()})
        kept = list(spec.indices("hidden") or range(5))
        whole["fc1.weight"][kept], whole["fc2.weight"][:, kept] = tensors["fc1.weight"], tensors["fc2.weight"]
        whole["fc2.bias"].copy_(tensors["fc2.bias"])
        columns.append(whole.buffers[torch.float32].tolist())
    expected = state.values.clone()
    expected.buffers[torch.float32].copy_(torch.tensor(slow(columns, combine, trim)))
    for spec, found in locate(state, stored, combine, trim).items():
        wanted = state.submodels.plan(spec).gather(expected)
        torch.testing.assert_close(found.buffers[torch.float32], wanted.buffers[torch.float32], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("num", range(1, 10))
def test_the_network_sorts(num):
    """A network sorts everything if it sorts all zeros and ones (Knuth, volume 3, 5.3.4, theorem Z)."""
    for bits in range(2**num):
        values = [bits >> i & 1 for i in range(num)]
        for low, high in comparators(num):
            assert low < high
            if values[low] > values[high]:
                values[low], values[high] = values[high], values[low]
        assert values == sorted(values)


@pytest.mark.parametrize("chunk", [1, 3])
def test_the_chunk_changes_nothing(chunk, monkeypatch):
    updates = [(1.0, TOP, 9, 0), (2.0, MIDDLE, 1, 0), (60.0, FULL, 1, 0), (4.0, FULL, 1, 0)]
    whole = give(located(Mean(), "trimmed_mean", 0.3), line_state(), updates).values.model_digest()
    monkeypatch.setattr(flat_tensors, "CHUNK", chunk)
    assert give(located(Mean(), "trimmed_mean", 0.3), line_state(), updates).values.model_digest() == whole


@pytest.mark.parametrize("inner", [Mean(by_samples=False), Deltas(staleness=Staleness())], ids=str)
def test_nothing_trimmed_is_the_unweighted_coverage_mean(inner):
    updates = [(1.0, TOP, 9, 0), (2.5, MIDDLE, 1, 0), (60.0, FULL, 2, 0), (4.0, BOTTOM, 1, 0)]
    plain, trimmed = (
        give(inner, line_state(), updates),
        give(located(inner, "trimmed_mean", 0.0), line_state(), updates),
    )
    torch.testing.assert_close(values_of(plain), values_of(trimmed), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("inner", "revision", "expected"),
    [
        (DelayedNesterov(1.0, 0.0, every=2), 5, 1.0),
        (DelayedNesterov(1.0, 0.0, every=2), CURRENT, 2.0),  # 1/N of each of two updates
        (Nesterov(1.0, 0.0, "tokens"), CURRENT, 2.0),
    ],
    ids=str,
)
def test_a_combined_update_counts_as_those_that_it_stands_for(inner, revision, expected):
    state = line_state()
    state.submodels.rules = Rules(revision)
    assert one(give(located(inner, "trimmed_mean", 0.0), state, [(1.0, FULL, 1, 0), (3.0, FULL, 1, 0)])) == expected


def test_updates_are_only_lent():
    state, merge = line_state(), located(Mean())
    lent = filled(state, 3.0)
    take(merge, state, Update(1, 1, 0, lent, 1), FULL, 0)
    merge.detach(state)
    lent.buffers[torch.float32].fill_(99.0)
    merge_all(merge, state)
    assert one(state) == 3.0


# ---- saved and restored, options ----


@pytest.mark.parametrize("cut", [1, 4, 5, 9])
def test_a_restored_coordinator_goes_on_with_the_same_norms_and_stored_updates(cut):
    def fresh():
        guard = Guard(clip_norm=2.0, outlier=4.0, warm_up=2, combine="median")
        return coordinator_for(guarded(fed_buff(buffer_size=3), guard), min_clients=4)

    whole, again = cut_in_the_middle(fresh, cut, lambda step: 50.0 if step % 5 == 4 else 0.1 * step)
    assert again.state.values.model_digest() == whole.state.values.model_digest()
    assert again.admission.refused == whole.admission.refused and whole.admission.refused["outlier"] >= 2
    assert again.state.memory.of(GuardMemory) == whole.state.memory.of(GuardMemory)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Guard(clip_norm=0.0), "guard.clip_norm is 0.0: give a number above 0"),
        (lambda: Guard(outlier=1.0), "guard.outlier is 1.0: give a number above 1"),
        (lambda: Guard(combine="medain"), "guard.combine is 'medain': did you mean 'median'"),
        (lambda: Guard(trim=0.5), "guard.trim is 0.5: give a number from 0 to below 0.5"),
        (lambda: Guard(warm_up=0), "guard.warm_up is 0"),
        (lambda: guarded(fed_async(), Guard(combine="median")), "fed_async merges each update alone: choose"),
        (lambda: guarded(fed_raa(), Guard(combine="trimmed_mean")), "fed_raa merges each update alone: choose"),
        (lambda: guarded(fed_buff(buffer_size=1), Guard(combine="median")), "fed_buff merges each update alone"),
    ],
)
def test_values_out_of_range_are_named(make, says):
    with pytest.raises(BadInput, match=says):
        make()


def test_a_guard_that_asks_for_nothing_is_not_there():
    algorithm = fed_opt()
    assert guarded(algorithm, Guard()) is algorithm


def test_the_answer_in_words():
    guard = Guard(clip_norm=1.0, outlier=3.0, combine="trimmed_mean", trim=0.2)
    assert str(guarded(fed_avg(), guard).merge) == (
        "norms clipped to 1, outliers above 3 x median refused, then coordinate-wise mean without 20% at each end, "
        "then coverage mean, weighted by samples"
    )


@pytest.mark.parametrize(
    ("algorithm", "guard", "refused"),
    [
        (fed_mezo(), Guard(clip_norm=1.0), "guard.clip_norm is 1, but updates of fed_mezo are numbers"),
        (fed_mezo(), Guard(outlier=3.0), "guard.outlier is 3, but updates of fed_mezo are numbers"),
        (fed_pm(), Guard(clip_norm=1.0, outlier=3.0), "guard.clip_norm is 1, but updates of fed_pm are masks"),
        (fed_pm(), Guard(outlier=3.0), None),
        (fed_avg(), Guard(clip_norm=1.0, outlier=3.0), None),
    ],
)
def test_updates_that_are_no_change_of_the_model_have_no_norm_to_limit(algorithm, guard, refused):
    """fed_mezo's have no tensors, whose norm is 0; fed_pm's 0 and 1 would be drawn towards weights of half of sigma."""
    state = line_state()
    merge = guarded(algorithm, guard).merge
    assert [problem[: len(refused or "")] for problem in merge.check(state)] == ([refused] if refused else [])
    state.submodels.rules = Rules(6)  # an older run folder replays
    assert merge.check(state) == []
