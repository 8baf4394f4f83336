"""Exits that a config asks for: on the server's model and the clients' skeletons alike, trained, and not in the way later."""

from __future__ import annotations

import dataclasses

import pytest
import torch

pytest.importorskip("transformers")

from transformers import AutoModelForSequenceClassification

from model_zoo import MLP, HFSequenceClassifier, ViT
from raafl.algorithms import fed_avg
from raafl.config.experiment import SubmodelOptions
from raafl.config.parse import parse
from raafl.core.algorithm import Select
from raafl.core.types import Work
from raafl.errors import BadInput
from raafl.runfolder import checkpoint_reader
from raafl.runtime.setup import build, client_parts, user_model
from raafl.submodel import add_exits, depth_window
from tests.helpers.lora_models import BERT, Tokens
from tests.helpers.small_runs import experiment, finish

EXITS = SubmodelOptions(exits=[1])


class Early(Select):
    """Clients 1 and 2 train the first block and its exit, the others all."""

    def __call__(self, client, fleet):
        submodels = fleet.state.submodels
        exit = "model.exit1"
        return Work(
            depth_window(submodels, 0, 1, exit=exit) if client.id < 3 else depth_window(submodels, 0, 2, exit=exit)
        )


def bert():
    return HFSequenceClassifier(architecture=BERT, lr=0.01)


def run_of(output, **fields):
    algorithm = dataclasses.replace(fed_avg(), select=Early())
    fields = {"model": bert, "data": Tokens, "max_updates": 8, "submodels": EXITS} | fields
    return experiment(output, algorithm, **fields)


def test_server_and_clients_have_the_exits_alike(tmp_path):
    made = run_of(tmp_path / "run")
    parts = build(made, pace=False)
    submodels, _ = client_parts(made, parts.data, made.fabric)
    assert list(parts.submodels.exits) == list(submodels.exits) == ["model.exit1"]
    spec = depth_window(submodels, 0, 1, exit="model.exit1")
    assert submodels.layout(spec).fingerprint == parts.submodels.layout(spec).fingerprint
    values = parts.coordinator.state.values  # an exit begins as a copy of the model's own last layers
    assert torch.equal(values["model.exits.exit1.1.weight"], values["model.classifier.weight"])


def test_a_run_trains_the_exits_and_saves_a_model_that_loads_without(tmp_path):
    finished = finish(run_of(tmp_path / "run"))
    state = checkpoint_reader.load(finished.folder).state_dict
    first = user_model(run_of(tmp_path / "other")).state_dict()
    assert set(state) == set(first)
    assert not torch.equal(state["model.exits.exit1.1.weight"], state["model.classifier.weight"])
    loaded, info = AutoModelForSequenceClassification.from_pretrained(
        finished.folder / "model", output_loading_info=True
    )
    assert not info["unexpected_keys"] and not info["missing_keys"]
    assert torch.equal(loaded.classifier.weight, state["model.classifier.weight"])


def test_a_config_names_them():
    options = ["--config", "configs/quickstart.yaml", "--submodels.exits", "[2, 4]"]
    assert parse("simulate", options).experiment.submodels.exits == [2, 4]


class Holding(torch.nn.ModuleList):
    """Holds models, and could be trained."""

    def __init__(self, *models):
        super().__init__(models)

    def training_step(self, batch, batch_idx):
        raise NotImplementedError


@pytest.mark.parametrize(
    ("make", "exits", "says"),
    [
        (lambda: ViT("micro"), [2], r"submodels\.exits is \[2\]: there is no exit after 2 of 2 blocks: give 1 to 1"),
        (lambda: MLP(4, (4,), 2), [1], r"submodels\.exits is \[1\], but raafl does not know the last layers of MLP"),
        (
            lambda: Holding(ViT("micro"), ViT("micro")),
            [1],
            r"contains several models, '0.model' and '1.model': call `add_exits`",
        ),
        (
            lambda: Holding(add_exits(ViT("micro").model, [1])),
            [1],
            "'0' of Holding declares its own exits: leave one of the two out",
        ),
    ],
)
def test_a_model_that_cannot_have_them_is_named(tmp_path, make, exits, says):
    with pytest.raises(BadInput, match=says) as found:
        user_model(experiment(tmp_path / "run", model=make, submodels=SubmodelOptions(exits=exits)))
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("exits", [[0], [1.5], [True]])
def test_numbers_that_are_no_depths(exits):
    with pytest.raises(BadInput, match=r"submodels\.exits is \[.*\]: give depths in blocks, from 1"):
        SubmodelOptions(exits=exits)
