"""Every comparison that comes with raafl can be read, and each of its rows is a run that can be started."""

from __future__ import annotations

import pytest
import yaml

from raafl.compare.comparison import read
from raafl.compare.runs import resolve
from raafl.compare.search import trials_of
from tests.habits.source import ROOT

FILES = sorted(path for path in (ROOT / "configs" / "papers").glob("*.yaml") if path.stem != "index")


def variants(path):
    """The file as it is, and each of its variants."""
    return [None, *yaml.safe_load(path.read_text()).get("variants", {})]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_comparisons_are_read_and_named_as_their_files(path):
    for variant in variants(path):
        assert read(path, variant).name == (path.stem if variant is None else f"{path.stem}-{variant}")


@pytest.mark.long
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_each_row_and_trial_resolves(path):
    for variant in variants(path):
        check_rows(read(path, variant))


def check_rows(comparison):
    runs = [
        run
        for label, options in comparison.rows.items()
        for run in resolve(comparison.config, label, (*comparison.options, *options), comparison.seeds)
    ]
    assert len({run.digest for run in runs}) == len(comparison.rows) * len(comparison.seeds)
    if comparison.search is not None:
        trials = trials_of(comparison, comparison.search)
        assert len({len(some) for some in trials.values()}) == 1
