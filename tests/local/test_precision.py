"""Loss scaling, autocast and GPUs: a task gives what it gives without them, as far as their rounding lets it."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from lightning.fabric.plugins.precision import MixedPrecision

from raafl.core.algorithm import Local
from raafl.submodel import Spec
from tests.helpers.emulated_cuda import Emulated
from tests.local.bench import Bench, Net, Norm, assignment, same

ROOT = Path(__file__).parents[2]
HALF = Spec.select({"fc1": range(4)})


class Scaled(MixedPrecision):
    """Loss scaling alone: by a power of 2, so that what is unscaled is as it was, to the bit."""

    def __init__(self):
        super().__init__("16-mixed", "cpu")

    def forward_context(self):
        return nullcontext()


@pytest.mark.parametrize(("clip", "prox"), [(None, 0.0), (0.05, 0.0), (None, 0.7), (0.05, 0.7)])
def test_scaled_gradients_are_clipped_and_pulled_on_as_they_are(clip, prox):
    plain, scaled = (Bench.of(Net, local=Local(prox=prox), gradient_clip_val=clip) for _ in range(2))
    scaled.trainer._strategy.precision = Scaled()
    task = assignment(epochs=2)
    assert same(scaled.run(task)[1], plain.run(task)[1])


def test_each_task_begins_with_a_loss_scaler_of_its_own():
    scales = []

    class Overflowing(Net):
        def training_step(self, batch, index):
            scales.append(bench.trainer._strategy.precision.scaler.get_scale())
            loss = super().training_step(batch, index)
            return loss * torch.inf if index == 0 else loss  # its gradients are not finite: the step is left out

    bench = Bench.of(Overflowing)
    bench.trainer._strategy.precision = Scaled()
    for _ in range(2):
        assert bench.run(assignment(steps=2))[1].is_finite()
    assert scales == 2 * [2.0**16, 2.0**15]


def test_what_a_step_makes_on_an_emulated_gpu_lies_on_the_tasks_own(emulated_cuda: Emulated):
    class Making(Net):
        def training_step(self, batch, index):
            made.append(torch.zeros(1, device="cuda").device.index)
            return super().training_step(batch, index)

    made: list[int] = []
    Bench.of(Making, accelerator="cuda", device=1).run(assignment(steps=1))
    assert made == [1] and torch.cuda.current_device() == 0


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_mixed_precision_on_an_emulated_gpu_casts_layers_and_returns_the_layouts_dtype(emulated_cuda, precision):
    """The casts are a CPU's, so bf16 is its bits; 16-mixed, which scales by 2^16, is within what half precision rounds."""

    class Seen(Net):
        def forward(self, x):
            found = super().forward(x)
            dtypes.add(found.dtype)
            return found

    dtypes: set[torch.dtype] = set()
    bench = Bench.of(Seen, accelerator="cuda", precision=precision, gradient_clip_val=0.05)
    reference = Bench.of(
        Net, precision="bf16-mixed" if precision == "bf16-mixed" else "32-true", gradient_clip_val=0.05
    )
    task = assignment(epochs=2)
    found, expected = bench.run(task)[1], reference.run(task)[1]
    assert dtypes == {torch.bfloat16 if precision == "bf16-mixed" else torch.float16}
    assert found.device.type == "cuda" and found.layout.fingerprint == expected.layout.fingerprint
    if precision == "bf16-mixed":
        assert found.fingerprint() == expected.fingerprint()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name].cpu(), tensor, rtol=2e-3, atol=1e-4)
    assert bench.run(task)[1].fingerprint() == found.fingerprint()


@pytest.mark.gpu
@pytest.mark.parametrize("sends", ["values", "delta"])
def test_steps_on_a_gpu_give_nearly_the_same(sends):
    task = assignment(epochs=1)
    here, there = Bench.of(Norm, sends=sends), Bench.of(Norm, sends=sends, accelerator="cuda")
    expected, found = here.run(task)[1], there.run(task)[1]
    assert found.device.type == "cuda"
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name].cpu(), tensor, rtol=1e-3, atol=1e-4)
    assert there.run(task)[1].fingerprint() == found.fingerprint()
