"""Check that the guards in tests/conftest.py fail the tests that they should, and no others."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.habits.source import ROOT
from tests.helpers.guards import ALLOWANCE, BUDGET_S, over_budget, unnamed

GRACE = "grace_s: float = 3.0"
TESTS = """
import os, subprocess, sys, threading, time
import pytest

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]

def test_process():
    test_process.child = subprocess.Popen(SLEEP)

def test_thread():
    threading.Thread(target=time.sleep, args=(2,), name="left over").start()

def test_group():
    import torch.distributed as dist
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

def test_environment():
    os.environ["LEFT_OVER"] = "1"

def test_folder(tmp_path):
    os.chdir(tmp_path)

def test_clean(monkeypatch, tmp_path):
    assert "LEFT_OVER" not in os.environ
    monkeypatch.setenv("PUT_BACK", "1")
    monkeypatch.chdir(tmp_path)
    subprocess.run([sys.executable, "-c", ""])
    threading.Thread(target=time.sleep, args=(0.1,)).start()
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()

def test_data(raafl_data):
    pass

def test_skipped():
    pytest.skip("needs two GPUs")

@pytest.fixture
def costly(monkeypatch):
    # on this clock of CPU time every look is 99 seconds later
    looks = iter(range(0, 999, 99))
    monkeypatch.setattr(sys.modules["conftest"], "cpu_s", lambda: next(looks))

def test_costly(costly):
    pass

@pytest.mark.slow("it costs")
def test_costly_for_a_reason(costly):
    pass
"""


@pytest.fixture
def outcomes(tmp_path):
    """Fixture: a function that runs some of TESTS under the project's conftest and returns their outcomes and the output."""
    guards = (ROOT / "tests" / "helpers" / "guards.py").read_text()
    assert guards.count(GRACE) == 1
    (tmp_path / "conftest.py").write_text(guards.replace(GRACE, "grace_s: float = 1.0"))
    (tmp_path / "test_it.py").write_text(TESTS)

    def run(*options, **environment):
        clean = {
            k: v for k, v in os.environ.items() if k not in ("RAAFL_DATA", "RAAFL_REQUIRE_DATA", "RAAFL_TEST_BUDGET")
        }
        command = [sys.executable, "-m", "pytest", "-vrA", "-p", "no:cacheprovider", *options, str(tmp_path)]
        text = subprocess.run(
            command, cwd=tmp_path, env=clean | environment, capture_output=True, text=True, timeout=100
        ).stdout
        found: dict[str, list[str]] = {}
        for name, outcome in re.findall(r"test_it\.py::test_(\w+) (PASSED|FAILED|ERROR|SKIPPED)", text):
            found.setdefault(name, []).append(outcome)
        return found, text

    return run


def test_each_leftover_fails_its_test_and_no_other(outcomes):
    found, text = outcomes()
    left = ["PASSED", "ERROR"]  # the test itself passes; what it left behind is found at its teardown
    assert found == {
        **dict.fromkeys(("process", "thread", "group", "environment", "folder"), left),
        **{name: ["PASSED"] for name in ("clean", "costly", "costly_for_a_reason")},
        "data": ["SKIPPED"],
        "skipped": ["SKIPPED"],
    }
    for reason in ("time.sleep(60)", "thread left over", "process group", "variable LEFT_OVER", "directory"):
        assert reason in text


def test_required_data_may_not_be_skipped(outcomes):
    found, text = outcomes("-k", "data or skipped", RAAFL_REQUIRE_DATA="1")
    assert found["data"] == ["ERROR"]
    assert found["skipped"] == ["SKIPPED"]
    assert "RAAFL_REQUIRE_DATA=1 forbids this skip" in text


def test_the_budget_asks_for_a_reason():
    assert over_budget(ALLOWANCE * BUDGET_S, []) is None
    assert over_budget(1.1 * ALLOWANCE * BUDGET_S, [pytest.mark.slow("it learns").mark]) is None
    complaint = over_budget(50.0, [])
    assert complaint and "took 50.0 s of CPU; a test may take 5" in complaint
    marks = [pytest.mark.slow.mark, pytest.mark.slow("").mark, pytest.mark.slow(3).mark, pytest.mark.slow("why").mark]
    assert unnamed(marks) == marks[:3]


def test_a_test_over_the_budget_fails_where_it_is_asked_for(outcomes):
    found, text = outcomes("-k", "costly", RAAFL_TEST_BUDGET="1")
    assert found == {"costly": ["FAILED"], "costly_for_a_reason": ["PASSED"]}
    assert "test_costly took 99.0 s of CPU" in text
