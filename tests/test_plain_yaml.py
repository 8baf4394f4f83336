"""YAML of users: a key given twice is an error with its line; YAML of others has no more values than its text shows."""

from __future__ import annotations

import pytest
import yaml
from jsonargparse._loaders_dumpers import yaml_load

from raafl import plain_yaml
from raafl.plain_yaml import dump_yaml, load_untrusted_yaml, load_yaml, yaml_problem


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: 1\nb: 2\na: 3", "line 3, column 1: 'a' is given twice"),
        ("- x: {c: 1, c: 2}", "line 1, column 13: 'c' is given twice"),
        ("0.1: a\n0.10: b", "line 2, column 1: '0.10' is given twice"),
        ("a: [", "line 1, column 5: expected the node content"),
        ("a: 2020-13-01", "ValueError: month must be in 1..12"),
    ],
)
def test_errors_say_where(text, problem):
    with pytest.raises(yaml.YAMLError) as caught:
        load_yaml(text)
    assert yaml_problem(caught.value).startswith(problem)


NUMBERS = (
    "1e5",
    "1E-5",
    "-1e5",
    "+1e5",
    "1_0e5",
    "1.5e5",
    "1.e5",
    "1.5e+5",
    ".5e5",
    "1e400",
    "1.5",
    "5",
    "-.inf",
    "0x1",
    "1:30",
)


@pytest.mark.parametrize("text", (*NUMBERS, "e5", "1e", "e", ".", "1e5a", "v1e5", "no", "null", "2026-11-29"))
def test_every_reader_of_what_is_written_takes_texts_for_texts_and_numbers_for_numbers(text):
    values = {"text": text, "as key": {text: [text]}, "number": 1e5, "small": 1e-7, "none": None, "flag": False}
    for written in (dump_yaml(values), dump_yaml(values, default_flow_style=True)):
        assert load_yaml(written) == yaml.safe_load(written) == yaml_load(written) == values


def test_a_merged_mapping_may_be_overridden():
    assert load_yaml("x: &x {a: 1, b: 2}\ny: {<<: *x, a: 3}\n=: 4") == {
        "x": {"a": 1, "b": 2},
        "y": {"a": 3, "b": 2},
        "=": 4,
    }


def test_a_long_text_may_have_as_many_values_as_characters_and_aliases_add_none(monkeypatch):
    monkeypatch.setattr(plain_yaml, "_MAX_VALUES", 20)
    devices = [{"name": f"d{i}", "flops_per_s": 1e9} for i in range(50)]
    text = yaml.safe_dump({"devices": devices})
    assert load_untrusted_yaml(text) == {"devices": devices}  # a device is a mapping with two keys and two values
    short = "a: &a [1, 1, 1, 1]\nb: &b [*a, *a, *a]\nc: [*b, *b, *b]\n"
    assert len(short) < 6 + 4 + 15 + 48  # three keys with their lists, and what is in a, b and c
    with pytest.raises(ValueError, match=f"it has more than {len(short)} values"):
        load_untrusted_yaml(short)
