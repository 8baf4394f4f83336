"""One algorithm, two runtimes: real ranks that report in a simulated run's order leave the same model, bit for bit."""

from __future__ import annotations

import pytest

from raafl.algorithms import (
    ALGORITHMS,
    ada_vit,
    ca2fl,
    co_s2p,
    depth_fl,
    diloco,
    fadas,
    fed_async,
    fed_avg,
    fed_buff,
    fed_compass,
    fed_dyn,
    fed_mezo,
    fed_nova,
    fed_opt,
    fed_per,
    fed_pm,
    fed_prox,
    fed_raa,
    fed_rolex,
    fiarse,
    fjord,
    hetero_fl,
    ist,
    moon,
    oap,
    platon,
    prune_fl,
    q_vit,
    ra_fed,
    ram_fed,
    scaffold,
    scale_fl,
    split_fed,
    streaming_diloco,
    timely_fl,
)
from raafl.parts.select.rate_select import RateSelect
from tests.conformance.clocks import on_both_clocks, order_of
from tests.helpers.methods import each_method
from tests.helpers.real_ranks import ranks
from tests.helpers.small_runs import SPEEDS, equal_replay, experiment, finish, unequal

pytestmark = pytest.mark.timeout(90)

VARIANTS = {
    "ada_vit": ada_vit(),
    "co_s2p": co_s2p(mask_rounds=1, mask_steps=2),
    "asynchronous co_s2p": co_s2p(trigger="async", mask_rounds=1, mask_steps=2),
    "diloco": diloco(),
    "asynchronous diloco of submodels": diloco(trigger="each", submodel=RateSelect(rates=[1.0, 0.5])),
    "ca2fl": ca2fl(buffer_size=3),
    "ca2fl of submodels": ca2fl(2, submodel=RateSelect(rates=[1.0, 0.5])),
    "fadas": fadas(buffer_size=3),
    "fadas of submodels": fadas(2, submodel=RateSelect(rates=[1.0, 0.5])),
    "fed_compass": fed_compass(2, 6),
    "fed_compass of submodels": fed_compass(2, 6, submodel=RateSelect(rates=[1.0, 0.5])),
    "fjord": fjord(),
    "depth_fl": depth_fl(),
    "asynchronous depth_fl": depth_fl(dyn_alpha=0.0, alpha=0.5),
    "scale_fl": scale_fl(),
    "fiarse": fiarse(rates=[1.0, 0.5, 0.25]),
    "fiarse of units": fiarse("units", [1.0, 0.5], buffer_size=3),
    "fed_raa": fed_raa(),
    "fed_raa random, staleness": fed_raa(select="random", staleness="polynomial", prox=0.1),
    "sync fed_raa": fed_raa(trigger="all"),
    "fed_async": fed_async(),
    "fed_async hinge, few at a time": fed_async(staleness="hinge", staleness_b=1, concurrency=2),
    "fed_buff": fed_buff(buffer_size=3),
    "fed_buff, server adam": fed_buff(buffer_size=3, server_optimizer="adam"),
    "fed_avg": fed_avg(),
    "fed_avg cohort": fed_avg(cohort=2),
    "fed_dyn": fed_dyn(0.1),
    "fed_nova": fed_nova(),
    "fed_per": fed_per(alpha=0.5),
    "fed_mezo": fed_mezo(),
    "asynchronous fed_mezo": fed_mezo(trigger="each", staleness="polynomial"),
    "fed_pm": fed_pm(),
    "fed_prox": fed_prox(prox=0.5),
    "fed_opt": fed_opt(),
    "hetero_fl": hetero_fl(),
    "fed_rolex": fed_rolex(),
    "ist": ist(),
    "moon": moon(),
    "oap": oap(),
    "platon": platon(rates=[1.0, 0.5, 0.25], warm_up=0, rounds=1, groups=8),
    "asynchronous platon": platon(rates=[1.0, 0.5], warm_up=1, rounds=1, trigger="each", staleness="polynomial"),
    "prune_fl": prune_fl(every=2),
    "q_vit": q_vit(edge_bits=4),
    "ra_fed": ra_fed(mask="MIX-Arb", trained=3, every=2),
    "ram_fed": ram_fed(mask="S-Arb", coverage=1, rest=4),
    "asynchronous ram_fed": ram_fed(trigger="each", staleness="polynomial", max_age=6),
    "scaffold": scaffold(),
    "asynchronous scaffold, option I, of submodels": scaffold(1, buffer_size=3, submodel=RateSelect(rates=[1.0, 0.5])),
    "split_fed": split_fed(),
    "streaming_diloco": streaming_diloco(2),
    "asynchronous streaming_diloco": streaming_diloco(2, trigger="each"),
    "timely_fl": timely_fl(participation=0.75, adaptive=False),
}
# TimelyFL's deadline is in seconds and it measures them: here they are the profiles', and too many to pass on real ranks
DEVICES = {"timely_fl": unequal([speed / 1e4 for speed in SPEEDS])}


MEASURED = ("fed_compass", "fed_compass of submodels")
"""Variants whose groups follow from measured seconds, which differ between the clocks."""


@pytest.mark.parametrize("name", each_method(VARIANTS, but=MEASURED, parts=["select", "local", "trigger"]))
def test_a_scripted_order_gives_the_simulated_runs_model(tmp_path, name):
    more = {"devices": DEVICES[name]} if name in DEVICES else {}
    base = experiment(tmp_path / "simulated", VARIANTS[name], max_updates=10, emulate=False, **more)
    simulated, real = on_both_clocks(base, tmp_path / "real")
    assert (real.summary["runtime"], simulated.summary["runtime"]) == ("distributed", "simulated")
    for field in ("versions", "updates_merged", "staleness", "participation", "final"):
        assert real.summary[field] == simulated.summary[field]


@pytest.mark.quick_cases(MEASURED[0])
@pytest.mark.parametrize("name", MEASURED)
def test_a_real_run_by_measured_seconds_replays(tmp_path, name):
    made = experiment(tmp_path / "real", VARIANTS[name], max_updates=16, emulate=False)
    with ranks(made) as fleet:
        real = fleet.serve()
        assert set(fleet.exit_codes().values()) == {0}
    assert real.summary["runtime"] == "distributed" and real.summary["updates_merged"] >= 16
    assert equal_replay(made, real)


def test_every_algorithm_is_among_the_variants():
    assert {algorithm.name for algorithm in VARIANTS.values()} == ALGORITHMS.keys()


def test_the_order_matters_to_an_asynchronous_run(tmp_path):
    """Else the test above would prove nothing: two simulated runs whose clients report in another order differ."""
    first = finish(experiment(tmp_path / "a", fed_async()))
    devices = list(reversed(experiment(tmp_path / "x").devices))
    second = finish(experiment(tmp_path / "b", fed_async(), devices=devices))
    assert order_of(first) != order_of(second)
    assert first.digest != second.digest
