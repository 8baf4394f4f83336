"""A search by an Optuna study: equally many trials for each row, pruned by stages, the same after it was killed."""

from __future__ import annotations

import fcntl
import math
from types import SimpleNamespace

import pytest

from raafl.errors import BadInput
from raafl.lab.compare import search as searches
from raafl.lab.compare.comparison import Comparison, Range, Search, of_fields
from raafl.lab.compare.processes import check_free
from raafl.lab.compare.search import run_studies
from tests.helpers.refusals import cannot_lock, refuses

pytest.importorskip("optuna")
GRID = {"--model.lr": {"low": 0.001, "high": 1.0, "log": True}, "--train.num_steps": {"low": 1, "high": 4}}


class Runs:
    """Stands for the runner: a run's value depends on its settings alone, best at a rate of 0.1."""

    def __init__(self, killed_after=None):
        self.runs, self.killed_after = [], killed_after

    def run_all(self, runs, metric):
        if self.killed_after is not None and len(self.runs) >= self.killed_after:
            raise KeyboardInterrupt
        self.runs += runs
        return [SimpleNamespace(run=run, summary={}, folder="", by_itself=True, error=None) for run in runs]


def value(options):
    rate = float(options[options.index("--model.lr") + 1])
    return math.nan if rate > 0.5 else -abs(math.log10(rate) + 1)


@pytest.fixture(autouse=True)
def scored(monkeypatch):
    def scores(trial, outcomes, comparison, search):
        return {run.seed: value(trial.settings) for run in trial.runs}

    monkeypatch.setattr(searches, "scores_of", scores)


def compared(**search):
    search = Search(GRID, (10,), **{"sampler": "tpe", "trials": 4, **search})
    return Comparison("small", "quickstart", {"A": (), "B": ("--algorithm", "fed_avg")}, (0,), search=search)


def studied(folder, runs, jobs=1, **search):
    comparison = compared(**search)
    trials, best = run_studies(comparison, comparison.search, runs, folder, jobs)
    return {label: [(one.settings, one.scores, one.fraction) for one in some] for label, some in trials.items()}, best


def test_each_row_has_its_trials_and_the_best_wins(tmp_path):
    trials, best = studied(tmp_path, Runs())
    assert [len(some) for some in trials.values()] == [4, 4]
    for label, some in trials.items():
        assert all(1 <= int(settings[3]) <= 4 and 0.001 <= float(settings[1]) <= 1 for settings, _, _ in some)
        known = [value(settings) for settings, _, _ in some if not math.isnan(value(settings))]
        assert value(best[label].settings) == max(known)


def test_a_search_that_was_killed_goes_on_as_it_would_have_gone(tmp_path):
    whole, _ = studied(tmp_path / "whole", Runs())
    with pytest.raises(KeyboardInterrupt):
        studied(tmp_path / "killed", Runs(killed_after=3))
    after = Runs()
    assert studied(tmp_path / "killed", after)[0] == whole
    assert len(after.runs) == 8 - 3
    nothing = Runs()
    assert studied(tmp_path / "killed", nothing)[0] == whole and not nothing.runs


def test_trials_are_asked_for_as_many_at_a_time_as_run(tmp_path):
    class Counted(Runs):
        def run_all(self, runs, metric):
            sizes.append(len(runs))
            return super().run_all(runs, metric)

    sizes = []
    studied(tmp_path, Counted(), jobs=3, trials=4)
    assert sizes == [3, 1, 3, 1]


def test_a_second_search_in_the_folder_is_refused_and_spoils_nothing(tmp_path):
    refusals = []

    class Busy(Runs):
        def run_all(self, runs, metric):
            if not self.runs:
                with pytest.raises(BadInput, match="another process is writing its run: wait until it ends") as refused:
                    studied(tmp_path / "busy", Runs())
                refusals.append(refused)
            return super().run_all(runs, metric)

    whole, _ = studied(tmp_path / "whole", Runs())
    assert studied(tmp_path / "busy", Busy())[0] == whole
    assert len(refusals) == 1


