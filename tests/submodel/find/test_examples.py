"""Batches made for models that came without one: of the kind and size that the model reads."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from raafl.submodel.find.trace import made_batch
from raafl.submodel.isolated_run import call


def made(module):
    def runs(batch):
        try:
            call(module, batch)
        except Exception:
            return False
        return True

    return made_batch(module, runs)


@pytest.mark.parametrize(
    ("layers", "shape"),
    [
        ([nn.Linear(5, 2)], (2, 5)),
        ([nn.Linear(3, 6), nn.Flatten(), nn.Linear(24, 2)], (2, 4, 3)),
        ([nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(4 * 25, 2)], (2, 1, 7, 7)),
        ([nn.Conv1d(3, 4, 3)], (2, 3, 8)),
        ([nn.Embedding(9, 6), nn.Flatten(), nn.Linear(24, 2)], (2, 4)),
    ],
)
def test_what_the_first_layer_reads(layers, shape):
    (value,) = made(nn.Sequential(*layers)).values()
    assert value.shape == shape and value.is_floating_point() == (type(layers[0]) is not nn.Embedding)
    (double,) = made(nn.Sequential(*layers).double()).values()
    assert double.dtype == (torch.long if type(layers[0]) is nn.Embedding else torch.float64)


def test_a_model_says_itself_what_it_reads():
    model = nn.Sequential(nn.Linear(5, 2))
    model.example_input_array = torch.ones(3, 5)
    assert made(model)["input"].shape == (3, 5)


def test_none_is_made_for_a_model_that_runs_on_nothing():
    class Never(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x):
            raise RuntimeError

    assert made(Never()) is None
