"""Check that the covering set is small, and leaves out no kind of part."""

from __future__ import annotations

from raafl.algorithms import ALGORITHMS, fed_avg, fed_buff, fed_opt, fed_prox
from tests.helpers.methods import covering, each_method, kinds


def test_few_methods_have_every_kind():
    made = {name: make() for name, make in ALGORITHMS.items()}
    few = covering(made)
    assert len(few) <= len(made) // 2
    assert set().union(*(kinds(made[name]) for name in few)) == set().union(*map(kinds, made.values()))


def test_of_some_parts_only_the_kinds_of_those_count():
    assert kinds(fed_buff(), ["trigger"]) == {one for one in kinds(fed_buff()) if one.startswith("trigger")}
    assert covering({"fed_avg": fed_avg(), "fed_opt": fed_opt()}, ["select", "local"]) == ["fed_avg"]
    assert "fed_opt" in covering({"fed_avg": fed_avg(), "fed_opt": fed_opt()}, ["merge"])


def test_a_method_that_adds_no_kind_is_left_out():
    assert covering({"fed_avg": fed_avg(), "fed_prox": fed_prox()}) == ["fed_avg"]


def test_the_rest_is_long():
    chosen = each_method(
        {"fed_avg": fed_avg(), "fed_prox": fed_prox(), "fed_buff": fed_buff()}, also=["fed_prox"], but=["fed_buff"]
    )
    assert chosen == ["fed_avg", "fed_prox"]
    first, second = each_method({"fed_avg": fed_avg(), "fed_prox": fed_prox()})
    assert first == "fed_avg" and second.values == ("fed_prox",) and [mark.name for mark in second.marks] == ["long"]
