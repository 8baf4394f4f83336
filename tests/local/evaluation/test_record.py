"""What a module logs, caught without a Trainer."""

from __future__ import annotations

import inspect

import pytest
import torch
from lightning.pytorch import LightningModule

from raafl.errors import BadInput
from raafl.local.record import POSITIONS, Recorder
from raafl.runtime.executors.rank_worker import PartialRecorder, add


def test_values_are_weighted_by_what_holds_when_they_are_logged():
    recorder = Recorder()
    recorder.log("a", 1.0)
    recorder.weight = 3.0
    recorder.log("a", torch.tensor(5.0), on_step=True)
    recorder.log("a", 2.0, batch_size=4)
    assert recorder.means() == {"a": (1 + 15 + 8) / 8}
    assert recorder.means() == {}


def test_a_metric_object_gives_what_it_computes():
    class Metric:
        def compute(self):
            return torch.tensor(0.5)

    recorder = Recorder()
    recorder.log("f1", Metric())
    assert recorder.means() == {"f1": 0.5}


def test_arguments_may_be_given_by_position_as_in_lightning():
    for log in (LightningModule.log, LightningModule.log_dict):
        assert [name for name in inspect.signature(log).parameters if name in POSITIONS] == list(POSITIONS)
    module, recorder = LightningModule(), Recorder()
    recorder.attach(module)
    for number in (1.0, 2.0):
        module.log("hits", number, False, None, None, None, "sum")
        module.log_dict({"most": number}, False, None, None, None, "max")
        module.log("weighed", number, batch_size=int(number))
    assert recorder.means() == {"hits": 3.0, "most": 2.0, "weighed": 5 / 3}


def test_logging_holds_no_graph():
    recorder = Recorder()
    recorder.log("loss", torch.ones((), requires_grad=True) * 2)
    total, _ = recorder._sums["loss"]
    assert not total.requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_sums_are_in_float64_whatever_the_precision_of_the_model(dtype):
    """A running sum in bfloat16 stands still at 256: the mean of 2,000 would be 0.15."""
    recorder, noting = Recorder(), PartialRecorder()
    value = torch.tensor(1.14, dtype=dtype)
    for one in (recorder, noting):
        for _ in range(2000):
            one.log("loss", value)
            one.log("number", value, reduce_fx="sum")
    wanted = {"loss": value.item(), "number": 2000 * value.item()}
    assert recorder.means() == pytest.approx(wanted, rel=1e-12)
    add(recorder, noting.partials())
    assert recorder.means() == pytest.approx(wanted, rel=1e-12)


def test_what_is_logged_is_kept_as_it_was():
    recorder, value = Recorder(), torch.tensor(2.0, dtype=torch.float64)
    recorder.log("most", value, reduce_fx="max")
    value.zero_()
    assert recorder.means() == {"most": 2.0}


def test_what_is_no_number_is_named():
    with pytest.raises(BadInput, match="'phase' is logged and is str: give one number"):
        Recorder().log("phase", "early")
