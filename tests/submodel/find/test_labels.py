"""Labels of dimensions, worked out by hand: what a view, a slice or a sum of two values says of their units."""

from __future__ import annotations

import pytest

from raafl.submodel.find.labels import Dim, Labels, ShapeConflict


def sizes(dim):
    return [atom.size for atom in dim.leaves()]


def same(one, other):
    return one.leaves() == other.leaves()


def pins(dim):
    return [None if atom.pin is None else atom.pin.text for atom in dim.units()]


def test_a_dimension_of_one_index_has_no_atoms():
    labels = Labels()
    assert labels.new(1).leaves() == [] and labels.new(1).size == 1
    assert sizes(Dim([*labels.new(3).atoms, *labels.new(1).atoms])) == [3]


def test_a_view_splits_and_joins_factors_in_their_order():
    labels = Labels()
    features = labels.new(12)
    heads, width = labels.regroup([features], [3, 4])
    assert sizes(heads) == [3] and sizes(width) == [4] and sizes(features) == [3, 4]
    batch = labels.new(2)
    (rows,) = labels.regroup([batch, heads, width], [24])
    assert rows.leaves() == [*batch.leaves(), *features.leaves()]
    # (2, 3, 4) seen as (2, 3, 2, 2): the last factor is split in two
    again = labels.regroup([rows], [6, 2, 2])
    assert [sizes(dim) for dim in again] == [[2, 3], [2], [2]] and sizes(features) == [3, 2, 2]


def test_a_view_whose_borders_lie_within_a_factor_does_not_fit():
    labels = Labels()
    with pytest.raises(ShapeConflict):
        labels.regroup([labels.new(2), labels.new(3)], [3, 2])
    with pytest.raises(ShapeConflict):
        labels.regroup([labels.new(4)], [5])


def test_what_is_added_is_the_same_and_so_are_its_factors():
    labels = Labels()
    one, other = labels.new(12), labels.new(12)
    labels.regroup([one], [3, 4])
    labels.unify(one, other)
    assert sizes(other) == [3, 4] and same(one, other)
    with pytest.raises(ShapeConflict):
        labels.unify(one, labels.new(6))


def test_factors_are_split_until_they_agree():
    labels = Labels()
    one, other = labels.new(12), labels.new(12)
    labels.regroup([one], [6, 2])
    labels.regroup([other], [3, 4])
    labels.unify(one, other)
    assert sizes(one) == sizes(other) == [3, 2, 2] and same(one, other)


def test_factors_that_never_agree_stay_whole():
    labels = Labels()
    one, other = labels.new(6), labels.new(6)
    labels.regroup([one], [2, 3])
    labels.regroup([other], [3, 2])
    labels.unify(one, other)
    assert pins(one) == pins(other) == ["it is factored in two ways that do not fit"] * 2


def test_a_pin_holds_for_all_that_is_the_same_before_and_after():
    labels = Labels()
    one, other, third = labels.new(4), labels.new(4), labels.new(4)
    labels.unify(one, other)
    labels.pin(one, "first")
    labels.pin(other, "second")
    labels.unify(third, other)
    assert pins(one) == pins(other) == pins(third) == ["first"]


def test_halves_of_a_slice_are_units_of_their_own():
    labels = Labels()
    fused = labels.new(6)
    gate, value = labels.take(fused, 0, 3), labels.take(fused, 3, 3)
    assert not same(gate, value)
    labels.unify(gate, value)
    assert [len(part.leaves()) for part in fused.leaves()[0].parts] == [1, 1] and same(gate, value)
    labels.pin(fused, "all of it")
    assert pins(gate) == ["all of it"]


def test_a_slice_of_whole_runs_keeps_the_faster_factor():
    labels = Labels()
    qkv = labels.new(12)
    _, width = labels.regroup([qkv], [3, 4])
    q, k = labels.take(qkv, 0, 4), labels.take(qkv, 4, 4)
    assert same(q, width) and same(k, width)


def test_a_slice_through_a_factor_pins_it():
    labels = Labels()
    features = labels.new(12)
    labels.regroup([features], [3, 4])
    assert pins(labels.take(features, 1, 5)) == ["it is a part of something else"]
    assert pins(features) == ["a slice takes a part of it"] * 2


def test_the_parts_of_a_concatenation_are_found_again():
    labels = Labels()
    one, other = labels.new(3), labels.new(5)
    both = labels.join([one, other])
    assert both.size == 8
    weight = labels.new(8)
    labels.unify(weight, both)
    assert same(labels.take(weight, 0, 3), one) and same(labels.take(weight, 3, 5), other)
    middle = labels.take(weight, 2, 4)  # one of the first, three of the second
    assert [part.size for part in middle.leaves()[0].parts] == [1, 3]


def test_two_concatenations_are_cut_alike():
    labels = Labels()
    one, other = labels.new(8), labels.new(8)
    labels.take(one, 0, 4)
    labels.take(other, 0, 6)
    labels.unify(one, other)
    assert [part.size for part in one.leaves()[0].parts] == [4, 2, 2] and same(one, other)


def test_parts_seen_as_heads_are_alike_in_all_parts():
    labels = Labels()
    q, k, v = labels.new(8), labels.new(4), labels.new(4)
    fused = labels.join([q, k, v])
    heads, width = labels.regroup([fused], [4, 4])
    assert sizes(q) == [2, 4] and sizes(k) == [4] and heads.size == 4
    assert q.leaves()[1] is width.leaves()[0] is k.leaves()[0]


def test_equal_runs_of_parts_go_together():
    labels = Labels()
    one, other, third, fourth = (labels.new(n) for n in (2, 3, 2, 3))
    outer, inner = labels.regroup([labels.join([one, other, third, fourth])], [2, 5])
    assert same(one, third) and same(other, fourth) and inner.size == 5
    assert pins(outer) == ["its parts are alike, and only go together"]


def test_a_span_is_no_pin_and_comes_with_the_place():
    labels = Labels(lambda: "model.py:7")
    width, other = labels.new(4), labels.new(4)
    labels.span(width, "a norm")
    labels.unify(other, width)
    (atom,) = other.leaves()
    assert atom.pin is None and str(atom.span) == "a norm (model.py:7)"
    labels.regroup([other], [2, 2])
    assert all(unit.span is not None for unit in width.units())
