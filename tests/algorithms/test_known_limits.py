"""Each method, at the settings where it is another one, comes to the same model to the last bit."""

from __future__ import annotations

from functools import cache

import pytest

from raafl.algorithms import (
    depth_fl,
    fed_async,
    fed_avg,
    fed_dyn,
    fed_rolex,
    fjord,
    hetero_fl,
    ist,
    oap,
    platon,
    prune_fl,
    q_vit,
    ra_fed,
    scale_fl,
)
from raafl.data import Dirichlet, Iid
from tests.algorithms.test_q_vit import deep_cnn, deep_mlp
from tests.helpers.small_runs import experiment, finish

UNEQUAL = {"partition": Dirichlet(alpha=1.0)}
SETTINGS = {
    "equal clients": {"partition": Iid()},
    "unequal clients": UNEQUAL,
    "clients with few classes": {"partition": Dirichlet(alpha=0.1)},
    "perceptron": {**UNEQUAL, "model": deep_mlp},
    "convolutions": {**UNEQUAL, "model": deep_cnn},
    "links without a limit": {
        **UNEQUAL,
        "devices": None,
    },  # scores' bytes take no time: the order of arrival is the same
}
KNOWN = {
    "fed_avg": fed_avg(),
    "unweighted": fed_avg(by_samples=False),
    "fed_async": fed_async(staleness="polynomial"),
    "fed_dyn": fed_dyn(0.1),
}
CASES = {
    "fed_rolex at full width": (fed_rolex(rates=1.0), "unweighted", "equal clients"),
    "fed_rolex, not masked": (fed_rolex(rates=1.0, masked=False), "unweighted", "clients with few classes"),
    "hetero_fl at full width": (hetero_fl(rates=1.0), "unweighted", "equal clients"),
    "hetero_fl, not masked": (hetero_fl(rates=1.0, masked=False), "unweighted", "clients with few classes"),
    "oap at full width": (oap(rates=1.0), "unweighted", "unequal clients"),
    "ist with one subnet": (ist(subnets=1), "unweighted", "unequal clients"),
    "ra_fed with all regions": (ra_fed(mask=[4]), "unweighted", "equal clients"),
    "ra_fed, scaled by 1": (ra_fed(mask=[4], rescale=True), "unweighted", "equal clients"),
    "depth_fl without exits": (depth_fl(1.0, dyn_alpha=0.0), "unweighted", "equal clients"),
    "scale_fl without exits": (scale_fl(1.0, 1.0), "unweighted", "equal clients"),
    "depth_fl, regularised": (depth_fl(1.0, dyn_alpha=0.1), "fed_dyn", "equal clients"),
    "fjord at full width": (fjord(1.0, [1.0], distil=False), "fed_avg", "equal clients"),
    "prune_fl with whole rounds": (prune_fl(every=1), "fed_avg", "unequal clients"),
    "q_vit with 32 bits": (q_vit(bits=32), "fed_avg", "perceptron"),
    "q_vit with 32 bits, convolutions": (q_vit(bits=32), "fed_avg", "convolutions"),
    "platon at rate 1": (platon(rates=1.0), "fed_avg", "links without a limit"),
    "platon at rate 1, late": (
        platon(rates=1.0, trigger="each", staleness="polynomial"),
        "fed_async",
        "links without a limit",
    ),
}


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    """The model of a known method in a setting, trained once."""

    @cache
    def digest(name, setting):
        folder = tmp_path_factory.mktemp("known") / "run"
        return finish(experiment(folder, KNOWN[name], max_updates=8, **SETTINGS[setting])).digest

    return digest


@pytest.mark.parametrize("case", CASES)
def test_it_is_the_known_method_to_the_last_bit(tmp_path, known, case):
    algorithm, name, setting = CASES[case]
    run = finish(experiment(tmp_path / "run", algorithm, max_updates=8, **SETTINGS[setting]))
    assert run.digest == known(name, setting)
