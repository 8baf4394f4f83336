"""A federation under scripted faults, whole: what it must still have done is listed by `tests.chaos.run`."""

from __future__ import annotations

import json
from itertools import islice

import pytest

from tests.chaos.faults import EARLY, LATE, script
from tests.chaos.federation import leaks
from tests.chaos.run import main as chaos
from tests.helpers import forkserver
from tests.helpers.forked_command import command

ONCE_EACH = len(LATE) + 2  # all clients die twice before the late kinds begin


def first(seed, num, clients=3):
    return list(islice(script(seed, clients), num))


def test_the_script_follows_from_its_seed():
    assert first(5, 100) == first(5, 100)
    assert first(5, 100) != first(6, 100)


def test_every_kind_of_fault_comes_before_any_comes_by_chance():
    kinds = [fault.kind for fault in first(0, ONCE_EACH)]
    assert sorted(kinds) == sorted([*LATE, "vanish", "vanish"])
    assert kinds[0] == kinds[len(EARLY) + 1] == "vanish"
    assert set(kinds[1 : len(EARLY) + 1]) == set(EARLY)
    assert {fault.client for fault in first(0, 100)} == {1, 2, 3}


def test_a_server_that_holds_on_to_what_clients_left_is_found():
    assert leaks([(1, 5, 12, 0), (1, 9, 40, 0), (1, 6, 13, 0), (2, 9, 20, 0)]) == []
    assert leaks([(1, 5, 12, 0), (2, 9, 20, 0), (1, 8, 12, 0)]) == ["server 1 held 5 threads without clients, later 8"]
    assert leaks([(1, 5, 12, 0), (1, 5, 15, 0)]) == ["server 1 held 12 open files without clients, later 15"]


@pytest.mark.long
@pytest.mark.slow("each kind of fault once takes its own dozen restarts")
@pytest.mark.timeout(900)
def test_a_federation_survives_every_kind_of_fault(tmp_path):
    """Once each, by forked processes (`tests.helpers.forkserver`); `make test-long` starts them from nothing, 200 times."""
    out = tmp_path / "out"
    options = ("--faults", str(ONCE_EACH), "--gap", "1", "--restart", "2", "--seed", "0", "--out", str(out))
    with command(tmp_path / "c", *options, before=forkserver.start, entry=chaos) as started:
        code = started.end(deadline_s=880)
        print(started.out)
        assert code == 0, started.out[-6000:] + started.err[-2000:]
    report = json.loads((out / "report.json").read_text())
    assert set(report["faults"]) == set(LATE)
    assert report["kills"] >= 8
    assert report["resumed"] >= 1
    assert len(report["server_without_clients"]) >= 2
