"""A small ViT: real ranks in a simulation's order leave the same model, bit for bit.

Three methods run each time: one that cuts heads and units and trains masks, one that cuts blocks, one that wraps them. The others,
whose way with any model test_two_clocks.py proves on an MLP, run in `make test-long`.
"""

from __future__ import annotations

import pytest

from tests.helpers.methods import long_except

pytest.importorskip("transformers")

from raafl.algorithms import ALGORITHMS, co_s2p, fed_async, fed_raa, fed_rolex, hetero_fl, oap, platon, prune_fl
from raafl.core.algorithm import Training
from tests.conformance.clocks import on_both_clocks
from tests.conformance.test_transformers_two_clocks import MODELS
from tests.conformance.test_two_clocks import DEVICES, MEASURED
from tests.conformance.test_two_clocks import VARIANTS as USUAL
from tests.helpers.small_runs import experiment, unequal

pytestmark = pytest.mark.timeout(600)

RATES = [1.0, 0.75, 0.5, 0.4]
VARIANTS = {name: USUAL[name] for name in ALGORITHMS if name not in MEASURED} | {
    "co_s2p": co_s2p(rates=RATES, mask_rounds=1, mask_steps=2),
    "fed_async": fed_async(staleness="hinge", staleness_b=1, concurrency=2),
    "fed_raa": fed_raa(staleness="polynomial"),
    "fed_rolex": fed_rolex(rates=RATES),
    "hetero_fl": hetero_fl(rates=RATES),
    "oap": oap(rates=RATES),
    "platon": platon(rates=RATES, warm_up=0, rounds=1, groups=8),
    "prune_fl": prune_fl(every=2, rates=0.6),
}


CUT_DIFFERENTLY = ("ada_vit", "co_s2p", "fed_raa")


@pytest.mark.quick_cases("fed_raa")
@pytest.mark.slow("five processes train a transformer")
@pytest.mark.parametrize("name", long_except(VARIANTS, *CUT_DIFFERENTLY))
def test_ten_updates_are_the_same_on_real_ranks(tmp_path, name):
    model, data = MODELS["ViT"]
    made = experiment(
        tmp_path / "simulated",
        VARIANTS[name],
        model=model,
        data=data,
        max_updates=10,
        eval_every=5,
        emulate=False,
        train=Training(num_epochs=None, num_steps=2),
        devices=DEVICES.get(name, unequal()),
    )
    simulated, real = on_both_clocks(made, tmp_path / "real")
    assert simulated.summary["updates_merged"] >= 10
    for field in ("versions", "updates_merged", "staleness", "participation", "final"):
        assert real.summary[field] == simulated.summary[field]


def test_every_algorithm_is_among_the_variants():
    assert {algorithm.name for algorithm in VARIANTS.values()} == ALGORITHMS.keys() - set(MEASURED)
