"""A model that changes its own weights for inference is measured right, and what it has trained goes up as it was."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from raafl.local.evaluate import Evaluator
from raafl.submodel import Submodels
from tests.local.bench import Bench, Net, assignment, plain_loop, same, samples


class Measured(Net):
    def validation_step(self, batch, index):
        return {"loss": F.cross_entropy(self(batch[0]), batch[1])}


class Rescaled(Measured):
    """Halves its last weights for inference and doubles what comes of them: the same to the bit, as RWKV does."""

    is_rescaled = False

    def __init__(self) -> None:
        super().__init__()
        self.is_rescaled = False

    def forward(self, x):
        if self.training == self.is_rescaled:
            with torch.no_grad():
                self.fc2.weight.mul_(2.0 if self.training else 0.5)
            self.is_rescaled = not self.training
        scale = 2.0 if self.is_rescaled else 1.0
        return F.linear(scale * torch.relu(self.fc1(x)), self.fc2.weight, self.fc2.bias)


def losses(make):
    torch.manual_seed(1)
    module, (x, y) = make(), samples().tensors
    evaluator = Evaluator(Submodels(module, (x, y)), lambda: [((x, y), len(x))], seed=0)
    values = Submodels(module).state(module)
    evaluator.module.train()(x)  # as a step is tried before a run
    return [evaluator(values, 0)["loss"] for _ in range(3)]


def test_it_is_measured_as_the_model_that_it_is():
    assert len(set(losses(Rescaled))) == 1
    assert losses(Rescaled) == losses(Measured)


def test_a_client_that_measures_it_sends_what_it_has_trained():
    bench, task = Bench.of(Rescaled), assignment(steps=5)
    bench.data.test = bench.data
    for _ in range(2):
        update, tensors = bench.run(task)
        assert same(tensors, plain_loop(bench, task))
        assert "test/loss" in update.metrics
