from __future__ import annotations

import pytest

from benchmarks import startup


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_start_of_three_ranks():
    (row,) = startup.rows(ranks=3, repeats=1, timeout_s=120)
    assert 0 < row["joined_s"] <= row["training_s"] <= row["first_update_s"] < 120
    assert row["training_s_max"] == row["training_s"]
    # sympy comes with torch.optim (through torch._dynamo); a rank that trains an MLP needs nothing else of the list
    assert set(row["client_unneeded"]) <= {"sympy"} and set(row["aggregator_unneeded"]) <= {"sympy"}
    assert row["client_modules"] > 500 and row["client_import_s"] > 0


@pytest.mark.long
def test_a_run_that_fails_is_an_error_with_its_output():
    with pytest.raises(RuntimeError, match="alpah"):
        startup.rows(ranks=2, repeats=1, options=["--algorithm.alpah", "1"], timeout_s=60)
