"""The way of an update stays short: files entered and calls from file to file, counted in a simulated run."""

from __future__ import annotations

import sys

import pytest

from benchmarks import way

MOST = {"join": (36, 480), "task": (26, 470), "merge": (40, 180), "evaluation": (51, 375)}
"""Most files and switches of an event of the quick start."""


@pytest.fixture(scope="module")
def traces():
    return way.traces(24)


@pytest.mark.parametrize("kind", MOST)
def test_an_event_enters_few_files_and_switches_seldom(traces, kind):
    files, switches = way.typical(kind, traces[kind]).counts()
    assert files <= MOST[kind][0]
    assert switches <= MOST[kind][1]


def test_an_update_is_its_task_and_its_merge(traces):
    assert len(traces["update"]) == len(traces["merge"])
    last = traces["update"][-1]
    assert traces["merge"][-1].files.keys() < last.files.keys()
    assert last.counts()[1] > traces["merge"][-1].counts()[1]


def test_a_switch_is_a_call_into_another_file():
    from raafl import errors
    from raafl.units import quantity

    (_, trace), before = way.traced(lambda: (quantity(2, "client"), quantity(3, "client"), errors)), sys.getprofile()
    assert trace.files == {"units.py": 2}
    assert trace.switches == {(None, "units.py", "quantity"): 2}
    assert sys.getprofile() is before
