"""What a run says before training about its targets and the metric of its best checkpoint."""

from __future__ import annotations

import pytest

from raafl.errors import BadInput
from raafl.runtime.first_look import check_goals, met_at_once
from tests.helpers.small_runs import experiment, finish

METRICS = {"mse": 1.6, "accuracy": 0.1, "gap": 0.5}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"target": "acc=0.9"},
            "target is 'acc=0.9', but validation_step gives no 'acc': use one of mse, accuracy, gap",
        ),
        (
            {"target": "gap=0.1"},
            "target is 'gap=0.1', and the name 'gap' does not say which values are better: "
            "give 'gap<=0.1' or 'gap>=0.1'",
        ),
        (
            {"keep_best": "f1:max"},
            "keep_best is 'f1', but validation_step gives no 'f1': use one of mse, accuracy, gap, or null",
        ),
        (
            {"keep_best": "gap"},
            "keep_best is 'gap', and this name does not say which values are better: give 'gap:min' or 'gap:max'",
        ),
    ],
)
def test_a_goal_that_cannot_be_judged_is_refused(tmp_path, settings, message):
    with pytest.raises(BadInput) as refused:
        check_goals(experiment(tmp_path / "run", **settings), METRICS, has_client_tests=False)
    assert str(refused.value) == message


def test_goals_with_a_direction_are_taken(tmp_path):
    goals = {"target": ["gap<=0.1", "mse=0.5", "client_accuracy=0.9"], "keep_best": "gap:min"}
    check_goals(experiment(tmp_path / "run", **goals), METRICS, has_client_tests=True)


def test_a_target_on_an_error_is_not_met_by_a_model_that_is_far_from_it(tmp_path):
    assert met_at_once(experiment(tmp_path / "run", target="mse=0.0001"), METRICS) == []


def test_a_target_that_the_initial_model_meets_is_warned_of(tmp_path):
    (warning,) = met_at_once(experiment(tmp_path / "run", target="mse=2"), METRICS)
    assert warning.startswith(
        "target is 'mse=2', which the initial model meets (mse is 1.6), so nothing will be trained: "
    )
    with pytest.raises(BadInput, match=r"which the initial model meets .* \(an error, since strict is true"):
        finish(experiment(tmp_path / "r", target="accuracy=0.0001", strict=True))
