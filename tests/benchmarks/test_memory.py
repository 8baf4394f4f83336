from __future__ import annotations

import pytest

from benchmarks import memory

# weights, gradients and momentum of the whole model, 4 bytes each
WEIGHTS_BYTES = 4 * ((memory.FEATURES + 1) * 2048 + 2049 * memory.CLASSES)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_client_holds_its_fragment_only():
    fragments = memory.Setting((0.1, 0.9), (0.1,), hidden=2048, updates=3)
    whole = memory.Setting((1.0,), (1.0,), hidden=2048, updates=3)
    small, full = memory.rows([fragments, whole], timeout_s=120)
    assert (small["client"], small["share"], full["share"], full["ratio"]) == (1, 0.1, 1.0, 1.0)
    assert small["ratio"] == pytest.approx(small["peak_bytes"] / full["peak_bytes"])
    assert full["predicted_bytes"] >= 3 * WEIGHTS_BYTES
    assert full["expected_bytes"] == full["predicted_bytes"] + WEIGHTS_BYTES
    assert full["peak_bytes"] > 3 * WEIGHTS_BYTES > 2 * small["peak_bytes"]
