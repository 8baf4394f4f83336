"""Updates that are finite and far too large: refused by their norm, or since their merge would overflow; honest ones never."""

from __future__ import annotations

import math

import pytest
import torch

from raafl.algorithms import fed_avg, fed_buff, fed_dyn, scaffold
from raafl.core import saving
from raafl.core.state import GlobalState
from raafl.core.types import Arrived, Suspend, Update
from raafl.parts.merge.deltas import Deltas
from raafl.parts.merge.mean import Mean, Staleness
from raafl.parts.merge.server_optimizer import ServerOptimizer
from raafl.parts.protect.assembly import Bounded, BoundedMemory
from raafl.submodel import FULL, FlatTensors, Spec, Submodels
from tests.helpers.coordinators import (
    EXAMPLE,
    Line,
    answer,
    assigned,
    coordinator_for,
    cut_in_the_middle,
    filled,
    join,
    line_state,
    update_for,
    values_of,
)
from tests.helpers.merges import bounded, merge_all, take

TOP = Spec.select({"hidden": range(0, 2)})
MOST = torch.finfo(torch.float32).max
ROOT_13 = math.sqrt(13)  # the line's parameters


def judge(merge, state, value, spec=FULL, number=1, samples=1):
    """Why an update with every element at `value` is refused; None = it is received."""
    tensors = value if isinstance(value, FlatTensors) else filled(state, value, spec)
    update = Update(number, 1, 0, tensors, samples)
    problem = merge.reject_reason(state, update, spec, 0)
    if problem is None and merge.overflows(state, update, spec, 0):
        problem = "overflow"
    if problem is None:
        take(merge, state, update, spec, 0)
    return problem


def accept(merge, state, values, spec=FULL):
    for number, value in enumerate(values, start=1):
        assert judge(merge, state, value, spec, number) is None
        merge_all(merge, state)


# ---- norms ----


@pytest.mark.parametrize("inner", [Mean(), Deltas(staleness=Staleness())])
def test_a_norm_above_a_thousand_times_the_median_is_refused_after_eight(inner):
    state = line_state(value=0.0)  # a model of norm 0: nothing is judged before
    merge, size = Bounded(inner, 1000.0), 1.0 if inner.sends == "delta" else 0.0
    # values 1, 2, ... 8 and deltas of 1 are steps of 1 both, with norm sqrt(13)
    accept(merge, state, [1.0] * 8 if size else range(1, 9))
    assert values_of(state).tolist() == [8.0] * 13
    before = state.values.model_digest()
    assert judge(merge, state, 1000.5 + (0.0 if size else 8.0), number=9) == "huge-norm"
    assert state.values.model_digest() == before
    assert judge(merge, state, 999.5 + (0.0 if size else 8.0), number=10) is None


def test_until_eight_are_accepted_the_models_own_norm_counts():
    state, merge = line_state(value=2.0), Bounded(Mean(), 10.0)
    # the model's norm is 2 sqrt(13); a difference of 20 is ten times that
    assert judge(merge, state, 22.1) == "huge-norm"
    assert judge(merge, state, 21.9) is None
    assert judge(Bounded(Mean(), 10.0), line_state(value=0.0), 1e6) is None


def test_each_layout_has_norms_of_its_own():
    state, merge = line_state(value=0.0), Bounded(Deltas(), 10.0)
    accept(merge, state, [1.0] * 8)
    accept(merge, state, [1e-3] * 8, TOP)
    assert judge(merge, state, 0.1, TOP, 17) == "huge-norm" and judge(merge, state, 0.1, FULL, 18) is None


def test_the_median_never_falls_as_training_converges():
    state, merge = line_state(value=0.0), Bounded(Deltas(), 10.0)
    accept(merge, state, [1.0] * 8 + [1e-4] * 300)
    assert judge(merge, state, 9.0, number=400) is None  # who comes late takes a step as large as the first ones
    merge_all(merge, state)
    assert judge(merge, state, 11.0, number=401) == "huge-norm"


def test_the_bundle_of_a_method_is_judged_too():
    state = line_state(value=0.0)
    merge = bounded(scaffold(), 100.0).merge
    layout = state.submodels.layout(part="trained")

    def send(number, value):
        bundle = {"c_i": FlatTensors.zeros(layout)}
        for buffer in bundle["c_i"].buffers.values():
            buffer.fill_(value)
        update = Update(number, 1, 0, filled(state, 0.1 * number), 1, bundles=bundle)
        problem = merge.reject_reason(state, update, FULL, 0)
        if problem is None:
            take(merge, state, update, FULL, 0)
            merge_all(merge, state)
        return problem

    assert [send(number, 1.0) for number in range(1, 9)] == [None] * 8
    assert send(9, 101.0) == "huge-norm" and send(10, 99.0) is None


# ---- overflow ----

MERGES = {
    "mean": Mean(),
    "mix": Mean(alpha=0.5),
    "deltas": Deltas(),
    "adam": ServerOptimizer(),
    "adagrad": ServerOptimizer(kind="adagrad"),
    "variates": scaffold().merge,
    "fed_dyn": fed_dyn().merge,
}


