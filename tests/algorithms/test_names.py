"""The methods by name: the folder is the list, and a method is imported when it is named."""

from __future__ import annotations

import ast

import pytest

import raafl
from raafl import algorithms
from raafl.algorithms import ALGORITHMS
from tests.habits.source import ROOT


def test_type_checkers_see_the_methods_of_the_folder():
    tree = ast.parse((ROOT / "raafl" / "algorithms" / "__init__.py").read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    lines = [
        node for node in block.body if isinstance(node, ast.ImportFrom) and node.module.startswith("raafl.algorithms.")
    ]
    named = {(node.module.rpartition(".")[2], node.names[0].name, node.names[0].asname) for node in lines}
    assert named == {(name, name, name) for name in ALGORITHMS}


def test_the_name_of_a_method_means_its_factory():
    from raafl.algorithms.fed_nova import fed_nova  # binds the module to the name in the package first

    assert algorithms.fed_nova is raafl.fed_nova is ALGORITHMS["fed_nova"] is fed_nova
    assert fed_nova().name == "fed_nova" and fed_nova.__module__ == "raafl.algorithms.fed_nova"


def test_a_name_that_is_no_method_is_an_error():
    assert "fed_raaa" not in ALGORITHMS
    with pytest.raises(KeyError):
        ALGORITHMS["fed_raaa"]
    with pytest.raises(AttributeError, match="has no attribute 'fed_raaa'"):
        _ = algorithms.fed_raaa
