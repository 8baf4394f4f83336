"""Scores of segments and the merge by them (Co-S2P, Eqs. 4 and 5), and the published merge, with numbers followed by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from raafl.algorithms import co_s2p
from raafl.algorithms.co_s2p.merge import ImportanceMerge, PublishedMerge, importance
from raafl.core import restoring, saving
from raafl.core.state import GlobalState
from raafl.core.types import Update, Work
from raafl.errors import BadInput
from raafl.parts.local.mask_training import SCORES
from raafl.parts.merge.personal import AtWork, WithScores, forget_work, record_work, scores_of
from raafl.submodel import FULL, FlatTensors, Spec, Submodels
from tests.helpers.coordinators import filled, line_state
from tests.helpers.merges import merge_all, take

# ---- Scores of segments and the merge by them (Co-S2P, Eqs. 4 and 5), with numbers followed by hand ----


FIRST = Spec.select({"hidden": range(2)})


def update(state, client, value, spec=FULL, **more):
    return Update(0, client, 0, filled(state, value, spec), 1, **more)


def test_a_score_by_hand():
    score = importance(torch.tensor([6.0, 6.0]), torch.tensor([0.0, 8.0]), torch.tensor([4.0, 4.0]))
    assert score.tolist() == [6.0, 2.0]
    assert importance(torch.tensor([1.0]), torch.tensor([0.0]), torch.tensor([0.0])).tolist() == [1.0]
    assert importance(torch.tensor([1.0]), torch.tensor([1.0]), torch.tensor([0.0])).item() < 1e-30


def test_two_clients_one_of_them_late_by_hand():
    """Two segments of two units. Client 2 started at 3 and has the first segment; now all values are 1.

    Client 1 moves all by 0.5, scores 0.5 ||1||; client 2 by 1, scores 1 / (1 + 2/1) ||1|| = 1/3 ||1||. Where both are the
    step is (0.5 * 0.5 + 1/3 * 1) / (0.5 + 1/3) = 0.7.
    """
    state, merge = line_state(value=3.0), ImportanceMerge(segments=2)
    record_work(state, 2, Work(FIRST))
    take(merge, state, update(state, 1, -2.0), FULL, 0)
    merge_all(merge, state)
    assert {float(v) for b in state.values.buffers.values() for v in b} == {1.0}
    record_work(state, 1, Work())
    take(merge, state, update(state, 1, 0.5), FULL, 0)
    take(merge, state, update(state, 2, 1.0, FIRST), FIRST, 1)
    merge_all(merge, state)
    values = state.values
    torch.testing.assert_close(values["fc2.weight"], torch.tensor([[1.7, 1.7, 1.5, 1.5]]))
    torch.testing.assert_close(values["fc1.weight"], torch.tensor([[1.7] * 2] * 2 + [[1.5] * 2] * 2))
    torch.testing.assert_close(values["fc2.bias"], torch.tensor([1.7]))  # on no axis: a segment of its own


def test_segments_are_weighed_apart():
    """A client that moves one segment much and the other little weighs much in the first and little in the second."""
    state, merge = line_state(value=1.0), ImportanceMerge(segments=2)
    one, other = update(state, 1, 1.0), update(state, 2, 1.0)
    one.tensors["fc2.weight"][0, :2], one.tensors["fc1.weight"][:2] = 3.0, 3.0
    take(merge, state, one, FULL, 0)
    take(merge, state, other, FULL, 0)
    merge_all(merge, state)
    torch.testing.assert_close(state.values["fc2.weight"], torch.tensor([[3.5, 3.5, 2.0, 2.0]]))  # (3*3 + 1*1) / 4


def test_what_no_update_moves_or_covers_keeps_every_bit():
    state, merge = line_state(value=0.1), ImportanceMerge(segments=2)
    mine = update(state, 1, 0.0, FIRST)
    mine.tensors["fc2.bias"][0] = 1.0
    take(merge, state, mine, FIRST, 0)
    merge_all(merge, state)
    assert torch.equal(state.values["fc1.weight"], torch.full((4, 2), 0.1))
    assert state.values["fc2.bias"].item() == pytest.approx(1.1)


def test_a_server_step_scales_the_delta():
    state = line_state(value=1.0)
    merge = ImportanceMerge(server_lr=0.5)
    take(merge, state, update(state, 1, 1.0), FULL, 0)
    merge_all(merge, state)
    assert state.values["fc2.bias"].item() == pytest.approx(1.5)


class Net(nn.Module):
    """Two hidden layers: the weight between them lies on two axes; a batch norm has running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 1))

    def forward(self, x):
        return self.net(x)


