"""Trials of a search: what of a budget a stage of halving has."""

from __future__ import annotations

import pytest

from raafl.errors import BadInput
from raafl.lab.compare.comparison import Comparison, Halving, Search
from raafl.lab.compare.search import trials_of

TARGET = ("--max_updates", "null", "--target", "accuracy=0.9")
HALVING = Halving()


def compared(*options, halving=HALVING, trial_options=()):
    search = Search({"--model.lr": [0.1, 0.2]}, (10,), options=trial_options, halving=halving)
    return Comparison("small", "quickstart", {"A": ()}, (0,), options=options, search=search)


def test_halving_needs_a_budget():
    comparison = compared(*TARGET)
    with pytest.raises(BadInput, match=r"search.halving needs a budget, and trials of row 'A' end by a target alone"):
        trials_of(comparison, comparison.search)


@pytest.mark.parametrize(
    ("comparison", "quarter"),
    [
        (compared(*TARGET, halving=None), ()),
        (compared(*TARGET, trial_options=("--max_updates", "12")), ("--max_updates", "3")),
        (compared(*TARGET, "--max_time", "8s"), ("--max_time", "2.0")),
    ],
)
def test_a_part_has_its_share_of_each_limit(comparison, quarter):
    (trial, _) = trials_of(comparison, comparison.search)["A"]
    run = trial.runs[0]
    assert run.part(0.25).options == (*run.options, *quarter)