def test_a_search_goes_on_where_nothing_can_be_locked(tmp_path, monkeypatch, caplog):
    """It ended with an error of the system, on a file system where a run alone goes on with a warning."""
    monkeypatch.setattr(fcntl, "flock", cannot_lock)
    check_free(tmp_path / "run.log")
    studied(tmp_path / "search", Runs())
    assert caplog.messages[0].startswith(f"{tmp_path / 'search'} cannot be locked (No locks available)")


def test_rows_have_equally_many_trials_though_an_earlier_search_asked_for_more(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        studied(tmp_path, Runs(killed_after=6), trials=6)  # all of row A's, none of row B's
    trials, _ = studied(tmp_path, Runs(), trials=4)
    assert [len(some) for some in trials.values()] == [4, 4]


@pytest.mark.parametrize("pruner", ["halving", "median"])
def test_trials_that_a_pruner_may_stop_need_a_budget(pruner):
    def check(*limits):
        search = Search(GRID, (10,), sampler="tpe", trials=4, pruner=pruner, options=limits)
        options = ("--max_updates", "null", "--max_time", "null", "--target", "accuracy=0.9")
        searches.check_space(Comparison("small", "quickstart", {"A": options}, (0,), search=search), search)

    with pytest.raises(BadInput, match=r"search\.pruner needs a budget, and trials of row 'A' end by a target alone"):
        check()
    check("--max_time", "8s")


@pytest.mark.parametrize("sampler", [None, "random"])
def test_null_is_a_value_to_try(tmp_path, sampler):
    grid = {"--model.lr": [0.1], "--fabric.gradient_clip_val": [None]}
    search = Search(grid, (10,), sampler=sampler, trials=1)
    comparison = Comparison("small", "quickstart", {"A": ()}, (0,), search=search)
    if sampler is None:
        (trial,) = searches.trials_of(comparison, search)["A"]
    else:
        searches.check_space(comparison, search)
        trial = run_studies(comparison, search, Runs(), tmp_path, 1)[1]["A"]
    assert trial.settings == ("--model.lr", "0.1", "--fabric.gradient_clip_val", "null")


def test_a_pruned_trial_counts_and_has_a_part_of_the_budget(tmp_path):
    trials, best = studied(tmp_path, Runs(), pruner="halving", trials=8)
    for label, some in trials.items():
        assert len(some) == 8 and {fraction for _, _, fraction in some} >= {0.25, 1.0}
        assert best[label].fraction == 1.0


def test_the_range_of_a_file_is_read():
    fields = {"config": "quickstart", "rows": {"A": ""}, "seeds": [0]}
    found = of_fields({**fields, "search": {"grid": GRID, "seeds": [1], "sampler": "tpe", "trials": 2}}, "x", "here")
    assert found.search.grid == GRID
    assert Range.of("--x", {"low": 1, "high": 3}).whole and not Range.of("--x", {"low": 1.0, "high": 3}).whole


def checked(**search):
    return compared(**search)


test_searches_are_checked = refuses(
    checked,
    ({"trials": None}, "search.trials is missing"),
    ({"sampler": "bayes"}, "search.sampler is 'bayes'"),
    ({"sampler": None, "pruner": "halving"}, "search.pruner is 'halving', but there is no sampler"),
    ({"rows": {"A": {"--model.lr": {"low": 1, "high": 0}}}}, "low is 1, high 0: give numbers, low below high"),
    ({"rows": {"A": {"--model.lr": {"low": 1, "high": math.inf}}}}, "low is 1, high inf: give numbers, low below high"),
    ({"rows": {"A": {"--model.lr": {"low": 1}}}}, "search.grid.--model.lr.high is missing"),
    ({"sampler": None}, "give each option a list of values"),
    error=BadInput,
)
