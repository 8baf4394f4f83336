"""The name table is complete, and every entry says what it is."""

from __future__ import annotations

import inspect
import re

import pytest

import raafl
from raafl.algorithms import ALGORITHMS
from raafl.core.algorithm import Algorithm, Sample
from raafl.parts.merge.deltas import Deltas
from raafl.parts.merge.mean import Staleness
from raafl.parts.merge.server_optimizer import ServerOptimizer
from tests.habits.source import ROOT

PARTS = ("sample", "select", "local", "trigger", "merge")
FILES = sorted(
    path.stem
    for path in (ROOT / "raafl" / "algorithms").iterdir()
    if (path.suffix == ".py" or (path / "__init__.py").is_file()) and path.stem != "__init__"
)


def documented(factory) -> dict[str, str]:
    """Argument -> text, from the Args section of a factory's docstring."""
    section = inspect.getdoc(factory).split("Args:\n")[1]
    section = re.split(r"^(?:Returns|Raises):", section, flags=re.M)[0]
    return {
        m[1]: " ".join(m[2].split()) for m in re.finditer(r"^ {4}(\w+): (.*?)(?=^ {4}\w+: |\Z)", section, re.M | re.S)
    }


def test_one_file_for_each_name_and_one_name_for_each_file():
    assert sorted(ALGORITHMS) == FILES


@pytest.mark.parametrize("name", FILES)
def test_the_file_defines_the_factory_of_its_name(name):
    factory = ALGORITHMS[name]
    assert (factory.__name__, factory.__module__) == (name, f"raafl.algorithms.{name}")
    assert getattr(raafl, name) is factory
    assert name in raafl.__all__ and name in dir(raafl)


def test_a_star_import_has_every_method_and_an_unknown_name_is_none():
    names: dict = {}
    exec("from raafl import *", names)
    assert {*FILES, "Federation", "Algorithm"} <= set(names)
    assert not hasattr(raafl, "fed_nothing")


@pytest.mark.parametrize("name", FILES)
def test_a_factory_without_arguments_gives_the_algorithm_of_that_name(name):
    algorithm = ALGORITHMS[name]()
    assert isinstance(algorithm, Algorithm)
    assert algorithm.name == name


@pytest.mark.parametrize("name", FILES)
def test_describe_gives_name_paper_and_five_answers(name):
    described = ALGORITHMS[name]().describe()
    assert list(described) == ["name", "paper", *PARTS]
    for key, words in described.items():
        assert words.strip(), key
        assert "object at 0x" not in words  # a part without words of its own
        assert "(" not in words[:1]
    assert re.search(r"\b(19|20)\d\d\b", described["paper"]), "the paper's year"


@pytest.mark.parametrize("name", FILES)
def test_every_argument_is_documented_and_none_that_is_not_there(name):
    factory = ALGORITHMS[name]
    texts = documented(factory)
    assert list(texts) == list(inspect.signature(factory).parameters)
    assert all(len(text) > 5 for text in texts.values())


@pytest.mark.parametrize("name", FILES)
def test_the_docstring_of_the_file_cites_the_paper_first(name):
    module = inspect.getmodule(ALGORITHMS[name])
    first = module.__doc__.strip().splitlines()[0]
    author = ALGORITHMS[name]().paper.split()[0]
    assert author in first
    assert '"' in module.__doc__, "the paper's title"


@pytest.mark.parametrize("name", FILES)
def test_the_clients_at_work_reach_the_sample(name):
    known = inspect.signature(ALGORITHMS[name]).parameters
    given = {argument: number for argument, number in (("cohort", 4), ("concurrency", 2)) if argument in known}
    assert given and ALGORITHMS[name](**given).sample == Sample(**given)


