from __future__ import annotations

import subprocess
import sys

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


def test_quick_imports_collect_again_afterwards_and_leave_a_clean_end():
    code = """
import gc
from raafl.lean_import import quick_imports
with quick_imports():
    assert not gc.isenabled()
    import torch._dynamo
assert gc.isenabled() and gc.get_freeze_count() > 10_000
try:
    with quick_imports():
        raise KeyError
except KeyError:
    assert gc.isenabled()
gc.disable()
with quick_imports():
    pass
assert not gc.isenabled()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
