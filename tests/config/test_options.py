"""Which values of a metric are better, and targets that are given with or without a direction."""

from __future__ import annotations

import pytest

from raafl.config.targets import Target, direction, ranking


@pytest.mark.parametrize(
    ("better", "names"),
    [
        (
            "min",
            "loss val_loss valloss mse val/rmse MAE MeanSquaredError test_nll word_error_rate negative_log_likelihood",
        ),
        ("min", "client_loss cross_entropy CrossEntropyLoss ppl brier_score"),
        (
            "max",
            "accuracy val_acc top5 acc@1 F1Score roc_auc mAP50 r2_score score neg_mean_squared_error psnr log_likelihood",
        ),
        (None, "worst constant gap lossless_ratio false_positive_rate mapping"),
    ],
)
def test_a_metrics_name_says_which_values_are_better_or_nothing(better, names):
    assert {name: direction(name) for name in names.split()} == dict.fromkeys(names.split(), better)


@pytest.mark.parametrize(
    ("text", "shown", "at_most"),
    [
        ("mse=0.1", "mse=0.1", True),
        ("accuracy = 0.9", "accuracy=0.9", False),
        ("mse<=0.1", "mse=0.1", True),
        ("gap<=0.1", "gap<=0.1", True),
        ("gap >= 2", "gap>=2", False),
        ("accuracy<=0.2", "accuracy<=0.2", True),
    ],
)
def test_a_target_may_state_its_direction(text, shown, at_most):
    target = Target.parse(text)
    assert (str(target), target.at_most, target.is_clear) == (shown, at_most, True)
    assert target.met({target.metric: target.value - 0.01}) is at_most
    assert (
        Target.parse(shown) == target and Target.of(target.metric, target.value, "min" if at_most else "max") == target
    )


@pytest.mark.parametrize(
    ("metric", "better"),
    [
        ("mIoU", "max"),
        ("val_IoU", "max"),
        ("neg_accuracy", "min"),
        ("neg_rmse", "max"),
        ("accuracy_drop", None),
        ("loss_std", None),
        ("val_mAP", "max"),
    ],
)
def test_the_direction_of_names_in_camel_case_negated_or_of_differences(metric, better):
    assert direction(metric) == better


def test_two_targets_of_many_digits_have_two_names():
    # the name is a column of metrics.csv, and what `raafl sweep` gives its trials as --target
    texts = ["accuracy=0.9123454", "accuracy=0.9123451", "loss=1234567.8", "loss=1e-07", "loss=5"]
    assert [str(Target.parse(text)) for text in texts] == texts


def test_a_target_without_any_direction_is_not_clear():
    assert not Target.parse("gap=0.1").is_clear


def test_the_metric_of_the_best_checkpoint_may_state_its_direction():
    assert [ranking(text) for text in ("loss", "loss:max", "a:b", "gap:min")] == [
        ("loss", "min"),
        ("loss", "max"),
        ("a:b", None),
        ("gap", "min"),
    ]
