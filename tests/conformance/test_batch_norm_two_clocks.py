"""With batch norm too, real ranks that report in a simulated run's order leave the same model, bit for bit."""

from __future__ import annotations

import pytest
import torch

from raafl.algorithms import fed_avg, fed_buff
from raafl.config.experiment import SubmodelOptions
from raafl.parts import RateSelect
from raafl.runfolder import checkpoint_reader
from tests.conformance.clocks import on_both_clocks
from tests.helpers.small_runs import experiment
from tests.numerics.test_batch_norm_runs import ConvNorm

pytestmark = pytest.mark.timeout(90)

VARIANTS = {
    "merged": fed_buff(buffer_size=3, server_lr=0.7, submodel=RateSelect(rates=[1.0, 0.25])),
    "static": fed_avg(submodel=RateSelect(rates=[1.0, 0.25])),
}


@pytest.mark.long("tests/numerics/test_batch_norm_runs.py::test_a_run_that_crashed_ends_as_if_it_had_not_and_replays")
@pytest.mark.parametrize("batch_norm", VARIANTS)
def test_running_statistics_are_the_same_on_real_ranks(tmp_path, batch_norm):
    options = SubmodelOptions(batch_norm=batch_norm, static_batches=3)
    base = experiment(
        tmp_path / "simulated", VARIANTS[batch_norm], model=ConvNorm, submodels=options, max_updates=10, emulate=False
    )
    simulated, real = on_both_clocks(base, tmp_path / "real")
    assert real.summary["final"] == simulated.summary["final"]
    one, other = (checkpoint_reader.load(run.folder).state_dict for run in (simulated, real))
    assert one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    assert not one["norm1.running_mean"].eq(0).all()
