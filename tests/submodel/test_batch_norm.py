"""Running statistics of batch norm: what comes back, static ones, and variances merged exactly."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from raafl.errors import BadInput
from raafl.submodel import FULL, Spec, Submodels, collect_statistics
from raafl.submodel.batch_norm import Pooling
from tests.local.bench import filled


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(0.5), nn.Linear(4, 2))


def pooling_of(submodels):
    return submodels.pooling()


def test_floating_statistics_come_back_and_counts_do_not():
    submodels = Submodels(model())
    names = [entry.name for entry in submodels.layout(FULL, "trained").entries]
    assert names[-2:] == ["1.running_mean", "1.running_var"] and "1.num_batches_tracked" not in names
    assert "1.num_batches_tracked" in submodels.layout().by_name
    # those of a layer that a spec freezes are of no use to anyone
    frozen = [entry.name for entry in submodels.layout(Spec.select(trained=["4"]), "trained").entries]
    assert frozen == ["4.weight", "4.bias"]


def test_static_statistics_neither_change_nor_come_back():
    module = model()
    submodels = Submodels(module, batch_norm="static")
    full = submodels.state(module)
    full["1.running_mean"].copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert "1.running_mean" not in submodels.layout(FULL, "trained").by_name
    shrunk = filled(submodels, Spec.select({"0": [1, 3]}), full)
    x = torch.randn(6, 3)
    hidden = shrunk.module.train()[:2](x)
    torch.testing.assert_close(hidden.mean(0), torch.zeros(2), atol=1e-6, rtol=0)  # those of the batch are used
    assert shrunk.module[1].running_mean.tolist() == [2.0, 4.0]
    module.submodel_batch_norm = "static"
    assert Submodels(module).layout(FULL, "trained") == submodels.layout(FULL, "trained")
    with pytest.raises(BadInput, match="batch_norm is 'dynamic': give merged or static"):
        Submodels(module, batch_norm="dynamic")


def test_statistics_are_collected_at_the_end():
    module = model().train()
    module[1].running_mean.fill_(9.0)
    batches = [torch.randn(5, 3), torch.randn(5, 3)]
    modes = [part.training for part in module.modules()]
    collect_statistics(module, batches, lambda net, batch: net(batch))
    with torch.no_grad():
        hidden = [module[0](batch) for batch in batches]
    torch.testing.assert_close(module[1].running_mean, (hidden[0].mean(0) + hidden[1].mean(0)) / 2)
    torch.testing.assert_close(module[1].running_var, (hidden[0].var(0) + hidden[1].var(0)) / 2)
    assert modes == [part.training for part in module.modules()] and module[1].momentum == 0.1


def test_norms_in_eval_mode_keep_their_statistics_and_send_none():
    module = model()
    module[1].eval().running_mean.fill_(9.0)
    assert "1.running_mean" not in Submodels(module).layout(FULL, "trained").by_name
    collect_statistics(module, [torch.randn(5, 3)], lambda net, batch: net(batch))
    assert module[1].running_mean.tolist() == [9.0] * 4 and not module[1].training
    # a model as its user loads it
    collect_statistics(module.eval(), [torch.randn(5, 3)], lambda net, batch: net(batch))
    assert module[1].running_mean.tolist() != [9.0] * 4


def test_merged_variances_are_those_of_all_samples_together():
    submodels = Submodels(model())
    pooling = Pooling(submodels.module)
    samples = {1: torch.randn(6, 4), 3: torch.randn(18, 4) * 3 + 5}
    updates = {}
    for client, x in samples.items():
        values = submodels.state(model())
        values["1.running_mean"].copy_(x.mean(0))
        values["1.running_var"].copy_(x.var(0, correction=0))
        updates[client] = pooling.to_moments_(values)
    state = submodels.state(model())
    with pooling.merging(state):
        for buffer, one, other in zip(*(t.buffers.values() for t in (state, updates[1], updates[3])), strict=True):
            if buffer.is_floating_point():
                buffer.copy_(0.25 * one + 0.75 * other)
    together = torch.cat(list(samples.values()))
    torch.testing.assert_close(state["1.running_mean"], together.mean(0))
    torch.testing.assert_close(state["1.running_var"], together.var(0, correction=0))


def test_two_clients_with_other_means_by_hand():
    """Means 0 and 4, variances 1 and 3, shares 1/4 and 3/4: mean 3, variance 1/4 (1 + 9) + 3/4 (3 + 1) = 5.5."""
    submodels = Submodels(model())
    pooling = pooling_of(submodels)
    state, one, other = (submodels.state(model()) for _ in range(3))
    for tensors, mean, variance in ((one, 0.0, 1.0), (other, 4.0, 3.0)):
        tensors["1.running_mean"].fill_(mean)
        tensors["1.running_var"].fill_(variance)
        pooling.to_moments_(tensors)
    assert other["1.running_var"].tolist() == [19.0] * 4
    with pooling.merging(state):
        for name in ("1.running_mean", "1.running_var"):
            state[name].copy_(0.25 * one[name] + 0.75 * other[name])
    assert state["1.running_mean"].tolist() == [3.0] * 4 and state["1.running_var"].tolist() == [5.5] * 4


def test_there_is_pooling_only_where_statistics_are_merged():
    assert pooling_of(Submodels(nn.Linear(3, 2))) is None
    assert pooling_of(Submodels(nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False)))) is None
    assert pooling_of(Submodels(model(), batch_norm="static")) is None
    assert pooling_of(Submodels(model())).pairs == [("1.running_mean", "1.running_var")]


def test_what_is_to_be_left_alone_is():
    submodels = Submodels(model())
    values, pooling = submodels.state(model()), pooling_of(submodels)
    with pooling.untouched(values):
        values.buffers[torch.float32].fill_(7.0)
    assert values["0.weight"].eq(7).all() and values["1.weight"].eq(7).all()
    assert values["1.running_mean"].eq(0).all() and values["1.running_var"].eq(1).all()


def test_variances_that_no_update_covers_keep_every_bit():
    module = model()
    submodels = Submodels(module)
    state = submodels.state(module)
    state["1.running_mean"].uniform_()
    state["1.running_var"].uniform_()
    before = state.clone()
    plan = submodels.plan(Spec.select({"0": [0, 2]}))
    pooling = Pooling(submodels.module)
    update = pooling.to_moments_(plan.gather(state))
    update["1.running_mean"].add_(1.0)
    with pooling.merging(state):
        plan.lerp_(state, update, 0.5)
    assert torch.equal(state["1.running_var"][[1, 3]], before["1.running_var"][[1, 3]])
    assert not torch.equal(state["1.running_var"][[0, 2]], before["1.running_var"][[0, 2]])


def test_statistics_collected_in_half_precision_are_a_mean_rounded_once():
    """Of 299 batches of 0 and one of 300 the mean is 1; increments of 1/300 would vanish in bfloat16."""
    module = nn.Sequential(nn.BatchNorm1d(1)).to(torch.bfloat16)
    batches = [torch.full((2, 1), 300.0 if n == 200 else 0.0, dtype=torch.bfloat16) for n in range(300)]
    collect_statistics(module, batches, lambda net, batch: net(batch))
    assert module[0].running_mean.item() == 1.0 and module[0].momentum == 0.1 and not module[0]._forward_hooks
