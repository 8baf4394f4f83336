"""The catalogue of papers: each entry is a comparison or says why there is none."""

from __future__ import annotations

import json

import pytest

from raafl.commands.reproduce import catalogue, paper, papers_folder, reproduce
from raafl.errors import BadInput

EXHIBITS = [(name, exhibit) for name, one in catalogue().items() for exhibit in one.exhibits.values()]


@pytest.mark.parametrize(("of", "exhibit"), EXHIBITS, ids=lambda value: getattr(value, "name", value))
def test_each_entry_is_a_comparison_or_says_why_not(of, exhibit):
    assert bool(exhibit.missing) != bool(exhibit.scales)
    for scale in exhibit.scales:
        assert exhibit.comparison(scale).rows


def test_each_file_of_the_folder_that_is_a_papers_is_in_the_catalogue():
    listed = {target.partition("#")[0] for _, exhibit in EXHIBITS for target in exhibit.scales.values()}
    own = {
        "async-local-sgd-toy",
        "cifar10-gre-raa-windows",
        "diloco-shakespeare",
        "fed-prox-stragglers-mnist",
        "hetero-fl-mnist",
        "niid-bench-mnist",
        "shakespeare-llama",
        "shakespeare-llama-10m",
        "sst2-lora",
        "sst2-lora-16",
    }
    assert listed | own | {"index"} == {path.stem for path in papers_folder().glob("*.yaml")}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["fed-ra"], "paper is 'fed-ra', which the catalogue does not have: .*fed-raa"),
        (["fed-raa", "table-9"], "table is 'table-9', which the catalogue of fed-raa does not have"),
        (["timely-fl", "table-1-speech"], "cannot be reproduced: its recordings"),
        (["ram-fed", "table-2-cifar10-0.1"], "scale is 'small', which 'table-2-cifar10-0.1' does not have: .*full"),
        (["fed-raa", "table-3-mnist", "--jobs", "0"], "jobs is 0"),
    ],
)
def test_what_cannot_be_run_is_named(argv, message):
    with pytest.raises(BadInput, match=message):
        reproduce(argv)


def test_the_list_names_every_table():
    text = reproduce([])
    assert all(exhibit.name in text and exhibit.shows in text for _, exhibit in EXHIBITS)
    listed = json.loads(reproduce(["ram-fed", "--json"]))
    assert [table["name"] for table in listed[0]["tables"]] == list(paper("ram-fed").exhibits)
