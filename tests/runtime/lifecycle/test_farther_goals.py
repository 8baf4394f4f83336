"""A finished run whose goal is farther now goes on: simulated to the bits of a longer run, on the wall clock from its end."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raafl.core.options import Privacy, Subfederations
from raafl.errors import BadInput
from raafl.runfolder.books import check_books
from raafl.runfolder.checkpoints import versions
from raafl.runfolder.journal import RunFolder
from raafl.runfolder.reading import read
from raafl.runtime.replay import replay
from raafl.runtime.run import simulate
from tests.helpers.crash import Crash, crash, simulated
from tests.helpers.real_ranks import ranks
from tests.helpers.small_runs import equal_replay, experiment, finish
from tests.runtime.lifecycle.test_resume import CONFIG, SMALL, contents, metric_rows

pytestmark = pytest.mark.timeout(240)

GOALS = {
    "max_updates": ({"max_updates": 12}, {"max_updates": 20}),
    "max_time": ({"max_updates": None, "max_time": 0.5}, {"max_updates": None, "max_time": 0.9}),
    "target": ({"max_updates": None, "target": "accuracy=0.3"}, {"max_updates": None, "target": "accuracy=0.45"}),
}


def lasting(output, **more):
    """An experiment with evaluations and checkpoints all along."""
    return experiment(output, **{"algorithm": "fed_async", "eval_every": 1, "checkpoint_every": 2, **more})


def outcome(run):
    """What a run says of itself, without real times."""
    real = ("wall_s", "checkpoint_s", "peak_memory")
    return {name: value for name, value in run.summary.items() if name not in real}


@pytest.mark.parametrize("reason", GOALS)
def test_a_simulation_ends_as_if_it_had_had_the_farther_goal_from_the_start(tmp_path, reason):
    near, far = GOALS[reason]
    first = finish(lasting(tmp_path / "run", **near))
    longer = finish(lasting(tmp_path / "longer", **far))
    assert first.summary["finished"] == longer.summary["finished"] == reason
    assert first.summary["updates_merged"] < longer.summary["updates_merged"]
    again = lasting(None, **far, resume=str(first.folder))
    resumed = finish(again)
    assert outcome(resumed) == outcome(longer) and resumed.rows() == longer.rows()
    assert [row[:6] for row in metric_rows(resumed.folder)] == [row[:6] for row in metric_rows(longer.folder)]
    assert not check_books(resumed.folder).findings and equal_replay(again, resumed)
    assert read(resumed.folder).summary["versions"] == longer.summary["versions"]


def test_a_simulation_of_regions_and_one_with_privacy_go_on_from_before_their_end(tmp_path):
    """What is kept beside the model goes back with it: the runs below, and what the noise has cost."""
    for name, more in {
        "regions": {"subfederations": Subfederations(size=2, merges=2, up_bytes_per_s=1e5), "algorithm": "fed_avg"},
        "private": {"privacy": Privacy(clip_norm=0.5, noise_multiplier=0.5), "algorithm": "fed_avg"},
    }.items():
        first = finish(lasting(tmp_path / name, max_updates=16, **more))
        longer = finish(lasting(tmp_path / f"{name}-longer", max_updates=24, **more))
        resumed = finish(lasting(None, max_updates=24, **more, resume=str(first.folder)))
        assert outcome(resumed) == outcome(longer) and resumed.rows() == longer.rows()
        assert not check_books(resumed.folder).findings


NOT_FARTHER = {
    "nearer target": ("target", {"max_updates": None, "target": "accuracy=0.25"}, "a target that it has not reached"),
    "nearer time": ("max_updates", {"max_updates": 20, "max_time": 0.1}, "a larger max_time"),
    "same target": (
        "target",
        {"max_updates": 99, "target": ["accuracy=0.3"], "max_time": 0.1},
        "a larger max_time and a target that it has not reached",
    ),
}


@pytest.mark.parametrize("name", NOT_FARTHER)
def test_a_run_that_has_reached_another_goal_given_stays_as_it_is(tmp_path, name):
    reason, given, wanted = NOT_FARTHER[name]
    first = finish(lasting(tmp_path / "run", **GOALS[reason][0]))
    before = contents(first.folder)
    with pytest.raises(BadInput, match=rf"is finished \({reason}\): give {wanted} to go on, or start a new one"):
        simulate(lasting(None, **given, resume=str(first.folder)))
    assert contents(first.folder) == before


def test_a_simulation_whose_only_checkpoint_is_its_end_starts_anew(tmp_path):
    first = finish(lasting(tmp_path / "run", checkpoint_every=None))
    before = contents(first.folder)
    with pytest.raises(
        BadInput, match=r"finished \(max_updates\), and it has no checkpoint from before its end, where a"
    ):
        simulate(lasting(None, max_updates=20, resume=str(first.folder)))
    assert contents(first.folder) == before


def test_a_run_that_goes_on_and_crashes_again_forgets_its_first_end(tmp_path, monkeypatch):
    """Its first end would be its newest checkpoint, which a later resume took for the state of the run."""
    options = ("--config", CONFIG, *SMALL, "--checkpoint_every=4")
    longer = simulated(*options, "--max_updates=30", f"--output={tmp_path / 'longer'}")
    folder = tmp_path / "run"
    simulated(*options, "--max_updates=18", f"--output={folder}")
    with crash(monkeypatch, 3):
        simulated("--resume", str(folder), "--max_updates=30")
    assert versions(folder)[-1].stem < "version-000018" and read(folder).summary is None
    again = simulated("--resume", str(folder), "--max_updates=30")
    assert again["model_digest"] == longer["model_digest"] and replay(folder)["equal"] is True
    assert not check_books(folder).findings


@pytest.mark.parametrize("dies_in", ["seal", "event"])
def test_a_run_that_dies_as_it_goes_on_has_true_books(tmp_path, monkeypatch, dies_in):
    """Its end is deleted between a seal, as the one before has the digest of it, and the row by which its events count no more."""
    first = finish(lasting(tmp_path / "run"))
    again = lasting(None, max_updates=20, resume=str(first.folder))

    def die(*_, **__):
        raise Crash

    with monkeypatch.context() as patch, pytest.raises(Crash):
        patch.setattr(RunFolder, dies_in, die)
        simulate(again)
    assert not check_books(first.folder).findings and read(first.folder).summary is not None
    resumed = finish(again)
    assert resumed.summary["updates_merged"] == 20 and resumed.summary["warnings"] == []
    assert not check_books(first.folder).findings and equal_replay(again, resumed)


def test_real_clients_go_on_from_the_end(tmp_path):
    """What was merged stays, all join again, and a replay tells of both parts; a server that dies at once loses nothing."""
    made = lasting(tmp_path / "run", max_updates=8, checkpoint_every=None)
    with ranks(made) as fleet:
        first = fleet.serve()
    with (
        ranks(replace(made, output=None, resume=str(first.folder))) as fleet,
        pytest.raises(BadInput, match=r"is finished .*: give a larger max_updates to go on, or start a new one"),
    ):
        fleet.serve()
    for most in (16, 24):
        with ranks(replace(made, output=None, resume=str(first.folder), max_updates=most)) as fleet:
            resumed = fleet.serve()
        assert resumed.summary["finished"] == "max_updates" and resumed.summary["updates_merged"] == most
        assert 0 not in resumed.summary["updates_lost_by_reason"].values()
        assert len([row for row in resumed.rows() if row["outcome"] == "merged"]) == most
        assert not check_books(resumed.folder).findings and equal_replay(made, resumed)
    assert resumed.rows()[:8] == first.rows()[:8]
    assert read(resumed.folder).summary["updates_merged"] == 24


def test_what_cannot_be_resumed_is_named(tmp_path):
    simulated("--config", CONFIG, "--max_updates=8", f"--output={tmp_path / 'done'}")
    with pytest.raises(
        BadInput, match=r"whose run is finished \(max_updates\): give a larger max_updates to go on, or"
    ):
        simulated("--resume", str(tmp_path / "done"))
    with pytest.raises(
        BadInput, match=r"output is 'elsewhere', but .* goes on in its own folder, '.*done': leave output"
    ):
        simulated("--resume", str(tmp_path / "done"), "--output=elsewhere")
    with pytest.raises(BadInput, match="which is not a run folder"):
        simulated("--resume", str(tmp_path / "nowhere"))
