"""A step that needs values costs what it does on drawn ones; of a large model it is a guess that says so."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

from model_zoo import MLP
from raafl.errors import BadInput
from raafl.lab.plan.plan import make_plan
from raafl.lab.plan.show import text
from raafl.rules import Rules
from raafl.runtime.run import simulate
from raafl.submodel import FULL, Submodels
from raafl.submodel.cost.ledger import Ledger
from tests.helpers.small_runs import experiment

LABELS = torch.zeros(2, dtype=torch.long)


def say_large(monkeypatch):
    """Let each model be one whose step is not run for its costs."""
    monkeypatch.setattr("raafl.submodel.find.trace.LARGE", 0)
    monkeypatch.setattr("raafl.submodel.cost.ledger.LARGE", 0)


class Reads(MLP):
    """A step that reads a value, which a meta tensor does not have."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.last = loss.item()
        return loss


def test_a_step_that_reads_values_is_followed_on_drawn_ones():
    plain, reads = (Submodels(kind(8, (7,), 3), (torch.zeros(2, 8), LABELS)) for kind in (MLP, Reads))
    for batch_size in (1, 5, 64):  # of 64 activations take most of the memory
        one, other = plain.cost(FULL, batch_size), reads.cost(FULL, batch_size)
        assert other.guessed == "" and replace(other, peak_bytes=0) == replace(one, peak_bytes=0)
        assert other.peak_bytes == pytest.approx(one.peak_bytes, rel=0.05)


class Recurrent(nn.Module):
    """An LSTM whose step may read a value."""

    def __init__(self, reads):
        super().__init__()
        self.lstm, self.reads = nn.LSTM(8, 16, batch_first=True), reads

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def training_step(self, batch, index):
        loss = self.lstm(batch)[0].square().mean()
        return loss * float(loss.item() < 1e9) if self.reads else loss


X = torch.randn(2, 5, 8)


def test_a_fused_layer_costs_the_same_on_drawn_values():
    plain, reads = (Submodels(Recurrent(reads), X).cost(FULL, 6) for reads in (False, True))
    assert reads.guessed == "" and reads.flops_per_sample == plain.flops_per_sample > 0


@dataclass
class LoraPair:
    x: torch.Tensor


class Hidden:
    """A batch whose tensors nobody finds."""

    def __init__(self, x):
        self.get = lambda: x

    @property
    def x(self):
        return self.get()


class Own(Recurrent):
    def training_step(self, batch, index):
        return super().training_step(batch.x, index)


def test_a_batch_in_a_dataclass_costs_what_its_tensors_do():
    plain, own = (Submodels(kind(True), batch).cost(FULL, 6) for kind, batch in ((Recurrent, X), (Own, LoraPair(X))))
    assert own == plain and own.guessed == ""


def test_a_batch_whose_samples_cannot_be_counted_leaves_a_guess():
    assert Submodels(Own(True), Hidden(X)).cost(FULL, 6).guessed


class ReadsSize(MLP):
    """A step that computes a size from the data, so that its cost depends on a value."""

    def training_step(self, batch, batch_idx):
        some = torch.ones(int(batch[1].sum().item()) + 1)
        return super().training_step(batch, batch_idx) + 0 * some.sum()


def test_a_large_model_whose_step_reads_values_costs_what_it_does_without_them(monkeypatch):
    say_large(monkeypatch)
    batch = (torch.zeros(2, 8), LABELS)
    plain, reads = (Submodels(kind(8, (7,), 3), batch).cost(FULL, 4) for kind in (MLP, Reads))
    assert reads == plain and reads.guessed == ""
    older = Submodels(Reads(8, (7,), 3), batch, rules=Rules(4)).cost(FULL, 4)
    sized = Submodels(ReadsSize(8, (7,), 3), batch).cost(FULL, 4)
    for guess in (older, sized):
        assert guess.flops_per_sample == 6 * (8 * 7 + 7 * 3)
        assert guess.guessed.startswith("the training step cannot be followed without values (RuntimeError: ")
        assert guess.guessed.endswith("): three times its forward pass counts")


class Fused(MLP):
    optimizer = None

    def configure_optimizers(self):
        return self.optimizer(self.parameters())


FUSED = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "adam": lambda parameters: torch.optim.Adam(parameters, fused=True, amsgrad=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, fused=True),
}


