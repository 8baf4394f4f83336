"""What clients do for each way of merging adapters, what travels, what is measured, and what does not go together."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from raafl.algorithms import fed_avg, fed_buff
from raafl.core.state import GlobalState
from raafl.core.types import Arrived, Update
from raafl.errors import BadInput
from raafl.parts.lora import Adapted
from raafl.parts.merge.low_rank import rank_energy
from raafl.submodel import FlatTensors, Submodels
from tests.helpers.coordinators import assigned
from tests.helpers.lora_merge import BY_RANK, RANKS, A, B, Tiny, adapters, give, product, started, state_of

# ---- one factor at a time ----


def test_ffa_freezes_a_and_the_mean_is_exact():
    algorithm = fed_avg(lora="ffa")
    state = state_of(algorithm)
    coordinator, tasks = started(algorithm, 2, state)
    assert A in state.submodels.frozen and A not in state.submodels.layout(part="sent").by_name
    before, answers = state.values[A].clone(), []
    for client, value in ((1, 1.0), (2, 4.0)):
        small = FlatTensors.zeros(state.submodels.layout(tasks[client].spec, "trained"))
        small[B].fill_(value)
        answers.append(product(small[B], before))
        coordinator.handle(Arrived(Update(tasks[client].id, client, 0, small, 1)), 0.0)
    torch.testing.assert_close(adapters(state), sum(answers) / 2, rtol=0, atol=1e-6)
    assert torch.equal(state.values[A], before)


def test_rolora_trains_b_and_a_in_turn_and_each_mean_is_exact():
    algorithm = fed_avg(submodel=BY_RANK, lora="rolora")
    coordinator, tasks = started(algorithm)
    state = coordinator.state
    for version, (moves, still) in enumerate(((B, A), (A, B), (B, A))):
        assert state.version == version
        layouts = [state.submodels.layout(task.spec, "trained") for task in tasks.values()]
        assert all(set(layout.by_name) == {moves, "head.weight", "head.bias"} for layout in layouts)
        before = state.values[still].clone()
        new = {}
        for client, value in ((1, 1.0), (2, 2.0), (3, 6.0)):
            small = FlatTensors.zeros(state.submodels.layout(tasks[client].spec, "trained"))
            small[moves].fill_(value)
            new = assigned(coordinator.handle(Arrived(Update(tasks[client].id, client, 0, small, 1)), 0.0))
        tasks = new
        assert torch.equal(state.values[still], before)
        mean = state.values[moves] if moves == A else state.values[moves].T
        assert mean.tolist() == [[3.0] * mean.shape[1], [1.5] * mean.shape[1], [1.0] * mean.shape[1]]


# ---- what travels, what is measured, what is refused ----


@pytest.mark.parametrize("lora", [None, "hetlora", "flexlora", "raflora", "fedex", "flora", "ffa", "rolora"])
def test_bytes_of_each(lora):
    """float32: head 4 x 2 + 2, A 5 and B 4 for each rank, base 5 x 4."""
    coordinator, tasks = started(fed_avg(submodel=BY_RANK, lora=lora))
    for client, rank in RANKS.items():
        cost = coordinator.fleet.cost(tasks[client].spec)
        up = {"ffa": 4 * rank, "rolora": 4 * rank}.get(lora, 9 * rank)
        down = {"ffa": 4 * rank, "fedex": 9 * rank + 20, "flora": 9 * rank + 20}.get(lora, 9 * rank)
        assert (cost.down_bytes, cost.up_bytes) == (4 * (10 + down), 4 * (10 + up))


def test_rank_energy_by_hand():
    """B A with singular values 3, 2 and 1 (and s = 2 throughout): 9, 4 and 1 of 14."""
    state = state_of(fed_avg())
    assert sum(rank_energy(state).values()) == pytest.approx(1.0)
    state.values[A].copy_(torch.eye(3, 5)), state.values[B].copy_(torch.eye(4, 3) * torch.tensor([1.0, 3.0, 2.0]))
    assert rank_energy(state) == {
        "rank_energy/1": pytest.approx(9 / 14),
        "rank_energy/2": pytest.approx(4 / 14),
        "rank_energy/3": pytest.approx(1 / 14),
    }
    state.values[B].zero_()
    assert set(rank_energy(state).values()) == {0.0}
    state.values[B].fill_(math.nan)
    assert all(math.isnan(share) for share in rank_energy(state).values())
    plain = Submodels(Tiny(None))
    assert rank_energy(GlobalState(plain, plain.state(Tiny(None)))) == {}


def test_rank_energy_of_flora_is_that_of_what_was_merged_last():
    coordinator, tasks = started(fed_avg(submodel=BY_RANK, lora="flora"))
    mean = sum(give(coordinator, task)[0] for task in tasks.values()) / 3
    squares = torch.linalg.svdvals(mean).square()
    assert list(rank_energy(coordinator.state).values()) == pytest.approx(
        (squares / squares.sum())[:3].tolist(), abs=1e-5
    )


def test_what_does_not_go_together_is_refused():
    with pytest.raises(BadInput, match="lora is 'flex': did you mean 'flexlora'"):
        fed_avg(lora="flex")
    with pytest.raises(BadInput, match="leave server_optimizer out, or use ffa or rolora"):
        fed_buff(server_optimizer="adam", lora="fedex")
    fed_buff(server_optimizer="adam", lora="ffa")
    with pytest.raises(BadInput, match="but the model has no LoRA layers"):
        Adapted("flexlora").prepare(Tiny(None))
    with pytest.raises(
        BadInput, match="merges plain adapters of linear layers, but 'conv' has another kind of adapter"
    ):
        Adapted("flexlora").prepare(Tiny("conv"))
    with pytest.raises(BadInput, match="but 'layer' has another kind of adapter"):
        Adapted("flexlora").prepare(Tiny(use_dora=True))
    small = Tiny()
    small.layer.base_layer.weight = nn.Parameter(torch.zeros(10, 1, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(BadInput, match=r"that is quantised \(torch.uint8\): use flexlora or raflora"):
        Adapted("fedex").prepare(small)
    Adapted("raflora").prepare(small)
    waves = Tiny()
    waves.layer.lora_A["default"].weight.data = torch.ones(3, 5, dtype=torch.complex64)
    with pytest.raises(BadInput, match=r"needs real numbers, but the adapter 'layer\.lora_A"):
        Adapted("hetlora").prepare(waves)
    several = Tiny()
    several.submodel_bases = ("fp32", "nf4")
    with pytest.raises(
        BadInput,
        match="changes the base weights, but clients have these in several precisions, fp32, nf4: use flexlora or raflora",
    ):
        Adapted("fedex").prepare(several)
    tied = Tiny()
    tied.other = nn.Linear(5, 4, bias=False)
    tied.other.weight = tied.layer.base_layer.weight
    with pytest.raises(BadInput, match="another layer shares that weight"):
        Adapted("flora").prepare(tied)


def test_joint_updates_are_refused():
    from raafl.core.options import Guard
    from raafl.parts.protect.robust import guarded

    with pytest.raises(BadInput, match="each client's update by itself"):
        guarded(fed_avg(lora="fedex"), Guard(combine="median"))
    clipped = guarded(fed_avg(lora="fedex"), Guard(clip_norm=1e9))
    assert type(replace(clipped.merge).inner).__name__ == "FedEx"
