"""What is said to somebody who writes a Trainer's arguments."""

import inspect

import pytest
from lightning import Trainer

from raafl.algorithms import ALGORITHMS
from raafl.api.settings import Settings
from raafl.config.messages import unknown

OWN = {"self", "devices", *Settings.__annotations__}


def test_every_argument_of_the_trainer_is_a_setting_or_has_an_answer():
    names = [name for name in inspect.signature(Trainer.__init__).parameters if name not in OWN]
    assert len(names) > 20
    for name in names:
        assert not unknown("no", name, ["a"]).startswith(("no: did you mean", "no: known")), name


def test_a_name_that_is_there_in_its_group_and_one_of_a_part_are_as_any_other():
    assert unknown("no x", "--train.max_epochs", []).startswith("no x: a run ends by max_updates (merged updates)")
    assert unknown("no x", "resume", ["a"]).startswith("no x: it is an argument of a run: simulate(")
    assert unknown("no x", "model.max_epochs", ["model.epochs"]) == "no x: did you mean 'model.epochs'?"
    assert unknown("no x", "max_update", ["max_updates"]) == "no x: did you mean 'max_updates'?"


@pytest.mark.parametrize("shown", ("fragments", "--fragments"))
def test_an_argument_of_a_method_is_no_misspelled_field(shown):
    says = "it is an argument of methods, such as fed_raa: --algorithm.fragments, or raafl.fed_raa(fragments=...) in Python"
    assert unknown("no x", shown, ["clients", "--clients"]) == f"no x: {says}"
    assert unknown("no x", "train.fragments", ["train.fragment"]) == "no x: did you mean 'train.fragment'?"


@pytest.mark.parametrize("method", ALGORITHMS)
def test_every_argument_of_a_method_is_found_in_its_source(method):
    for name in inspect.signature(ALGORITHMS[method]).parameters:
        assert not unknown("no", name, [name]).startswith("no: did you mean"), name
