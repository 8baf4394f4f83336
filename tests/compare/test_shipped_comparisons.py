"""Every comparison that comes with raafl can be read, and each of its rows is a run that can be started."""

from __future__ import annotations

import pytest

from raafl.compare.comparison import read
from raafl.compare.runs import resolve
from raafl.compare.search import trials_of
from tests.habits.source import ROOT

FILES = sorted((ROOT / "configs" / "papers").glob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_comparisons_are_read_and_named_as_their_files(path):
    assert read(path).name == path.stem


@pytest.mark.long
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_each_row_and_trial_resolves(path):
    comparison = read(path)
    runs = [
        run
        for label, options in comparison.rows.items()
        for run in resolve(comparison.config, label, (*comparison.options, *options), comparison.seeds)
    ]
    assert len({run.digest for run in runs}) == len(comparison.rows) * len(comparison.seeds)
    if comparison.search is not None:
        trials = trials_of(comparison, comparison.search)
        assert len({len(some) for some in trials.values()}) == 1
