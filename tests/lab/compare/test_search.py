"""Trials of a search: what of a budget a stage of halving has."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from raafl.errors import BadInput
from raafl.lab.compare.comparison import Comparison, Halving, Search
from raafl.lab.compare.search import NO_RANK, Trial, trials_of

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


@pytest.mark.parametrize("maximize", [True, False])
def test_trials_that_miss_the_target_come_after_those_that_reach_it_in_the_order_of_their_ends(maximize):
    comparison = replace(compared(*TARGET, halving=None), maximize=maximize)
    search = replace(comparison.search, target=0.9)
    run = trials_of(comparison, search)["A"][0].runs[0]
    soon, late = (
        Trial(("soon",), [run], {10: 3.0}, finals={10: 0.9}),
        Trial(("late",), [run], {10: 4.0}, finals={10: 1.0}),
    )
    low, high = (Trial((str(end),), [run], {10: math.inf}, finals={10: end}) for end in (0.4, 0.5))
    failed, diverged = Trial(("failed",), [run]), Trial(("nan",), [run], {10: math.inf}, finals={10: math.nan})
    best_last = [high, low] if maximize else [low, high]
    tried = [failed, low, late, high, diverged, soon]
    assert sorted(tried, key=lambda one: one.rank(comparison, search)) == [soon, late, *best_last, failed, diverged]
    assert failed.rank(comparison, search) == diverged.rank(comparison, search) == NO_RANK