@pytest.mark.parametrize("spec", [FULL, TOP], ids=["whole", "part"])
@pytest.mark.parametrize("name", MERGES)
def test_what_would_overflow_is_refused_and_leaves_no_trace(name, spec):
    """Beside a plain update, which is merged as if the other had never been there."""
    merge = Bounded(MERGES[name], None)
    states = line_state(value=1.0), line_state(value=1.0)
    for hostile, state in zip((True, False), states, strict=True):
        for number, (value, kind) in enumerate([(1.5, FULL), (MOST, spec), (-MOST, spec), (0.5, TOP)], start=1):
            if abs(value) < MOST or hostile:
                update = Update(number, number, 0, filled(state, value, kind), 3)
                update.bundles = {n: filled(state, value, kind) for n in ("c_i", "g_i", "h_i")}
                assert merge.reject_reason(state, update, kind, 0) is None
                overflows = merge.overflows(state, update, kind, 0)
                assert overflows == (abs(value) == MOST)
                if not overflows:
                    take(merge, state, update, kind, 0)
                    merge.detach(state)
        merge_all(merge, state)
        assert state.values.is_finite()
    assert states[0].values.model_digest() == states[1].values.model_digest()
    plain = [saving.to_plain(state.memory.to_plain()) for state in states]
    assert all(torch.equal(a, b) for a, b in zip(*map(tensors_in, plain), strict=True))
    clients = [saving.to_plain(state.clients.values) for state in states]
    assert all(torch.equal(a, b) for a, b in zip(*map(tensors_in, clients), strict=True))


def tensors_in(data):
    if isinstance(data, torch.Tensor):
        return [data]
    items = data.values() if isinstance(data, dict) else data if isinstance(data, list) else ()
    return [tensor for item in items for tensor in tensors_in(item)]


def test_large_updates_that_are_fine_alone_and_overflow_together():
    state, merge = line_state(value=0.0), Bounded(Deltas(staleness=Staleness()), None)
    most = MOST / 40
    assert judge(merge, state, most, number=1) is None  # 16 times as large it is still finite
    merge.detach(state)
    assert judge(merge, state, 1.0, number=2) is None  # tried too, since it comes beside a large one
    merge.detach(state)
    found = [judge(merge, state, most, number=number) for number in range(3, 40)]
    assert found[0] is None and found[-1] == "overflow"  # the sum of all, before it is divided
    merge_all(merge, state)
    assert state.values.is_finite() and not state.memory.of(BoundedMemory).large


def test_half_precision_overflows_sooner():
    module = Line().half()
    submodels = Submodels(module, tuple(tensor.half() for tensor in EXAMPLE))
    state = GlobalState(submodels, submodels.state(module))
    for buffer in state.values.buffers.values():
        buffer.fill_(60000.0)
    merge = Bounded(Deltas(staleness=Staleness()), None)
    assert judge(merge, state, 50.0, number=1) is None
    merge_all(merge, state)
    assert judge(merge, state, 6000.0, number=2) == "overflow"  # 65504 is the largest
    assert state.values.is_finite()


# ---- in the loop ----


def test_the_client_is_kept_out_and_the_others_go_on():
    coordinator = coordinator_for(bounded(fed_avg(), 1e4), line_state(value=1.0), min_clients=3, num_clients=3)
    tasks = assigned(join(coordinator, [1, 2, 3]))
    out = []
    for turn in range(4):
        actions = []
        while 3 in tasks:
            actions += (last := answer(coordinator, tasks.pop(3), MOST))
            tasks |= assigned(last)
        out += [action.client for action in actions if isinstance(action, Suspend)]
        answer(coordinator, tasks[1], 2.0 + turn)
        tasks = assigned(answer(coordinator, tasks[2], 2.0 + turn))
    assert out == [3] and values_of(coordinator.state).tolist() == [5.0] * 13
    assert coordinator.admission.refused == {"huge-norm": 3}


def test_nobody_is_kept_out_for_what_a_ruined_model_does_to_its_training():
    coordinator = coordinator_for(fed_buff(buffer_size=2), line_state(value=1e8), min_clients=2, num_clients=2)
    tasks = assigned(join(coordinator, [1, 2]))
    actions = []
    for _ in range(4):
        actions += (
            last := coordinator.handle(Arrived(update_for(coordinator.state, tasks[1], 1.0, refusal="non-finite")), 0.0)
        )
        tasks |= assigned(last)
    assert (
        not any(isinstance(action, Suspend) for action in actions) and coordinator.admission.refused["non-finite"] == 4
    )


def test_norms_survive_a_checkpoint():
    def fresh():
        return coordinator_for(bounded(fed_buff(buffer_size=3), 10.0), line_state(value=1.0), num_clients=4)

    def value(step):
        return 60.0 if step == 11 else 1.0 + 0.1 * step  # deltas

    whole, again = cut_in_the_middle(fresh, 10, value)
    assert whole.admission.refused == again.admission.refused == {"huge-norm": 1}
    assert whole.state.values.model_digest() == again.state.values.model_digest()
    assert whole.state.memory.of(BoundedMemory).norms == again.state.memory.of(BoundedMemory).norms
