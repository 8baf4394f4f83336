"""The learning rate's schedule over a run, by hand."""

from __future__ import annotations

import math

import pytest

from raafl.core.options import Training
from raafl.core.restoring import assignment_from_json
from raafl.core.saving import assignment_to_json
from raafl.core.types import Assignment
from raafl.errors import BadInput
from raafl.submodel import FULL


def test_without_a_schedule_the_factor_is_one():
    assert Training().lr_scale(10**6, 1e9) == 1.0


@pytest.mark.parametrize(("version", "factor"), [(0, 1.0), (25, 0.775), (50, 0.55), (100, 0.1), (1000, 0.1)])
def test_a_linear_schedule_by_versions(version, factor):
    train = Training(lr_schedule="linear", lr_versions=100, lr_final=0.1)
    assert train.lr_scale(version, 0.0) == pytest.approx(factor)


@pytest.mark.parametrize(
    ("now_s", "factor"),
    [(0.0, 0.1), (5.0, 0.55), (10.0, 1.0), (55.0, 0.5), (10.0 + 90.0 / 3, 0.75), (100.0, 0.0), (1e9, 0.0)],
)  # after the warm-up's 10 s, a cosine over 90 s: cos(pi / 3) = 1/2
def test_a_cosine_schedule_by_time_after_a_warm_up(now_s, factor):
    train = Training(lr_schedule="cosine", lr_time_s=100.0, lr_warmup=0.1)
    assert train.lr_scale(0, now_s) == pytest.approx(factor, abs=1e-12)


@pytest.mark.parametrize(("version", "factor"), [(0, 1.0), (199, 1.0), (200, 0.1), (399, 0.1), (400, 0.01)])
def test_a_step_schedule_multiplies_after_each_span(version, factor):
    train = Training(lr_schedule="step", lr_versions=200, lr_final=0.1)
    assert train.lr_scale(version, 0.0) == pytest.approx(factor)


def test_a_step_schedule_rises_in_its_warm_up_first():
    train = Training(lr_schedule="step", lr_versions=200, lr_final=0.1, lr_warmup=0.1)
    assert [train.lr_scale(version, 0.0) for version in (0, 10, 20, 199, 200)] == pytest.approx([0.1, 0.55, 1, 1, 0.1])


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"lr_schedule": "stairs"}, "train.lr_schedule is 'stairs': give constant, linear, cosine, step"),
        (
            {"lr_schedule": "step", "lr_versions": 5},
            "train.lr_final is 0, so that nothing is trained after the first step",
        ),
        ({"lr_schedule": "cosine"}, "train.lr_schedule is cosine, which needs a length"),
        (
            {"lr_schedule": "linear", "lr_versions": 5, "lr_time_s": 3.0},
            "give either train.lr_versions or train.lr_time_s, not both",
        ),
        ({"lr_versions": 5}, "train.lr_versions has no effect with a constant lr_schedule"),
        ({"lr_warmup": 0.1}, "train.lr_warmup has no effect with a constant lr_schedule"),
        ({"lr_final": 0.1}, "train.lr_final has no effect with a constant lr_schedule: set"),
        ({"lr_warmup": 1.0}, "train.lr_warmup is 1.0: give a number from 0 to below 1"),
        ({"lr_final": math.inf}, "train.lr_final is inf"),
        (
            {"lr_final": 1e200, "lr_schedule": "linear", "lr_versions": 1},
            "train.lr_final is 1e+200: give a number from 0 to 1000",
        ),
        (
            {"lr_final": 1.5, "lr_schedule": "step", "lr_versions": 1},
            "train.lr_final is 1.5: give a number from 0 to 1",
        ),
        ({"lr_schedule": "linear", "lr_time_s": math.nan}, "train.lr_time_s is nan: give seconds above 0"),
    ],
)
def test_a_schedule_out_of_range_is_named(fields, says):
    with pytest.raises(BadInput) as refused:
        Training(**fields)
    assert says in str(refused.value)


def test_a_task_says_its_factor_where_it_has_one():
    task = Assignment(1, 1, 0, 0, 0, FULL, 0, 1, None, 5, 0.0, lr_scale=0.25)
    assert assignment_from_json(assignment_to_json(task)) == task
    plain = Assignment(1, 1, 0, 0, 0, FULL, 0, 1, None, 5, 0.0)
    assert "lr_scale" not in assignment_to_json(plain) and assignment_from_json(assignment_to_json(plain)) == plain
