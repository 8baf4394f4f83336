"""Merges of adapters by their products, against the slow obvious ones: whole matrices, in double precision, client by client."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from raafl.algorithms import fed_async, fed_avg, fed_buff
from raafl.core import restoring, saving
from raafl.core.state import GlobalState
from raafl.core.types import OUT_OF_MEMORY, Arrived, Lost, Sending, Update
from raafl.parts import RateSelect
from raafl.parts.merge.low_rank import LoraMemory
from raafl.runtime.executors.base import unanswered
from raafl.submodel import FlatTensors, Submodels
from tests.helpers.coordinators import assigned, coordinator_for
from tests.helpers.lora_merge import (
    BASE,
    BY_RANK,
    RANK,
    RANKS,
    SCALING,
    A,
    B,
    Tiny,
    adapters,
    give,
    note_starts,
    product,
    start_product,
    started,
    state_of,
    trained,
    weight,
)
from tests.helpers.merges import bounded

# ---- rounds: the mean of B A ----


@pytest.mark.parametrize("lora", ["fedex", "flora"])
def test_a_round_ends_at_the_exact_mean_of_the_products(lora):
    """Of unequal ranks, weighed by samples, from adapters that are not 0, three rounds on end."""
    coordinator, tasks = started(fed_avg(submodel=BY_RANK, lora=lora))
    for _ in range(3):
        base = coordinator.state.values[BASE].double().clone()
        assert {client: task.spec.indices("layer.rank") for client, task in tasks.items()} == {
            1: None,
            2: range(2),
            3: range(1),
        }
        answers, after = [], {}
        for client, samples in ((2, 1), (1, 5), (3, 2)):
            wanted, after = give(coordinator, tasks[client], samples)
            answers.append(samples * wanted)
        torch.testing.assert_close(weight(coordinator.state), base + sum(answers) / 8, rtol=3e-7, atol=1e-6)
        tasks = after


def test_the_residual_by_hand():
    """Two clients of rank 1, samples alike: B 1 and 3, A 1 and 5, all else 0. mean(BA) = 8, mean(B) mean(A) = 6: 2 s go to W."""
    coordinator, tasks = started(fed_avg(submodel=RateSelect(rates=1 / 3, rate_of="width"), lora="fedex"), 2)
    state = coordinator.state
    before = state.values[BASE].clone()
    state.values[B].zero_()
    for task, b, a in ((tasks[1], 1.0, 1.0), (tasks[2], 3.0, 5.0)):
        small = FlatTensors.zeros(state.submodels.layout(task.spec, "trained"))
        small[B][0, 0], small[A][0, 0] = b, a
        coordinator.handle(Arrived(Update(task.id, task.client, 0, small, 1)), 0.0)
    assert (state.values[B][0, 0], state.values[A][0, 0]) == (2.0, 3.0)
    assert (state.values[BASE] - before)[0, 0].item() == pytest.approx(SCALING * 2.0, abs=1e-6)
    assert (state.values[BASE] - before).abs().sum().item() == pytest.approx(SCALING * 2.0, abs=1e-6)


def test_a_transposed_base_takes_up_the_transposed_product():
    """As of GPT-2's layers, whose weights are (in, out)."""
    algorithm = fed_avg(lora="fedex")
    torch.manual_seed(0)
    module = Tiny(fan_in_fan_out=True)
    module.layer.fan_in_fan_out = True  # peft warns, and clears it, for a Linear
    module.layer.base_layer.weight = nn.Parameter(torch.randn(5, 4), requires_grad=False)
    submodels = Submodels(algorithm.local.prepare(module))
    state = GlobalState(submodels, submodels.state(module))
    coordinator, tasks = started(algorithm, 2, state)
    before = state.values[BASE].double().clone()
    answers = [give(coordinator, task)[0] for task in tasks.values()]
    expected = before + (sum(answers) / 2).T
    torch.testing.assert_close(state.values[BASE].double() + adapters(state).T, expected, rtol=0, atol=1e-6)


def test_flora_begins_anew_after_a_merge():
    coordinator, tasks = started(fed_avg(submodel=BY_RANK, lora="flora"))
    state = coordinator.state
    before = state.values[A].clone()
    for task in tasks.values():
        give(coordinator, task)
    assert not state.values[B].any() and state.values[A].abs().max() <= 1 / math.sqrt(5)
    assert (state.values[A] != before).all() and state.values[A].unique().numel() == 15
    other, tasks = started(fed_avg(submodel=BY_RANK, lora="flora"))
    for task in tasks.values():
        give(other, task)
    assert torch.equal(other.state.values[A], state.values[A]), "drawn anew, and the same in a replay"


def truncated(matrix, rank=RANK):
    u, s, v = torch.linalg.svd(matrix)
    return (u[:, :rank] * s[:rank]) @ v[:rank]


