"""Static running statistics while a thread measures beside the run."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

from model_zoo.classifier import Classifier
from raafl.core.hooks import RunHooks
from raafl.data import Digits, Iid
from raafl.data.federated import FederatedData
from raafl.runtime.lifecycle.batch_norm import StaticStatistics, StatisticsHookList
from raafl.submodel import Submodels


class Norm(Classifier):
    def __init__(self):
        super().__init__(0.1, 0.9)
        self.first, self.norm, self.head = nn.Linear(64, 4), nn.BatchNorm1d(4), nn.Linear(4, 10)

    def forward(self, x):
        return self.head(torch.relu(self.norm(self.first(x.flatten(1)))))


class Seen(RunHooks):
    def on_values(self, version, metrics, values):
        self.mean = values["norm.running_mean"].clone()


def test_a_model_that_was_measured_is_passed_on_with_its_own_statistics_whatever_the_server_collects_meanwhile():
    torch.manual_seed(0)
    module = Norm()
    submodels = Submodels(module, batch_norm="static")
    statistics = StaticStatistics(submodels, FederatedData(Digits(batch_size=32), Iid(), 2), 1, 32, seed=0)
    earlier, final = submodels.state(module), submodels.state(module)
    final["first.bias"].add_(1.0)  # moves the means by 1
    seen = Seen()
    hooks = StatisticsHookList(statistics, seen)
    with ThreadPoolExecutor(1) as evaluator:
        evaluator.submit(statistics.fill_, earlier.clone()).result()
        statistics.fill_(final)
        evaluator.submit(hooks.on_values, 1, {}, earlier).result()
    torch.testing.assert_close(final["norm.running_mean"], seen.mean + 1.0)
    assert earlier["norm.running_mean"].eq(0).all()  # as the global state has them