def test_arguments_reach_their_parts():
    # Each factory's arguments differ from its defaults here; what the parts say of themselves must differ too.
    cases = {
        "ada_vit": (
            {"heads": 0.5},
            "local",
            "SGD on the loss, usage policies by input, heads 0.5, blocks 0.7, weight 2",
        ),
        "platon": (
            {"rates": 0.5},
            "select",
            "units by upper confidence bound, down to 0.5 of the width within 21 tasks",
        ),
        "q_vit": ({"bits": 32}, "local", "SGD on the loss, nothing quantised"),
        "split_fed": ({"share": 0.5}, "local", "SGD on the loss in two halves, 0.5 of the parameters at the client"),
        "fed_mezo": ({"trigger": "each"}, "trigger", "each arrival"),
        "fed_pm": ({"reset": 5}, "merge", "mode of Beta counts of masks, prior 1, reset every 5 merges"),
        "co_s2p": ({"trigger": "sync"}, "trigger", "all"),
        "ca2fl": ({"buffer_size": 7}, "trigger", "7 in the buffer"),
        "fadas": ({"delay": "none"}, "merge", "server amsgrad, lr 0.001"),
        "fed_compass": ({"min_steps": 9}, "select", "full, 9 to 100 steps by speed"),
        "fjord": ({"ladder": [0.5]}, "local", "SGD on the loss at widths 0.5 by draw, distilled"),
        "depth_fl": ({"depths": 0.5}, "select", "lowest blocks, at most 0.5 of them"),
        "scale_fl": (
            {"gamma": 0.0},
            "local",
            "SGD on the loss, exits weighed by depth, distilled with 0, activations rescaled",
        ),
        "fiarse": ({"server_lr": 0.5}, "merge", "mean of the deltas that change an element, server lr 0.5"),
        "fed_async": ({"alpha": 0.25}, "merge", "mix with alpha 0.25"),
        "fed_avg": ({"cohort": 3}, "sample", "3 at random"),
        "fed_buff": ({"buffer_size": 7}, "trigger", "7 in the buffer"),
        "fed_opt": ({"optimizer": "yogi"}, "merge", "server yogi, lr 0.01"),
        "fed_prox": ({"prox": 0.5}, "local", "SGD on the loss + proximal term 0.5"),
        "fed_raa": ({"trigger": "all"}, "trigger", "all"),
        "fed_rolex": ({"rates": 0.5}, "select", "rolling units, at most 0.5 of the width"),
        "hetero_fl": ({"masked": False}, "local", "SGD on the loss, activations rescaled"),
        "ist": ({"subnets": 2}, "select", "disjoint shares of all units, 2"),
        "oap": ({"by_samples": True}, "merge", "coverage mean, weighted by samples"),
        "prune_fl": ({"every": 9}, "select", "units by squared gradient per time, chosen every 9 rounds"),
        "ra_fed": ({"mask": "S-Arb", "rest": 4}, "select", "S-Arb of 4 arbitrary regions, Gamma* 1, tau 4"),
        "ram_fed": ({"trigger": "each"}, "trigger", "each arrival"),
        "timely_fl": ({"layers": "share"}, "select", "epochs and last layers by time, layers by share alone"),
    }
    for name, (arguments, part, words) in cases.items():
        assert ALGORITHMS[name](**arguments).describe()[part] == words
        assert ALGORITHMS[name]().describe()[part] != words


def test_fed_buff_with_a_server_optimizer_has_a_learning_rate_of_its_own():
    assert raafl.fed_buff().merge == Deltas(1.0, Staleness("polynomial"))
    plain = raafl.fed_buff(server_optimizer="adam").merge
    assert plain == ServerOptimizer("adam", 0.01, staleness=Staleness("polynomial"), by_samples=False)
    assert raafl.fed_buff(server_optimizer="adam", server_lr=0.1, staleness="constant").merge.server_lr == 0.1
    assert str(plain) == "server adam, unweighted, deltas x (s+1)^-0.5, lr 0.01"
    with pytest.raises(raafl.BadInput, match="server optimizer is 'sgd'"):
        raafl.fed_buff(server_optimizer="sgd")


def test_a_decay_that_adagrad_does_not_have_is_refused():
    with pytest.raises(raafl.BadInput, match=r"beta2 is 0\.5, but adagrad has no beta2: leave beta2 out"):
        raafl.fed_opt(optimizer="adagrad", beta2=0.5)
    assert raafl.fed_opt(optimizer="adagrad").merge.kind == "adagrad"


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("argument", ["cohort", "concurrency"])
def test_counts_below_one_are_refused(name, argument):
    with pytest.raises(raafl.BadInput, match=f"{argument} is 0: give a number above 0"):
        ALGORITHMS[name](**{argument: 0})