def test_flexlora_keeps_the_largest_singular_values_and_each_rank_is_the_best_of_its_size():
    coordinator, tasks = started(fed_avg(submodel=BY_RANK, lora="flexlora"))
    base = coordinator.state.values[BASE].clone()
    mean = sum(give(coordinator, task)[0] for task in tasks.values()) / 3
    for rank in (1, 2, 3):
        torch.testing.assert_close(adapters(coordinator.state, rank), truncated(mean, rank), rtol=0, atol=1e-5)
    a = coordinator.state.values[A]
    torch.testing.assert_close(a @ a.T, torch.eye(RANK), rtol=0, atol=1e-5)
    assert torch.equal(coordinator.state.values[BASE], base)


def test_raflora_shares_out_each_rank_among_those_who_have_it():
    """Rank 1 is the mean of three, rank 2 of two, rank 3 client 1's own; weighed by samples."""
    coordinator, tasks = started(fed_avg(submodel=BY_RANK, lora="raflora"))
    samples, answers = {1: 1, 2: 3, 3: 4}, {}
    for client, task in tasks.items():
        update, _ = trained(coordinator, task)
        answers[client] = [product(update.tensors[B][:, [k]], update.tensors[A][[k]]) for k in range(RANKS[client])]
    for client, task in tasks.items():
        give(coordinator, task, samples[client])
    mean = torch.zeros(4, 5, dtype=torch.float64)
    for k in range(RANK):
        have = [client for client in RANKS if RANKS[client] > k]
        mean += sum(samples[c] * answers[c][k] for c in have) / sum(samples[c] for c in have)
    torch.testing.assert_close(adapters(coordinator.state), truncated(mean), rtol=0, atol=1e-5)


def test_hetlora_weighs_padded_factors_by_the_norms_of_their_products():
    coordinator, tasks = started(fed_avg(by_samples=False, submodel=BY_RANK, lora="hetlora"))
    answers = {client: trained(coordinator, task) for client, task in tasks.items()}
    norms = {client: wanted.norm() for client, (_, wanted) in answers.items()}
    expected = {name: torch.zeros_like(coordinator.state.values[name]).double() for name in (A, B)}
    for client, (update, _) in answers.items():
        expected[A][: RANKS[client]] += update.tensors[A] * norms[client] / sum(norms.values())
        expected[B][:, : RANKS[client]] += update.tensors[B] * norms[client] / sum(norms.values())
    for task in tasks.values():
        give(coordinator, task)
    for name in (A, B):
        torch.testing.assert_close(coordinator.state.values[name].double(), expected[name], rtol=0, atol=1e-6)


def test_hetlora_as_published_weighs_by_the_norm_alone():
    coordinator, tasks = started(fed_avg(submodel=BY_RANK, lora="hetlora_paper"))
    answers = {client: trained(coordinator, task, 10**client) for client, task in tasks.items()}
    norms = {client: wanted.norm() for client, (_, wanted) in answers.items()}
    expected = torch.zeros_like(coordinator.state.values[A]).double()
    for client, (update, _) in answers.items():
        expected[: RANKS[client]] += update.tensors[A] * norms[client] / sum(norms.values())
        coordinator.handle(Arrived(update), 0.0)
    torch.testing.assert_close(coordinator.state.values[A].double(), expected, rtol=0, atol=1e-6)


def test_the_published_norm_is_that_of_all_layers_together():
    merge = fed_avg(lora="hetlora_paper").merge
    one, other = torch.full((1, 1), 3.0), torch.full((1, 1), 4.0)
    layers = {"first": ([0], one, one / 3, None), "second": ([0], other, other / 4, None)}
    assert merge.update_weight(7.0, layers) == pytest.approx(5.0)
    assert merge.weight_of(5.0, one, one) == 5.0


def test_hetlora_of_adapters_that_do_nothing_is_the_plain_mean():
    coordinator, tasks = started(fed_avg(lora="hetlora"), 2)
    for task, value in ((tasks[1], 1.0), (tasks[2], 4.0)):
        small = FlatTensors.zeros(coordinator.state.submodels.layout(task.spec, "trained"))
        small[A].fill_(value)
        coordinator.handle(Arrived(Update(task.id, task.client, 0, small, 1)), 0.0)
    torch.testing.assert_close(coordinator.state.values[A], torch.full((3, 5), 2.5))


