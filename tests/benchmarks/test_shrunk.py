from __future__ import annotations

import pytest
import torch

from benchmarks import shrunk


@pytest.mark.parametrize("name", ["MLP", "nanoGPT", "nn.TransformerEncoderLayer"])
def test_both_models_have_the_same_tensors_and_give_the_same_loss(name):
    ours, theirs, batch = shrunk.pair(shrunk.CASES[name], 0.25)
    shapes = [{key: value.shape for key, value in module.state_dict().items()} for module in (ours, theirs)]
    assert shapes[0] == shapes[1]
    losses = []
    for module in (ours, theirs):
        step = shrunk.stepper(module, batch)
        assert step() >= 0.0  # a step changes the values of both alike
        answer = module.training_step(batch, 0)
        losses.append(answer["loss"] if isinstance(answer, dict) else answer)
    torch.testing.assert_close(losses[0], losses[1])
