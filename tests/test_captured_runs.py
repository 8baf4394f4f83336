"""Runs on an emulated GPU whose steps are captured come to the model of eager ones, whatever the method."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from model_zoo import MLP
from raafl.algorithms import ALGORITHMS, ca2fl, diloco, fadas, fed_buff, streaming_diloco
from raafl.core.algorithm import Training
from raafl.core.options import FabricOptions
from tests.helpers.emulated_cuda import Emulated
from tests.helpers.methods import each_method
from tests.helpers.small_runs import experiment, finish

SMALLER = {"ca2fl": ca2fl(2), "fadas": fadas(2), "fed_buff": fed_buff(buffer_size=2)}
SHORT = {"clients": 2, "max_updates": 6, "eval_every": 100, "train": Training(num_epochs=None, num_steps=4)}
CUDA = FabricOptions(accelerator="cuda", gradient_clip_val=1.0)
STEPS_OF_THEIR_OWN = {
    "ada_vit",
    "co_s2p",
    "depth_fl",
    "fed_mezo",
    "fed_pm",
    "fiarse",
    "fjord",
    "platon",
    "q_vit",
    "scale_fl",
    "split_fed",
}
"""Methods whose steps read values, draw on the CPU or go another way each time, and so stay eager."""


@pytest.mark.parametrize("name", each_method(parts=["local"], also=["scaffold", "fed_dyn", "fed_nova"]))
def test_a_run_with_captured_steps_gives_the_model_of_eager_ones(tmp_path, emulated_cuda: Emulated, name):
    compare(tmp_path, name, replace(CUDA, gradient_clip_val=None if name == "split_fed" else 1.0))


@pytest.mark.quick_cases("hetero_fl")
@pytest.mark.parametrize("name", sorted(ALGORITHMS.keys() - {"split_fed"}))  # which refuses clipping
def test_so_it_does_in_bf16(tmp_path, emulated_cuda: Emulated, name):
    compare(tmp_path, name, replace(CUDA, precision="bf16-mixed"))


def compare(tmp_path, name, fabric):
    """Run a method with eager and with captured steps."""
    algorithm = SMALLER.get(name, name)
    plain = finish(experiment(tmp_path / "eager", algorithm, fabric=replace(fabric, capture="off"), **SHORT))
    found = finish(experiment(tmp_path / "captured", algorithm, fabric=fabric, **SHORT))
    told = found.summary["captured"]
    assert found.digest == plain.digest and "captured" not in plain.summary
    assert found.summary["updates_merged"] == plain.summary["updates_merged"] == 6
    assert (told["captured"] == 0) == (name in STEPS_OF_THEIR_OWN) == bool(told["eager"]), told


class Adam(MLP):
    def __init__(self) -> None:
        super().__init__(64, (24,), 10, lr=0.05, dropout=0.2)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


@pytest.mark.quick_cases("diloco")
@pytest.mark.parametrize("name", ["diloco", "streaming_diloco"])
def test_moments_that_go_on_from_task_to_task_lie_where_graphs_find_them(tmp_path, emulated_cuda: Emulated, name):
    """AdamW's captured form has other bits than its plain one, so that the eager run here has that form, too."""
    algorithm = {"diloco": diloco, "streaming_diloco": streaming_diloco}[name](inner_state="kept")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("raafl.local.captured.tasks.problems", lambda *_: ["this one is eager"])
        plain = finish(experiment(tmp_path / "eager", algorithm, model=Adam, fabric=CUDA, **SHORT))
    found = finish(experiment(tmp_path / "captured", algorithm, model=Adam, fabric=CUDA, **SHORT))
    assert plain.summary["captured"]["captured"] == 0 < found.summary["captured"]["captured"]
    assert found.digest == plain.digest and found.summary["captured"]["eager"] == []
