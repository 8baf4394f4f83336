"""A model with torch's own fake quantisation, whose scales get their size in the first forward pass, runs on both clocks."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.ao.quantization import get_default_qat_qconfig, prepare_qat

from model_zoo.classifier import Classifier
from raafl.algorithms import fed_avg, fed_raa
from raafl.runfolder import checkpoint_reader
from tests.conformance.clocks import on_both_clocks
from tests.helpers.small_runs import equal_replay, experiment, finish

pytestmark = [pytest.mark.timeout(90), pytest.mark.filterwarnings("ignore:.*(reduce_range|torch.ao).*")]
SCALE = "net.0.weight_fake_quant.scale"
RANGE = "net.0.activation_post_process.activation_post_process.max_val"


class Quantised(Classifier):
    """Weights with a scale for each channel, and activations with one range, as torch.ao prepares them."""

    def __init__(self):
        super().__init__(0.1, 0.9)
        self.net = nn.Sequential(nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 10)).train()
        self.net.qconfig = get_default_qat_qconfig("fbgemm")
        with warnings.catch_warnings(action="ignore"):
            prepare_qat(self.net, inplace=True)

    def forward(self, x):
        return self.net(x.flatten(1))


def test_a_quantisation_aware_model_trains_the_same_simulated_and_on_real_ranks(tmp_path):
    base = experiment(tmp_path / "simulated", fed_avg(), model=Quantised, emulate=False)
    simulated, real = on_both_clocks(base, tmp_path / "real")
    assert real.summary["final"] == simulated.summary["final"]
    saved = checkpoint_reader.load(simulated.folder).state_dict
    assert saved[SCALE].shape == (24,) and saved[SCALE].unique().numel() > 12
    assert all(tensor.isfinite().all() for tensor in saved.values())


def test_ranges_that_begin_infinite_can_be_mixed(tmp_path):
    """Fed-RAA adds shares of an update to the model, and a share of infinity is infinity."""
    assert Quantised().state_dict()[RANGE].isinf()
    made = experiment(tmp_path / "run", fed_raa(), model=Quantised)
    run = finish(made)
    assert equal_replay(made, run)
    saved = checkpoint_reader.load(run.folder).state_dict
    read = Quantised.load_from_checkpoint(max((run.folder / "checkpoints").glob("*.ckpt")))  # as Lightning reads it
    assert all(torch.equal(tensor, saved[name]) for name, tensor in read.state_dict().items())
    assert saved[RANGE].isfinite()
