"""A module made ready: hooks that build layers, steps that are lacking, what steps itself."""

import pytest
import torch
from lightning import LightningModule
from torch import nn

from raafl.errors import BadInput
from raafl.local.missing_steps import given_class
from raafl.local.prepare import prepare


class Bare(LightningModule):
    def training_step(self, batch, batch_idx):
        return self.net(batch).sum()


def test_layers_are_built_by_setup_and_then_by_configure_model():
    calls = []

    class Late(Bare):
        def setup(self, stage):
            calls.append(stage)
            self.width = 3

        def configure_model(self):
            calls.append("model")
            self.net = nn.Linear(2, self.width)

    assert prepare(Late()).net.weight.shape == (3, 2)
    assert calls == ["fit", "model"]


def test_a_hook_that_asks_for_a_trainer_is_named_with_the_line():
    class Asks(Bare):
        def setup(self, stage):
            self.net = nn.Linear(2, self.trainer.datamodule.width)

    with pytest.raises(
        BadInput,
        match=r"^Asks.setup fails: NotInTask: self.trainer.datamodule .*Trainer.*\(tests/local/preparation/test_prepare.py:\d+\)",
    ):
        prepare(Asks())


def test_without_a_validation_step_the_test_step_measures_or_else_the_training_loss():
    class Tested(Bare):
        def test_step(self, batch, batch_idx):
            return {"seen": batch_idx}

    assert prepare(Tested()).validation_step(None, 7) == {"seen": 7}
    module = Bare()
    module.net = nn.Identity()
    assert prepare(module).validation_step(torch.ones(3), 0) == {"loss": 3.0}
    assert given_class(module) is Bare and given_class(prepare(module)) is Bare


def test_what_cannot_be_trained_is_said():
    class ByHand(Bare):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

    with pytest.raises(
        BadInput, match=r"ByHand.automatic_optimization is False, but raafl calls backward .* leave it True"
    ):
        prepare(ByHand())
    with pytest.raises(BadInput, match="LightningModule has no training_step: define one that returns the loss"):
        prepare(LightningModule())


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
@pytest.mark.parametrize(
    ("layer", "line"),
    [
        (
            lambda: nn.LazyLinear(3),
            r"Bare.net.1.weight has no size before a first batch: give LazyLinear\(.*\) the size of",
        ),
        (lambda: nn.Linear(4, 0), r"Bare.net.1.weight is empty, \(0, 4\): give Linear\(.*\) sizes of 1 or more"),
    ],
)
def test_a_parameter_without_a_size_is_said_by_its_name(layer, line):
    module = Bare()
    module.net = nn.Sequential(nn.Flatten(), layer())
    with pytest.raises(BadInput, match=line):
        prepare(module)


def test_what_was_compiled_is_taken_off():
    module = Bare()
    module.net = nn.Sequential(torch.compile(nn.Linear(2, 2), backend="eager"))
    compiled = torch.compile(module, backend="eager")
    assert prepare(compiled) is module
    assert list(dict(module.named_parameters())) == ["net.0.weight", "net.0.bias"]


def test_steps_without_an_index_are_given_one():
    class Short(Bare):
        def training_step(self, batch):
            return batch

        def validation_step(self, batch):
            return {"seen": batch}

    class Starred(Bare):
        def training_step(self, *args):
            return args

    short = prepare(Short())
    assert (short.training_step(3, 0), short.validation_step(4, 1)) == (3, {"seen": 4})
    assert given_class(short) is Short
    assert prepare(Starred()).training_step(3, 7) == (3, 7)


def test_a_part_that_setup_compiles_is_unwrapped_too():
    class Compiles(Bare):
        def setup(self, stage):
            self.net = torch.compile(nn.Linear(2, 3))

    assert type(prepare(Compiles()).net) is nn.Linear


def test_hooks_of_a_test_are_called_where_the_test_step_measures():
    class Tested(Bare):
        def test_step(self, batch, batch_idx):
            return {"loss": 1.0}

        def on_test_epoch_end(self):
            calls.append("end")

    calls = []
    prepare(Tested()).on_validation_epoch_end()
    assert calls == ["end"]