@pytest.mark.parametrize("lora", ["hetlora", "flexlora", "raflora", "fedex", "flora"])
def test_what_is_no_adapter_is_merged_as_ever(lora):
    heads = []
    for option in (lora, None):
        coordinator, tasks = started(fed_avg(submodel=BY_RANK, lora=option))
        for client in (1, 2, 3):
            update, _ = trained(coordinator, tasks[client], client)
            for number, name in enumerate(("head.weight", "head.bias")):
                update.tensors[name].fill_(client + number)
            coordinator.handle(Arrived(update), 0.0)
        heads.append([coordinator.state.values[name].clone() for name in ("head.weight", "head.bias")])
    assert all(torch.equal(one, other) for one, other in zip(*heads, strict=True))


# ---- without waiting ----


def scenario(algorithm):
    """Three clients start together; 1, 2 and 1 again report, then 3, which is by now stale. Yields before and after each."""
    coordinator, tasks = started(algorithm)
    note_starts(coordinator.state, tasks)
    for client in (1, 2, 1, 3, 2):
        state, task = coordinator.state, tasks[client]
        before, old, version = weight(state).clone(), adapters(state).clone(), state.version
        unseen = old - adapters(state, RANKS[client])
        wanted, new = give(coordinator, task)
        tasks |= new
        yield coordinator, task, wanted, before, old, unseen, version - task.version


@pytest.mark.parametrize("lora", ["fedex", "flora"])
def test_fed_async_mixes_in_the_change_against_what_the_client_was_sent(lora):
    """W' = W + a (s B_i A_i - s B A as sent), and ranks that it has not count as 0; a = 0.5 (1 + staleness)^-0.5."""
    seen = []
    algorithm = fed_async(0.5, "polynomial", submodel=BY_RANK, lora=lora)
    for coordinator, task, wanted, before, _, unseen, staleness in scenario(algorithm):
        share = 0.5 * (1 + staleness) ** -0.5
        expected = before + share * (wanted - start_product(task) - unseen)
        torch.testing.assert_close(weight(coordinator.state), expected, rtol=0, atol=1e-5)
        seen.append(staleness)
    assert seen == [0, 1, 1, 3, 2]


