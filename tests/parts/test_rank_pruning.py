"""HetLoRA's pruning of ranks: the tail by hand, who loses ranks, and the loss on them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from raafl.algorithms import fed_avg
from raafl.core.algorithm import Select
from raafl.core.types import OUT_OF_MEMORY, Arrived, Update, Work
from raafl.parts.merge.low_rank import RankMemory, kept, tail
from raafl.rules import CURRENT, Rules
from raafl.runtime.executors.base import unanswered
from raafl.submodel import FlatTensors, Spec
from tests.helpers.coordinators import assigned
from tests.helpers.lora_merge import A, B, started
from tests.helpers.refusals import refuses


def test_the_tail_is_the_sum_over_layers_of_products_of_norms():
    b, a = torch.tensor([[9.0, 3.0, 0.0], [9.0, 0.0, 4.0]]), torch.tensor([[9.0], [0.0], [2.0]])
    assert tail([(b, a)], 0.5).item() == 5.0 * 2.0  # k is 1 of 3
    assert tail([(b, a), (b, 2 * a)], 0.5).item() == 30.0
    assert tail([(b, a)], 0.7).item() == 4.0 * 2.0  # k is 2
    assert tail([(b[:, :1], a[:1])], 0.5).item() == 0.0
    assert [kept(n, 0.99) for n in (16, 2, 1)] == [15, 1, 1]


def answered(coordinator, task, factor):
    """Answer with the values that were sent, those beyond the second rank times ``factor``."""
    state = coordinator.state
    tensors = FlatTensors.zeros(state.submodels.layout(task.spec, "trained"))
    num = len(tensors[A])
    tensors[A].copy_(state.values[A][:num])
    tensors[B].copy_(state.values[B][:, :num])
    tensors[A][2:] *= factor
    return assigned(coordinator.handle(Arrived(Update(task.id, task.client, 0, tensors, 1)), 0.0))


def test_a_client_whose_tail_has_shrunk_has_fewer_ranks_from_its_next_task_on():
    coordinator, tasks = started(fed_avg(lora="hetlora", prune_ranks=0.7, prune_penalty=0.1), 2)
    layout = coordinator.state.submodels.layout

    def num_ranks(task):
        return layout(task.spec, "trained").by_name[A].shape[0]

    assert [num_ranks(task) for task in tasks.values()] == [3, 3]
    answered(coordinator, tasks[1], 0.5)
    tasks = answered(coordinator, tasks[2], 2.0)
    assert {client: num_ranks(task) for client, task in tasks.items()} == {1: 2, 2: 3}
    assert coordinator.state.memory.of(RankMemory).pruned == {1: 1}


@pytest.mark.parametrize(("revision", "ranks"), [(5, 3), (CURRENT, 2)])
def test_a_client_out_of_memory_stays_pruned(revision, ranks):
    coordinator, tasks = started(fed_avg(lora="hetlora", prune_ranks=0.7), 1)
    coordinator.change(fleet=replace(coordinator.fleet, rules=Rules(revision)))
    task = answered(coordinator, tasks[1], 0.5)[1]
    task = assigned(coordinator.handle(Arrived(unanswered(task, OUT_OF_MEMORY)), 0.0))[1]
    assert coordinator.state.submodels.layout(task.spec, "trained").by_name[A].shape[0] == ranks


class HeadAlone(Select):
    """A choice of work that trains no adapter, as the windows of blocks of a large model train few of them."""

    def __call__(self, client, fleet):
        return Work(Spec.select(trained=["head"]))


@pytest.mark.parametrize(("revision", "pruned"), [(5, {1: 1}), (CURRENT, {})])
def test_adapters_that_a_task_does_not_train_are_no_tail_that_has_shrunk(revision, pruned):
    algorithm = fed_avg(lora="hetlora", prune_ranks=0.7, submodel=HeadAlone())
    coordinator, tasks = started(algorithm, 2)
    coordinator.change(fleet=replace(coordinator.fleet, rules=Rules(revision)))
    algorithm.select(coordinator.roster.clients[1], coordinator.fleet)  # notes the tail of what client 1 is sent
    tensors = FlatTensors.zeros(coordinator.state.submodels.layout(tasks[1].spec, "trained"))
    coordinator.handle(Arrived(Update(tasks[1].id, 1, 0, tensors, 1)), 0.0)
    assert coordinator.state.memory.of(RankMemory).pruned == pruned


def test_the_loss_acts_on_the_ranks_that_would_go_alone(tmp_path):
    from raafl.parts.merge.low_rank import Penalised

    class OneTask:
        def __init__(self, module):
            self.module = module

        def loss(self, batch, index):
            return torch.zeros(())

    from tests.helpers.lora_merge import Tiny

    module = Tiny()
    with torch.no_grad():
        module.get_parameter(B).normal_()
    hook = Penalised(OneTask(module), 0.7, 0.25)
    b, a = module.get_parameter(B), module.get_parameter(A)
    loss = hook.loss(None, 0)
    assert loss.item() == pytest.approx(0.25 * b[:, 2:].norm().item() * a[2:].norm().item())
    loss.backward()
    assert not b.grad[:, :2].any() and b.grad[:, 2:].any() and not a.grad[:2].any() and a.grad[2:].any()


test_what_prunes_nothing_is_refused = refuses(
    fed_avg,
    ({"lora": "flora", "prune_ranks": 0.5}, "prune_ranks is 0.5, but lora is 'flora'"),
    ({"prune_ranks": 0.5}, "prune_ranks is 0.5, but lora is None"),
    ({"lora": "hetlora", "prune_ranks": 1.0}, "prune_ranks is 1.0: give the share"),
    ({"lora": "hetlora", "prune_ranks": 0.5, "prune_penalty": -1.0}, "prune_penalty is -1.0"),
    ({"lora": "hetlora", "prune_penalty": 1.0}, "prune_penalty is 1.0"),
)