@pytest.mark.parametrize("name", FUSED)
def test_a_fused_optimizer_moves_without_values_what_it_does_with_them(name, monkeypatch):
    """The reference is the same ledger around a step on the CPU, which runs torch's fused kernel."""
    monkeypatch.setattr(Fused, "optimizer", staticmethod(FUSED[name]))
    batch, model = (torch.zeros(2, 8), LABELS), Fused(8, (7,), 3)
    cost, still = (Submodels(one, batch).cost(FULL, 2) for one in (model, Still(8, (7,), 3)))
    assert cost.guessed == still.guessed == ""
    optimizer = model.configure_optimizers()
    for ledger in (Ledger(), second := Ledger()):  # the first step creates the optimizer's state
        model.training_step(batch, 0).backward()
        with ledger, torch.no_grad():
            optimizer.step()
    assert second.kernels[getattr(torch.ops.aten, f"_fused_{name}_")] == 1
    assert 2 * (cost.moved_bytes_per_sample - still.moved_bytes_per_sample) == second.moved_bytes
    assert 2 * (cost.kernels_per_sample - still.kernels_per_sample) == len(second.kernels)


class Still(MLP):
    """A model whose optimizer moves nothing."""

    def configure_optimizers(self):
        return torch.optim.SGD([torch.zeros(0, requires_grad=True)], lr=0.1)


def test_a_run_and_a_plan_say_that_a_cost_is_a_guess_and_why(tmp_path, monkeypatch):
    say_large(monkeypatch)
    one, other = (
        experiment(tmp_path / name, "fed_async", model=lambda: ReadsSize(64, (4,), 10), max_updates=1) for name in "ab"
    )
    why = "the training step cannot be followed without values (RuntimeError: "
    (warning,) = simulate(one)[0]["warnings"]
    assert warning.startswith(f"predicted times and memory are a guess: {why}")
    with pytest.raises(BadInput, match="are a guess"):
        simulate(replace(other, strict=True))
    plan = make_plan(other, [], 1)
    assert plan.guessed.startswith(why) and plan.to_json()["guessed"] == plan.guessed
    assert f"Times and memory are a guess: {why}" in text(plan, 140, terminal=False)


class Routed(nn.Module):
    """Experts that are called with the samples that are dealt to them, if any are, as mixtures are written by hand."""

    def __init__(self, checked=False):
        super().__init__()
        self.gate = nn.Linear(8, 2)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.checked = checked

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def training_step(self, batch, index):
        x = batch[0]
        dealt = self.gate(x).argmax(-1)
        if self.checked:
            if torch.isnan(x).any() or torch.isinf(x).any():
                raise NotImplementedError("not finite")
            if (batch[1] > 9).any():
                raise ValueError("no such class")
            return self.experts[0](x).sum()
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mine = dealt == number
            if mine.any():
                out[mine] = expert(x[mine])
        return out.sum()


def test_experts_that_are_called_where_they_have_samples_are_no_cost_of_nothing(monkeypatch):
    torch.manual_seed(0)  # the first two samples go to different experts
    batch = (torch.randn(4, 8), LABELS)
    cost = Submodels(Routed(), batch).cost(FULL, 6)
    # each sample goes to one of the two, whichever: the gate forward, an expert and its weights' gradient
    assert cost.guessed == "" and cost.flops_per_sample == 2 * (8 * 2 + 2 * 8 * 8)
    # an expert that none of the example's samples goes to has a gradient, which other samples would give it
    alone, both = (Submodels(Routed(), (x, LABELS)).cost(FULL, 2) for x in (batch[0][:1].repeat(2, 1), batch[0][:2]))
    assert 0.7 * both.moved_bytes_per_sample < alone.moved_bytes_per_sample < both.moved_bytes_per_sample
    say_large(monkeypatch)
    cost = Submodels(Routed(), batch).cost(FULL, 4)
    # how many there are is not known
    assert cost.guessed.startswith("the training step cannot be followed without values (")
    assert cost.flops_per_sample == 6 * sum(p.numel() for p in Routed().parameters())
    # nothing is not finite, and a check of one's own finds nothing: gate and expert, and the expert's weights once more
    checked = Submodels(Routed(checked=True), batch).cost(FULL, 4)
    assert checked.guessed == "" and checked.flops_per_sample == 2 * (8 * 2 + 2 * 8 * 8)


class Grouped(nn.Module):
    """Experts as one stack of matrices, with whose rows' products torch has one operation."""

    def __init__(self):
        super().__init__()
        self.below, self.experts = nn.Linear(8, 8), nn.Parameter(torch.randn(4, 8, 16))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def training_step(self, batch, index):
        ends = torch.histc(batch[1].float(), 4, 0, 3).cumsum(0).to(torch.int32)
        return torch._grouped_mm(self.below(batch[0]), self.experts, offs=ends).square().sum()


def test_flops_of_grouped_products_by_hand():
    batch = (torch.randn(12, 8), torch.arange(12) // 3)
    try:
        Grouped().training_step(batch, 0).backward()
    except (AttributeError, NotImplementedError, RuntimeError) as error:
        pytest.skip(f"this torch has no grouped products on a processor: {error}")
    cost = Submodels(Grouped(), batch).cost(FULL, 12)
    assert cost.guessed == ""
    assert cost.flops_per_sample == 2 * (2 * 8 * 8) + 3 * (2 * 8 * 16)  # no gradient of the batch
