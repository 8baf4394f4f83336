"""Server and clients on emulated GPUs, as real ranks: payloads are staged, and the model is the simulated run's and the CPU's."""

from __future__ import annotations

import pytest

from raafl.algorithms import fed_async, fed_buff, fed_raa, split_fed
from raafl.compression.plan import Compress
from raafl.core.algorithm import Training
from raafl.core.options import Guard
from raafl.local.train import FabricOptions
from raafl.parts.protect.privacy import Privacy
from tests.conformance.clocks import on_both_clocks
from tests.helpers import cached_models
from tests.helpers.small_runs import experiment, finish

pytestmark = pytest.mark.timeout(90)

VARIANTS = {
    "fed_async, compressed": (fed_async(), {"compress": Compress("int8", "top_k", 0.3)}),
    "fed_buff, guarded": (fed_buff(buffer_size=2), {"guard": Guard(0.4, combine="median")}),
    "fed_raa, private": (fed_raa(fragments=2), {"privacy": Privacy(clip_norm=0.4, noise_multiplier=0.2)}),
    "split_fed": (split_fed(), {}),
}


@pytest.mark.quick_cases("fed_async, compressed")
@pytest.mark.parametrize("name", VARIANTS)
def test_ranks_on_emulated_gpus_give_the_cpus_model(tmp_path, request, name):
    algorithm, more = VARIANTS[name]
    more = {"clients": 2, "max_updates": 4, "train": Training(num_epochs=None, num_steps=1), "emulate": False, **more}
    with cached_models.reuse_findings():
        plain = finish(experiment(tmp_path / "cpu", algorithm, **more))
        emulated = request.getfixturevalue("emulated_cuda")
        on_gpus = {"server_device": "cuda:1", "fabric": FabricOptions(accelerator="cuda")}
        base = experiment(tmp_path / "gpu", algorithm, **more, **on_gpus)
        _, real = on_both_clocks(base, tmp_path / "real")
    assert real.digest == plain.digest
    assert emulated.counts["to host"] > 0 and emulated.counts["to device"] > 0
