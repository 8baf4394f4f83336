"""Specs: one form for each submodel, plain data out and back, and one clear error for each mistake."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raafl.submodel import FULL, Spec, SpecError, Submodels
from raafl.submodel.spec import runs
from tests.submodel.models import Blocks, built

indices = st.one_of(
    st.tuples(st.integers(0, 50), st.integers(1, 50)).map(lambda pair: range(pair[0], pair[0] + pair[1])),
    st.lists(st.integers(0, 99), min_size=1, max_size=20, unique=True),
)
names = st.text(min_size=1, max_size=5)
any_spec = st.builds(
    Spec.select,
    st.dictionaries(names, indices, max_size=3),
    blocks=st.dictionaries(names, indices, max_size=2),
    trained=st.none() | st.lists(names, max_size=3),
    exits=st.none() | st.lists(names, max_size=3),
)


@settings(deadline=None)
@given(any_spec)
def test_plain_data_round_trip(spec):
    again = Spec.from_json(json.loads(json.dumps(spec.to_json())))
    assert again == spec and hash(again) == hash(spec)


def test_the_same_indices_are_the_same_spec():
    assert Spec.select({"a": [3, 1, 2]}) == Spec.select({"a": range(1, 4)}) == Spec.select({"a": (1, 2, 3)})
    assert Spec.select({"b": [1], "a": [0]}) == Spec.select({"a": [0], "b": [1]})
    assert Spec.select({"a": [1, 3]}).indices("a") == (1, 3)
    assert Spec.select({"a": [2, 3]}).indices("a") == range(2, 4)
    assert Spec.select({"a": range(0, 9, 4)}).indices("a") == (0, 4, 8)
    assert Spec.select({"a": [1]}).indices("b") is None


def test_full_is_empty_data():
    assert FULL.to_json() == {} and FULL.is_full and Spec.from_json({}) == FULL
    assert not Spec.select(trained=[]).is_full


@settings(deadline=None)
@given(st.lists(st.integers(0, 60), min_size=1, unique=True).map(sorted))
def test_runs_cover_the_indices_and_do_not_touch(kept):
    found = runs(tuple(kept))
    assert [i for start, stop in found for i in range(start, stop)] == kept
    assert all(stop < following for (_, stop), (following, _) in pairwise(found))


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        ({"fc1": []}, "keeps nothing of axis 'fc1'"),
        ({"fc1": range(5, 5)}, "keeps nothing of axis 'fc1'"),
        ({"fc1": [2, 2]}, "index 2 of axis 'fc1' twice"),
        ({"fc1": [-1, 0]}, "index -1 of axis 'fc1'"),
    ],
)
def test_an_impossible_selection_is_refused_at_once(kept, message):
    with pytest.raises(SpecError, match=message):
        Spec.select(kept)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "spec is '\\[\\]'"),
        ({"keep": {}}, "field 'keep'"),
        ({"kept": [1]}, "kept is "),
        ({"kept": {"a": 5}}, r"kept\['a'\] is '5'"),
        ({"kept": {"a": {"range": [1]}}}, r"kept\['a'\]"),
        ({"kept": {"a": {"range": [0, "9"]}}}, r"kept\['a'\]"),
        ({"kept": {"a": {"range": [5, 2]}}}, "keeps nothing"),
        ({"kept": {"a": [0, True]}}, r"kept\['a'\]"),
        ({"kept": {"a": [0.5]}}, r"kept\['a'\]"),
        ({"blocks": {"d": [-1]}}, r"blocks\['d'\]"),
        ({"trained": "fc1"}, "trained is 'fc1'"),
        ({"exits": [1]}, "exits is "),
    ],
)
def test_bad_data_is_refused_with_its_field(data, message):
    with pytest.raises(SpecError, match=message):
        Spec.from_json(data)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (Spec.select({"conv_1": [0]}), "axis 'conv_1', which this model does not have; did you mean 'conv1'"),
        (Spec.select({"conv1": [0, 3]}), "index 3 of axis 'conv1', which has 3"),
        (Spec.select({"fc3": [0]}), "'fc3' cannot shrink: it is an output of the model"),
        (Spec.select(trained=["fc7"]), "trains 'fc7', which this model does not have; did you mean 'fc"),
        (Spec.select(blocks={"depth": [0]}), "blocks of 'depth'.*it declares none"),
        (Spec.select(exits=["early"]), "exit 'early'.*it declares none"),
    ],
)
def test_a_spec_of_another_model_is_refused_with_the_remedy(spec, message):
    _, submodels, _ = built("cnn")
    for use in (submodels.normal, submodels.layout, submodels.plan, submodels.shrink, submodels.cost):
        with pytest.raises(SpecError, match=message):
            use(spec)


def test_blocks_are_checked_against_the_stack():
    submodels = Submodels(Blocks())
    submodels.normal(Spec.select(blocks={"depth": [0, 3]}))
    with pytest.raises(SpecError, match="block 4 of 'depth', which has 4"):
        submodels.normal(Spec.select(blocks={"depth": [4]}))
    with pytest.raises(SpecError, match="did you mean 'depth'"):
        submodels.normal(Spec.select(blocks={"deph": [0]}))
    assert submodels.normal(Spec.select(blocks={"depth": range(4)})) == FULL


def test_words_for_a_spec():
    assert str(Spec()) == "full"
    spec = Spec.select(
        {"fc1": range(40, 100), "conv1": [1, 5, 9]}, blocks={"layers": [0, 2]}, trained=["fc2", "fc1"], exits=[]
    )
    assert str(spec) == "conv1[3 of them] fc1[40:100] layers[0,2] trains fc1,fc2 exits nothing"


def test_axes_that_keep_the_same_are_counted_when_they_are_many():
    heads = {f"layer{i}.heads": range(2) for i in range(5)}
    assert str(Spec.select({**heads, "hidden": range(8)})) == "hidden[0:8] 5 axes[0:2]"