def slow_merge(values, updates, submodels, server_lr=1.0):
    """Element by element: segment of its output unit (pairs), else its tensor; weights by norms over what a client holds."""
    hidden = {"net.0.weight": "a", "net.0.bias": "a", "net.1.weight": "a", "net.1.bias": "a", "net.3.weight": "b"}
    hidden |= {"net.3.bias": "b"}

    def segment(name, place):
        if name in hidden:
            return hidden[name], place[0] // 2
        return ("b", place[1] // 2) if name == "net.4.weight" else (name, 0)

    new = {name: tensor.clone() for name, tensor in values.items()}
    squares = []
    for delta, held in updates:
        mine = {}
        for name in held:
            for place in held[name]:
                key = segment(name, place)
                mine[key] = mine.get(key, 0.0) + delta[name][place].item() ** 2
        squares.append(mine)
    for name, tensor in new.items():
        for place in [()] if tensor.dim() == 0 else [tuple(p) for p in (tensor == tensor).nonzero().tolist()]:
            weights = [
                (squares[n][segment(name, place)] ** 0.5 if "running" not in name else 1.0, delta[name][place].item())
                for n, (delta, held) in enumerate(updates)
                if place in held.get(name, ())
            ]
            if sum(w for w, _ in weights) > 0:
                tensor[place] += server_lr * sum(w * d for w, d in weights) / sum(w for w, _ in weights)
    return new


def test_tensors_on_two_axes_and_statistics_against_a_slow_reference():
    torch.manual_seed(0)
    model = Net()
    submodels = Submodels(model, (torch.zeros(2, 2), torch.zeros(2)))
    first, second = submodels.axes
    state = GlobalState(submodels, submodels.state(model))
    merge = ImportanceMerge(segments=2)
    specs = [FULL, Spec.select({first: [0, 1, 3], second: [1, 2]}), Spec.select({first: [2, 3]})]
    before = {n: t.clone() for n, t in state.values.items() if t.is_floating_point()}
    updates = []
    for client, spec in enumerate(specs):
        tensors = FlatTensors.empty(submodels.layout(spec, "trained"))
        for buffer in tensors.buffers.values():
            buffer.normal_()
        full, count = (FlatTensors.zeros(submodels.layout()) for _ in range(2))
        submodels.plan(spec).scatter_(full, tensors)
        submodels.plan(spec).cover_(count)
        held = {n: {tuple(p) for p in t.nonzero().tolist()} for n, t in count.items() if n in before}
        updates.append(({n: full[n].clone() for n in before}, held))
        take(merge, state, Update(0, client, 0, tensors, 1), spec, 0)
    merge_all(merge, state)
    for name, wanted in slow_merge(before, updates, submodels).items():
        torch.testing.assert_close(state.values[name], wanted, rtol=1e-4, atol=1e-5)


# ---- what is remembered ----


def test_starts_are_kept_only_where_the_model_changes_under_a_client():
    state, merge = line_state(value=1.0), WithScores(ImportanceMerge())
    for client, work in ((1, Work()), (2, Work(FIRST)), (3, Work(Spec(trained=()), extra={"masks": ["hidden"]}))):
        record_work(state, client, work)
    take(merge, state, update(state, 1, 1.0), FULL, 0)
    merge_all(merge, state)
    at_work = state.memory.of(AtWork).starts
    assert sorted(at_work) == [2, 3]
    assert at_work[3].start is None  # it trains no values
    start = at_work[2].start
    assert start.layout == state.submodels.layout(FIRST, "trained")
    assert start["fc1.weight"].tolist() == [[1.0, 1.0]] * 2 and state.values["fc1.weight"][0, 0] == 2.0
    take(merge, state, update(state, 1, 1.0), FULL, 0)
    merge_all(merge, state)
    assert state.memory.of(AtWork).starts[2].start is start  # what it started from, not what has come since
    assert merge.report(state) == {"start_bytes": start.num_bytes}
    forget_work(state, 2)
    assert sorted(state.memory.of(AtWork).starts) == [3]


def test_scores_are_remembered_and_do_not_reach_the_inner_merge():
    state, merge = line_state(value=1.0), WithScores(ImportanceMerge())
    frozen = Spec(trained=())
    for client in (1, 2):
        record_work(state, client, Work(frozen, extra={"masks": ["hidden"]}))
    nothing = FlatTensors.empty(state.submodels.layout(frozen, "trained"))
    sent = FlatTensors.from_named({"hidden": torch.full((4,), 2e4), "other": torch.zeros(2)})
    mine = Update(0, 1, 0, nothing, 1, bundles={SCORES: sent})
    assert merge.reject_reason(state, mine, frozen, 0) == "wrong-scores"
    sent["hidden"].copy_(torch.tensor([1, 2.5, -1.0, 0.0]))
    assert merge.reject_reason(state, mine, frozen, 0) is None
    take(merge, state, mine, frozen, 0)
    merge.detach(state)
    merge_all(merge, state)
    # the other has not trained
    assert scores_of(state, 1) == {"hidden": [1.0, 2.5, -1.0, 0.0]} and scores_of(state, 2) == {}
    for client, wanted in ((1, [1.0, 2.5, -1.0, 0.0]), (2, None)):
        merge.personalize(state, client, frozen, nothing, {SCORES: sent.zero_()})
        assert sent["hidden"].isnan().all() if wanted is None else sent["hidden"].tolist() == wanted
        assert sent["other"].isnan().all()
    assert float(state.values["fc2.bias"]) == 1.0
    plain = state.memory.to_plain()
    assert restoring.from_plain(saving.to_plain(plain)) == plain
    assert merge.reject_reason(state, update(state, 3, 1.0), FULL, 0) is None


# ---- Co-S2P's published merge: one weight a client, absent elements as 0, absent inputs as -theta, by han ----


def receive(merge, state, client, value, spec=FULL):
    merge.receive(state, Update(0, client, 0, filled(state, value, spec), 1), spec, 0)


@pytest.mark.parametrize(("absent_inputs", "last"), [(False, 2 + 0.5 / 3), (True, 2 + 0.5 / 3 - 2 * 2 / 3)])
def test_two_clients_by_hand(absent_inputs, last):
    """T values in all, F in the first half. gamma is 0.5 T / 1 for client 1, 1 F / (F / T) = T for client 2: 1/3 and 2/3.

    Where both are: 2 + 0.5 / 3 + 2 / 3. Rows that client 2 lacks move by client 1's third alone; so do columns that it
    lacks, or, with the fault, by a further -2 * 2/3.
    """
    state, merge = line_state(value=2.0), PublishedMerge(absent_inputs)
    receive(merge, state, 1, 0.5)
    receive(merge, state, 2, 1.0, FIRST)
    merge.apply(state)
    both, rows = 2 + 0.5 / 3 + 2 / 3, 2 + 0.5 / 3
    torch.testing.assert_close(state.values["fc2.weight"], torch.tensor([[both, both, last, last]]))
    torch.testing.assert_close(state.values["fc1.weight"], torch.tensor([[both] * 2] * 2 + [[rows] * 2] * 2))
    torch.testing.assert_close(state.values["fc2.bias"], torch.tensor([both]))


def test_a_late_client_weighs_less_by_how_far_the_model_has_moved():
    """Client 2 started at 3 and the model is at 1: of F values that is a drift of 2 F."""
    state, merge = line_state(value=3.0), PublishedMerge(absent_inputs=False)
    record_work(state, 2, Work(FIRST))
    receive(merge, state, 1, -2.0)
    merge.apply(state)
    receive(merge, state, 1, 0.5)
    receive(merge, state, 2, 1.0, FIRST)
    merge.apply(state)
    first = sum(tensor.numel() for _, tensor in filled(state, 0.0, FIRST).items())
    late = 1 / (2 * first + 1)  # in units of T, as is client 1's 0.5
    assert state.values["fc2.bias"].item() == pytest.approx(1 + (0.5 * 0.5 + late) / (0.5 + late), rel=1e-6)


def test_updates_of_nothing_move_nothing():
    state, merge = line_state(value=0.1), PublishedMerge()
    receive(merge, state, 1, 0.0, FIRST)
    merge.apply(state)
    assert torch.equal(state.values["fc1.weight"], torch.full((4, 2), 0.1))


def test_it_is_a_setting_and_has_no_server_step():
    assert co_s2p(merge="published").merge.inner == PublishedMerge()
    with pytest.raises(BadInput, match=r"server_lr is 0\.5"):
        co_s2p(merge="published", server_lr=0.5)
