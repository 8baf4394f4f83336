"""Layers of half precision are proven in doubles, also where the model casts to its own dtype."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from raafl.submodel import Submodels
from raafl.submodel.prove.proof import refuted


class Half(nn.Module):
    """Casts its input to the dtype of its layers."""

    def __init__(self, cast, conv):
        super().__init__()
        first = nn.Conv2d(2, 6, 3) if conv else nn.Linear(8, 6)
        self.net = nn.Sequential(first, nn.ReLU(), nn.Flatten(1), nn.Linear(24 if conv else 6, 3))
        self.cast = cast

    def forward(self, x):
        hidden = self.net[2](self.net[1](self.net[0](self.cast(x))))
        return self.net[3](hidden)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]).float(), batch[1])


class Wrong(Half):
    """Says of its hidden units that they may shrink, but takes their mean as well."""

    def submodel_axes(self):
        columns = self.net[3].in_features // self.net[0].weight.shape[0]
        return {"hidden": [("net.0.weight", 0), ("net.0.bias", 0), ("net.3.weight", 1, columns)]}

    def forward(self, x):
        hidden = self.net[2](self.net[1](self.net[0](self.cast(x))))
        return self.net[3](hidden + hidden.mean(1, keepdim=True))


@pytest.mark.parametrize("kind", [Half, Wrong])
@pytest.mark.parametrize("conv", [False, True])
@pytest.mark.parametrize(
    ("dtype", "cast"),
    [
        (torch.bfloat16, lambda x: x.bfloat16()),
        (torch.bfloat16, lambda x: x.to(torch.bfloat16)),
        (torch.float16, lambda x: x.half()),
    ],
)
def test_a_model_that_casts_to_its_own_dtype_is_proven_and_a_wrong_axis_refuted(dtype, cast, conv, kind):
    model = kind(cast, conv).to(dtype)
    batch = [torch.randn(4, 2, 4, 4) if conv else torch.randn(4, 8), torch.tensor([0, 2, 1, 1])]
    submodels = Submodels(model, batch)
    assert submodels.axes
    assert set(refuted(submodels, model, batch)) == (set(submodels.axes) if kind is Wrong else set())
