"""Rounds that close without their last clients, in whole runs: simulated, replayed, interrupted and resumed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raafl.algorithms import fed_avg, fed_buff, scaffold
from raafl.core.options import Rounds
from raafl.errors import BadInput
from raafl.runtime.replay import event_of
from tests.helpers.crash import crash
from tests.helpers.small_runs import equal_replay, experiment, finish, unequal

SLOW = unequal((8e7, 6e7, 5e7, 2e6))
"""Three clients that are done within 1.6 times the median time, and one that takes some twenty times as long."""


@pytest.mark.quick_cases("fed_avg")
@pytest.mark.parametrize("algorithm", [fed_avg(), scaffold()], ids=["fed_avg", "scaffold"])
def test_a_run_with_a_client_that_is_late_goes_on_replays_and_resumes(tmp_path, monkeypatch, algorithm):
    made = experiment(
        tmp_path / "run",
        algorithm,
        devices=SLOW,
        rounds=Rounds(deadline=3.0),
        max_updates=75,
        eval_every=50,
        checkpoint_every=1,
    )
    run = finish(made)
    assert run.summary["participation"]["4"] == 0 and run.summary["updates_refused"]["late"] >= 1
    assert run.summary["updates_merged"] == 75 and run.summary["versions"] == 25
    # the first round takes three times as long as the second of its four, later ones as long as the third
    rounds = [float(row["arrived_s"]) for row in run.rows() if row["client"] == "3" and row["outcome"] == "merged"]
    assert rounds[1] - rounds[0] > 1.8 * (rounds[2] - rounds[1]) and rounds[3] - rounds[2] == pytest.approx(
        rounds[2] - rounds[1]
    )
    assert equal_replay(made, run)
    again = replace(made, output=str(tmp_path / "again"))
    with crash(monkeypatch, 40):
        finish(again)
    resumed = finish(replace(again, output=None, resume=again.output))
    assert resumed.digest == run.digest and resumed.summary["updates_refused"] == run.summary["updates_refused"]


def test_a_deadline_that_nobody_misses_changes_no_bit(tmp_path):
    plain = finish(experiment(tmp_path / "plain"))
    closing = finish(experiment(tmp_path / "closing", rounds=Rounds(deadline=50.0)))
    assert closing.digest == plain.digest and closing.summary["time_s"] == plain.summary["time_s"]
    assert [event_of(row, {}) for row in plain.events("joined")] == [
        event_of(row, {}) for row in closing.events("joined")
    ]


def test_rounds_belong_to_methods_that_have_them(tmp_path):
    for rounds, options in ((Rounds(0.9), "--rounds.close_at 1"), (Rounds(deadline=10.0), "--rounds.deadline null")):
        with pytest.raises(BadInput, match=rf"fed_buff does not work in rounds .*: leave rounds out, .* by {options}$"):
            experiment(tmp_path / "run", fed_buff(), rounds=rounds).check()
    with pytest.raises(BadInput, match=r"rounds\.deadline is 0\.5: give a number above 1"):
        experiment(tmp_path / "run", rounds=Rounds(deadline=0.5)).check()
