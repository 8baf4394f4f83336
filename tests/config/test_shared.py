"""What a config says to another version of raafl: fields that are null and not known there keep nobody away."""

from __future__ import annotations

from dataclasses import asdict

import yaml

from raafl.config.experiment import SECTIONS, marked
from raafl.config.shared import config_digest, for_clients, sections

# With PROTOCOL 1. A new field of these is null unless it is used; else PROTOCOL is raised, and the field is added here.
SET = {
    "train": {"num_epochs", "lr_schedule", "lr_warmup", "lr_final"},
    "submodels": {"static_batches"},
    "secure_aggregation": {"bound", "threshold", "simulate_masks", "step_s"},
    "compress": {"down", "up", "top_k"},
}


class Made:
    """A part of a config whose later version has the arguments ``more`` and ``other``."""

    def __init__(self, width=1, more=None, other=3):
        pass


def config(**arguments):
    part = {"class_path": f"{__name__}.Made", "init_args": arguments}
    return yaml.safe_dump({"model": part, "train": {"num_steps": None, "num_epochs": 2}, "seed": 0})


def test_a_field_that_one_end_does_not_know_and_the_other_does_not_use_is_no_difference():
    assert sections(config(width=2, more=None)) == sections(config(width=2))
    assert sections(config(width=2, more=1))["model"] != sections(config(width=2))["model"]


def test_a_digest_takes_mappings_whose_keys_are_of_several_types_and_no_order():
    assert config_digest({"rates": {1: 0.5, "phone": 1.0}}) == config_digest({"rates": {"phone": 1.0, 1: 0.5}})
    assert config_digest({"rates": {1: 0.5, "phone": 1.0}}) != config_digest({"rates": {"1": 0.5, "phone": 1.0}})
    assert sections(config(width={1: 0.5, "phone": 1.0})) == sections(config(width={"phone": 1.0, 1: 0.5}))


def test_clients_are_sent_no_field_that_is_null_by_default():
    sent = yaml.safe_load(for_clients(config(width=None, more=None, other=None)))
    assert sent["model"]["init_args"] == {"width": None, "other": None}  # null is not what these are without a word
    assert sent["train"] == {"num_epochs": 2}


def test_fields_of_compared_sections_that_are_set_by_default_are_those_of_this_protocol():
    compared = {name: SECTIONS[name] for name in marked("must_match") if name in SECTIONS}
    assert {
        name: {k for k, value in asdict(made()).items() if value is not None} for name, made in compared.items()
    } == SET
