"""The tables of names hold all of raafl's own parts, each under every path by which configs name it, and nothing else."""

from __future__ import annotations

import inspect

import model_zoo
from raafl import data, parts
from raafl.algorithms import ALGORITHMS
from raafl.config.trust import DATA, PARTITIONS, paths, registry
from raafl.core.algorithm import Select
from raafl.data.partition import Partition

OLDER_NAMES = {"Rated": "RateSelect"}


def test_every_path_leads_to_the_object_of_that_name_at_its_home():
    for kind, table in registry().items():
        for path, entry in table.items():
            found = entry.find()
            assert (found.__module__, found.__qualname__) == (entry.home, OLDER_NAMES.get(entry.name, entry.name)), (
                kind,
                path,
            )
            assert path.rpartition(".")[2] == entry.name


def test_the_tables_are_complete():
    from lightning import LightningDataModule

    public = {name: getattr(data, name) for name in data.__all__}
    modules = {n for n, v in public.items() if inspect.isclass(v) and issubclass(v, LightningDataModule)}
    partitions = {
        n for n, v in public.items() if inspect.isclass(v) and issubclass(v, Partition) and v is not Partition
    }
    assert (set(DATA), set(PARTITIONS)) == (modules, partitions)
    found = {kind: {path.rpartition(".")[2] for path in table} for kind, table in registry().items()}
    assert found["model"] == set(model_zoo._HOMES) and found["algorithm"] == set(ALGORITHMS)
    assert found["select"] == {n for n in parts.__all__ if issubclass(getattr(parts, n), Select)}
    assert found["data"] == modules and found["partition"] == partitions


def test_a_name_has_no_other_spelling():
    known = set(paths())
    assert {"raafl.fed_raa", "raafl.algorithms.fed_raa", "raafl.algorithms.fed_raa.fed_raa"} <= known
    assert not {"raafl.data", "model_zoo", "fed_raa", "raafl.data.readers", "model_zoo.MLP.forward"} & known
