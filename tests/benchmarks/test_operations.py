from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise

import pytest

BATCH, WIDTHS = 32, (3072, 2048, 2048, 10)


@pytest.mark.slow("a benchmark starts processes of its own, from nothing")
@pytest.mark.alone
@pytest.mark.timeout(300)
def test_operations_of_a_step_are_counted_by_hand():
    command = [sys.executable, "-m", "benchmarks.operations", "--models", "mlp", "--json"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert result.returncode == 0, result.stderr
    rows = {(row["rate"], row["operation"]): row for row in json.loads(result.stdout)["rows"]}
    forward = rows[1.0, "aten.addmm"]
    layers = list(pairwise(WIDTHS))
    assert forward["calls"] == len(layers)
    assert forward["flops"] == sum(2 * BATCH * a * b for a, b in layers)
    # inputs, weights and bias are read, the output is written
    assert forward["bytes"] == sum(4 * (BATCH * a + a * b + b + BATCH * b) for a, b in layers)
    assert forward["counted"] == pytest.approx(1.2, abs=1e-6) and forward["seconds"] > 0
    assert {rate for rate, _ in rows} == {1.0, 0.015625}
    for rate in (1.0, 0.015625):
        shares = [row["share"] for (of, _), row in rows.items() if of == rate]
        assert 0.9 < sum(shares) <= 1.0 + 1e-9
