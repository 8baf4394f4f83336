"""With a guard or noise too, real ranks that report in a simulated run's order leave the same model, bit for bit."""

from __future__ import annotations

import pytest

from raafl.algorithms import fed_buff, fed_raa
from raafl.core.options import Guard
from raafl.parts.protect.privacy import Privacy
from tests.conformance.clocks import on_both_clocks
from tests.helpers.small_runs import experiment

pytestmark = pytest.mark.timeout(90)

VARIANTS = {
    "guarded": (fed_buff(buffer_size=3), {"guard": Guard(0.4, outlier=1.05, warm_up=2, combine="median")}),
    "private": (fed_raa(), {"privacy": Privacy(clip_norm=0.4, noise_multiplier=0.2)}),
}


@pytest.mark.quick_cases("private")
@pytest.mark.parametrize("name", VARIANTS)
def test_a_protected_run_is_the_same_on_real_ranks(tmp_path, name):
    algorithm, protection = VARIANTS[name]
    base = experiment(tmp_path / "simulated", algorithm, max_updates=10, emulate=False, **protection)
    simulated, real = on_both_clocks(base, tmp_path / "real")
    for field in ("updates_refused", "guard", "privacy"):
        assert real.summary.get(field) == simulated.summary.get(field)
    assert "outlier" in simulated.summary["updates_refused"] or name == "private"
