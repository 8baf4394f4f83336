"""Integers remember where they were read."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch

from raafl.submodel.find.size_tracker import NonTorchUses, Size


def test_numbers_remember_where_they_come_from():
    uses = NonTorchUses(lambda: "model.py:7")
    width, heads = Size(12, "width", uses), Size(3, "heads", uses)
    assert (width // heads, width * 2, 2 + heads, 12 % heads, -heads) == (4, 24, 5, 0, -3)
    assert (width // heads).origin == ("floordiv", "width", "heads")
    assert (2 + heads).origin == ("add", 2, "heads") and (-heads).origin == ("sub", 0, "heads")
    assert uses.numbers == {} and width**2 == 144
    for number in (width / 2, 72 / width, width * 0.5, width**-1 * 72, math.sqrt(width * 3)):
        assert number == pytest.approx(6.0) and not isinstance(number, Size)
    assert uses.numbers == dict.fromkeys([("width", 12), (("mul", "width", 3), 36)], "model.py:7")
    assert width / heads == 4.0 and ("heads", 3) in uses.numbers
    assert type(pickle.loads(pickle.dumps(width))) is int and copy.deepcopy(width) is width
    assert torch.zeros(heads, 2).view(heads * 2).shape == (6,)


def test_a_dictionary_finds_a_size_by_one_of_the_same_origin_alone():
    uses = NonTorchUses(str)
    width = Size(12, "width", uses)
    assert not uses.was_key and width == 12 and width in (11, 12)
    known = {width: "width", (4, width * 2): "twice"}
    assert known[Size(12, "width", uses)] == "width" and known[4, Size(12, "width", uses) * 2] == "twice"
    assert uses.was_key and not known.keys() & {12, (4, 24), Size(12, "other", uses)}
    plain = NonTorchUses(str, are_keys_plain=True)
    assert {12: "number"}[Size(12, "width", plain)] == "number"
