"""Every comparison that comes with raafl can be read, and each of its rows is a run that can be started."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import yaml

from raafl.lab.compare.comparison import read
from raafl.lab.compare.runs import resolve
from raafl.lab.compare.search import trials_of
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
        check_rows(here(read(path, variant)))


def here(comparison):
    """The comparison, on the CPU where it asks for a GPU that is not there: such a device is refused before all else."""
    if torch.cuda.is_available():
        return comparison
    on_cpu = {"cuda": "cpu", "cuda:0": "cpu"}
    return replace(comparison, options=tuple(on_cpu.get(option, option) for option in comparison.options))


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
