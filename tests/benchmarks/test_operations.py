from __future__ import annotations

from itertools import pairwise

import pytest

from benchmarks import operations
from tests.helpers.forked_command import in_fork

BATCH, WIDTHS = 32, (3072, 2048, 2048, 10)


def test_operations_of_a_step_are_counted_by_hand(monkeypatch):
    """In a process of its own, as the command has it, with a quick look at the machine's speeds; `make bench` runs that."""
    monkeypatch.setattr(operations, "PROBES", {"num_samples": 256, "num_calls": 1})
    measured = {rate: in_fork(operations.measured, "mlp", rate) for rate in (1.0, 0.015625)}
    rows = {(row["rate"], row["operation"]): row for found in measured.values() for row in found}
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
