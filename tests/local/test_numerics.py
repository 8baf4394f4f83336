from __future__ import annotations

import os

import pytest
import torch

from raafl.config.problems import device_problem
from raafl.local.numerics import numerics_left, set_numerics, tf32
from raafl.local.train import FabricOptions


@pytest.fixture(autouse=True)
def flags_left():
    with numerics_left():
        yield


def states():
    kernels = torch.backends.cudnn.deterministic, torch.are_deterministic_algorithms_enabled()
    return torch.get_num_threads(), *kernels, tf32(), os.environ.get("CUBLAS_WORKSPACE_CONFIG")


def test_torch_is_left_as_it_is_but_for_threads():
    before = states()
    set_numerics(3, FabricOptions())
    assert states() == (3, *before[1:])


def test_what_is_asked_for_is_set_and_undone():
    before = states()
    with numerics_left():
        set_numerics(2, FabricOptions(deterministic=True, tf32=True))
        assert states() == (2, True, True, "matmul True, convolutions True", ":4096:8")
        with pytest.raises(RuntimeError, match="deterministic"):
            torch.empty(10).put_(torch.tensor([0]), torch.ones(1))
        set_numerics(2, FabricOptions(tf32=False))
        assert tf32() == "matmul False, convolutions False"
    assert states() == before


def test_tf32_that_was_set_both_ways_is_described():
    matmul, conv = torch.backends.cuda.matmul, torch.backends.cudnn.conv
    before = matmul.fp32_precision, conv.fp32_precision
    matmul.allow_tf32 = True
    try:
        matmul.fp32_precision, conv.fp32_precision = "ieee", "tf32"
        with numerics_left():
            assert tf32() == "matmul ieee, convolutions tf32"
    finally:
        matmul.fp32_precision, conv.fp32_precision = before


@pytest.mark.parametrize(
    ("num_gpus", "options", "words"),
    [
        (0, {}, None),
        (0, {"accelerator": "auto"}, None),
        (2, {"accelerator": "auto"}, None),
        (0, {"accelerator": "cuda"}, "fabric.accelerator is 'cuda', but torch sees no GPU here: give cpu, or auto"),
        (0, {"accelerator": "gpu"}, "fabric.accelerator is 'gpu', but torch sees no GPU here"),
        (0, {"accelerator": "mps"}, "fabric.accelerator is 'mps', but torch finds none here"),
        (2, {"device": 1}, "fabric.device is 1, the index of a GPU, but steps run on the CPU: leave it out"),
        (0, {"accelerator": "auto", "device": 0}, "fabric.device is 0, the index of a GPU, but steps run on the CPU"),
        (2, {"accelerator": "cuda", "device": 1}, None),
        (
            2,
            {"accelerator": "cuda", "device": 2},
            "fabric.device is 2, but torch sees 2 GPUs here: give 0 to 1, or leave it out",
        ),
        (
            1,
            {"accelerator": "gpu", "device": 1},
            "fabric.device is 1, but torch sees 1 GPU here: give 0, or leave it out",
        ),
        (2, {"accelerator": "auto", "device": -1}, "fabric.device is -1, but torch sees 2 GPUs here"),
    ],
)
def test_a_device_that_is_not_there_is_named_with_the_remedy(monkeypatch, num_gpus, options, words):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    problem = device_problem(FabricOptions(**options))
    assert problem is None if words is None else problem.startswith(words)
