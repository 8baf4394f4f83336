"""Models as users write them, some of them wrong: what is said before the run, and what is left after it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from lightning import LightningModule
from torch import nn
from torch.nn import functional as F

from raafl.algorithms import fed_avg
from raafl.core.algorithm import Training
from raafl.errors import BadInput
from raafl.parts.select.rate_select import RateSelect
from raafl.runtime.setup import build, make_model
from raafl.submodel import Member, Submodels
from tests.helpers.methods import each_method
from tests.helpers.small_runs import experiment, finish

HALVED = {"algorithm": fed_avg(submodel=RateSelect(rates=[1.0, 0.25]))}


class Own(LightningModule):
    """A hidden layer of 16 units between 64 inputs and 10 classes."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(64, 16), nn.Linear(16, 10)

    def hidden(self, x):
        return torch.relu(self.a(x.flatten(1)))

    def forward(self, x):
        return self.b(self.hidden(x))

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        return {"accuracy": (self(batch[0]).argmax(1) == batch[1]).float().mean()}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class AnotherStep(Own):
    """Its training step uses the hidden units once more than its forward pass does."""

    def __init__(self):
        super().__init__()
        self.more = nn.Linear(16, 4)

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + self.more(self.hidden(batch[0])).square().mean()


class LeftOut(Own):
    """Declares an axis without the layer that reads it."""

    def submodel_axes(self):
        return {"hidden": [("a.weight", 0), ("a.bias", 0)]}


class Whole(Own):
    """Nothing in it can shrink: a softmax spans the hidden units."""

    def hidden(self, x):
        return torch.softmax(self.a(x.flatten(1)), -1)


class Frozen(Own):
    """On top of a layer that does not train."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(64, 64)
        self.base.requires_grad_(False)
        with torch.no_grad():  # pruned: about half of its weights are 0.0 or -0.0
            self.base.weight.mul_(self.base.weight.abs() > 0.06)

    def hidden(self, x):
        return super().hidden(self.base(x.flatten(1)))


STEPS: list[int] = []


class Writes(Frozen):
    """Whose base does change, from the second task on."""

    def training_step(self, batch, batch_idx):
        STEPS.append(batch_idx)
        if len(STEPS) > 4:
            with torch.no_grad():
                self.base.weight.mul_(0.999)
        return super().training_step(batch, batch_idx)


class Folders(Own):
    """Saves itself as several files in folders."""

    def save_pretrained(self, folder):
        (Path(folder) / "pooling").mkdir()
        (Path(folder) / "pooling" / "config.json").write_text("{}")
        torch.save(self.state_dict(), Path(folder) / "weights.bin")


class Picky(Own):
    """Does not like its arguments."""

    def __init__(self, width=15):
        raise ValueError(f"width {width} is not a multiple\nof 2")


def test_a_cut_that_the_training_step_does_not_survive_is_found_before_the_run(tmp_path):
    said = r"axis 'hidden' stays whole, not proven: its training step does not run: RuntimeError: "
    with pytest.raises(BadInput, match=said):
        finish(experiment(tmp_path / "strict", model=LeftOut, strict=True, **HALVED))
    assert not (tmp_path / "strict").exists()
    summary = finish(experiment(tmp_path / "run", model=LeftOut, **HALVED)).summary
    assert any(re.match(said, warning) for warning in summary["warnings"])
    assert "hidden" in summary["kept_whole"]


def test_what_the_training_step_alone_does_with_units_goes_with_them():
    (axis,) = Submodels(AnotherStep(), [torch.ones(2, 64), torch.tensor([0, 1])]).axes.values()
    assert axis.size == 16 and Member("more.weight", 1) in axis.members


def test_the_layer_that_cannot_shrink_is_named_once(tmp_path, capsys):
    """Everyone trains the whole model then, and the run says why."""
    finish(experiment(tmp_path / "run", model=Whole, **{**HALVED, "progress": "plain"}))
    said = [line for line in capsys.readouterr().err.splitlines() if "has no axes to cut by rates" in line]
    assert len(said) == 1 and said[0].count("'a'") == 1


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("rates", [1.0, [1.0, 0.25]])
def test_a_task_that_writes_to_what_is_frozen_ends_the_run_by_name(tmp_path, rates, workers):
    STEPS.clear()
    training = Training(num_epochs=None, num_steps=1)
    run = experiment(
        tmp_path / "run",
        fed_avg(submodel=RateSelect(rates=rates)),
        model=Writes,
        workers=workers,
        train=training,
        max_updates=40,
    )
    with pytest.raises(BadInput, match=r"parameter 'base.weight' has requires_grad=False, but training writes to it"):
        finish(run)


@pytest.mark.parametrize("name", each_method(parts=["merge"]))
def test_no_merge_changes_a_frozen_bit(tmp_path, name, monkeypatch):
    import raafl.runtime.run

    built = []
    monkeypatch.setattr(
        raafl.runtime.run, "build", lambda *args, **more: built.append(build(*args, **more)) or built[-1]
    )
    finish(experiment(tmp_path / "run", name, model=Frozen, max_updates=8))
    (parts,) = built
    torch.manual_seed(0)
    now, first = parts.coordinator.state.values["base.weight"], make_model(parts.experiment).base.weight
    assert torch.signbit(first[first == 0]).any(), "no -0.0 to keep"
    assert torch.equal(now.view(torch.int32), first.detach().view(torch.int32))


def test_a_model_may_be_saved_in_folders(tmp_path):
    run = finish(experiment(tmp_path / "run", model=Folders))
    assert run.summary["model"] == "model" and not run.summary["warnings"]
    assert {str(file.relative_to(run.folder)) for file in (run.folder / "model").rglob("*.*")} == {
        "model/README.md",
        "model/pooling/config.json",
        "model/weights.bin",
    }


class Unlucky(Picky):
    """Finds something missing."""

    def __init__(self):
        raise RuntimeError("no such\nlibrary")


def test_a_model_that_cannot_be_made_is_one_line(tmp_path):
    with pytest.raises(
        BadInput, match=r"the model cannot be constructed: RuntimeError: no such library \(.*.py:\d+\)$"
    ):
        finish(experiment(tmp_path / "run", model=Unlucky))
    with pytest.raises(BadInput, match=r"the model cannot be constructed: width 15 is not a multiple of 2$"):
        finish(experiment(tmp_path / "run", model=Picky))


class Unannotated(LightningModule):
    """A constructor whose arguments have defaults alone."""

    def __init__(self, hidden=16, lr=1):
        super().__init__()
        self.layer = nn.Linear(4, hidden)


def test_an_argument_that_torch_refuses_is_named_with_what_its_default_is():
    made = experiment(Path("unused"), model=lambda: Unannotated(hidden=96.5))
    with pytest.raises(BadInput, match=r"^model.hidden is 96.5: give a whole number, as its default, 16$"):
        make_model(made)
    made = experiment(Path("unused"), model=lambda: Unannotated(hidden=[8], lr=0.5))
    with pytest.raises(BadInput, match=r"^model.hidden is \[8\]: give a whole number"):
        make_model(made)


def test_devices_that_nobody_has_checked_are_one_line(tmp_path):
    """As those of a run folder that is replayed."""
    with pytest.raises(BadInput, match="devices: entry 1: unknown field class_path"):
        build(experiment(tmp_path / "run", devices="[{class_path: os.system}]"), pace=False)
