"""What a module logs, caught without a Trainer."""

from __future__ import annotations

import pytest
import torch

from raafl.local.record import Recorder, batch_length, to_device


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


def test_logging_holds_no_graph():
    recorder = Recorder()
    recorder.log("loss", torch.ones((), requires_grad=True) * 2)
    total, _ = recorder._sums["loss"]
    assert not total.requires_grad


@pytest.mark.parametrize(
    ("batch", "length"),
    [
        (torch.zeros(4, 2), 4),
        (torch.tensor(1.0), 1),
        ([torch.zeros(3), torch.zeros(3)], 3),
        ({"ids": torch.zeros(5, 7), "mask": torch.zeros(5, 7)}, 5),
        (("text", {"x": torch.zeros(6)}), 6),
        ("text", 1),
        ([], 1),
    ],
)
def test_the_length_of_a_batch_is_that_of_its_first_tensor(batch, length):
    assert batch_length(batch) == length


def test_what_is_on_the_cpu_already_is_not_copied():
    batch = {"x": [torch.zeros(2)]}
    assert to_device(batch, torch.device("cpu")) is batch


def test_every_tensor_of_a_nested_batch_is_moved():
    moved = to_device({"x": [torch.zeros(2), "label"], "y": (torch.ones(1),)}, torch.device("meta"))
    assert moved["x"][0].device.type == moved["y"][0].device.type == "meta"
    assert (moved["x"][1], type(moved["x"]), type(moved["y"])) == ("label", list, tuple)
