"""Following a step finds the axes of every model, touches nothing, and says why a width stays whole."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from torch import nn

from raafl.submodel import Spec, Submodels
from raafl.submodel.find.discover import Candidates, discover_axes
from raafl.submodel.find.trace import trace
from raafl.submodel.prove.proof import refuted
from tests.submodel.architectures import Step


def find_axes(module, batch, **options):
    shapes = {name: tuple(value.shape) for name, value in (*module.named_parameters(), *module.named_buffers())}
    return discover_axes(module, batch, shapes, {}, **options)


def members(found):
    return {axis.name: [(m.name, m.dim, m.unit, m.offset) for m in axis.members] for axis in found.axes}


class Routed(nn.Module):
    """Each half of a batch goes to an expert that its values choose."""

    def __init__(self) -> None:
        super().__init__()
        self.route = nn.Linear(4, 1)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4)) for _ in range(2))
        self.unused = nn.Linear(6, 2)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        chosen = self.route(x).squeeze(-1) > 0
        parts = [expert(x[chosen == bool(i)]) for i, expert in enumerate(self.experts)]
        answer = torch.zeros_like(x)
        for i, part in enumerate(parts):
            answer[chosen == bool(i)] = part
        return self.head(answer)


def test_a_flattened_picture_and_a_row_of_positions():
    model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Flatten(), nn.Linear(5 * 4, 7), nn.ReLU(), nn.Linear(7, 2))
    found = find_axes(Step(model), (torch.randn(2, 3, 4, 4), torch.tensor([0, 1])))
    assert members(found) == {
        "model.0": [("model.0.weight", 0, 1, 0), ("model.0.bias", 0, 1, 0), ("model.2.weight", 1, 4, 0)],
        "model.2": [("model.2.weight", 0, 1, 0), ("model.2.bias", 0, 1, 0), ("model.4.weight", 1, 1, 0)],
    }
    row = nn.Sequential(nn.Embedding(9, 5), nn.Flatten(), nn.Linear(3 * 5, 2))
    found = find_axes(Step(row), (torch.tensor([[1, 2, 3], [3, 4, 5]]), torch.tensor([0, 1])))
    # the width of the embedding lies in the layer that reads it once for each of three positions
    assert members(found) == {
        "model.0": [("model.0.weight", 1, 1, 0), *(("model.2.weight", 1, 1, i) for i in (0, 5, 10))]
    }


def test_a_step_that_needs_values_runs_on_drawn_ones():
    torch.manual_seed(0)
    found = find_axes(Step(Routed()), (torch.randn(8, 4), torch.randint(2, (8,))))
    assert found.problem is None
    names = {name for name, _ in found.whole}
    # the route's answer is compared by value; a layer that no step has called may belong to nothing
    assert {"model.unused.weight", "model.unused.bias", "model.head.bias"} <= names
    assert all(f"model.experts.{i}.0" in members(found) for i in (0, 1))


def test_two_samples_find_all_of_eight_experts():
    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.head = nn.Linear(4, 8), nn.Linear(4, 2)
            self.experts = nn.ModuleList(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4)) for _ in range(8))

        def forward(self, x):
            chosen = self.gate(x).argmax(-1).tolist()
            return self.head(torch.stack([self.experts[i](one) for i, one in zip(chosen, x, strict=True)]))

    found = find_axes(Step(Mixture()), (torch.randn(2, 4), torch.tensor([0, 1])))
    assert {f"model.experts.{i}.0" for i in range(8)} <= set(members(found))


def test_an_axis_to_which_a_layer_may_belong_that_was_not_called_stays_whole():
    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.other, self.down = nn.Linear(4, 6), nn.Linear(6, 3), nn.Linear(6, 2)

        def forward(self, x):
            return self.down(self.up(x)) if self.training else self.other(self.up(x))

    found = find_axes(Step(Sometimes()), (torch.randn(2, 4), torch.tensor([0, 1])))
    assert found.axes == []
    assert str(found.whole["model.up.weight", 0]) == (
        "'model.other.weight', which may belong to it, was not used in the traced steps"
    )


def test_nothing_is_changed():
    model = Step(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(), nn.Linear(6, 2))).eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    attributes = {path: set(part.__dict__) for path, part in model.named_modules()}
    batch = (torch.randn(8, 4), torch.randint(2, (8,)))
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    find_axes(model, batch)
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    assert np.random.get_state()[1].tolist() == states[2]
    assert not model.training and all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert {path: set(part.__dict__) for path, part in model.named_modules()} == attributes
    assert all(p.grad is None for p in model.parameters())


def test_a_width_that_stays_whole_says_why_and_where():
    class Spread(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 2)

        def forward(self, x):
            return self.down(torch.softmax(self.up(x), -1))

    found = find_axes(Step(Spread()), (torch.randn(2, 4), torch.tensor([0, 1])))
    assert found.axes == []
    assert found.kept_whole["model.up"].startswith("a softmax runs along it (test_trace.py:")


def test_a_span_is_an_axis_only_where_it_is_asked_for():
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 2))
    batch = (torch.randn(2, 4), torch.tensor([0, 1]))
    found = find_axes(Step(model), batch)
    assert found.axes == [] and "residual_width" in found.kept_whole["model.0"]
    wide = find_axes(Step(model), batch, residual_width=True)
    assert list(members(wide)) == ["model.0"] and wide.spanned == {"model.0"}


def test_what_a_model_gives_is_never_cut():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.out = nn.Linear(4, 6), nn.Linear(6, 3)

        def forward(self, x):
            return {"hidden": self.up(x).relu(), "answer": self.out(self.up(x).relu())}

    found = find_axes(Two(), [torch.randn(2, 4)])
    assert found.axes == []
    assert str(found.whole["up.weight", 0]) == "it is an output of the model"


def test_a_step_that_fails_names_its_line():
    class Broken(nn.Module):
        def forward(self, x):
            raise RuntimeError("no such luck")

    found = find_axes(Broken(), [torch.randn(2, 4)])
    assert "no such luck" in found.problem and "test_trace.py:" in found.problem and "submodel_axes" in found.problem


@pytest.mark.parametrize("counts", [(3, 2), (1, 1), (4, 5)])
def test_sizes_follow_from_the_counts(counts):
    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(4, 4 + 5), nn.Linear(4 + 5, 2)

        def forward(self, x):
            one, other = self.up(x).split([4, 5], -1)
            return self.down(torch.cat([other, one], -1))

    seen = trace(Step(Fused()), (torch.randn(2, 4), torch.tensor([0, 1])))
    candidates = Candidates(seen, Step(Fused()), residual_width=False)
    first, second = candidates.axes
    extent = candidates.extent(seen.dims["model.up.weight"][0])
    assert extent({first: counts[0], second: counts[1]}) == sum(counts)
    assert [spot.starts for spot in candidates.axes[first].spots] == [(0,), (0,), (5,)]
    assert [spot.starts for spot in candidates.axes[second].spots] == [(4,), (4,), (0,)]


class Scored(nn.Module):
    """A head whose scores are divided by the root of its size."""

    def __init__(self, root) -> None:
        super().__init__()
        self.size, self.root = 6, root
        self.q, self.k, self.v, self.out = nn.Linear(4, 6), nn.Linear(4, 6), nn.Linear(4, 5), nn.Linear(5, 2)

    def forward(self, x):
        q, k = self.q(x).view(-1, self.size), self.k(x)
        return self.out(((q @ k.t()) / self.root(self, k)).softmax(-1) @ self.v(x))


def test_a_size_that_is_used_as_a_number_stays_whole_or_stays_as_it_is():
    batch = (torch.randn(3, 4), torch.tensor([0, 1, 0]))
    found = find_axes(Step(Scored(lambda own, k: k.shape[-1] ** 0.5)), batch)
    assert list(members(found)) == ["model.v"]
    assert str(found.whole["model.q.weight", 0]).startswith("its size is used as a number (test_trace.py:")
    # what the module holds need not change: the view is corrected
    module = Step(Scored(lambda own, k: math.sqrt(own.size)))
    submodels = Submodels(module, batch)
    assert [axis.size for axis in submodels.axes.values()] == [6, 5] and refuted(submodels, module, batch) == {}
    small = submodels.shrink(Spec.select({"model.q": [0, 3]})).module
    assert small.model.size == 6 and "forward" in small.model.__dict__


def test_an_expert_that_is_given_nothing_costs_nothing_and_counts_as_not_called():
    class Sent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.idle, self.down = nn.Linear(4, 6), nn.Linear(4, 6), nn.Linear(6, 2)

        def forward(self, x):
            chosen = x[: int(x.sum() > 1e9)]
            return self.down(torch.cat([self.up(x), self.idle(chosen)]).relu())

    seen = trace(Step(Sent()), (torch.randn(2, 4), torch.tensor([0, 1])))
    assert seen.problem is None and seen.untouched == {"model.idle.weight", "model.idle.bias"}
    assert [atom.pin for atom in seen.dims["model.up.weight"][0].units()] == [None]


def test_what_code_does_where_a_mask_is_not_all_ones_is_seen_too():
    class Repeated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.groups, self.up, self.gate, self.down = 6, nn.Linear(4, 6), nn.Linear(4, 1), nn.Linear(6, 2)

        def forward(self, x):
            gate = self.gate(x)
            if not (x < 1e9).all():
                gate = gate.expand(-1, self.groups)
            return self.down(self.up(x) * gate)

    module, batch = Step(Repeated()), (torch.randn(2, 4), torch.tensor([0, 1]))
    small = Submodels(module, batch).shrink(Spec.select({"model.up": [0, 3]})).module
    assert small.model.groups == 2


def test_a_size_of_the_batch_is_never_taken_for_one_of_the_model():
    class Folded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads, self.up, self.down = 3, nn.Linear(4, 6), nn.Linear(6, 2)

        def forward(self, x):
            count = torch.linspace(0, 1, len(x))[:, None]  # made by code, and as long as the batch
            y = self.up(x + count).view(len(x) * self.heads, 2).relu()
            return self.down(y.view(len(x), -1))

    seen = trace(Step(Folded()), (torch.randn(2, 4), torch.tensor([0, 1])))
    candidates = Candidates(seen, Step(Folded()), residual_width=False)
    folded = [asked.dim for asked in seen.watch.asked if asked.dim.size == 6 and asked.where == (1,)]
    assert folded and all(candidates.extent(dim) is None for dim in folded)


def test_a_large_model_is_followed_without_values_though_it_asks_for_a_condition(monkeypatch):
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 2)

        def forward(self, x):
            asked.append(x.device.type)
            return self.down(self.up(x) if (x[:, 0] == 0).all() else self.up(x).relu())

    asked: list[str] = []
    monkeypatch.setattr("raafl.submodel.find.trace.LARGE", 1)
    monkeypatch.setattr("raafl.submodel.find.trace.MOST_VALUES", 1)
    found = find_axes(Step(Masked()), (torch.randn(2, 4), torch.tensor([0, 1])))
    assert [axis.size for axis in found.axes] == [6] and set(asked) == {"meta"}


def test_a_large_model_that_needs_a_number_says_so(monkeypatch):
    class Counted(nn.Module):
        def forward(self, x):
            return x * int(x.sum())

    monkeypatch.setattr("raafl.submodel.find.trace.LARGE", 0)
    monkeypatch.setattr("raafl.submodel.find.trace.MOST_VALUES", -1)
    found = find_axes(Step(Counted()), (torch.randn(2, 4), torch.tensor([0, 1])))
    assert found.axes == [] and "item() cannot be called on meta tensors" in found.problem


def test_an_empty_parameter_is_in_nobodys_way():
    class Registers(nn.Module):
        """A transformer's register tokens, none of which it has been given."""

        def __init__(self) -> None:
            super().__init__()
            self.up, self.down, self.registers = nn.Linear(4, 6), nn.Linear(6, 2), nn.Parameter(torch.zeros(1, 0, 4))

        def forward(self, x):
            x = torch.cat([self.registers.expand(len(x), -1, -1), x[:, None]], 1)
            return self.down(self.up(x).relu()).mean(1)

    module, batch = Step(Registers()), (torch.randn(2, 4), torch.tensor([0, 1]))
    submodels = Submodels(module, batch)
    assert list(submodels.axes) == ["model.up"] and refuted(submodels, module, batch) == {}
    small = submodels.shrink(Spec.select({"model.up": range(2)})).module
    assert small.model.registers.shape == (1, 0, 4) and small.model.up.weight.shape == (2, 4)