def test_flexlora_in_fed_async_mixes_values():
    """M' = (1 - a) M + a B_i A_i, cut to the rank, however stale."""
    for coordinator, _, wanted, _, old, _, staleness in scenario(
        fed_async(0.5, "polynomial", submodel=BY_RANK, lora="flexlora")
    ):
        share = 0.5 * (1 + staleness) ** -0.5
        expected = truncated((1 - share) * old + share * wanted)
        torch.testing.assert_close(adapters(coordinator.state), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("lora", ["fedex", "flora", "flexlora", "raflora"])
def test_fed_buff_adds_the_mean_of_changes_of_products(lora):
    """K = 1: M' = M + eta s (B_i A_i - B A as sent, of its ranks); of what it has not it says nothing."""
    algorithm = fed_buff(1, server_lr=0.7, submodel=BY_RANK, lora=lora)
    for coordinator, task, wanted, before, old, _, staleness in scenario(algorithm):
        change = 0.7 * (1 + staleness) ** -0.5 * (wanted - start_product(task))
        if lora in ("fedex", "flora"):
            torch.testing.assert_close(weight(coordinator.state), before + change, rtol=0, atol=1e-5)
        else:
            torch.testing.assert_close(adapters(coordinator.state), truncated(old + change), rtol=0, atol=1e-5)


def test_a_buffer_of_fresh_and_stale_updates():
    coordinator, tasks = started(fed_buff(2, lora="fedex"))
    note_starts(coordinator.state, tasks)
    for client in (1, 2):
        tasks |= give(coordinator, tasks[client])[1]
    assert coordinator.state.version == 1 and (tasks[3].version, tasks[2].version) == (0, 1)
    before = weight(coordinator.state).clone()
    changes = []
    for client, factor in ((3, 2**-0.5), (2, 1.0)):
        task = tasks[client]
        changes.append(factor * (give(coordinator, task)[0] - start_product(task)))
    assert coordinator.state.version == 2
    torch.testing.assert_close(weight(coordinator.state), before + sum(changes) / 2, rtol=0, atol=1e-5)


@pytest.mark.quick_cases(
    "hetlora-fed_avg", "flexlora-<lambda>0", "raflora-<lambda>1", "fedex-fed_avg", "flora-<lambda>0"
)
@pytest.mark.parametrize("make", [fed_avg, lambda **o: fed_async(0.5, **o), lambda **o: fed_buff(2, **o)])
@pytest.mark.parametrize("lora", ["hetlora", "flexlora", "raflora", "fedex", "flora"])
def test_a_run_that_is_cut_in_its_middle_goes_on_as_if_it_had_not_been(make, lora):
    ends = []
    for cut in (False, True):
        coordinator, tasks = started(make(submodel=BY_RANK, lora=lora))
        note_starts(coordinator.state, tasks)
        for place, client in enumerate((1, 2, 3, 2, 1, 3)):
            if cut and place in (1, 4):
                saved, values = saving.save(coordinator), coordinator.state.values.clone()
                coordinator = coordinator_for(
                    make(submodel=BY_RANK, lora=lora), state_of(make(lora=lora)), min_clients=3
                )
                restoring.restore(coordinator, saved)
                coordinator.state.values.copy_(values)
            tasks |= give(coordinator, tasks[client])[1]
        ends.append(coordinator.state.values)
    assert all(torch.equal(tensor, ends[1][name]) for name, tensor in ends[0].items())
    assert coordinator.state.version >= 2


@pytest.mark.parametrize("lora", ["fedex", "flora"])
def test_a_client_that_trains_while_it_sends_has_two_starts(lora):
    """Client 1 begins tasks of versions 0, 0 and 2 before it has answered the one before; client 2 merges between them."""
    coordinator, tasks = started(fed_buff(1, server_lr=0.7, lora=lora), clients=2)
    note_starts(coordinator.state, tasks)
    changes = []

    def begin():
        ahead = assigned(coordinator.handle(Sending(1, 0, tasks[1].id), 0.0))
        note_starts(coordinator.state, ahead)
        return ahead[1]

    def answer(task):
        before = weight(coordinator.state)
        factor = 0.7 * (1 + coordinator.state.version - task.version) ** -0.5
        wanted, new = give(coordinator, task)
        changes.append(coordinator.state.version - 1 - task.version)
        expected = before + factor * (wanted - start_product(task))
        torch.testing.assert_close(weight(coordinator.state), expected, rtol=0, atol=1e-5)
        return new

    first, second = tasks[1], begin()
    tasks |= answer(tasks[2])
    answer(first)
    tasks[1] = second
    third = begin()
    tasks |= answer(tasks[2])
    answer(second)
    answer(third)
    assert (first.version, second.version, third.version) == (0, 0, 2) and changes == [0, 1, 1, 3, 2]


@pytest.mark.parametrize("lora", ["fedex", "flora"])
def test_a_client_out_of_memory_keeps_the_start_of_its_other_task(lora):
    """Client 1 sends a task of version 0 that ran out of memory, and trains one of version 1, which nobody else has."""
    coordinator, tasks = started(fed_async(lora=lora), clients=2)
    note_starts(coordinator.state, tasks)
    tasks |= give(coordinator, tasks[2])[1]
    ahead = assigned(coordinator.handle(Sending(1, 0, tasks[1].id), 0.0))
    note_starts(coordinator.state, ahead)
    tasks |= give(coordinator, tasks[2])[1]
    coordinator.handle(Arrived(unanswered(tasks[1], OUT_OF_MEMORY)), 0.0)
    give(coordinator, tasks[2])
    before = weight(coordinator.state)
    wanted, _ = give(coordinator, ahead[1])
    expected = before + 0.75 * (wanted - start_product(ahead[1]))
    torch.testing.assert_close(weight(coordinator.state), expected, rtol=0, atol=1e-5)


def test_a_checkpoint_of_an_earlier_version_has_one_start_for_a_client():
    assert LoraMemory.from_plain({"at_work": {1: 3, 2: [3, 4]}}).at_work == {1: [3], 2: [3, 4]}


def test_versions_that_nobody_works_on_are_forgotten():
    coordinator, tasks = started(fed_async(lora="fedex"))
    note_starts(coordinator.state, tasks)
    for client in (1, 2, 1, 2):
        tasks |= give(coordinator, tasks[client])[1]
    assert sorted(coordinator.state.memory.of(LoraMemory).starts) == [
        0,
        3,
    ]  # of client 3, and of client 1; 2 has the newest
    give(coordinator, tasks[3])
    assert sorted(coordinator.state.memory.of(LoraMemory).starts) == [3, 4]


@pytest.mark.parametrize("lora", ["hetlora", "flexlora", "raflora", "fedex", "flora"])
def test_adapters_whose_product_overflows_are_refused_and_leave_no_trace(lora):
    """1e25 is a number in float32, and the product of two is none; HetLoRA takes means of factors, and those of 3e38 are none."""
    values, value = [], 3e38 if lora == "hetlora" else 1e25
    for hostile in (True, False):
        coordinator, tasks = started(bounded(fed_avg(submodel=BY_RANK, lora=lora), None))
        give(coordinator, tasks[1])
        if hostile:
            update, _ = trained(coordinator, tasks[2])
            update.tensors[A].fill_(value)
            update.tensors[B].fill_(value)
            coordinator.handle(Arrived(update), 0.0)
            assert coordinator.admission.refused == {"overflow": 1}
        else:
            coordinator.handle(Lost(2, "gone"), 0.0)
        give(coordinator, tasks[3])
        values.append(coordinator.state.values)
    assert values[0].is_finite() and values[0].model_digest() == values[1].model_digest()
