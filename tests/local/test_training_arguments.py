"""Each field of the arguments is taken, has a setting of raafl in its place, or is refused."""

from __future__ import annotations

import dataclasses

import pytest

from raafl.config.experiment import ABOUT, SECTIONS
from raafl.local.training_arguments import FIELDS

transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[hf]'")
pytest.importorskip("accelerate", reason="accelerate is not installed: pip install '.[hf]'")


def test_every_field_is_accounted_for() -> None:
    fields = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    assert not fields - FIELDS.keys()


def test_settings_that_are_named_exist() -> None:
    known = {*ABOUT, *(f"{group}.{field.name}" for group in SECTIONS for field in dataclasses.fields(SECTIONS[group]))}
    named = {name for field in FIELDS.values() for name in field.text.split("`")[1::2] if " " not in name}
    assert named <= known, named - known
